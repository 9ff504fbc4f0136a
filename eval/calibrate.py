"""How long a window pays on this machine: steps fall as it grows, a forward costs more. It changes nothing.

The window is a setting of the decoder and part of what a seed means, so nothing chooses it during a run.
"""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from statistics import mean, median
from typing import Any

from tqdm import tqdm

from draftgrid.common.files import write_json
from draftgrid.common.table import table as columns_of
from draftgrid.eval.decoders import DECODERS
from draftgrid.eval.measure import Plan, Run, measure
from draftgrid.eval.setup import DecoderSpec, Loaded

WINDOWS = (4, 8, 12, 16, 24, 32, 48, 64)


def windowed(decoders: Sequence[DecoderSpec]) -> list[DecoderSpec]:
    """Those that have a window, each once and without it. Raises ValueError if none has one."""
    having = [d for d in decoders if "window" in signature(DECODERS[d.name]).parameters]
    if not having:
        names = ", ".join(d.text for d in decoders)
        raise ValueError(f"calibrate=true measures windows, but {names} has none; use e.g. decoders=scd,ssd_coupled")
    bare = [DecoderSpec(d.name, {k: v for k, v in d.settings.items() if k != "window"}) for d in having]
    return list({d.text: d for d in bare}.values())


def calibrate(
    loaded: Loaded, decoders: Sequence[DecoderSpec], out: Path, plan: Plan, windows: Sequence[int] = WINDOWS
) -> dict[str, Any]:
    """Steps of all prompts and milliseconds a step at every window that the grid has room for.

    Writes calibrate.json into `out` and returns what it holds.
    """
    fitting = [w for w in windows if w <= loaded.backbone.grid.positions]
    sweep = {d.text: [DecoderSpec(d.name, {**d.settings, "window": w}) for w in fitting] for d in decoders}
    every = [d for variants in sweep.values() for d in variants]
    with tqdm(total=len(every) * plan.pictures(len(loaded.prompts)), desc="calibrate", unit="img") as bar:
        runs = iter(measure(loaded, every, plan, bar))
    sampling = loaded.sampling
    report: dict[str, Any] = {"guidance": sampling.guidance, "batch_size": plan.batch_size, "decoders": []}
    for text, variants in sweep.items():
        rows = [_row(next(runs)) for _ in variants]
        best = min(rows, key=lambda r: r["seconds_per_image"])
        report["decoders"].append({"decoder": text, "rows": rows, "best": best["setting"]})
    write_json(out / "calibrate.json", report)
    return report


def _row(run: Run) -> dict[str, Any]:
    forwards = sum(part.result.stats.nfe for part in run.passes[0])
    whole, steps = median(run.seconds().sum(1)) / forwards, mean(run.steps)
    together = mean(len(part.numbers) for part in run.passes[0])
    return {
        "window": run.decoder.settings["window"],
        "setting": run.decoder.text,
        "steps": steps,
        **{name: run.phase(name) / forwards for name in ("seconds_forward", "seconds_draft", "seconds_verify")},
        "seconds_per_step": whole,
        "seconds_per_image": steps * whole / together,
    }


def table(report: dict[str, Any]) -> str:
    """A block per decoder, a line per window, the quickest marked; and the setting to write."""
    lines = []
    for found in report["decoders"]:
        lines.append(f"{found['decoder']}, guidance {report['guidance']:g}, {report['batch_size']} at a time")
        rows = [["window", "steps", "forward ms", "draft ms", "ms a step", "s/image, predicted", ""]]
        for r in found["rows"]:
            ms = [f"{1000 * r[f'seconds_{name}']:.2f}" for name in ("forward", "draft", "per_step")]
            best = "<- best" if r["setting"] == found["best"] else ""
            rows.append([str(r["window"]), f"{r['steps']:.1f}", *ms, f"{r['seconds_per_image']:.3f}", best])
        lines += columns_of(rows)
        lines.append(f"write: {found['best']}")
    return "\n".join(lines)
