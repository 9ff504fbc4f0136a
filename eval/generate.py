"""Prompts -> PNGs and a sheet, with any decoder.

python -m eval.generate prompt="a red apple" heads=runs/emoji_ssd/heads decoder=ssd:rounds=2 out=runs/pictures
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from eval.decoders import decode
from eval.setup import EvalConfig, load, policies
from heads.cli import key, main
from heads.files import atomic, write_json
from heads.sheet import contact_sheet


@dataclass
class GenerateConfig(EvalConfig):
    images: int = key(0, "pictures; 0 = one of `prompt`, or 8 of `prompts`")
    prompt: str = key("", "one prompt; '' = draw the prompts of `prompts`")
    decoder: str = key("ssd:rounds=2", "name:setting=value:..., e.g. ar, ssd:rounds=2:rows=2")
    scale: int = key(4, "pixels are enlarged so many times")
    out: str = key("runs/pictures", "folder for the PNGs, sheet.png and pictures.json")


def run(config: GenerateConfig) -> None:
    chosen = policies(config.decoder)
    if len(chosen) != 1:
        raise ValueError(f"decoder is {config.decoder!r}; name one (eval.bench compares several)")
    ((name, settings, policy),) = chosen
    if config.scale < 1:
        raise ValueError(f"scale is {config.scale}; it enlarges, so at least 1")
    config.images = config.images or (1 if config.prompt else 8)
    loaded = load(config, bool(policy.drafts_with))
    prompts = [config.prompt] * config.images if config.prompt else loaded.prompts
    out = Path(config.out)
    records, pictures = [], []
    grid = loaded.backbone.grid
    with tqdm(total=len(prompts) * grid.height, desc=f"draw with {name}", unit="row") as bar:
        for start in range(0, len(prompts), config.batch_size):
            batch = prompts[start : start + config.batch_size]
            result = decode(
                loaded.backbone,
                batch,
                loaded.heads,
                decoder=name,
                guidance=config.guidance,
                temperature=config.temperature,
                top_k=config.top_k,
                top_p=config.top_p,
                seed=config.seed,
                samples=range(start, start + len(batch)),
                callback=partial(_advance, bar, bar.n, len(batch)),
                **settings,
            )
            for i, (prompt, picture) in enumerate(
                zip(batch, loaded.tokenizer.pil(result.tokens, config.scale), strict=True)
            ):
                file = f"{start + i:04d}-{re.sub(r'[^a-z0-9]+', '-', prompt.lower()).strip('-')[:60]}.png"
                with atomic(out / file) as temporary:
                    picture.save(temporary, "PNG")
                pictures.append(picture)
                records.append({"file": file, "prompt": prompt, "steps": result.stats.nfe, "exact": result.exact})
    columns = min(8, len(pictures))
    with atomic(out / "sheet.png") as temporary:
        contact_sheet([pictures[i : i + columns] for i in range(0, len(pictures), columns)]).save(temporary, "PNG")
    write_json(out / "pictures.json", {"decoder": name, "settings": settings, "seed": config.seed, "pictures": records})
    print(f"{len(pictures)} pictures, {records[-1]['steps']} steps each batch: {out / 'sheet.png'}")


def _advance(bar: tqdm, before: int, batch: int, rows: int, _: object) -> None:
    bar.update(before + rows * batch - bar.n)


if __name__ == "__main__":
    main(run, GenerateConfig, __doc__)
