"""From a resolved recipe to a job that can be fitted and finished. Imported by train.py alone."""

import time
from dataclasses import asdict
from pathlib import Path

import lightning as L
import torch
import yaml

from draftgrid.data.encode import encode, processes, wait_until
from draftgrid.data.module import TokenDataModule
from draftgrid.data.places import is_url
from draftgrid.data.shards import MANIFEST
from draftgrid.data.sources import Source, open_picture, open_source, pixels, read_prompts
from draftgrid.heads.backbones import Backbone, load_backbone
from draftgrid.heads.distributions import count_table
from draftgrid.heads.mtp import new_heads
from draftgrid.heads.tokenizers import ImageTokenizer, PatchVQ, load_tokenizer
from draftgrid.recipes.launch.finish import Job
from draftgrid.recipes.launch.schema import TrainConfig
from draftgrid.recipes.launch.trainer import StepTimer, callbacks, make_trainer, quiet
from draftgrid.recipes.plan.subject import new_backbone
from draftgrid.training.module import BackboneModule, HeadsModule
from draftgrid.training.ranks import rank_zero
from draftgrid.training.run_folder import RunFolder
from draftgrid.training.strategy import choose_devices, choose_precision

HOW = {
    "": "resume overwrite out plan assume",
    "backbone": "local_files_only",
    "data": "workers cache cache_gb",
    "trainer": "devices num_nodes strategy threads compile save_every keep max_hours max_skipped",
    "evaluate": "eval_every images prompts decoders batch_size",
}
"""Keys, by section, that may differ when a run is resumed."""
TABLE_SAMPLES = 4000
TABLE_CODES = 4096
"""Largest codebook for which a dense count table is made."""


def resolved(config: TrainConfig) -> str:
    """The recipe as YAML, without the keys that say how to run it and not what is run."""
    value = asdict(config)
    for section, names in HOW.items():
        for name in names.split():
            (value[section] if section else value).pop(name)
    return yaml.safe_dump(value, sort_keys=False)


def claim(folder: RunFolder, config: TrainConfig) -> bool:
    """Rank 0: take the folder. True if the run in it is finished. Raises ValueError."""
    return folder.claim(resolved(config), config.resume, config.overwrite)


def shrink(config: TrainConfig) -> None:
    """smoke=true: the same path in seconds."""
    if not config.smoke:
        return
    t = config.trainer
    t.steps, t.validate_every, t.save_every = 2, 2, 2
    config.data.batch_size = min(config.data.batch_size, 2)
    config.data.validation_samples = 4
    config.data.copies, config.sheet.images = 1, min(config.sheet.images, 2)
    config.evaluate.eval_every = min(config.evaluate.eval_every, 2)
    config.evaluate.images = min(config.evaluate.images, 2)
    if config.data.source:  # without one the shards are there already
        config.data.dir += "_smoke"


def image_tokenizer(config: TrainConfig, folder: RunFolder) -> ImageTokenizer:
    """The checkpoint's own; for task=backbone one fitted on the training pictures, kept in the run folder."""
    b = config.backbone
    if config.task == "heads" or b.tokenizer:
        return load_tokenizer(b.tokenizer or b.place, local_files_only=b.local_files_only)
    path = folder.path / "image_tokenizer"
    config_file = path / "tokenizer_config.json"
    if rank_zero() and not config_file.is_file():
        source = open_source(config.data.source)
        count = source.count("train")
        items = source.take("train", range(min(count, 256) if config.smoke else count))
        pictures = pixels([open_picture(i, 4 * b.grid[0]) for i in items])
        PatchVQ.fit(pictures, b.codes, patch=4, seed=config.seed).save_pretrained(path)
    wait_until(path, config_file.is_file, config_file.name)
    return load_tokenizer(path)


def open_sources(config: TrainConfig) -> dict[str, Source]:
    """{split: what it is encoded from}, or {} if shard sets are only read. Raises ValueError."""
    data = config.data
    if not data.source:
        return {}
    if is_url(data.dir):
        raise ValueError(
            f"data.source is {data.source!r} and data.dir {data.dir!r}; encoding writes to a folder: encode there, "
            "copy it to the URL and leave data.source empty"
        )
    sources = {"train": open_source(data.source, data.copies), "validation": open_source(data.source)}
    for split, source in sources.items():
        source.count(split, 1)  # a wrong one is told now, not after weights are read
    return sources


