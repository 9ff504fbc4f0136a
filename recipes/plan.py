"""What a recipe will need, before anything is loaded: `python train.py recipe=NAME plan=true`.

The checkpoint's config.json is all that is read, and of a published one on the hub not even that. The training code
runs once on tensors without data (heads.meter), so parameters, activations and FLOPs are counted and not estimated;
what a rank holds by strategy is arithmetic (heads.memory); seconds and speed-ups follow from the stated machine and are
estimates.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbones.base import Backbone
from heads.backbones.loading import ADAPTERS, FAMILIES, family, find_checkpoint, read_card, shipped
from heads.backbones.published import PUBLISHED, meta_model
from heads.config import LossConfig
from heads.files import read_json
from heads.memory import STRATEGIES, Held, Layout, Shape, Tensors, held, layout
from heads.meter import Meter, fake_gradients, fakes, make_fake
from heads.module import BackboneModule, HeadsModule
from heads.mtp import MTPHeads, TrainedOn, kind_of
from heads.ranks import rank_zero
from recipes.schema import BackboneConfig, TrainConfig
from recipes.speed import count_decoding


@dataclass
class Subject:
    """What is planned for, on the meta device or with fake weights."""

    backbone: Backbone
    heads: MTPHeads | None
    """None for task=backbone, which trains the backbone itself."""
    module: Any
    unread: int
    """Weights of the checkpoint that drawing does not read: its picture tokenizer, and what an adapter lets go of."""

    @property
    def trained(self) -> nn.Module:
        return self.backbone if self.heads is None else self.heads


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
    frozen: int
    heads: int
    loss: int
    optimizer: int
    """A copy of the second moments that AdamW makes while it steps."""

    @property
    def total(self) -> int:
        return self.held.total + max(self.frozen, self.heads + self.loss, self.optimizer)


def load_subject(config: TrainConfig) -> Subject:
    """The recipe's modules without weights. Raises ValueError, saying what to set, if there is no checkpoint."""
    if config.task == "backbone":
        return _new_backbone(config)
    b = config.backbone
    found, card, name = _description(b)
    adapter = b.adapter or card.get("adapter")
    if adapter not in ADAPTERS:
        raise ValueError(f"backbone.adapter is {adapter!r}; set it to one of {', '.join(ADAPTERS)}")
    grid = b.grid or card.get("grid")
    model, kind = meta_model(found, name), family(adapter, name)
    whole = count(model)
    kind.lighten(model)
    settings = {"grid": tuple(grid)} if grid else {}
    backbone = kind(model, None, name=name, **settings)  # type: ignore[call-arg]
    size = (backbone.grid.height, backbone.grid.width)
    config.heads.check()
    with torch.device("meta"):
        heads = kind_of(config.heads.kind)(config.heads, TrainedOn(name, "", backbone.hidden_size, size))  # type: ignore[call-arg]
    lightning = HeadsModule(backbone, heads, config.optim, {}, [1.0], config.loss)
    return Subject(backbone, heads, lightning, whole - count(model))


