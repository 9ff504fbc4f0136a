"""Settings of heads, optimizer and the demo's backbone: plain dataclasses, so that reading a recipe loads no model."""

from dataclasses import dataclass

from draftgrid.common.cli import check_ranges, key
from draftgrid.common.settings import one_of
from draftgrid.heads.grid import Offset

INPUTS = ("h+e", "h", "e")
KINDS = {"offsets": "draftgrid.heads.offsets:OffsetHeads", "chain": "draftgrid.heads.chain:ChainHeads"}
"""Kinds of heads, and the class of each."""
UNREAD = {"offsets": ("cell", "rows", "lefts", "recent"), "chain": ("right", "down", "input", "shared")}
"""Settings that a kind of heads does not read, and that are refused with it."""
TARGETS = ("h_pre", "h_post", "token")


@dataclass
class HeadsConfig:
    kind: str = key("offsets", "offsets: a head per offset; chain: one head reading the row above and the left token")
    target: str = key(
        "h_pre",
        "state read and predicted: h_pre before the final norm, h_post after it; token: h_pre, trained on tokens",
    )
    right: int = key(5, "kind=offsets: heads to the right, 1 .. right cells", least=0)
    down: int = key(2, "kind=offsets: heads below, 1 .. down rows", least=0)
    width: int = key(0, "hidden width of each head's SwiGLU; 0 = the backbone's hidden size", least=0)
    norm_inputs: bool = key(False, "divide states and embeddings by their root mean square before they are read")
    input: str = key("h+e", "kind=offsets: what a head reads, h+e (state and token embedding), h, or e")
    shared: bool = key(False, "kind=offsets: one trunk for all offsets, and a part of `rank` units for each")
    project_rank: int = key(0, "rank of the matrix W0 a head begins with; 0 = full", least=0)
    rank: int = key(0, "kind=chain: units for the left token; shared=true: units of an offset; 0 = hidden / 4", least=0)
    cell: int = key(0, "kind=chain: numbers each cell above is squeezed to; 0 = half of the hidden size", least=0)
    rows: int = key(1, "kind=chain: rows of context above, 1 or 2", least=1, most=2)
    lefts: int = key(1, "kind=chain: tokens to the left, 1 or 2", least=1, most=2)
    recent: int = key(0, "kind=chain: cells right of the newest drawn one that read its state too; 0 = none", least=0)

    def check(self) -> None:
        """Raises ValueError naming the field."""
        check_ranges(self, "heads.")
        for name, known in (("kind", tuple(KINDS)), ("target", TARGETS), ("input", INPUTS)):
            one_of(f"heads.{name}", getattr(self, name), known)
        if self.right + self.down == 0:
            raise ValueError(f"heads.right is {self.right} and heads.down is {self.down}; at least one head is needed")
        for name in UNREAD[self.kind]:
            if (value := getattr(self, name)) != getattr(HeadsConfig, name):
                raise ValueError(f"heads.{name} is {value}, but heads.kind={self.kind} does not read it; leave it out")

    @property
    def offsets(self) -> list[Offset]:
        return [(0, x) for x in range(1, self.right + 1)] + [(y, 0) for y in range(1, self.down + 1)]


@dataclass
class OptimConfig:
    lr: float = key(1e-3, "peak learning rate of AdamW", above=0)
    warmup: int = key(50, "steps of linear warm-up, then cosine decay", least=0)
    final: float = key(0.05, "last learning rate, as a share of the peak", least=0, most=1)
    weight_decay: float = key(0.01, "on matrices, not on norms", least=0)
    beta2: float = key(0.99, "AdamW's second-moment decay", least=0, most=1)


@dataclass
class LossConfig:
    state: float = key(1.0, "weight of Smooth-L1 on the state; target=token: the true token's cross-entropy", least=0)
    tv: float = key(0.0, "weight of 1 - sum of min(p, q), the chance of a rejected draft", least=0)
    ce: float = key(0.0, "weight of the cross-entropy -sum of p log q", least=0)
    kl: float = key(0.0, "weight of KL(p || q); its gradient is ce's", least=0)
    weights: dict[str, float] = key(dict, "weights of heads by name, {right1: 2}; those not named have 1", least=0)
    guidance: list[float] = key(
        [1.0], "guidance scales at which p and q are taken; with one other than 1 both branches are trained on"
    )
    top_k: int = key(0, "p keeps its k most likely tokens, and q in tv its own, as when decoding; 0 = all", least=0)
    chunk: int = key(1024, "positions of the batch whose logits are held at once; 0 = all", least=0)
    recompute: bool = key(False, "recompute a head's activations in the backward pass: less memory, a third more work")
    own_drafts: float = key(0.0, "kind=chain: share of left tokens drawn from the head's own q", least=0, most=1)

    @property
    def on_distributions(self) -> bool:
        """Whether a term compares q with p."""
        return self.tv > 0 or self.ce > 0 or self.kl > 0

    @property
    def guided(self) -> bool:
        return any(g != 1 for g in self.guidance)

    def check(self) -> None:
        """Raises ValueError naming the field."""
        check_ranges(self, "loss.")
        if not self.state and not self.on_distributions:
            raise ValueError("loss.state, loss.tv, loss.ce and loss.kl are all 0; give one of them a weight")
        if not self.guidance:
            raise ValueError("loss.guidance is empty; use [1.0], or the guidance scales you decode with")
        for name, value in (("guidance", self.guidance if self.guided else None), ("top_k", self.top_k)):
            if value and not self.on_distributions:
                terms = "loss.tv, loss.ce and loss.kl"
                raise ValueError(f"loss.{name} is {value}, but {terms} are 0; only those terms know p and q")


@dataclass
class Emu3Size:
    hidden_size: int = key(256, "task=backbone: width of the new backbone", least=1)
    layers: int = key(6, "task=backbone: transformer layers", least=1)
    intermediate_size: int = key(640, "task=backbone: width of its MLP", least=1)
    heads: int = key(4, "task=backbone: attention heads", least=1)
    kv_heads: int = key(2, "task=backbone: key-value heads", least=1)
    dropout: float = key(0.1, "task=backbone: attention dropout while it is trained", least=0, most=1)
