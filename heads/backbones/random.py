"""The published architectures at full size with random weights: to know what a forward costs takes no checkpoint."""

from collections.abc import Sequence
from typing import Any

import torch

from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.backbones.loading import adapter_class
from draftgrid.heads.backbones.registry import find_family
from draftgrid.heads.weights import meta_model

PROMPT, UNCONDITIONAL = 64, 48
"""Tokens of a random prompt and of its unconditional prompt; as in real ones, the lengths differ."""


def random_backbone(
    kind: str,
    layers: int = 0,
    grid: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    narrow: bool = False,
) -> Backbone:
    """The backbone that adapter `kind` is for, frozen, on its first `layers` (0 = all). Prompts are random ids.

    Weights are normal with deviation .02, norms one: no number grows without bound and none is denormal, so that a
    forward takes what it takes with trained ones. `narrow` leaves 64 numbers a layer, to try a program. Raises
    ValueError for an unknown family or more layers than it has.
    """
    config = find_family(kind).model_config()
    text = config.get("text_config", config)
    if not 0 <= layers <= text["num_hidden_layers"]:
        raise ValueError(f"layers is {layers}; {kind} has {text['num_hidden_layers']}, and 0 stands for all")
    text["num_hidden_layers"] = layers or text["num_hidden_layers"]
    if narrow:
        _narrow(config, text)
    name = f"random:{kind}"
    adapter, model = adapter_class(kind, name), meta_model(config, name)
    adapter.lighten(model)
    model = model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.fill_(1.0) if key.endswith("norm.weight") else p.normal_(0, 0.02, generator=generator)
    backbone = adapter(model, None, name=name, **({"grid": grid} if grid else {}))  # type: ignore[call-arg]
    inner: Any = backbone.text
    inner.rotary_emb = type(inner.rotary_emb)(config=inner.config).to(device)  # its table is no weight
    ids = torch.randint(text["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(0))
    backbone.prompt_ids = lambda prompts: [ids if p is not None else ids[:UNCONDITIONAL] for p in prompts]  # type: ignore[method-assign]
    return backbone.to(device).freeze()


def _narrow(config: dict[str, Any], text: dict[str, Any]) -> None:
    groups = text["num_attention_heads"] // text["num_key_value_heads"]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4 // groups}
    text |= {"hidden_size": 64, "intermediate_size": 96, **heads}
    if "projection_dim" in config.get("vq_config", {}):
        config["vq_config"] |= {"projection_dim": 64, "image_token_embed_dim": 64}
