"""The VQGAN of Chameleon: encoder, codebook and pixel decoder as networks, named as in Meta's own checkpoint.

The architecture is taming-transformers' (arXiv 2012.09841): residual blocks of two convolutions, one attention in the
middle, halving by strided convolutions and doubling by nearest neighbours. No training code and no discriminator.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad, scaled_dot_product_attention, silu


@dataclass(frozen=True)
class Sizes:
    """The defaults are those of Chameleon 7B and 34B."""

    channels: int = 128
    multipliers: list[int] = field(default_factory=lambda: [1, 1, 2, 2, 4])
    """Width of each resolution in units of `channels`, finest first; each further one halves the side."""
    blocks: int = 2
    """Residual blocks of a resolution; the decoder has one more."""
    latent: int = 256
    """Channels between encoder and quantizer."""
    codes: int = 8192
    code_size: int = 256
    resolution: int = 512
    """Side in pixels at which `attention` counts."""
    attention: list[int] = field(default_factory=list)
    """Sides at which every block is followed by an attention of its own."""

    @property
    def widths(self) -> list[int]:
        return [self.channels * m for m in self.multipliers]

    @property
    def patch(self) -> int:
        return 2 ** (len(self.multipliers) - 1)

    def attends(self, level: int) -> bool:
        return self.resolution >> level in self.attention


def norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, width, eps=1e-6)


class Block(nn.Module):
    """(B, into, h, w) -> (B, out, h, w)."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(into), nn.Conv2d(into, out, 3, padding=1)
        self.norm2, self.conv2 = norm(out), nn.Conv2d(out, out, 3, padding=1)
        if into != out:
            self.nin_shortcut = nn.Conv2d(into, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(silu(self.norm1(x)))
        y = self.conv2(silu(self.norm2(y)))
        return y + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class Attention(nn.Module):
    """One head over all places of (B, D, h, w)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        from einops import rearrange  # here, for a machine that decodes with another tokenizer may lack it

        y = self.norm(x)
        q, k, v = (rearrange(part(y), "b d h w -> b (h w) d") for part in (self.q, self.k, self.v))
        found = scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(rearrange(found, "b (h w) d -> b d h w", h=x.shape[2]))


def middle(width: int) -> nn.Sequential:
    block_1, block_2 = Block(width, width), Block(width, width)
    return nn.Sequential(OrderedDict(block_1=block_1, attn_1=Attention(width), block_2=block_2))


class Resample(nn.Module):
    """Half or twice the side."""

    def __init__(self, width: int, down: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2 if down else 1, padding=0 if down else 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.conv.stride == (2, 2):
            return self.conv(pad(x, (0, 1, 0, 1)))  # one row and column of zeros, at the end alone
        return self.conv(interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """All blocks of one resolution, and the way to the next."""

    def __init__(self, into: int, out: int, blocks: int, attends: bool, resample: str = "") -> None:
        super().__init__()
        self.block = nn.ModuleList(Block(into if i == 0 else out, out) for i in range(blocks))
        self.attn = nn.ModuleList(Attention(out) for _ in range(blocks if attends else 0))
        if resample:
            setattr(self, resample, Resample(out, resample == "downsample"))
        self.resample = resample

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        return getattr(self, self.resample)(x) if self.resample else x


class Encoder(nn.Module):
    """Pictures (B, 3, h, w) in [-1, 1] -> (B, latent, h / patch, w / patch)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        widths, last = sizes.widths, len(sizes.widths) - 1
        self.conv_in = nn.Conv2d(3, sizes.channels, 3, padding=1)
        self.down = nn.ModuleList(
            Level(into, out, sizes.blocks, sizes.attends(i), "downsample" if i < last else "")
            for i, (into, out) in enumerate(zip([sizes.channels, *widths], widths, strict=False))
        )
        self.mid, self.norm_out = middle(widths[-1]), norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], sizes.latent, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(silu(self.norm_out(self.mid(x))))


class PixelDecoder(nn.Module):
    """(B, latent, H, W) -> pictures (B, 3, H * patch, W * patch), about [-1, 1]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        widths = sizes.widths
        self.conv_in = nn.Conv2d(sizes.latent, widths[-1], 3, padding=1)
        self.mid = middle(widths[-1])
        self.up = nn.ModuleList(  # numbered as the encoder's levels, and run from the last to the first
            Level(into, out, sizes.blocks + 1, sizes.attends(i), "upsample" if i else "")
            for i, (into, out) in enumerate(zip([*widths[1:], widths[-1]], widths, strict=True))
        )
        self.norm_out, self.conv_out = norm(widths[0]), nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(silu(self.norm_out(x)))


class VQGAN(nn.Module):
    """All of it; `pixels=False` leaves the decoder out."""

    def __init__(self, sizes: Sizes, pixels: bool = True) -> None:
        super().__init__()
        self.sizes = sizes
        self.encoder = Encoder(sizes)
        self.quantize = nn.ModuleDict({"embedding": nn.Embedding(sizes.codes, sizes.code_size)})
        self.quant_conv = nn.Conv2d(sizes.latent, sizes.code_size, 1)
        self.post_quant_conv = nn.Conv2d(sizes.code_size, sizes.latent, 1)
        self.decoder = PixelDecoder(sizes) if pixels else None

    def latents(self, x: Tensor) -> Tensor:
        """(B, 3, h, w) in [-1, 1] -> (B, H, W, code_size): what is compared with the codebook."""
        return self.quant_conv(self.encoder(x)).movedim(1, -1)

    def draw(self, codes: Tensor) -> Tensor:
        """(B, H, W) -> (B, 3, h, w), about [-1, 1]."""
        assert self.decoder is not None
        return self.decoder(self.post_quant_conv(self.quantize["embedding"](codes).movedim(-1, 1)))


def new_vqgan(sizes: Sizes, pixels: bool = True) -> VQGAN:
    """Frozen, on the meta device: weights are assigned, never drawn."""
    with torch.device("meta"):
        return VQGAN(sizes, pixels).eval().requires_grad_(False)
