"""Emu3's vision tokenizer (arXiv 2409.18869) through transformers' Emu3VQVAE, read from an Emu3 checkpoint.

Only the tensors under `vqmodel.` are read, so the language model beside them costs neither time nor memory.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftgrid.common.files import read_json
from draftgrid.heads.tokenizers.learned import (
    PREFIX,
    LearnedTokenizer,
    fill,
    normalisation,
    picture_side,
    tokenizer_weights,
)

SIDE = 720
"""Pixels of Emu3's own pictures, 90 x 90 codes of 8 x 8 pixels."""


class Emu3VQ(LearnedTokenizer):
    model_types = ("emu3", "emu3_vqgan")

    def __init__(self, model: Any, mean: list[float], std: list[float], image_size: int = SIDE) -> None:
        super().__init__(model, mean, std, image_size, model.spatial_scale_factor)

    @property
    def codebook(self) -> Tensor:
        return self.model.quantize.embedding.weight

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Tensor:
        sizes = torch.tensor([images.shape[-2:]] * len(images))
        return torch.stack(list(self.model.encode(self.normalised(images), sizes).image_tokens))

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        return self.pixels(self.model.decode(tokens.to(self.mean.device)))

    def save_pretrained(self, folder: str | Path) -> None:
        self.model.save_pretrained(folder)
        self.write_processor(Path(folder))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Emu3VQ":
        """Raises ValueError if there are no such weights, or they lack a key, or have one too many."""
        from transformers import Emu3VQVAE, Emu3VQVAEConfig

        folder = Path(folder)
        config = read_json(folder / "config.json")
        whole = config["model_type"] == "emu3"
        model = Emu3VQVAE(Emu3VQVAEConfig.from_dict(config["vq_config"] if whole else config))
        state = tokenizer_weights(folder, whole)
        if not state:
            raise ValueError(f"{folder} holds no weights of a vision tokenizer (safetensors with {PREFIX}...)")
        fill(model, state, folder, "vision tokenizer")
        mean, std, side = normalisation(folder, SIDE)
        return cls(model, mean, std, picture_side(folder, model.spatial_scale_factor, side))
