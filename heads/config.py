"""Settings of heads, optimizer and the demo's backbone: plain dataclasses, so that reading a recipe loads no model."""

from dataclasses import dataclass

from heads.cli import key
from heads.grid import Offset

INPUTS = ("h+e", "h", "e")
KINDS = ("offsets", "chain")


@dataclass
class HeadsConfig:
    kind: str = key(
        "offsets", "offsets: one head per offset; chain: one head that reads the row above and the left token"
    )
    right: int = key(5, "kind=offsets: heads to the right, 1 .. right cells")
    down: int = key(2, "kind=offsets: heads below, 1 .. down rows")
    width: int = key(0, "hidden width of each head's SwiGLU; 0 = the backbone's hidden size")
    input: str = key("h+e", "kind=offsets: what a head reads, h+e (state and token embedding), h, or e")
    rank: int = key(0, "kind=chain: units through which the left token enters; 0 = a quarter of the hidden size")

    cell: int = key(0, "kind=chain: numbers each cell above is squeezed to; 0 = half of the hidden size")

    def check(self) -> None:
        """Raises ValueError naming the field."""
        if self.cell < 0:
            raise ValueError(f"heads.cell is {self.cell}; use 0 for half of the hidden size, or a positive number")
        if self.kind not in KINDS:
            raise ValueError(f"heads.kind is {self.kind!r}; use one of {', '.join(KINDS)}")
        if self.rank < 0:
            raise ValueError(f"heads.rank is {self.rank}; use 0 for a quarter of the hidden size, or a positive rank")
        if self.right < 0 or self.down < 0 or self.right + self.down == 0:
            raise ValueError(f"heads.right is {self.right} and heads.down is {self.down}; at least one head is needed")
        if self.width < 0:
            raise ValueError(f"heads.width is {self.width}; use 0 for the backbone's hidden size, or a positive width")
        if self.input not in INPUTS:
            raise ValueError(f"heads.input is {self.input!r}; use one of {', '.join(INPUTS)}")

    @property
    def offsets(self) -> list[Offset]:
        return [(0, x) for x in range(1, self.right + 1)] + [(y, 0) for y in range(1, self.down + 1)]


@dataclass
class OptimConfig:
    lr: float = key(1e-3, "peak learning rate of AdamW")
    warmup: int = key(50, "steps of linear warm-up, then cosine decay")
    final: float = key(0.05, "last learning rate, as a share of the peak")
    weight_decay: float = key(0.01, "on matrices, not on norms")
    beta2: float = key(0.99, "AdamW's second-moment decay")

    def check(self) -> None:
        """Raises ValueError naming the field."""
        if self.lr <= 0:
            raise ValueError(f"optim.lr is {self.lr}; it must be positive")
        if self.warmup < 0:
            raise ValueError(f"optim.warmup is {self.warmup}; it counts steps, so 0 or more")


@dataclass
class LossConfig:
    tv: float = key(
        0.0, "weight of 1 - sum of min(p, q), the chance of a rejected draft, beside Smooth-L1 on the state"
    )
    guidance: list[float] = key(
        [1.0], "guidance scales at which that chance is taken; with one other than 1 both branches are trained on"
    )

    @property
    def guided(self) -> bool:
        return any(g != 1 for g in self.guidance)

    def check(self) -> None:
        """Raises ValueError naming the field."""
        if self.tv < 0:
            raise ValueError(f"loss.tv is {self.tv}; it is a weight, so 0 or more")
        if not self.guidance:
            raise ValueError("loss.guidance is empty; use [1.0], or the guidance scales you decode with")
        if self.guided and not self.tv:
            raise ValueError(f"loss.guidance is {self.guidance}, but loss.tv is 0; only that term has a guidance")


@dataclass
class Emu3Size:
    hidden_size: int = key(256, "task=backbone: width of the new backbone")
    layers: int = key(6, "task=backbone: transformer layers")
    intermediate_size: int = key(640, "task=backbone: width of its MLP")
    heads: int = key(4, "task=backbone: attention heads")
    kv_heads: int = key(2, "task=backbone: key-value heads")
    dropout: float = key(0.1, "task=backbone: attention dropout while it is trained")
