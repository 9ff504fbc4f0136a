"""The plan as text: four aligned tables and what they assume."""

from collections.abc import Sequence

from draftgrid.common.table import table
from draftgrid.recipes.launch.schema import TrainConfig
from draftgrid.recipes.plan.memory import Counted, Memory
from draftgrid.recipes.plan.speed import Decoding, speeds
from draftgrid.recipes.plan.subject import Subject, count

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
ROWS = {
    "backbone": "backbone's weights",
    "heads": "heads' weights",
    "gradients": "gradients",
    "master": "fp32 master weights",
    "moments": "AdamW's moments",
    "buffers": "reduction buffers",
    "gathered": "gathered layers",
    "held": "= held throughout",
    "frozen": "a  frozen forward",
    "work": "b  states, heads' activations",
    "loss": "b  logits and loss",
    "optimizer": "c  optimizer's scratch",
    "total": "= peak: held + largest of a, b, c",
}
BACKBONE_LABELS = {"heads": "weights", "work": "b  activations"}
"""For task=backbone."""


def si(value: float, unit: str = "") -> str:
    """1.23 GB: three digits and a prefix of thousands."""
    for scale, prefix in PREFIXES:
        if abs(value) >= scale or scale == 1:
            scaled = value / scale
            digits = 0 if scaled >= 100 or (scale == 1 and value == int(value)) else 1 if scaled >= 10 else 2
            return f"{scaled:.{digits}f} {prefix}{unit}".rstrip()
    raise AssertionError


