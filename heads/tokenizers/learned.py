"""What picture tokenizers with a learned encoder share: normalisation, moving, and reading them from a checkpoint."""

import hashlib
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from draftgrid.common.files import read_json, write_json
from draftgrid.heads.backbones.loading import read_card
from draftgrid.heads.tokenizers.base import ImageTokenizer
from draftgrid.heads.weights import check_tensors, new_model, read_config, read_tensors

PREFIX = "vqmodel."
"""In the names of a tokenizer's weights inside a language model's checkpoint."""


class LearnedTokenizer(ImageTokenizer):
    """`model` has `quant_conv`, the encoder's last layer, and the codebook as `quantize.embedding`."""

    model: Any
    model_types: tuple[str, ...]
    """`model_type` in config.json: of the family's language model, then of the tokenizer alone."""

    def __init__(self, model: Any, mean: list[float], std: list[float], image_size: int, patch: int) -> None:
        """`mean` and `std` per channel: what pictures in [0, 1] are normalised with."""
        self.model, self.image_size, self.patch = model.eval().requires_grad_(False), image_size, patch
        self.mean, self.std = (torch.tensor(x).view(3, 1, 1) for x in (mean, std))

    @property
    def codebook(self) -> Tensor:
        return self.model.quantize.embedding.weight

    @property
    def fingerprint(self) -> str:
        """Also over the encoder's last weights and the normalisation, which decide the codes; not over the decoder."""
        digest = hashlib.sha256(super().fingerprint.encode())
        for tensor in (self.mean, self.std, *self.model.quant_conv.parameters()):
            digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def to(self, device: str | torch.device) -> Self:
        self.model.to(device)
        self.mean, self.std = self.mean.to(device), self.std.to(device)
        return self

    def normalised(self, images: Tensor) -> Tensor:
        """(B, 3, h, w) in [0, 1] as the encoder reads it. Raises ValueError as `check_pixels`."""
        self.check_pixels(images)
        return (images.to(self.mean) - self.mean) / self.std

    def pixels(self, drawn: Tensor) -> Tensor:
        """What the decoder draws, back in [0, 1]."""
        return (drawn.float() * self.std + self.mean).clamp(0, 1)

    def save_pretrained(self, folder: str | Path) -> None:
        self.model.save_pretrained(folder)
        self.write_processor(Path(folder))

    def write_processor(self, folder: Path, **more: Any) -> None:
        mean, std = self.mean.flatten().tolist(), self.std.flatten().tolist()
        size = {"height": self.image_size, "width": self.image_size}
        write_json(folder / "preprocessor_config.json", {"image_mean": mean, "image_std": std, **more, "size": size})


def normalisation(folder: Path, side: int) -> tuple[list[float], list[float], int]:
    """(mean, std, side) of pictures in [0, 1] from the checkpoint's preprocessor; 0.5, 0.5, `side` if it has none.

    A rescale_factor other than 1 / 255 is folded in: transformers' Chameleon multiplies 0..255 by .0078.
    """
    mean, std, scale = [0.5] * 3, [0.5] * 3, 1.0
    # Published checkpoints have the first file, those that transformers 5 writes the second, which wins.
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            found = read_json(folder / name)
            found = found.get("image_processor", found)
            if "image_mean" in found:
                mean, std, scale = found["image_mean"], found["image_std"], 255 * found.get("rescale_factor", 1 / 255)
            size = found.get("crop_size") or found.get("size") or {}
            side = size.get("height") or size.get("shortest_edge") or side
    return [m / scale for m in mean], [s / scale for s in std], side


def picture_side(folder: Path, patch: int, side: int) -> int:
    """The side in pixels of the grid that the checkpoint's card names; `side` if it names none."""
    grid = read_card(folder).get("grid")
    return grid[0] * patch if grid else side


def read_checkpoint(folder: Path, family: str, advice: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, weights by its own names) of a tokenizer: alone in the folder, or within a language model of `family`.

    Raises ValueError, ending with `advice`, if there are no such weights.
    """
    config = read_config(folder)
    whole = config.get("model_type") == family
    stored = read_tensors(folder, lambda name: not whole or PREFIX in name)
    if not stored:
        raise ValueError(f"{folder} holds no weights of a picture tokenizer (safetensors with {PREFIX}...){advice}")
    weights = {name.partition(PREFIX)[2] if whole else name: tensor.float() for name, tensor in stored.items()}
    return config.get("vq_config") or {} if whole else config, weights


def checkpoint_model(folder: Path, model_class: Any, family: str) -> Any:
    """transformers' own tokenizer from `read_checkpoint`. Raises ValueError also for weights that do not fit."""
    sizes, state = read_checkpoint(folder, family)
    return fill(new_model(model_class, sizes, folder / "config.json", "cpu"), state, folder)


def fill(model: Any, state: dict[str, Tensor], folder: Path) -> Any:
    """The model with these weights, taken over as they are. Raises ValueError naming those that do not fit."""
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    check_tensors(f"{folder}: the picture tokenizer's weights do not fit its config", state, wanted)
    model.load_state_dict(state, assign=True)
    return model
