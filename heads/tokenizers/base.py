"""The contract of an image tokenizer."""

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

import torch
from torch import Tensor


class ImageTokenizer(ABC):
    """Pictures (B, 3, h, w) in [0, 1] <-> codes (B, H, W) in 0..codebook_size-1."""

    patch: int
    """Pixels of the picture's side per code."""
    image_size: int
    """Side in pixels of the pictures this tokenizer was made for."""

    @property
    def decodes(self) -> bool:
        """Whether it holds a pixel decoder; without one `decode` raises ValueError."""
        return True

    @property
    @abstractmethod
    def codebook(self) -> Tensor:
        """(K, C): one vector per code; neighbours in it are codes that look alike."""

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """(B, 3, h, w) in [0, 1] -> (B, h / patch, w / patch), int64."""

    @abstractmethod
    def decode(self, tokens: Tensor) -> Tensor:
        """(B, H, W) -> (B, 3, H * patch, W * patch) in [0, 1]."""

    @abstractmethod
    def save_pretrained(self, folder: str | Path) -> None: ...

    @classmethod
    @abstractmethod
    def from_pretrained(cls, folder: str | Path) -> Self: ...

    @abstractmethod
    def to(self, device: str | torch.device) -> Self:
        """Moves it to the device; returns itself."""

    @property
    def codebook_size(self) -> int:
        return self.codebook.shape[0]

    def check_pixels(self, images: Tensor) -> None:
        """Raises ValueError if a side of the pictures (B, 3, h, w) is no whole number of codes."""
        if images.shape[-1] % self.patch or images.shape[-2] % self.patch:
            size = tuple(images.shape[-2:])
            raise ValueError(f"picture of {size} pixels does not divide into {self.patch}x{self.patch}")

    def neighbours(self, count: int) -> Tensor:
        """(K, count) codes nearest to each code by the distance of their vectors, nearest first, itself left out.

        Raises ValueError if there are not so many.
        """
        if not 0 <= count < self.codebook_size:
            raise ValueError(f"neighbours is {count}; the codebook has {self.codebook_size} codes, so at most one less")
        found = []
        for codes in torch.arange(self.codebook_size, device=self.codebook.device).split(1024):
            distance = torch.cdist(self.codebook[codes].float(), self.codebook.float())
            distance[torch.arange(len(codes)), codes] = torch.inf
            found.append(distance.topk(count, dim=1, largest=False).indices)
        return torch.cat(found)

    @property
    def fingerprint(self) -> str:
        """sha256 over the kind, the patch size and the codebook; token shards record it and readers compare it."""
        digest = hashlib.sha256(f"{type(self).__name__}:{self.patch}:{tuple(self.codebook.shape)}".encode())
        digest.update(self.codebook.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def pil(self, tokens: Tensor, scale: int = 1) -> list:
        """(B, H, W) -> PIL pictures, enlarged `scale` times without smoothing."""
        from PIL import Image

        pixels = self.decode(tokens).repeat_interleave(scale, -2).repeat_interleave(scale, -1)
        channels_last = (pixels.clamp(0, 1) * 255).round().to("cpu", torch.uint8).movedim(1, -1)
        return [Image.fromarray(p) for p in channels_last.numpy()]
