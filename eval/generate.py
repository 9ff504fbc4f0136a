"""Prompts -> PNGs and a sheet, with any decoder; or token shards to train on, with any exact one.

draftgrid generate prompt="a red apple" images=4 decoder=ssd_coupled out=runs/pictures
draftgrid generate prompts=FILE decoder=scd save=shards shards=64 batch_size=8 out=runs/own/train
"""

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tqdm import tqdm

from draftgrid.common.cli import key, main
from draftgrid.common.files import atomic, write_json
from draftgrid.common.sheet import contact_sheet
from draftgrid.data.encode import processes
from draftgrid.data.sources import read_prompts
from draftgrid.eval.decoders import default_decoder
from draftgrid.eval.distill import check_exact, distill
from draftgrid.eval.measure import batches
from draftgrid.eval.setup import EvalConfig, load, parse_decoders


@dataclass
class GenerateConfig(EvalConfig):
    images: int = key(0, "pictures; 0 = one of `prompt`, or 8 of `prompts`, or with save=shards one of each", least=0)
    prompt: str = key("", "one prompt; '' = draw the prompts of `prompts`")
    decoder: str = key("", "as ar or ssd:rounds=2:rows=2; '' = ssd_coupled with heads, scd with heads=''")
    scale: int = key(4, "pixels are enlarged so many times", least=1)
    save: str = key("pictures", "pictures, or shards: token shards to train on, resumable, also under torchrun")
    shards: int = key(16, "save=shards: number of shard files", least=1)
    overwrite: bool = key(False, "save=shards: replace what else lies in out, once the new set is finished")
    out: str = key("runs/pictures", "folder for the PNGs, sheet.png and pictures.json, or for the shards")


def run(config: GenerateConfig) -> None:
    config = replace(config)  # the caller's own stays as it is
    chosen = parse_decoders(config.decoder or default_decoder(bool(config.heads)))
    if len(chosen) != 1:
        raise ValueError(f"decoder is {config.decoder!r}; name one (eval.bench compares several)")
    (decoder,) = chosen
    if config.save not in ("pictures", "shards"):
        raise ValueError(f"save is {config.save!r}; use pictures or shards")
    if config.save == "shards":
        check_exact(decoder)
        config.images = config.images or (1 if config.prompt else len(read_prompts(config.prompts)))
        _, world, local = processes()
        if world > 1 and config.device == "auto" and torch.cuda.is_available():
            config.device = f"cuda:{local % torch.cuda.device_count()}"
    config.images = config.images or (1 if config.prompt else 8)
    loaded = load(config, chosen)
    if config.prompt:
        loaded.prompts = [config.prompt] * config.images
    out = Path(config.out)
    if config.save == "shards":
        settings = {"seed": config.seed, "batch_size": config.batch_size, "shards": config.shards}
        manifest = distill(loaded, decoder, out, **settings, overwrite=config.overwrite)
        if manifest:
            print(f"{manifest.samples} samples in {len(manifest.shards)} shards: {out}")
        return
    records: list[dict[str, Any]] = []
    pictures = []
    prompts, grid = loaded.prompts, loaded.backbone.grid
    with tqdm(total=len(prompts) * grid.height, desc=f"draw with {decoder.name}", unit="row") as bar:
        for numbers in batches(range(len(prompts)), config.batch_size):
            result = loaded.draw(decoder, numbers, config.seed, partial(_advance, bar, bar.n, len(numbers)))
            drawn = zip(numbers, loaded.tokenizer.pil(result.tokens, config.scale), result.stats.steps, strict=True)
            for i, picture, steps in drawn:
                file = f"{i:04d}-{re.sub(r'[^a-z0-9]+', '-', prompts[i].lower()).strip('-')[:60]}.png"
                with atomic(out / file) as temporary:
                    picture.save(temporary, "PNG")
                pictures.append(picture)
                records.append({"file": file, "prompt": prompts[i], "steps": steps, "exact": result.exact})
    with atomic(out / "sheet.png") as temporary:
        contact_sheet(list(batches(pictures, 8))).save(temporary, "PNG")
    report = {"decoder": decoder.name, "settings": decoder.settings, "seed": config.seed, "pictures": records}
    write_json(out / "pictures.json", report)
    taken = mean(record["steps"] for record in records)
    print(f"pictures by {decoder.text}: {len(pictures)}, {taken:.1f} steps each: {out / 'sheet.png'}")


def _advance(bar: tqdm, before: int, batch: int, rows: int, _: object) -> None:
    bar.update(before + rows * batch - bar.n)


if __name__ == "__main__":
    main(run, GenerateConfig, __doc__)
