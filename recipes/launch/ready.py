"""What a run needs of this machine, asked before anything is loaded: GPUs, shards, a checkpoint."""

from pathlib import Path

from draftgrid.data.places import is_url
from draftgrid.data.shards import MANIFEST
from draftgrid.heads.backbones.loading import find_checkpoint
from draftgrid.heads.weights import HUB_ID
from draftgrid.recipes.launch.schema import TrainConfig
from draftgrid.training.strategy import choose_devices


def check_machine(config: TrainConfig) -> None:
    """Raises ValueError: one sentence of all that is missing here, and what to set.

    A hub id that is not in the cache is no fault while the hub may be asked, but is told beside one.
    """
    missing, b = [], config.backbone
    try:
        choose_devices(config.trainer.accelerator, config.trainer.devices)
    except ValueError as error:
        missing.append(str(error).replace("; set", ", set"))
    if config.task == "heads" and not config.data.source and not is_url(config.data.dir):
        absent = [s for s in ("train", "validation") if not (Path(config.data.dir) / s / MANIFEST).is_file()]
        if absent:
            missing.append(
                f"{Path(config.data.dir) / absent[0]} holds no token shards, set data.dir=DIR to where data.encode "
                "wrote train/ and validation/"
            )
    if config.task == "heads":
        try:
            find_checkpoint(b.place, local_files_only=True)
        except ValueError as error:
            if HUB_ID.fullmatch(b.place) is None:
                missing.append(f"backbone.checkpoint {error}")
            elif missing or b.local_files_only:
                missing.append(
                    f"backbone.checkpoint={b.place} is not on this machine, set backbone.checkpoint=DIR unless it can "
                    "be downloaded"
                )
    if missing:
        raise ValueError(f"recipe {config.recipe} cannot run here: {'; '.join(missing)}")
