"""What a run needs of this machine, asked before anything is loaded: packages, GPUs, shards, a checkpoint, memory."""

import os
from pathlib import Path

import torch

from draftgrid.common.packages import need
from draftgrid.data.places import is_url
from draftgrid.data.shards import MANIFEST
from draftgrid.heads.backbones.loading import find_checkpoint
from draftgrid.heads.backbones.registry import families
from draftgrid.heads.weights import HUB_ID
from draftgrid.recipes.launch.schema import TrainConfig
from draftgrid.recipes.plan.memory import held, layout
from draftgrid.recipes.plan.subject import count, load_subject, shapes
from draftgrid.training import ranks
from draftgrid.training.strategy import choose_devices, choose_precision


def check_machine(config: TrainConfig) -> None:
    """Raises ValueError: one sentence of all that is missing here, and what to set.

    A hub id that is not in the cache is told of only beside another fault, or if the hub may not be asked.
    """
    missing, b, t = [], config.backbone, config.trainer
    need("tensorboard", use="a training's log")
    if config.task == "heads" and config.sheet.images:
        need("matplotlib", use="sheet.images")
    if t.strategy.startswith("deepspeed"):
        need("deepspeed", use=f"trainer.strategy={t.strategy}")
    try:
        choose_devices(t.accelerator, t.devices)
    except ValueError as error:
        missing.append(str(error).replace("; set", ", set"))
    if config.task == "heads":
        sets = [Path(config.data.dir) / split for split in ("train", "validation")]
        absent = [folder for folder in sets if not (folder / MANIFEST).is_file()]
        if absent and not config.data.source and not is_url(config.data.dir):
            missing.append(
                f"{absent[0]} holds no token shards, set data.dir=DIR to where data.encode wrote train/ and validation/"
            )
        try:
            find_checkpoint(b.place, local_files_only=True)
        except ValueError as error:
            if HUB_ID.fullmatch(b.place) is None:
                missing.append(f"backbone.checkpoint {error}")
            elif missing or b.local_files_only:
                where = "set backbone.checkpoint=DIR unless it can be downloaded"
                missing.append(f"backbone.checkpoint={b.place} is not on this machine, {where}")
    if missing:
        raise ValueError(f"recipe {config.recipe} cannot run here: {'; '.join(missing)}")
    if not b.adapter or b.adapter in families():
        check_memory(config)


def check_memory(config: TrainConfig) -> None:
    """Raises ValueError if weights, gradients, AdamW's moments and a batch's states alone are more than memory holds.

    A lower bound, so what passes may still be too much.
    """
    t, subject = config.trainer, load_subject(config)
    accelerator, devices = choose_devices(t.accelerator, t.devices)
    strategy = "ddp" if t.strategy == "auto" else t.strategy
    precision = choose_precision(t.precision, accelerator)
    kept = held(shapes(subject), strategy, precision, max(ranks.world(), devices * t.num_nodes))
    grid = subject.backbone.grid
    states = 2 * config.data.batch_size * grid.positions * subject.backbone.hidden_size
    least = kept.total - kept.buffers - kept.gathered + states * layout(strategy, precision).backbone
    if accelerator == "gpu":
        room = torch.cuda.get_device_properties(0).total_memory
    else:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices
    if least > room:
        raise ValueError(
            f"{count(subject.trained):,} trained weights and data.batch_size="
            f"{config.data.batch_size} take at least {least / 1e9:,.1f} GB of each process, which has "
            f"{room / 1e9:,.1f}; use a smaller batch or fewer weights (heads.width, rank, cell; backbone.size)"
        )
