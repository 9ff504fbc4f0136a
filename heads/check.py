"""A backbone against the contract (heads/backbones/base.py), in a minute, before GPUs are booked to train on it.

    draftgrid check backbone=DIR

Every line measures one promise with random image tokens and prints ok or FAILED; FAILED says what that means and where
to look. Exit code 0 if all hold, 1 if one does not, 2 for bad input. In Python, for a model already held:
`check(Backbone.from_model(model, processor))`.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from draftgrid.common.cli import check_ranges, key, main, suggest
from draftgrid.common.device import pick_device
from draftgrid.heads.backbones import Backbone, load_backbone
from draftgrid.heads.backbones.loading import find_checkpoint
from draftgrid.heads.contract import DTYPES, Checks, Line
from draftgrid.heads.tokenizers import ImageTokenizer, load_tokenizer


@dataclass
class CheckConfig:
    backbone: str = key("emoji", "folder or hub id of the backbone; emoji is the demo's own")
    adapter: str = key("", "the backbone's adapter, or your own package.module:Class; '' = what the checkpoint says")
    grid: list[int] = key(list, "[rows, columns]; empty = what the checkpoint says", least=1, items="rows, columns")
    tokenizer: str = key("", "folder of the image tokenizer; '' = the backbone's own")
    dtype: str = key("auto", f"{', '.join(DTYPES)}; auto = float32 on a CPU, bfloat16 on a GPU")
    device: str = key("auto", "auto, cpu, cuda, cuda:1, ...")
    rows: int = key(0, "rows of the grid read token by token; 0 = as many as hold about 300 tokens", least=0)
    seed: int = key(0, "of the random image tokens")
    smoke: bool = key(False, "one row is read token by token")


def check(
    backbone: Backbone,
    tokenizer: ImageTokenizer | None = None,
    *,
    rows: int = 0,
    seed: int = 0,
    reason: str = "no tokenizer given",
    tell: Callable[[object], None] = print,
) -> list[Line]:
    """Measure every line, `tell` each, and return them. Leaves the backbone in eval mode.

    `rows` of the grid are read token by token (0: about 300 tokens). `reason` is why there is no tokenizer.
    """
    lines: list[Line] = []
    for measure in Checks(backbone, tokenizer, reason, rows, seed).measures():
        try:
            with torch.inference_mode():
                line = measure()
        except Exception as error:  # an adapter may break in any way, and one line must not hide the others
            text = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            line = Line(measure.__name__, False, text, "It must not raise here.")
        lines.append(line)
        tell(line)
    return lines


def open_tokenizer(config: CheckConfig) -> tuple[ImageTokenizer | None, str]:
    """(tokenizer, '') or (None, why there is none). Raises ValueError if one is named or there, and does not load."""
    place: Path = find_checkpoint(config.tokenizer or config.backbone, part="vqmodel.")
    try:
        return load_tokenizer(place), ""
    except ValueError as error:
        if config.tokenizer or (place / "image_tokenizer").is_dir():
            raise
        return None, str(error)


def run(config: CheckConfig) -> None:
    begun = time.perf_counter()
    if config.dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype is {config.dtype!r}; use auto or a float type. {suggest(config.dtype, list(DTYPES))}")
    check_ranges(config)
    device = pick_device(config.device)
    tokenizer, reason = open_tokenizer(config)
    adapter, dtype = config.adapter or None, DTYPES.get(config.dtype)
    backbone = load_backbone(config.backbone, adapter=adapter, grid=config.grid or None, dtype=dtype, device=device)
    tokenizer = tokenizer and tokenizer.to(device)
    lines = check(backbone, tokenizer, rows=1 if config.smoke else config.rows, seed=config.seed, reason=reason)
    failed = [line.name for line in lines if line.ok is False]
    seconds = f"{time.perf_counter() - begun:.0f} s"
    if failed:
        print(f"{len(failed)} of {len(lines)} FAILED ({', '.join(failed)}), {seconds}")
        sys.exit(1)
    print(f"all {sum(line.ok is True for line in lines)} lines hold, {seconds}")


if __name__ == "__main__":
    main(run, CheckConfig, __doc__)
