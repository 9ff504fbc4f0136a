"""The plan as text: tables and what they assume."""

from collections.abc import Sequence

from draftgrid.common.table import table
from draftgrid.recipes.launch.schema import TrainConfig
from draftgrid.recipes.plan.memory import Counted, Memory
from draftgrid.recipes.plan.speed import Decoding, speeds
from draftgrid.recipes.plan.subject import Subject, count

PREFIXES = ("", "k", "M", "G", "T", "P")


def si(value: float, unit: str = "") -> str:
    """1.23 GB: three digits and a prefix of thousands."""
    power = next((n for n in range(len(PREFIXES) - 1, 0, -1) if value >= 1000**n), 0)
    scaled = value / 1000**power
    digits = 0 if scaled >= 100 or (not power and value == int(value)) else 1 if scaled >= 10 else 2
    return f"{scaled:.{digits}f} {PREFIXES[power]}{unit}".rstrip()


def duration(seconds: float) -> str:
    for size, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def noted(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """A table of two columns, each line followed by its row's third cell as it is."""
    lines = table([row[:2] for row in rows])
    return [f"{line}   {note}".rstrip() for line, (_, _, note) in zip(lines, rows, strict=True)]


def parameters(config: TrainConfig, subject: Subject) -> str:
    b, grid = subject.backbone, subject.backbone.grid
    total = count(b)
    layers = sum(count(layer) for layer in b.layers)
    about = f"{b.name}: hidden size {b.hidden_size}, {grid.height} x {grid.width} cells, {b.image_vocab_size:,} codes"
    rows = [
        ("backbone", si(total), about),
        (f"  {b.num_layers} layers", si(layers), ""),
        ("  embedding, LM head, norm", si(total - layers), ""),
    ]
    if subject.unread:
        rows.append(("picture tokenizer, ...", si(subject.unread), "not read to draw codes; in no figure below"))
    if subject.heads is not None:
        own = count(subject.heads)
        rows.append((f"heads ({config.heads.kind})", si(own), f"{100 * own / total:.3g} % of the backbone"))
        rows += [(f"  {name}", si(count(part)), "") for name, part in subject.heads.named_children()]
    return "\n".join(["parameters", *noted(rows)])


def memory(config: TrainConfig, subject: Subject, precision: str, gpus: int, by_strategy: dict[str, Memory]) -> str:
    chosen = config.trainer.strategy if config.trainer.strategy in by_strategy else "ddp"
    columns = [_bytes(m, subject.heads is not None) for m in by_strategy.values()]
    rows = [["", *(f"{'*' * (name == chosen)}{name}" for name in by_strategy)]]
    for label in columns[0]:
        if any(column[label] for column in columns) or label.startswith("="):
            rows.append([label, *(si(c[label], "B") if c[label] else "-" for c in columns)])
    room = config.assume.memory_gb * 1e9
    rows.append([f"fits in {room / 1e9:g} GB", *("yes" if m.total <= room else "no" for m in by_strategy.values())])
    about = f"{precision}, {gpus} GPUs, {config.data.batch_size} pictures each"
    if config.loss.chunk and config.loss.on_distributions:
        about += f", loss in chunks of {config.loss.chunk} positions"
    notes = "  * the recipe's strategy. Not counted: validation, the CUDA context and the allocator's gaps."
    return "\n".join([f"memory of one GPU ({about})", *table(rows), notes])


def _bytes(m: Memory, heads: bool) -> dict[str, int]:
    return {
        "backbone's weights": m.held.backbone,
        "heads' weights" if heads else "weights": m.held.heads,
        "gradients": m.held.gradients,
        "fp32 master weights": m.held.master,
        "AdamW's moments": m.held.moments,
        "reduction buffers": m.held.buffers,
        "gathered layers": m.held.gathered,
        "= held throughout": m.held.total,
        "a  frozen forward": m.step.frozen_peak,
        "b  states, heads' activations" if heads else "b  activations": m.activations,
        "b  logits and loss": m.step.loss,
        "c  optimizer's scratch": m.optimizer,
        "= peak: held + largest of a, b, c": m.total,
    }


def step(config: TrainConfig, subject: Subject, gpus: int, counted: Counted) -> str:
    t, a, slots = config.trainer, config.assume, subject.backbone.grid.slots - 1
    batch, heads = config.data.batch_size, subject.heads is not None
    both = heads and config.loss.guided
    pictures = batch * t.accumulate * gpus
    tokens = pictures * (1 + both) * (a.prompt_tokens + slots)
    seconds = counted.flops * t.accumulate / (a.flops * a.utilisation)
    rows = [
        ("pictures", f"{pictures:,}", f"{batch} a GPU x {t.accumulate} batches x {gpus} GPUs"),
        (
            "tokens",
            f"{tokens:,}",
            f"prompts of {a.prompt_tokens}, {slots} a picture{', both guidance branches' * both}",
        ),
    ]
    for name, flops, more in (
        ("frozen forward", counted.frozen_flops, ""),
        (f"{'heads' if heads else 'backbone'}, forward and backward", counted.heads_flops, ""),
        ("LM head in the loss", counted.loss_flops, ", recomputation included" * config.loss.recompute),
    ):
        if flops:
            share = f"{100 * flops / counted.flops:.0f} %{more}"
            rows.append((name, si(flops * t.accumulate * gpus, "FLOP"), share))
    rows += [
        ("time", duration(seconds), f"at {si(a.flops, 'FLOP/s')} a GPU, {100 * a.utilisation:g} % of it reached"),
        ("pictures a second", f"{pictures / seconds:,.3g}", ""),
        (f"time for {t.steps:,} steps", duration(t.steps * seconds), "without validation, if data keeps up"),
    ]
    return "\n".join(["one step, all GPUs", *noted(rows)])


def drafting(cost: Decoding) -> str:
    W = cost.grid.width
    one, row = cost.forward(1), cost.forward(W)
    rows = [
        ["", "reads", "FLOP a row", "reads / forward", "FLOP / forward"],
        ["backbone, 1 token", si(one.bytes, "B"), "", "1", ""],
    ]
    calls = {f"backbone, {W} tokens": row} | {f"draft by {name}": cost.draft([name], W) for name in cost.heads}
    for label, work in calls.items():
        shares = (f"{work.bytes / row.bytes:.3f}", f"{work.flops / row.flops:.3f}")
        rows.append([label, si(work.bytes, "B"), si(work.flops, "FLOP"), *shares])
    about = "bf16, LM head included" + ", both guidance branches" * (cost.branches == 2)
    return "\n".join([f"drafting against a forward ({about})", *table(rows)])


def speed(config: TrainConfig, cost: Decoding) -> str:
    rows = [["", "forwards", "speed-up", "drafting"], ["ar", f"{cost.grid.positions}", "1.00x", ""]]
    for s in speeds(cost, config.assume):
        rows.append([s.decoder, f"{s.steps:.0f}", f"{s.speedup:.2f}x", f"{100 * s.drafting:.0f} %"])
    notes = [
        "  An estimate: a call takes the longer of reading its weights and computing, one picture at a time. Each of k",
        "  drafts is accepted with the same chance a, whatever came before: 1 + a + ... + a^k tokens a forward.",
        "  ssd_coupled keeps tokens right of a rejection, so it needs fewer. ssd is lossy; its blocks count in full.",
    ]
    return "\n".join(["expected speed-up of decoding", *table(rows), *notes])
