"""PatchVQ: a vector quantizer of square pixel patches, fitted by k-means. The demo's tokenizer.

Not a learned autoencoder: a code is the mean of the patches assigned to it, so pictures are recognisable but coarse.
"""

from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

from draftgrid.common.files import atomic, read_json, write_json
from draftgrid.heads.tokenizers.base import ImageTokenizer


class PatchVQ(ImageTokenizer):
    def __init__(self, codebook: Tensor, patch: int, image_size: int) -> None:
        """codebook (K, 3 * patch * patch), patches flattened as (channel, row, column)."""
        if codebook.ndim != 2 or codebook.shape[1] != 3 * patch * patch:
            raise ValueError(f"codebook is {tuple(codebook.shape)}; patch {patch} needs (K, {3 * patch * patch})")
        self._codebook, self.patch, self.image_size = codebook.float(), patch, image_size

    @property
    def codebook(self) -> Tensor:
        return self._codebook

    def to(self, device: str | torch.device) -> Self:
        self._codebook = self._codebook.to(device)
        return self

    def _patches(self, images: Tensor) -> Tensor:
        from einops import rearrange  # here, for a machine that decodes with another tokenizer may lack it

        self.check_pixels(images)
        return rearrange(images, "b c (h p) (w q) -> b h w (c p q)", p=self.patch, q=self.patch)

    def encode(self, images: Tensor) -> Tensor:
        return nearest_code(self._patches(images.to(self._codebook)), self._codebook)

    def decode(self, tokens: Tensor) -> Tensor:
        from einops import rearrange

        patches = self._codebook[tokens.to(self._codebook.device)]
        return rearrange(patches, "b h w (c p q) -> b c (h p) (w q)", p=self.patch, q=self.patch)

    def save_pretrained(self, folder: str | Path) -> None:
        folder = Path(folder)
        with atomic(folder / "codebook.safetensors") as temporary:
            temporary.write_bytes(save({"codebook": self._codebook.contiguous()}))
        config = {"image_tokenizer": "patch_vq", "patch": self.patch, "image_size": self.image_size}
        write_json(folder / "tokenizer_config.json", config)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Raises ValueError if a file is missing or damaged."""
        folder = Path(folder)
        config = read_json(folder / "tokenizer_config.json")
        try:
            codebook = load_file(folder / "codebook.safetensors")["codebook"]
            return cls(codebook, config["patch"], config["image_size"])
        except (SafetensorError, OSError, KeyError) as error:
            raise ValueError(f"{folder} holds a damaged image tokenizer: {error}") from None

    @classmethod
    def fit(cls, images: Tensor, codes: int = 512, patch: int = 4, steps: int = 20, seed: int = 0) -> "PatchVQ":
        """Lloyd's k-means, started at patches drawn by weight, over the distinct patches of images (N, 3, h, w).

        Each distinct patch counts by the square root of its frequency, so that plain background, half of all patches,
        does not take the codes that edges need. Deterministic for a seed.
        """
        empty = cls(torch.zeros(1, 3 * patch * patch), patch, images.shape[-1])
        flat = (empty._patches(images).flatten(0, 2) * 255).round().to(torch.uint8)
        patches, counts = torch.unique(flat, dim=0, return_counts=True)
        if len(patches) < codes:
            raise ValueError(f"{len(patches)} distinct patches are too few for {codes} codes")
        data, weight = patches.float() / 255, counts.float().sqrt()
        generator = torch.Generator().manual_seed(seed)
        centres = data[torch.multinomial(weight.double(), codes, generator=generator)]
        for _ in tqdm(range(steps), desc="fit codebook", unit="step", leave=False):
            label = nearest_code(data, centres)
            mass = torch.zeros(codes).index_add_(0, label, weight)
            total = torch.zeros_like(centres).index_add_(0, label, data * weight[:, None])
            centres = total / mass.clamp_min(1e-12)[:, None]
            if (empties := (mass == 0).nonzero().flatten()).numel():
                error = (data - centres[label]).square().sum(1) * weight
                centres[empties] = data[error.topk(len(empties)).indices]
        return cls(centres, patch, images.shape[-1])


def nearest_code(vectors: Tensor, centres: Tensor, chunk: int = 65536) -> Tensor:
    """(..., C), (K, C) -> (...,) index of the nearest centre; ties go to the lowest index."""
    norms = centres.square().sum(1)
    found = [(norms - 2 * v @ centres.T).argmin(1) for v in vectors.flatten(0, -2).split(chunk)]
    return torch.cat(found).view(vectors.shape[:-1])
