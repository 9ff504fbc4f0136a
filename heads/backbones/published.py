"""A published architecture without its weights, so that a run can be planned or a forward timed."""

from typing import Any

from draftgrid.heads.weights import new_model


def meta_model(config: dict[str, Any], where: str) -> Any:
    """transformers' own class on the meta device: all shapes, no numbers. Raises ValueError for an unknown config."""
    import transformers

    name = str((config.get("architectures") or ["?"])[0])
    if not hasattr(getattr(transformers, name, None), "config_class"):
        raise ValueError(f"{where}: config.json names no model transformers knows: architectures is {name!r}")
    return new_model(getattr(transformers, name), config, f"{where}: config.json").requires_grad_(False)
