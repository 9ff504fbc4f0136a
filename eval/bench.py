"""Decoders side by side with AR, in one process: steps, seconds, acceptance, likelihood.

draftgrid bench images=16 out=runs/bench
draftgrid bench suite=all
draftgrid bench calibrate=true decoders=ssd_coupled
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from draftgrid.common.cli import check_ranges, key, main
from draftgrid.common.environment import machine
from draftgrid.common.files import atomic, write_json
from draftgrid.common.packages import need
from draftgrid.common.sheet import contact_sheet
from draftgrid.common.table import table as columns_of
from draftgrid.eval.calibrate import calibrate, windowed
from draftgrid.eval.calibrate import table as calibrate_table
from draftgrid.eval.chart import speed_chart
from draftgrid.eval.decoders import Sampling, Stats
from draftgrid.eval.latency import milliseconds
from draftgrid.eval.measure import Plan, Run, accept_cost, batches, interpolate, lengths_on, measure, speedup, step_cost
from draftgrid.eval.metrics.likelihood import bootstrap, likelihood
from draftgrid.eval.setup import DecoderSpec, EvalConfig, Loaded, load, parse_decoders, spread
from draftgrid.eval.suites import CALIBRATED, SHORT, SMOKE, every


@dataclass
class BenchConfig(EvalConfig):
    suite: str = key("", "all = every decoder, 200 pictures of which 8 are timed, guidance 1 and 3; '' = a short list")
    decoders: str = key("", "comma-separated, in place of the suite's; AR is always measured, first")
    images: int = key(0, "pictures: the first N of the prompts, spread evenly; 0 = 8, or what the suite says", least=0)
    timed: int = key(0, "pictures that are timed, spread evenly; 0 = all of them, or what the suite says", least=0)
    repeats: int = key(3, "timed passes over the pictures; medians are reported", least=1)
    batch_size: int = key(1, "pictures drawn together while timing", least=1)
    quality_batch: int = key(8, "pictures drawn together where nothing is timed", least=1)
    guidances: list[float] = key(list, "several guidance scales, each in OUT/guidanceN; empty = `guidance`, or suite's")
    calibrate: bool = key(False, "only print what each window costs, for the decoders that have one")
    smoke: bool = key(False, "2 pictures, once, one guidance; of suite=all each decoder once with each kind of heads")
    columns: int = key(8, "pictures a row on the sheet", least=1)
    out: str = key("runs/bench", "folder for bench.json, sheet.png and speed.png (or calibrate.json)")


@dataclass(frozen=True)
class Suite:
    """What a name stands for; a key that is given wins."""

    decoders: str
    smoke: str
    images: int = 8
    timed: int = 0
    guidances: tuple[float, ...] = ()


SUITES = {
    "": Suite(SHORT, SHORT),
    "all": Suite(every(), SMOKE, images=200, timed=8, guidances=(1.0, 3.0)),
}


def resolve(config: BenchConfig) -> tuple[list[DecoderSpec], list[Sampling], Plan]:
    """Fill in what the suite and smoke say, and return what is to be done. Raises ValueError."""
    if config.suite not in SUITES:
        raise ValueError(f"suite is {config.suite!r}; use all, or name decoders=")
    suite = SUITES[config.suite]
    if config.calibrate:
        if config.suite:
            raise ValueError(f"suite is {config.suite!r}, but calibrate=true has its own list; name decoders=")
        suite = Suite(CALIBRATED, CALIBRATED, timed=2)
    if config.guidances and config.guidance != 1:
        raise ValueError(f"guidance is {config.guidance:g} and guidances is {config.guidances}; give one of them")
    check_ranges(config)
    config.images = config.images or suite.images
    config.timed = config.timed or suite.timed
    decoders = parse_decoders(config.decoders or (suite.smoke if config.smoke else suite.decoders))
    if config.calibrate:
        decoders = windowed(decoders)
    else:
        if not any(d.name == "ar" for d in decoders):
            decoders.append(DecoderSpec("ar"))
        decoders.sort(key=lambda d: d.name != "ar")
    guidances = config.guidances or (list(suite.guidances) if config.guidance == 1 else []) or [config.guidance]
    if len(set(guidances)) < len(guidances):
        raise ValueError(f"guidances is {guidances}; each once is enough")
    if config.smoke:
        config.timed, config.repeats, config.batch_size, guidances = 2, 1, 2, guidances[:1]
    config.guidance = guidances[0]
    samplings = [Sampling(g, config.temperature, config.top_k, config.top_p) for g in guidances]
    batches = config.batch_size, config.quality_batch
    return decoders, samplings, Plan(config.timed, config.repeats, *batches, config.seed, warm_up=not config.smoke)


def bench(
    loaded: Loaded, decoders: Sequence[DecoderSpec], out: Path, plan: Plan, *, heads: str = "", columns: int = 8
) -> dict[str, Any]:
    """Measure (the first decoder is AR), write bench.json, sheet.png and speed.png into `out`.

    Returns what bench.json holds.
    """
    images = len(loaded.prompts)
    total = len(decoders) * (plan.pictures(images) + images)  # every picture is drawn, then its likelihood measured
    with tqdm(total=total, desc=f"bench, guidance {loaded.sampling.guidance:g}", unit="img", smoothing=0.05) as bar:
        runs = measure(loaded, decoders, plan, bar)
        scores = [score(loaded, run, plan.quality_batch, bar) for run in runs]
    grid, sampling = loaded.backbone.grid, loaded.sampling
    windows = [d.settings["window"] for d in decoders if "window" in d.settings]
    cost, draft = step_cost(loaded, lengths_on(grid, windows), plan.batch_size, repeats=15 if plan.warm_up else 3)
    report: dict[str, Any] = {
        "backbone": {"name": loaded.backbone.name, "fingerprint": loaded.backbone.fingerprint},
        "heads": heads,
        "grid": [grid.height, grid.width],
        "machine": f"{machine()}, {torch.get_num_threads()} threads",
        "sampling": asdict(sampling),
        "compiled": loaded.backbone.compiled,
        "seed": plan.seed,
        "batch_size": plan.batch_size,
        "repeats": plan.repeats,
        "rows": [row(run, runs[0], found, loaded, cost) for run, found in zip(runs, scores, strict=True)],
        "step_cost": {str(n): t for n, t in cost.items()},
        "draft_row": draft,
    }
    write_json(out / "bench.json", report)
    shown = spread(columns, images)
    names = [label(r) for r in report["rows"]]
    form = "{}\n{:.0f} steps, {}\n{:.2f} s, {:.1f}x"
    labels = [form.format(label(r), r["nfe"], kept(r), r["seconds_per_image"], r["speedup"]) for r in report["rows"]]
    with atomic(out / "sheet.png") as temporary:
        pictures = [loaded.tokenizer.pil(run.tokens[shown]) for run in runs]
        contact_sheet(pictures, labels, [loaded.prompts[i] for i in shown]).save(temporary, "PNG")
    timed = report["rows"][0]["timed"]
    title = f"{loaded.backbone.name}, guidance {sampling.guidance:g}, {images} pictures, {timed} timed"
    speed_chart(report["rows"], names, title, out / "speed.png")
    return report


def score(loaded: Loaded, run: Run, batch: int, bar: tqdm) -> tuple[list[float], list[float]]:
    """Negative log-likelihood and excess NLL of every picture, nats a token."""
    parts = []
    tokens = run.tokens
    for numbers in batches(range(len(tokens)), batch):
        prompts = [loaded.prompts[i] for i in numbers]
        parts.append(torch.stack(likelihood(loaded.backbone, tokens[list(numbers)], prompts, loaded.sampling)))
        bar.update(len(numbers))
    nll, excess = torch.cat(parts, 1).tolist()
    return nll, excess


def row(
    run: Run, ar: Run, scores: tuple[list[float], list[float]], loaded: Loaded, cost: dict[int, float]
) -> dict[str, Any]:
    total = Stats.total([part.result.stats for part in run.parts])
    clocked = [part.result.stats for part in run.passes[-1]]
    images = sum(len(part.numbers) for part in run.passes[-1])
    nfe_timed = mean(s.nfe for s in clocked)
    forwarded = mean(s.tokens_forwarded for s in clocked)
    seconds = {name: run.phase(name) / images for name in ("seconds_draft", "seconds_forward", "seconds_verify")}
    ar_nfe = mean(part.result.stats.nfe for part in ar.passes[-1])
    steps = bootstrap(run.steps)
    faster, interval = speedup(ar, run)
    return {
        "decoder": run.decoder.name,
        "settings": run.decoder.settings,
        "drafts": run.decoder.pick(loaded.heads),
        "exact": run.decoder.exact,
        "images": len(loaded.prompts),
        "timed": images,
        "nfe": mean(run.steps),
        "nfe_interval": steps[1:],
        "nfe_timed": nfe_timed,
        "tokens_forwarded": forwarded,
        "seconds_per_image": float(np.median(run.seconds().sum(1))) / images,
        **seconds,
        "draft_share": seconds["seconds_draft"] / seconds["seconds_forward"],
        "speedup": faster,
        "speedup_interval": interval,
        "speedup_allowed": ar_nfe / nfe_timed * cost[1] / interpolate(cost, forwarded / max(nfe_timed - 1, 1)),
        "nll": mean(scores[0]),
        "excess_nll": bootstrap(scores[1]),
        "acceptance": total.acceptance,
        "change_rate": total.change_rate,
    }


def kept(row: dict[str, Any]) -> str:
    """Whether the backbone's distribution is kept, in a word."""
    return "exact" if row["exact"] else "lossy"


