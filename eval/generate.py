"""Prompts -> PNGs and a sheet, with any decoder.

python -m eval.generate prompt="a red apple" heads=runs/emoji_ssd/heads decoder=ssd:rounds=2 out=runs/pictures
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from eval.setup import EvalConfig, load, parse_decoders
from heads.cli import key, main
from heads.files import atomic, write_json
from heads.sheet import contact_sheet


@dataclass
class GenerateConfig(EvalConfig):
    images: int = key(0, "pictures; 0 = one of `prompt`, or 8 of `prompts`")
    prompt: str = key("", "one prompt; '' = draw the prompts of `prompts`")
    decoder: str = key("ssd:rounds=2", "name:setting=value:..., e.g. ar, ssd:rounds=2:rows=2, ssd_coupled:drafts=chain")
    scale: int = key(4, "pixels are enlarged so many times")
    out: str = key("runs/pictures", "folder for the PNGs, sheet.png and pictures.json")


def run(config: GenerateConfig) -> None:
    chosen = parse_decoders(config.decoder)
    if len(chosen) != 1:
        raise ValueError(f"decoder is {config.decoder!r}; name one (eval.bench compares several)")
    (decoder,) = chosen
    if config.scale < 1:
        raise ValueError(f"scale is {config.scale}; it enlarges, so at least 1")
    config.images = config.images or (1 if config.prompt else 8)
    loaded = load(config, chosen)
    if config.prompt:
        loaded.prompts = [config.prompt] * config.images
    out = Path(config.out)
    records, pictures = [], []
    prompts, grid = loaded.prompts, loaded.backbone.grid
    with tqdm(total=len(prompts) * grid.height, desc=f"draw with {decoder.name}", unit="row") as bar:
        for start in range(0, len(prompts), config.batch_size):
            numbers = range(start, min(start + config.batch_size, len(prompts)))
            result = loaded.draw(decoder, numbers, config.seed, partial(_advance, bar, bar.n, len(numbers)))
            for i, picture in zip(numbers, loaded.tokenizer.pil(result.tokens, config.scale), strict=True):
                file = f"{i:04d}-{re.sub(r'[^a-z0-9]+', '-', prompts[i].lower()).strip('-')[:60]}.png"
                with atomic(out / file) as temporary:
                    picture.save(temporary, "PNG")
                pictures.append(picture)
                records.append({"file": file, "prompt": prompts[i], "steps": result.stats.nfe, "exact": result.exact})
    columns = min(8, len(pictures))
    with atomic(out / "sheet.png") as temporary:
        contact_sheet([pictures[i : i + columns] for i in range(0, len(pictures), columns)]).save(temporary, "PNG")
    write_json(
        out / "pictures.json",
        {"decoder": decoder.name, "settings": decoder.settings, "seed": config.seed, "pictures": records},
    )
    print(f"{len(pictures)} pictures, {records[-1]['steps']} steps each batch: {out / 'sheet.png'}")


def _advance(bar: tqdm, before: int, batch: int, rows: int, _: object) -> None:
    bar.update(before + rows * batch - bar.n)


if __name__ == "__main__":
    main(run, GenerateConfig, __doc__)
