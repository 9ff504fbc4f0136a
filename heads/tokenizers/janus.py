"""Janus-Pro's picture tokenizer (LlamaGen's VQ-16, arXiv 2406.06525) through transformers' JanusVQVAE.

Only the tensors under `vqmodel.` are read, so the language model beside them costs neither time nor memory. Codes are
matched by angle, as in the release (github.com/deepseek-ai/Janus, janus/models/vq_model.py: states and codebook are
normalised first, and decoding reads normalised vectors); transformers' own encode compares them unnormalised, which
gives other codes than the model was trained on.
"""

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from draftgrid.heads.tokenizers.learned import LearnedTokenizer, checkpoint_model, normalisation
from draftgrid.heads.tokenizers.patch_vq import nearest_code

SIDE = 384
"""Pixels of Janus-Pro's own pictures, 24 x 24 codes of 16 x 16 pixels."""


class JanusVQ(LearnedTokenizer):
    model_types = ("janus", "janus_vqgan")

    def __init__(self, model: Any, mean: list[float], std: list[float], image_size: int = SIDE) -> None:
        super().__init__(model, mean, std, image_size, 2 ** (len(model.config.channel_multiplier) - 1))

    @property
    def codebook(self) -> Tensor:
        """(K, C), each of length 1."""
        return nn.functional.normalize(self.model.quantize.embedding.weight, dim=-1)

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Tensor:
        z = self.model.quant_conv(self.model.encoder(self.normalised(images))).movedim(1, -1)
        return nearest_code(nn.functional.normalize(z, dim=-1), self.codebook, chunk=4096)

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        z = self.codebook[tokens.to(self.mean.device)].movedim(-1, 1)
        return self.pixels(self.model.decoder(self.model.post_quant_conv(z)))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Raises ValueError as `checkpoint_model`."""
        from transformers import JanusVQVAE

        return cls(checkpoint_model(Path(folder), JanusVQVAE, "janus"), *normalisation(Path(folder), SIDE))