def label(row: dict[str, Any]) -> str:
    return " ".join([row["decoder"], *(f"{k}={v}" for k, v in row["settings"].items())])


def table(report: dict[str, Any]) -> str:
    """The rows as text, one line each."""
    rows = [["decoder", "", "steps", "s/image", "speed-up", "allowed", "NLL", "excess NLL (95 %)", "changed"]]
    for r in report["rows"]:
        m, low, high = r["excess_nll"]
        cells = [f"{r['nfe']:.1f}", f"{r['seconds_per_image']:.3f}"]
        cells += [f"{r['speedup']:.2f}x", f"{r['speedup_allowed']:.2f}x", f"{r['nll']:.2f}"]
        changed = "" if r["change_rate"] is None else f"{r['change_rate']:.1%}"
        rows.append([label(r), kept(r), *cells, f"{m:+.3f} ({low:+.3f} {high:+.3f})", changed])
    lines = columns_of(rows, indent="")
    lines.append(f"forward over L tokens, ms: {milliseconds(report['step_cost'])}")
    if draft := report["draft_row"]:
        lines.append(
            f"drafting a row, ms: {1000 * draft['seconds']:.2f}, {draft['share_of_forward']:.3f} of its forward "
            f"({1000 * draft['seconds_in_loop']:.2f} right after a forward)"
        )
    return "\n".join([*lines, f"machine: {report['machine']}"])


