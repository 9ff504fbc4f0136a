"""The recipe's modules on the meta device, which a plan counts: only the checkpoint's config.json is read."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.backbones.loading import adapter_class, find_checkpoint, read_card, shipped
from draftgrid.heads.backbones.registry import families
from draftgrid.heads.backbones.transformer import TransformerBackbone
from draftgrid.heads.mtp import MTPHeads, TrainedOn, kind_of
from draftgrid.heads.weights import meta_model, read_config
from draftgrid.recipes.launch.schema import BackboneConfig, TrainConfig
from draftgrid.recipes.plan.memory import Shape, Tensors
from draftgrid.training.module import BackboneModule, HeadsModule


@dataclass
class Subject:
    """The modules a plan is for, on the meta device or with fake weights."""

    backbone: Backbone
    heads: MTPHeads | None
    """None for task=backbone, which trains the backbone itself."""
    module: Any
    unread: int
    """Weights of the checkpoint that drawing does not read: its picture tokenizer, and what the adapter drops."""

    @property
    def trained(self) -> nn.Module:
        return self.backbone if self.heads is None else self.heads


def load_subject(config: TrainConfig) -> Subject:
    """The recipe's modules without weights. Raises ValueError, saying what to set, if there is no checkpoint."""
    if config.task == "backbone":
        new = new_backbone(config, config.backbone.codes, "meta")
        return Subject(new, None, BackboneModule(new, config.optim), 0)
    backbone, unread = _backbone(config.backbone)
    size = (backbone.grid.height, backbone.grid.width)
    with torch.device("meta"):
        heads = kind_of(config.heads.kind)(config.heads, TrainedOn(backbone.name, "", backbone.hidden_size, size))  # type: ignore[call-arg]
    lightning = HeadsModule(backbone, heads, config.optim, loss=config.loss)
    return Subject(backbone, heads, lightning, unread)


def _backbone(b: BackboneConfig) -> tuple[Backbone, int]:
    """The backbone without weights, and the number of its checkpoint's weights that it does not read.

    A published model on the hub is known without its checkpoint; a model that is not transformers' own is loaded.
    """
    published = {family.hub_id: name for name, family in families().items()}
    path = None
    try:
        path = find_checkpoint(b.place, local_files_only=True, part=None)
    except ValueError as error:
        if b.checkpoint not in published:
            raise ValueError(
                f"backbone.checkpoint is {b.place!r}, where no checkpoint is; the plan needs config.json alone: set "
                f"backbone.checkpoint to the folder it lies in, or to {' or '.join([*shipped(), *published])}"
            ) from error
    card = {"adapter": published[b.checkpoint]} if path is None else read_card(path)
    name = b.checkpoint if path is None else path.name
    grid = b.grid or card.get("grid")
    settings: dict[str, Any] = {"grid": tuple(grid)} if grid else {}
    kind = adapter_class(b.adapter or card.get("adapter"), name)
    if path is not None and not issubclass(kind, TransformerBackbone):
        return kind.from_pretrained(path, **settings).to("meta").freeze(), 0
    config = families()[published[name]].model_config() if path is None else read_config(path)
    model = meta_model(config, name)
    whole = count(model)
    kind.lighten(model)
    return kind(model, None, name=name, **settings), whole - count(model)  # type: ignore[call-arg]


def new_backbone(config: TrainConfig, codes: int, device: str = "cpu") -> Backbone:
    """Of task=backbone: random weights, and the words of the captions as its vocabulary."""
    from draftgrid.data.sources import open_source
    from draftgrid.heads.backbones.emu3_new import new_emu3

    source = open_source(config.data.source)
    captions = [i.caption for i in source.take("train", range(source.count("train")))]
    b = config.backbone
    return new_emu3(captions, codes, (b.grid[0], b.grid[1]), b.size, config.seed, device=device)


def count(module: nn.Module) -> int:
    """Parameters, each once."""
    return sum(p.numel() for p in module.parameters())


def shapes(subject: Subject) -> Tensors:
    """What `memory` computes with."""
    layers = subject.backbone.layers
    inside = {id(p) for layer in layers for p in layer.parameters()}
    rest = [tuple(p.shape) for p in subject.backbone.parameters() if id(p) not in inside]
    split = [_shapes(layer) for layer in layers]
    if subject.heads is None:
        return Tensors([], [], [*split, rest])
    return Tensors(split, rest, [_shapes(part) for part in subject.heads.children()])


def _shapes(module: nn.Module) -> list[Shape]:
    return [tuple(p.shape) for p in module.parameters()]
