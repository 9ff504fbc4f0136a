"""What decoding costs at the size of the published models, without their weights: random ones, real architecture.

AR and SSD take the same steps whatever the weights are, so their seconds are real ones. A whole AR picture takes
minutes; its steps are timed at five lengths of the cache and summed over the picture. All is measured eagerly and
compiled. Besides this checkout only torch, transformers and safetensors are needed.

draftgrid latency                                       the three families, on a GPU, in minutes
draftgrid latency backbones=emu3 layers=2 grid=[4,90]   as a check, on a CPU
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from draftgrid.common.cli import check_ranges, key, main
from draftgrid.common.device import pick_device
from draftgrid.common.environment import machine
from draftgrid.common.files import write_json
from draftgrid.common.packages import need
from draftgrid.common.table import table as columns_of
from draftgrid.common.timing import timed
from draftgrid.eval.decoders import Sampling, make_policy
from draftgrid.eval.decoders.engine import Canvas, steps
from draftgrid.eval.decoders.randomness import SeededSource
from draftgrid.eval.measure import draw, step_cost
from draftgrid.eval.setup import DecoderSpec, Loaded, parse_decoders
from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.backbones.random import random_backbone
from draftgrid.heads.backbones.registry import families, find_family
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.mtp import new_heads

PLACES, STEPS, WARM = 5, 30, 3
"""AR is timed at so many lengths of the cache, over so many steps, after so many untimed ones."""
UNTIMED = 2
"""Pictures of a decoder before the clock runs: kernels are chosen in the first, graphs recorded in the second."""
CAPTION = ["random"]


@dataclass
class LatencyConfig:
    backbones: str = key(",".join(families()), "families, comma-separated")
    layers: int = key(0, "transformer layers, the first N; 0 = all of them", least=0)
    grid: list[int] = key(list, "[rows, columns] of one family; empty = its own", least=1, items="rows, columns")
    decoders: str = key("ssd,ssd:rows_in_flight=2", "comma-separated; of kinds whose steps do not depend on weights")
    repeats: int = key(3, "pictures per decoder; medians are reported", least=1)
    compile: bool = key(True, "measure compiled as well")
    device: str = key("auto", "auto, cpu, cuda, cuda:1, ...")
    out: str = key("runs/latency", "folder for latency.json")
    smoke: bool = key(False, "2 layers of 64 numbers and 4 rows of 8 cells, eagerly, once")


def check(config: LatencyConfig) -> tuple[list[str], list[DecoderSpec]]:
    """(families, decoders). Raises ValueError before anything is made."""
    check_ranges(config)
    transformers = need("transformers", use="latency")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        raise ValueError(f"transformers is {transformers.__version__}; its layers take a cache of ours from 5.24 on")
    names = [name.strip() for name in config.backbones.split(",")]
    for name in names:
        find_family(name)
    if config.grid and len(names) > 1:
        raise ValueError(f"grid is {config.grid} and backbones {config.backbones}; give a grid to one family alone")
    decoders = parse_decoders(config.decoders)
    for d in decoders:
        if d.name != "ssd":
            raise ValueError(f"decoders names {d.text}; with random weights only ssd's steps mean anything, and AR's")
    return names, decoders


def run(config: LatencyConfig) -> None:
    names, decoders = check(config)
    if config.smoke:
        config = replace(config, layers=2, grid=[4, 8], repeats=1, compile=False)
    device = pick_device(config.device)
    if device == "cpu" and not config.layers:
        raise ValueError("layers is 0, all of them, which takes hours on a CPU; set layers=2 and a grid of a few rows")
    modes = 2 if config.compile else 1
    total = len(names) * modes * (PLACES + 1 + len(decoders) * (UNTIMED + config.repeats))
    bar = tqdm(total=total, desc="latency", unit="measurement", smoothing=0.05)
    report: dict[str, Any] = {"machine": machine(), "torch": torch.__version__, "families": []}
    for name in names:
        bar.set_postfix_str(name)
        backbone = random_backbone(name, config.layers, config.grid or None, device=device, narrow=config.smoke)
        found = measure_family(backbone, decoders, config.repeats, config.compile, bar)
        report["families"].append(found)
        write_json(Path(config.out) / "latency.json", report)
        bar.write(table(found))
        del backbone
        gc.collect()  # graphs and backbone hold each other
        if device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    bar.close()
    print(f"machine: {report['machine']}, torch {report['torch']}, {torch.get_num_threads()} threads")
    print(Path(config.out) / "latency.json")


def measure_family(
    backbone: Backbone, decoders: Sequence[DecoderSpec], repeats: int, compile: bool, bar: tqdm
) -> dict[str, Any]:
    """Everything about one backbone, eager and, last, compiled: what has been compiled stays so."""
    family, grid = find_family(backbone.adapter), backbone.grid
    settings = HeadsConfig(right=min(5, grid.width - 1), down=min(family.down, grid.height - 1))
    heads = new_heads(settings, backbone).to(backbone.device, backbone.dtype).eval()
    loaded = Loaded(backbone, None, {"offsets": heads}, CAPTION, Sampling(family.guidance, 1.0, family.top_k))  # type: ignore[arg-type]
    modes = {"eager": measure(loaded, decoders, repeats, bar)}
    if compile:
        backbone.compile_decoding()
        modes["compiled"] = measure(loaded, decoders, repeats, bar)
    return {
        "backbone": backbone.name,
        "grid": [grid.height, grid.width],
        "layers": backbone.num_layers,
        "parameters": sum(p.numel() for p in backbone.parameters()),
        "heads_parameters": sum(p.numel() for p in heads.parameters()),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "guidance": family.guidance,
        "top_k": family.top_k,
        "logits": backbone.image_vocab_size,
        "memory": torch.cuda.max_memory_allocated(backbone.device) if backbone.device.type == "cuda" else None,
        "modes": modes,
    }


def measure(loaded: Loaded, decoders: Sequence[DecoderSpec], repeats: int, bar: tqdm) -> dict[str, Any]:
    """Seconds of AR by length of the cache and of its picture, of a forward by tokens, a drafted row, each decoder."""
    grid, W = loaded.backbone.grid, loaded.backbone.grid.width
    lengths = [n for n in (1, W, 2 * W, 3 * W) if grid.height // 2 * W + n < grid.positions]
    ar = ar_steps(loaded, bar)
    forwards, draft = step_cost(loaded, lengths, repeats=5 * repeats)
    bar.update()
    rows = []
    seconds = picture(ar, grid.positions)
    for decoder in decoders:
        drawn = []
        for _ in range(UNTIMED + repeats):
            drawn.append(draw(loaded, decoder, [0], seed=0))
            bar.update()
        whole, nfe = median(part.seconds for part in drawn[UNTIMED:]), drawn[0].result.stats.nfe
        rates = {"per_step": whole / nfe, "speedup": seconds / whole}
        rows.append({"decoder": decoder.text, "steps": nfe, "seconds": whole, **rates})
    return {
        "ar": {"seconds": seconds, "steps": grid.positions, "by_cache": {str(n): t for n, t in ar}},
        "forward": {str(grid.slot(n)): t for n, t in forwards.items()},
        "draft_row": draft,
        "decoders": rows,
    }


def picture(by_cache: Sequence[tuple[int, float]], positions: int) -> float:
    """Seconds of a whole AR picture: its steps, each taking what the neighbouring measured lengths say, linearly."""
    lengths, seconds = zip(*by_cache, strict=True)
    return float(np.interp(np.arange(positions), lengths, seconds).sum())


@torch.inference_mode()
def ar_steps(loaded: Loaded, bar: tqdm) -> list[tuple[int, float]]:
    """(image tokens in the cache, median seconds of a whole AR step there), at PLACES places from top to bottom."""
    T = loaded.backbone.grid.positions
    count = min(STEPS, T - WARM - 1)
    if count < 1:
        raise ValueError(f"grid has {T} cells; AR is timed over at least {WARM + 2}")
    places = sorted({round((T - WARM - count) * k / (PLACES - 1)) for k in range(PLACES)})
    found = []
    for place in places:
        _, rest = resume(loaded, torch.randint(loaded.backbone.image_vocab_size, (1, T)), place)
        seconds = [timed(partial(next, rest), loaded.backbone.device) for _ in range(WARM + count)][WARM:]
        found.append((place + WARM + count // 2, median(seconds)))
    bar.update(PLACES)
    return found


def resume(loaded: Loaded, tokens: Tensor, place: int) -> tuple[Canvas, Iterator[None]]:
    """A picture whose first `place` of the tokens (1, T) are there, and AR's own steps from there on."""
    backbone, policy = loaded.backbone, make_policy("ar")
    canvas = Canvas(backbone, None, loaded.sampling, SeededSource(0), [0])
    canvas.tokens[:, :place] = tokens[:, :place].to(canvas.tokens.device)
    state, h = backbone.start(CAPTION, loaded.sampling.guidance)
    rows = 4 * backbone.grid.width
    for n in range(0, place, rows):
        h = backbone.forward(state, canvas.tokens[:, n : min(n + rows, place)], [n])[:, :, -1:]  # (G, 1, 1, D)
    canvas.committed = [place]
    policy.begin(canvas)
    return canvas, steps(canvas, policy, state, h)


