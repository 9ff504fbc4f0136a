"""What one GPU holds while heads are trained, by strategy: pure arithmetic over tensor shapes, no model and no device.

ddp keeps everything on every rank. ZeRO-1 splits the optimizer and the fp32 master weights over the ranks, ZeRO-2 the
gradients too, ZeRO-3 the parameters as well, the frozen backbone's included (arXiv 1910.02054). fsdp (torch's
fully_shard) splits the heads with all that belongs to them and the backbone's layers; embedding, LM head and final norm
stay whole. Activations are not computed here: `meter` counts them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from draftgrid.training import ranks

STRATEGIES = ranks.STRATEGIES[1:]
Shape = tuple[int, ...]
PERSISTENT = 100_000
"""ZeRO-3 leaves a tensor of at most so many elements whole on every rank (stage3_param_persistence_threshold)."""
LIVE = 1_000_000_000
"""ZeRO-3 keeps at most so many gathered elements (stage3_max_live_parameters)."""
BUCKETS = 2 * 200_000_000
"""Elements of the two buckets in which Lightning's DeepSpeed reduces gradients while the backward runs."""


@dataclass(frozen=True)
class Layout:
    """Bytes of a number, by what it belongs to. `master` are the fp32 weights DeepSpeed updates in place of the model's
    own; `autocast` says that weights are fp32 and products bf16."""

    backbone: int
    heads: int
    gradient: int
    moment: int
    master: int
    autocast: bool


def layout(strategy: str, precision: str) -> Layout:
    assert strategy in STRATEGIES and precision in ("32-true", "bf16-mixed", "bf16-true")
    if strategy.startswith("deepspeed"):  # it casts the whole module, and both bf16 settings mean the same to it
        size = 4 if precision == "32-true" else 2
        return Layout(size, size, size, 4, 4, False)
    if precision == "bf16-true":
        return Layout(2, 2, 2, 2, 0, False)
    mixed = precision == "bf16-mixed"
    return Layout(2 if mixed else 4, 4, 4, 4, 0, mixed)  # a frozen model gains nothing from fp32 there


@dataclass(frozen=True)
class Tensors:
    """Shapes of a frozen backbone and of what is trained.

    `layers` holds one list per transformer layer, `rest` what lies outside of them; `trained` one list per part that
    fully_shard splits (a head).
    """

    layers: Sequence[Sequence[Shape]]
    rest: Sequence[Shape]
    trained: Sequence[Sequence[Shape]]

    @property
    def groups(self) -> list[list[Shape]]:
        """The optimizer's: matrices, which decay, and the rest."""
        shapes = [s for part in self.trained for s in part]
        return [[s for s in shapes if len(s) >= 2], [s for s in shapes if len(s) < 2]]


@dataclass(frozen=True)
class Held:
    """Bytes a rank holds throughout a step, by what they are."""

    backbone: int
    heads: int
    gradients: int
    master: int
    moments: int
    buffers: int
    """What gradients are reduced in."""
    gathered: int
    """Parameters put together for the layers at work, where they are split."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def numel(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(s) for s in shapes)


def split_flat(shapes: Iterable[Shape], ranks: int) -> int:
    """Elements of a rank's part of the tensors laid end to end: ZeRO-1 and 2, which pad to an even part."""
    return 2 * math.ceil(numel(shapes) / (2 * ranks))


def split_each(shapes: Iterable[Shape], ranks: int) -> int:
    """Elements of a rank's parts of tensors that are split one by one: ZeRO-3."""
    return sum(math.ceil(math.prod(s) / ranks) for s in shapes)


def split_rows(shapes: Iterable[Shape], ranks: int) -> int:
    """Elements rank 0 holds of tensors split along their first dimension: fully_shard. It holds the longest part."""
    return sum(math.ceil(s[0] / ranks) * math.prod(s[1:]) if s else 1 for s in shapes)


def held(tensors: Tensors, strategy: str, precision: str, ranks: int) -> Held:
    """Bytes on rank 0 of `ranks`."""
    size = layout(strategy, precision)
    layers, trained = ([s for part in parts for s in part] for parts in (tensors.layers, tensors.trained))
    backbone = [*layers, *tensors.rest]
    kept_backbone, kept = numel(backbone), numel(trained)
    gradients = states = kept
    buffers = gathered = 0
    if strategy == "ddp":
        buffers = kept * size.gradient  # DDP's buckets are a second copy
    elif strategy in ("deepspeed_1", "deepspeed_2"):
        states = sum(split_flat(group, ranks) for group in tensors.groups)
        gradients = states if strategy == "deepspeed_2" else kept
        kept = states * ranks  # laid end to end, with the padding
        buffers = BUCKETS * size.gradient
    elif strategy == "deepspeed_3":
        gathered = min(LIVE, kept_backbone + kept) * size.heads
        small = [numel(s for s in shapes if math.prod(s) <= PERSISTENT) for shapes in (backbone, trained)]
        kept_backbone, kept = split_each(backbone, ranks) + small[0], split_each(trained, ranks) + small[1]
        gradients = states = split_each(trained, ranks)
        buffers = BUCKETS * size.gradient
    else:
        buffers = max(map(numel, tensors.trained), default=0) * size.gradient
        gathered = max(max(map(numel, tensors.layers), default=0) * size.backbone, buffers)
        kept_backbone = split_rows(layers, ranks) + numel(tensors.rest)
        gradients = states = kept = split_rows(trained, ranks)
    if ranks == 1:
        gathered = 0
        buffers = buffers if strategy.startswith("deepspeed") else 0
    return Held(
        backbone=kept_backbone * size.backbone,
        heads=kept * size.heads,
        gradients=gradients * size.gradient,
        master=states * size.master,
        moments=2 * states * size.moment,
        buffers=buffers,
        gathered=gathered,
    )


@dataclass(frozen=True)
class Counted:
    """One batch on one GPU: bytes and FLOPs."""

    frozen_peak: int
    """Most bytes alive during the frozen forward."""
    states: int
    """Bytes of h and e, kept to the end of the step."""
    saved: int
    """What the forward keeps for the backward: the heads' activations, and a gradient to each prediction."""
    loss: int
    """What loss and backward need beyond that for a while, logits above all."""
    frozen_flops: int
    heads_flops: int
    """Forward and backward of the heads alone."""
    loss_flops: int
    """The LM head's in the terms of the loss, and what is computed again."""

    @property
    def flops(self) -> int:
        return self.frozen_flops + self.heads_flops + self.loss_flops


@dataclass(frozen=True)
class Memory:
    """Bytes on a GPU. A step's peak is what is held and the largest of its three phases."""

    held: Held
    step: Counted

    @property
    def activations(self) -> int:
        return self.step.states + self.step.saved

    @property
    def optimizer(self) -> int:
        """A copy of the second moments that AdamW makes while it steps."""
        return self.held.moments // 2

    @property
    def total(self) -> int:
        return self.held.total + max(self.step.frozen_peak, self.activations + self.step.loss, self.optimizer)