def _description(b: BackboneConfig) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(config.json, card, name) of the checkpoint; of a hub id that is not on this machine what is known of it."""
    try:
        path = find_checkpoint(b.place, local_files_only=True, part=None)
        return read_json(path / "config.json"), read_card(path), path.name
    except ValueError:
        if b.checkpoint in PUBLISHED:
            config = PUBLISHED[b.checkpoint]()
            return config, {"adapter": FAMILIES[config["model_type"]]}, b.checkpoint
        raise ValueError(
            f"backbone.checkpoint is {b.place!r}, where no config.json is; the plan needs that file alone: set "
            f"backbone.checkpoint to the folder it lies in, or to {' or '.join([*shipped(), *PUBLISHED])}"
        ) from None


def _new_backbone(config: TrainConfig) -> Subject:
    """task=backbone: megabytes, so it is simply made; its vocabulary is the words of the captions."""
    from data.sources import open_source
    from heads.backbones.emu3_new import new_emu3

    source = open_source(config.data.source)
    captions = [i.caption for i in source.take("train", range(source.count("train")))]
    b = config.backbone
    backbone = new_emu3(captions, b.codes, tuple(b.grid), b.size, config.seed)  # type: ignore[arg-type]
    return Subject(backbone, None, BackboneModule(backbone, config.optim), 0)


def count(module: nn.Module) -> int:
    """Parameters, each once."""
    return sum(p.numel() for p in module.parameters())


def shapes(subject: Subject) -> Tensors:
    """What `heads.memory` computes with."""
    layers = subject.backbone.blocks
    inside = {id(p) for layer in layers for p in layer.parameters()}
    rest = [tuple(p.shape) for p in subject.backbone.parameters() if id(p) not in inside]
    split = [_shapes(layer) for layer in layers]
    if subject.heads is None:
        return Tensors([], [], [*split, rest])
    return Tensors(split, rest, [_shapes(part) for part in subject.heads.children()])


def _shapes(module: nn.Module) -> list[Shape]:
    return [tuple(p.shape) for p in module.parameters()]


def count_step(subject: Subject, config: TrainConfig, size: Layout) -> Counted:
    """Run one batch of training on fake tensors and count."""
    mode = fakes()
    types = {2: torch.bfloat16, 4: torch.float32}
    make_fake(subject.backbone, types[size.backbone], mode)
    if subject.heads is not None:
        make_fake(subject.heads, types[size.heads], mode)
    grid, B = subject.backbone.grid, config.data.batch_size
    prompt = torch.zeros(config.assume.prompt_tokens, dtype=torch.long)
    subject.backbone.prompt_ids = lambda prompts: [prompt] * len(prompts)  # type: ignore[method-assign]
    batch = SimpleNamespace(tokens=torch.zeros(B, grid.height, grid.width, dtype=torch.long), captions=[""] * B)
    cast = torch.autocast("cpu", torch.bfloat16) if size.autocast else nullcontext()
    module = subject.module
    with fake_gradients(subject.trained.parameters(), mode):
        if subject.heads is None:
            work = count_loss(lambda: module.nll(batch).mean(), cast)
            return Counted(0, 0, work.saved, work.beyond, 0, work.flops, 0)
        with Meter() as frozen, cast, torch.no_grad():
            h, e = module.states(batch)
        with Meter() as alone:
            with cast:
                predicted = predict_all(subject.heads, h, e, module.pairs)
            floor = 0 if config.loss.recompute else alone.peak
            torch.autograd.backward(predicted, [torch.empty_like(x) for x in predicted])
        del predicted
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
    """The same where the loss reads `terms.chunk` of `positions` in `rows` pictures.

    Many chunks would take a minute to run one by one, so their peak is read off the line through those of two larger
    chunks, for all that a chunk holds grows with its positions. `floor` is the peak before the first chunk.
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


def predict_all(heads: MTPHeads, h: Tensor, e: Tensor, names: Any) -> list[Tensor]:
    """States (G, B, H, W, D) and embeddings (B, H, W, D) -> every head's prediction of every branch, as in training."""
    rest: tuple[Any, ...] = ()
    if heads.kind == "chain" and heads.config.recent:
        rest = (None, torch.ones(len(e), heads.trained_on.grid[0] * heads.trained_on.grid[1] - 1, dtype=torch.long))
    return [heads.predict(branch, e.flatten(1, 2), name, *rest) for name in names for branch in h.flatten(2, 3)]


def memory(tensors: Tensors, counted: Counted, strategy: str, precision: str, gpus: int) -> Memory:
    kept = held(tensors, strategy, precision, gpus)
    return Memory(kept, counted.frozen_peak, counted.states + counted.saved, counted.loss, kept.moments // 2)


def gpus(config: TrainConfig) -> int:
    t = config.trainer
    asked = t.devices * t.num_nodes
    return config.assume.gpus or (asked if asked > 1 else 8)


def plan(config: TrainConfig) -> str:
    """The whole plan as text. Raises ValueError for what a user can set right."""
    from recipes.plan_text import render

    subject = load_subject(config)
    tensors = shapes(subject)
    precision = "bf16-mixed" if config.trainer.precision == "auto" else config.trainer.precision
    steps: dict[tuple[int, int, bool], Counted] = {}
    by_strategy = {}
    for strategy in STRATEGIES:
        size = layout(strategy, precision)
        key = (size.backbone, size.heads, size.autocast)
        if key not in steps:
            steps[key] = count_step(subject, config, size)
        by_strategy[strategy] = memory(tensors, steps[key], strategy, precision, gpus(config))
    branches = 1 if config.decoding.guidance == 1 else 2
    decoding = count_decoding(subject.backbone, subject.heads, branches) if subject.heads is not None else None
    return render(config, subject, precision, gpus(config), next(iter(steps.values())), by_strategy, decoding)


def show(config: TrainConfig) -> None:
    if rank_zero():
        print(plan(config))