def table(found: dict[str, Any]) -> str:
    """One family as text."""
    height, width = found["grid"]
    lines = [
        f"{found['backbone']}, {found['layers']} layers, {found['parameters'] / 1e9:.2f} billion weights, "
        f"{found['dtype']}, {height}x{width}, guidance {found['guidance']:g}, one picture at a time"
    ]
    eager = found["modes"]["eager"]["ar"]["seconds"]
    rows = [["", "steps", "s/image", "ms/step", "over eager AR", "over its own"]]
    for mode, m in found["modes"].items():
        ar = {"decoder": "ar", "speedup": 1.0, **m["ar"], "per_step": m["ar"]["seconds"] / m["ar"]["steps"]}
        for r in (ar, *m["decoders"]):
            seconds = [f"{r['seconds']:.2f}", f"{1000 * r['per_step']:.2f}"]
            ratios = [f"{eager / r['seconds']:.1f}x", f"{r['speedup']:.1f}x"]
            rows.append([f"{r['decoder']}, {mode}", str(r["steps"]), *seconds, *ratios])
    lines += columns_of(rows)
    for mode, m in found["modes"].items():
        by_cache, forward = (milliseconds(times) for times in (m["ar"]["by_cache"], m["forward"]))
        lines.append(f"  {mode}: AR step by tokens in the cache, ms: {by_cache}")
        lines.append(f"  {mode}: forward over tokens, the cache half full, ms: {forward}")
        if draft := m["draft_row"]:
            share = f"{draft['share_of_forward']:.3f} of its forward"
            lines.append(f"  {mode}: draft of a row {1000 * draft['seconds']:.2f} ms, {share}")
    return "\n".join(lines)


def milliseconds(cost: dict[str, float]) -> str:
    """{L: seconds} as text."""
    return ", ".join(f"{n}: {1000 * t:.1f}" for n, t in cost.items())


if __name__ == "__main__":
    main(run, LatencyConfig, __doc__)
