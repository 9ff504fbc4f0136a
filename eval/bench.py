"""Decoders side by side with AR, in one process: steps, seconds, acceptance, likelihood.

python -m eval.bench heads=runs/emoji_ssd/heads images=16 out=runs/bench
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from eval.decoders import DecodeResult, Policy, Sampling, make_policy
from eval.decoders.engine import run as decode
from eval.decoders.randomness import SeededSource, Where
from eval.metrics.likelihood import bootstrap, surprise
from eval.setup import EvalConfig, Loaded, load, policies
from heads.cli import key, main
from heads.files import atomic, write_json
from heads.run_folder import machine
from heads.sheet import contact_sheet
from heads.timing import timed

SUITE = "ar,ssd:rounds=0,ssd:rounds=1,ssd:rounds=2,ssd:rounds=3,ssd:rounds=2:rows=2,ssd:rounds=5:rows=2:staged=4"


@dataclass
class BenchConfig(EvalConfig):
    decoders: str = key(SUITE, "comma-separated; AR is always measured, first")
    repeats: int = key(3, "timed passes over the pictures; medians are reported")
    columns: int = key(8, "pictures a row on the sheet")
    out: str = key("runs/bench", "folder for bench.json and sheet.png")


@dataclass
class Run:
    """One decoder over all prompts: the pictures, and per repeat the seconds an image took."""

    name: str
    settings: dict[str, Any]
    policy: Policy
    results: list[DecodeResult]
    seconds: list[float]

    @property
    def tokens(self) -> Tensor:
        return torch.cat([r.tokens for r in self.results])

    def total(self, name: str) -> float:
        return sum(getattr(r.stats, name) for r in self.results)


def measure(
    loaded: Loaded, chosen: Sequence[tuple[str, dict, Policy]], repeats: int, batch: int, seed: int
) -> list[Run]:
    """Draw all prompts with every decoder, `repeats` times; decoders take turns, so a slow minute hits all alike."""
    runs = [Run(name, settings, policy, [], []) for name, settings, policy in chosen]
    prompts = loaded.prompts
    for run in runs:  # warm-up: first calls allocate and choose kernels
        decode(
            loaded.backbone, prompts[:batch], make_policy(run.name, **run.settings), loaded.sampling, loaded.heads, seed
        )
    with tqdm(total=len(runs) * repeats * len(prompts), desc="bench", unit="img") as bar:
        for _ in range(repeats):
            for run in runs:
                run.results, begun = [], time.perf_counter()
                for i in range(0, len(prompts), batch):
                    part = prompts[i : i + batch]
                    numbers = range(i, i + len(part))
                    policy = make_policy(run.name, **run.settings)
                    run.results.append(
                        decode(loaded.backbone, part, policy, loaded.sampling, loaded.heads, seed, numbers)
                    )
                    bar.update(len(part))
                run.seconds.append((time.perf_counter() - begun) / len(prompts))
    return runs


@torch.inference_mode()
def step_cost(loaded: Loaded, batch: int = 1, repeats: int = 15) -> tuple[dict[int, float], dict[str, float] | None]:
    """{L: median seconds of a forward over L image tokens, the cache half full}, and what drafting a row takes.

    A drafted row is all a head costs in decoding: W cells through it, the final norm, LM head, the sampling pipeline
    and the draw; `seconds` repeated alone, as the forwards are, and `seconds_in_loop` right behind a forward, which has
    emptied the caches. None without heads.
    """
    backbone, heads, sampling = loaded.backbone, loaded.heads, loaded.sampling
    grid, device = backbone.grid, backbone.device
    half = max(1, grid.height // 2 * grid.width)
    lengths = [
        n for n in sorted({1, 2, 4, 8, 16, 32, grid.width, 2 * grid.width}) if n == 1 or half + n < grid.positions
    ]
    prompts = loaded.prompts[:batch]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.image_vocab_size, (len(prompts), grid.positions), generator=generator).to(device)
    state, _ = backbone.start(prompts, sampling.guidance)
    first, source = [half] * len(prompts), SeededSource(0)
    h = backbone.forward(state, tokens[:, :half], [0] * len(prompts))[:, :, : grid.width]
    cells = h.shape[2]
    times: dict[int, list[float]] = {n: [] for n in lengths}
    alone: list[float] = []
    in_loop: list[float] = []

    def draft_row() -> None:
        assert heads is not None
        predicted = heads(h, backbone.embed(tokens[:, :cells]), heads.offsets[-1])  # type: ignore[index]
        q = sampling.probabilities(backbone.logits(predicted))
        source.draw(q, Where(range(len(prompts)), np.arange(cells), 0))

    for _ in range(repeats):
        for n in lengths:  # a forward follows one of its own length, as in decoding
            for _ in range(3):
                backbone.rollback(state, first)
                seconds = timed(partial(backbone.forward, state, tokens[:, half : half + n], first), device)
            times[n].append(seconds)
            if heads is not None and n == grid.width:
                in_loop.append(timed(draft_row, device))
                alone.append([timed(draft_row, device) for _ in range(3)][-1])
    cost = {n: median(t) for n, t in times.items()}
    if heads is None or not alone:
        return cost, None
    forward = interpolate(cost, grid.width)
    draft = {"seconds": median(alone), "seconds_in_loop": median(in_loop)}
    return cost, {**draft, "share_of_forward": draft["seconds"] / forward}


def interpolate(cost: dict[int, float], length: float) -> float:
    """Seconds of a forward over `length` tokens, linear between the measured lengths."""
    known = sorted(cost)
    length = min(max(length, known[0]), known[-1])
    high = next(n for n in known if n >= length)
    low = max(n for n in known if n <= length)
    share = 0.0 if high == low else (length - low) / (high - low)
    return cost[low] + share * (cost[high] - cost[low])


def row(run: Run, ar: Run, loaded: Loaded, cost: dict[int, float]) -> dict[str, Any]:
    stats = [r.stats for r in run.results]
    images = len(loaded.prompts)
    parts = [
        surprise(loaded.backbone, r.tokens, p, loaded.sampling)
        for r, p in zip(run.results, _batches(run, loaded), strict=True)
    ]
    nll = torch.cat([n for n, _ in parts]).tolist()
    excess = torch.cat([e for _, e in parts]).tolist()
    nfe = mean(s.nfe for s in stats)
    forwarded = mean(s.tokens_forwarded for s in stats)
    hits: dict[str, list[int]] = {}
    for s in stats:
        for name, (good, all_) in s.drafted.items():
            entry = hits.setdefault(name, [0, 0])
            entry[0], entry[1] = entry[0] + good, entry[1] + all_
    changed = [sum(s.changed[k] for s in stats) for k in (0, 1)]
    ar_nfe = mean(r.stats.nfe for r in ar.results)
    allowed = ar_nfe / nfe * cost[1] / interpolate(cost, forwarded / max(nfe - 1, 1))
    return {
        "decoder": run.name,
        "settings": run.settings,
        "exact": run.policy.exact,
        "images": images,
        "nfe": nfe,
        "tokens_forwarded": forwarded,
        "seconds_per_image": median(run.seconds),
        "seconds_draft": run.total("seconds_draft") / images,
        "seconds_forward": run.total("seconds_forward") / images,
        "seconds_verify": run.total("seconds_verify") / images,
        "speedup": median(a / b for a, b in zip(ar.seconds, run.seconds, strict=True)),
        "speedup_allowed": allowed,
        "nll": mean(nll),
        "excess_surprise": bootstrap(excess),
        "acceptance": {name: good / all_ for name, (good, all_) in hits.items()},
        "change_rate": changed[0] / changed[1] if changed[1] else None,
    }


def _batches(run: Run, loaded: Loaded) -> list[list[str]]:
    sizes = [len(r.tokens) for r in run.results]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [loaded.prompts[a : a + n] for a, n in zip(starts, sizes, strict=True)]


def bench(
    loaded: Loaded,
    decoders: str,
    out: Path,
    *,
    heads: str = "",
    repeats: int = 3,
    batch_size: int = 1,
    seed: int = 0,
    columns: int = 8,
) -> dict[str, Any]:
    """Measure, write bench.json and sheet.png into `out`, return what bench.json holds."""
    chosen = policies(decoders)
    if not any(name == "ar" for name, _, _ in chosen):
        chosen = [*policies("ar"), *chosen]
    chosen.sort(key=lambda c: c[0] != "ar")
    runs = measure(loaded, chosen, repeats, batch_size, seed)
    grid = loaded.backbone.grid
    cost, draft = step_cost(loaded, batch_size)
    sampling: Sampling = loaded.sampling
    report: dict[str, Any] = {
        "backbone": {"name": loaded.backbone.name, "fingerprint": loaded.backbone.fingerprint},
        "heads": heads,
        "grid": [grid.height, grid.width],
        "machine": f"{machine()}, {torch.get_num_threads()} threads",
        "sampling": {
            "guidance": sampling.guidance,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        },
        "batch_size": batch_size,
        "rows": [row(run, runs[0], loaded, cost) for run in runs],
        "step_cost": {str(n): t for n, t in cost.items()},
        "draft_row": draft,
    }
    write_json(out / "bench.json", report)
    shown = [loaded.tokenizer.pil(run.tokens[:columns]) for run in runs]
    labels = [
        f"{label(r)}\n{r['nfe']:.0f} steps, {law(r)}\n{r['seconds_per_image']:.2f} s, {r['speedup']:.1f}x"
        for r in report["rows"]
    ]
    with atomic(out / "sheet.png") as temporary:
        contact_sheet(shown, labels, loaded.prompts[:columns]).save(temporary, "PNG")
    return report


def law(row: dict[str, Any]) -> str:
    return "exact" if row["exact"] else "lossy"


def label(row: dict[str, Any]) -> str:
    return " ".join([row["decoder"], *(f"{k}={v}" for k, v in row["settings"].items())])


def table(report: dict[str, Any]) -> str:
    """The rows as text, one line each."""
    lines = [
        f"{'decoder':<32}{'law':>6}{'steps':>7}{'s/image':>9}{'speed-up':>10}{'allowed':>9}{'NLL':>7}"
        f"{'excess surprise (95 %)':>26}{'changed':>9}"
    ]
    for r in report["rows"]:
        m, low, high = r["excess_surprise"]
        changed = "" if r["change_rate"] is None else f"{r['change_rate']:.1%}"
        lines.append(
            f"{label(r):<32}{law(r):>6}{r['nfe']:>7.1f}{r['seconds_per_image']:>9.3f}{r['speedup']:>9.2f}x"
            f"{r['speedup_allowed']:>8.2f}x{r['nll']:>7.2f}{f'{m:+.3f} ({low:+.3f} {high:+.3f})':>26}{changed:>9}"
        )
    cost = ", ".join(f"{n}: {1000 * t:.1f}" for n, t in report["step_cost"].items())
    lines.append(f"forward over L tokens, ms: {cost}")
    if draft := report["draft_row"]:
        lines.append(
            f"drafting a row, ms: {1000 * draft['seconds']:.2f}, {draft['share_of_forward']:.3f} of its forward "
            f"({1000 * draft['seconds_in_loop']:.2f} right behind a forward)"
        )
    return "\n".join([*lines, f"machine: {report['machine']}"])


def run(config: BenchConfig) -> None:
    chosen = policies(config.decoders)
    if config.repeats < 1 or config.columns < 1:
        raise ValueError(f"repeats is {config.repeats} and columns is {config.columns}; both need at least 1")
    loaded = load(config, any(p.drafts_with for _, _, p in chosen))
    report = bench(
        loaded,
        config.decoders,
        Path(config.out),
        heads=config.heads,
        repeats=1 if config.smoke else config.repeats,
        batch_size=config.batch_size,
        seed=config.seed,
        columns=config.columns,
    )
    print(table(report))
    print(f"{config.out}/bench.json, {config.out}/sheet.png")


if __name__ == "__main__":
    main(run, BenchConfig, __doc__)