def run(config: BenchConfig) -> None:
    config = replace(config)  # the caller's own stays as it is
    decoders, samplings, plan = resolve(config)
    need("matplotlib", use="speed.png")
    loaded = load(config, decoders)
    for sampling in samplings:
        out = Path(config.out) / (f"guidance{sampling.guidance:g}" if len(samplings) > 1 else "")
        one = replace(loaded, sampling=sampling)
        if config.calibrate:
            print(calibrate_table(calibrate(one, decoders, out, plan)), out / "calibrate.json", sep="\n")
            continue
        report = bench(one, decoders, out, plan, heads=loaded.place, columns=config.columns)
        if len(samplings) > 1:
            print(f"guidance {sampling.guidance:g}")
        print(table(report))
        print(f"{out}/bench.json, {out}/sheet.png, {out}/speed.png")
    if config.suite == "all" and not config.smoke:
        cost = accept_cost(loaded.backbone.device)
        write_json(Path(config.out) / "accept_step.json", cost)
        softmax = 1000 * cost.pop("softmax_seconds")
        print(f"accept step, 2 x 96 positions of 32,768 codes, in softmaxes of {softmax:.1f} ms:", end=" ")
        print(*(f"{name} {price:.1f}" for name, price in cost.items()), sep=", ")


if __name__ == "__main__":
    main(run, BenchConfig, __doc__)
