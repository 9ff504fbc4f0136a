"""A published architecture without its weights, so that a run can be planned or a forward timed."""

from typing import Any

import torch


def meta_model(config: dict[str, Any], where: str) -> Any:
    """transformers' own class on the meta device: all shapes, no numbers. Raises ValueError for an unknown config."""
    import transformers

    try:
        found = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
        kind = getattr(transformers, (found.architectures or ["?"])[0])
    except (ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"{where}: config.json names no model transformers knows: {reason}") from None
    with torch.device("meta"):
        return kind(found).requires_grad_(False)