def prepare_data(
    config: TrainConfig, sources: dict[str, Source], tokenizer: ImageTokenizer, grid: tuple[int, int], accelerator: str
) -> None:
    """Encode the shard sets that are not there yet: every rank its share, on its own device."""
    rank, world, local = processes()
    for split, source in sources.items():
        out = Path(config.data.dir) / split
        encode(
            source,
            tokenizer.to(f"cuda:{local}" if accelerator == "gpu" else "cpu"),
            out,
            split,
            shards=config.data.shards,
            size=(grid[0] * tokenizer.patch, grid[1] * tokenizer.patch),
            limit=64 if config.smoke else None,
            advice=f"set another data.dir, or delete {out}",
            rank=rank,
            world=world,
        )
        wait_until(out, (out / MANIFEST).is_file, MANIFEST)
    tokenizer.to("cpu")


def build(config: TrainConfig, folder: RunFolder) -> Job:
    """Load everything and check what can be checked. Raises ValueError before the first step."""
    begun = time.monotonic()
    quiet()
    if config.task == "heads" and config.sheet.images:
        read_prompts(config.sheet.prompts)  # a wrong name is told now, not after the training
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    L.seed_everything(config.seed, verbose=False)
    devices = choose_devices(config.trainer.accelerator, config.trainer.devices)
    sources = open_sources(config)
    tokenizer = image_tokenizer(config, folder)
    if not tokenizer.decodes and (config.sheet.images or config.evaluate.eval_every):
        raise ValueError(
            f"sheet.images is {config.sheet.images} and evaluate.eval_every {config.evaluate.eval_every}, but the "
            "image tokenizer has no pixel decoder: set both to 0, or backbone.tokenizer to one that has"
        )
    backbone = make_backbone(config, tokenizer, devices[0])
    grid = (backbone.grid.height, backbone.grid.width)
    backbone.check_codes(tokenizer.codebook_size)
    prepare_data(config, sources, tokenizer, grid, devices[0])
    data = TokenDataModule(config.data, tokenizer.fingerprint, grid, config.seed)
    module: HeadsModule | BackboneModule
    if config.task == "heads":
        module = heads_module(config, backbone, data)
    else:
        module = BackboneModule(backbone, config.optim)
    module.origin = {"recipe": resolved(config), "data": data.digest}
    timer = StepTimer(begun)
    trainer = make_trainer(config, folder, devices, [timer, *callbacks(config, folder, tokenizer, begun)])
    if trainer.is_global_zero:
        folder.record()
    return Job(config, folder, tokenizer, data, module, trainer, timer)


def make_backbone(config: TrainConfig, tokenizer: ImageTokenizer, accelerator: str) -> Backbone:
    b = config.backbone
    if config.task == "heads":
        # A frozen model gains nothing from fp32 where the arithmetic is bf16, which takes half the memory.
        half = accelerator == "gpu" and choose_precision(config.trainer.precision, accelerator) != "32-true"
        return load_backbone(
            b.place,
            adapter=b.adapter or None,
            grid=b.grid or None,
            dtype=torch.bfloat16 if half else torch.float32,
            local_files_only=b.local_files_only,
        )
    return new_backbone(config, tokenizer.codebook_size)


def heads_module(config: TrainConfig, backbone: Backbone, data: TokenDataModule) -> HeadsModule:
    heads = new_heads(config.heads, backbone, config.seed)
    tables = {}
    if backbone.image_vocab_size <= TABLE_CODES:
        tokens = data.sample_tokens(TABLE_SAMPLES)
        pairs = heads.train_pairs(backbone.grid)
        tables = {name: count_table(tokens, *pair, backbone.image_vocab_size) for name, pair in pairs.items()}
    if config.trainer.compile:
        for part in heads.children():
            part.compile()
    return HeadsModule(
        backbone,
        heads,
        config.optim,
        tables=tables,
        guidance=config.guidance,
        loss=config.loss,
        seed=config.seed,
        max_skipped=config.trainer.max_skipped,
        top_k=config.decoding.top_k,
    )
