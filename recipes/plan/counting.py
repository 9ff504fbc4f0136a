"""The bytes and FLOPs of one training step: the training code runs once on tensors without data, inside a `Meter`."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from draftgrid.heads.config import LossConfig
from draftgrid.recipes.launch.schema import TrainConfig
from draftgrid.recipes.plan.memory import Counted, Layout
from draftgrid.recipes.plan.meter import Meter, fake_gradients, fakes, make_fake
from draftgrid.recipes.plan.subject import Subject


def count_step(subject: Subject, config: TrainConfig, size: Layout) -> Counted:
    """Run one batch of training on fake tensors and count."""
    mode = fakes()
    types = {2: torch.bfloat16, 4: torch.float32}
    make_fake(subject.backbone, types[size.backbone], mode)
    heads = subject.heads
    if heads is not None:
        make_fake(heads, types[size.heads], mode)
    grid, B = subject.backbone.grid, config.data.batch_size
    prompt = torch.zeros(config.assume.prompt_tokens, dtype=torch.long)
    subject.backbone.prompt_ids = lambda prompts: [prompt] * len(prompts)  # type: ignore[method-assign]
    batch = SimpleNamespace(tokens=torch.zeros(B, grid.height, grid.width, dtype=torch.long), captions=[""] * B)
    cast = torch.autocast("cpu", torch.bfloat16) if size.autocast else nullcontext()
    module = subject.module
    with fake_gradients(subject.trained.parameters(), mode):
        if heads is None:
            work = count_loss(lambda: module.nll(batch).mean(), cast)
            return Counted(0, 0, work.saved, work.beyond, 0, work.flops, 0)
        with Meter() as frozen, cast, torch.no_grad():
            h, e = module.states(batch)
        with Meter() as alone:
            with cast:
                more = heads.training_inputs(1, len(e), torch.Generator())
                branches = h.flatten(2, 3)
                predicted = [heads.predict(b, e.flatten(1, 2), name, *more) for name in module.pairs for b in branches]
            floor = 0 if config.loss.recompute else alone.peak
            torch.autograd.backward(predicted, [torch.empty_like(x) for x in predicted])
        del predicted, branches
        states = frozen.live
        work = count_chunked_loss(
            lambda: module.loss(h, e, batch.tokens), cast, config.loss, B * grid.positions, B, floor
        )
        rest = work.flops - alone.flops
        return Counted(frozen.peak, states, work.saved, work.beyond, frozen.flops, alone.flops, rest)


@dataclass(frozen=True)
class LossCount:
    saved: int
    """Bytes the forward keeps for the backward."""
    forward: int
    """Bytes beyond them at the forward's peak, and at the backward's."""
    backward: int
    flops: int

    @property
    def beyond(self) -> int:
        return max(self.forward, self.backward)


def count_loss(loss: Callable[[], Tensor], cast: AbstractContextManager) -> LossCount:
    with Meter() as meter:
        with cast:
            value = loss()
        saved, forward = meter.live, meter.peak
        meter.peak = meter.live
        value.backward()
    return LossCount(saved, forward - saved, meter.peak - saved, meter.flops)


def count_chunked_loss(
    loss: Callable[[], Tensor], cast: AbstractContextManager, terms: LossConfig, positions: int, rows: int, floor: int
) -> LossCount:
    """As count_loss, where the loss reads `terms.chunk` of `positions` in `rows` pictures.

    Many chunks would take a minute to run one by one, but all that a chunk holds grows linearly with its positions: the
    peak is read off the line through those of two larger chunks. `floor` is the peak before the first chunk.
    """
    chunk = terms.chunk
    if not chunk or positions <= 8 * chunk:
        return count_loss(loss, cast)
    sizes = [rows * math.ceil(positions / rows / parts) for parts in (2, 5)]
    found = []
    try:
        for terms.chunk in sizes:
            found.append(count_loss(loss, cast))
    finally:
        terms.chunk = chunk
    large, small = found
    slope = (large.forward - small.forward) / (sizes[0] - sizes[1])
    forward = round(small.forward - slope * (sizes[1] - max(chunk, rows)))
    return replace(small, forward=max(forward, floor - small.saved))