def duration(seconds: float) -> str:
    for size, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def noted(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of two columns, each line followed by its third cell as it is."""
    lines = table([row[:2] for row in rows])
    return [f"{line}   {row[2]}".rstrip() if len(row) > 2 else line for line, row in zip(lines, rows, strict=True)]


def render(
    config: TrainConfig,
    subject: Subject,
    precision: str,
    gpus: int,
    counted: Counted,
    by_strategy: dict[str, Memory],
    decoding: Decoding | None,
) -> str:
    parts = [
        parameters(config, subject),
        memory(config, subject, precision, gpus, by_strategy),
        step(config, subject, gpus, counted),
    ]
    if decoding is not None and subject.heads is not None:
        parts += [drafting(decoding), speed(config, decoding)]
    return "\n\n".join([f"plan of recipe {config.recipe}; nothing was loaded and nothing is written", *parts])


def parameters(config: TrainConfig, subject: Subject) -> str:
    backbone, grid = subject.backbone, subject.backbone.grid
    total = count(backbone)
    layers = sum(count(layer) for layer in backbone.layers)
    size = (
        f"hidden size {backbone.hidden_size}, {grid.height} x {grid.width} cells, {backbone.image_vocab_size:,} codes"
    )
    rows = [
        ["backbone", si(total), f"{backbone.name}: {size}"],
        [f"  {backbone.num_layers} layers", si(layers)],
        ["  embedding, LM head, norm", si(total - layers)],
    ]
    if subject.unread:
        rows.append(["picture tokenizer, ...", si(subject.unread), "not read to draw codes; in no figure below"])
    if subject.heads is not None:
        own = count(subject.heads)
        rows.append([f"heads ({config.heads.kind})", si(own), f"{100 * own / total:.3g} % of the backbone"])
        rows += [[f"  {name}", si(count(part))] for name, part in subject.heads.named_children()]
    return "\n".join(["parameters", *noted(rows)])


def memory(config: TrainConfig, subject: Subject, precision: str, gpus: int, by_strategy: dict[str, Memory]) -> str:
    chosen = config.trainer.strategy if config.trainer.strategy in by_strategy else "ddp"
    head = [f"{'*' if name == chosen else ''}{name}" for name in by_strategy]
    rows = [["", *head]]
    for key, label in ROWS.items():
        if subject.heads is None and key in BACKBONE_LABELS:
            label = BACKBONE_LABELS[key]
        values = [_item(m, key) for m in by_strategy.values()]
        if any(values) or key in ("held", "total"):
            rows.append([label, *(si(v, "B") if v else "-" for v in values)])
    room = config.assume.memory_gb * 1e9
    rows.append([f"fits in {room / 1e9:g} GB", *("yes" if m.total <= room else "no" for m in by_strategy.values())])
    chunk = config.loss.chunk if config.loss.on_distributions else 0
    about = f"{precision}, {gpus} GPUs, {config.data.batch_size} pictures each"
    if chunk:
        about += f", loss in chunks of {chunk} positions"
    notes = "  * the recipe's strategy. Not counted: validation, the CUDA context and the allocator's gaps."
    return "\n".join([f"memory of one GPU ({about})", *table(rows), notes])


def _item(m: Memory, key: str) -> int:
    if key == "held":
        return m.held.total
    if key in ("total", "frozen", "loss", "optimizer"):
        return getattr(m, key)
    return m.heads if key == "work" else getattr(m.held, key)


def step(config: TrainConfig, subject: Subject, gpus: int, counted: Counted) -> str:
    t, a, grid = config.trainer, config.assume, subject.backbone.grid
    pictures = config.data.batch_size * t.accumulate * gpus
    branches = 2 if subject.heads is not None and config.loss.guided else 1
    tokens = pictures * branches * (a.prompt_tokens + grid.slots - 1)
    seconds = counted.flops * t.accumulate / (a.flops * a.utilisation)
    frozen, heads, loss = (
        x * t.accumulate * gpus for x in (counted.frozen_flops, counted.heads_flops, counted.loss_flops)
    )
    share = [f"{100 * x / max(1, frozen + heads + loss):.0f} %" for x in (frozen, heads, loss)]
    name = "heads, forward and backward" if subject.heads is not None else "backbone, forward and backward"
    rows = [
        ["pictures", f"{pictures:,}", f"{config.data.batch_size} a GPU x {t.accumulate} batches x {gpus} GPUs"],
        [
            "tokens",
            f"{tokens:,}",
            f"prompts of {a.prompt_tokens}, {grid.slots - 1} a picture"
            + (", both guidance branches" if branches == 2 else ""),
        ],
        ["frozen forward", si(frozen, "FLOP"), share[0]],
        [name, si(heads, "FLOP"), share[1]],
        [
            "LM head in the loss",
            si(loss, "FLOP"),
            share[2] + (", recomputation included" if config.loss.recompute else ""),
        ],
        [
            "time",
            duration(seconds),
            f"at {si(a.flops, 'FLOP/s')} a GPU, {100 * a.utilisation:g} % of it reached",
        ],
        ["pictures a second", f"{pictures / seconds:,.3g}"],
        [f"time for {t.steps:,} steps", duration(t.steps * seconds), "without validation, and if data keeps up"],
    ]
    if not frozen:
        del rows[2]
    if not loss:
        rows = [r for r in rows if r[0] != "LM head in the loss"]
    return "\n".join(["one step, all GPUs", *noted(rows)])


def drafting(cost: Decoding) -> str:
    W = cost.grid.width
    one, row = cost.forward(1), cost.forward(W)
    rows = [
        ["", "reads", "FLOP a row", "reads / forward", "FLOP / forward"],
        ["backbone, 1 token", si(one.bytes, "B"), "", "1", ""],
        [f"backbone, {W} tokens", si(row.bytes, "B"), si(row.flops, "FLOP"), "1", "1"],
    ]
    for name in cost.heads:
        d = cost.draft([name], W)
        rows.append(
            [
                f"draft by {name}",
                si(d.bytes, "B"),
                si(d.flops, "FLOP"),
                f"{d.bytes / row.bytes:.3f}",
                f"{d.flops / row.flops:.3f}",
            ]
        )
    about = "bf16, LM head included" + (", both guidance branches" if cost.branches == 2 else "")
    return "\n".join([f"drafting against a forward ({about})", *table(rows)])


def speed(config: TrainConfig, cost: Decoding) -> str:
    a = config.assume
    T = cost.grid.positions
    rows = [["", "forwards", "speed-up", "drafting"], ["ar", f"{T}", "1.00x", ""]]
    for s in speeds(cost, a):
        rows.append([s.decoder, f"{s.steps:.0f}", f"{s.speedup:.2f}x", f"{100 * s.drafting:.0f} %"])
    notes = [
        "  An estimate: a call takes the longer of reading its weights and computing, one picture at a time. Each of k",
        "  drafts is accepted with the same chance a, whatever came before: 1 + a + ... + a^k tokens a forward.",
        "  ssd_coupled keeps tokens right of a rejection, so it needs fewer. ssd is lossy; its row 0 drafts free here.",
    ]
    return "\n".join(["expected speed-up of decoding", *table(rows), *notes])
