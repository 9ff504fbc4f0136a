"""Emu3's vision tokenizer (arXiv 2409.18869) through transformers' Emu3VQVAE, read from an Emu3 checkpoint.

Only the tensors under `vqmodel.` are read, so the language model beside them costs neither time nor memory.
"""

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from draftgrid.heads.tokenizers.learned import LearnedTokenizer, checkpoint_model, normalisation, picture_side

SIDE = 720
"""Pixels of Emu3's own pictures, 90 x 90 codes of 8 x 8 pixels."""


class Emu3VQ(LearnedTokenizer):
    model_types = ("emu3", "emu3_vqgan")

    def __init__(self, model: Any, mean: list[float], std: list[float], image_size: int = SIDE) -> None:
        super().__init__(model, mean, std, image_size, model.spatial_scale_factor)

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Tensor:
        sizes = torch.tensor([images.shape[-2:]] * len(images))
        return torch.stack(list(self.model.encode(self.normalised(images), sizes).image_tokens))

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        return self.pixels(self.model.decode(tokens.to(self.mean.device)))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Raises ValueError as `checkpoint_model`."""
        from transformers import Emu3VQVAE

        folder = Path(folder)
        model = checkpoint_model(folder, Emu3VQVAE, "emu3")
        mean, std, side = normalisation(folder, SIDE)
        return cls(model, mean, std, picture_side(folder, model.spatial_scale_factor, side))
