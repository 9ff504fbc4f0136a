"""Small worlds whose answers are known: a tiny Emu3, backbones made of tables, heads that say what we like, and a
random source that walks a production decoder through every path it can take."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftgrid.eval.decoders import Policy, Sampling
from draftgrid.eval.decoders.coupled import CoupledSSD
from draftgrid.eval.decoders.engine import run
from draftgrid.eval.decoders.randomness import Where
from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.backbones.emu3 import Emu3Backbone
from draftgrid.heads.backbones.emu3_new import Emu3Size, new_emu3
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.grid import Offset, TokenGrid
from draftgrid.heads.mtp import MTPHeads, TrainedOn, new_heads
from draftgrid.heads.offsets import OffsetHeads

CAPTIONS = ["a red apple", "big dog, looking left", "blue"]
Law = dict[tuple[int, ...], float]
"""Chance of every picture that has one."""


def tiny_emu3(
    grid: tuple[int, int] = (3, 4), codes: int = 24, double: bool = False, dropout: float = 0.0, spread: float = 6.0
) -> Emu3Backbone:
    """Two layers of 32; weights scaled up so that its distributions are far from flat and differ between contexts."""
    backbone = new_emu3(CAPTIONS, codes, grid, Emu3Size(32, 2, 48, 4, 2, dropout), seed=1)
    with torch.no_grad():
        for p in backbone.parameters():
            if p.ndim == 2:
                p.mul_(spread)
    if double:
        backbone = backbone.double()
    backbone.freeze()
    return backbone


@dataclass
class TableState:
    fed: list[list[int]]
    branches: int = 1


class TableBackbone(Backbone):
    """p(x_i | x_<i) from a table of random logits, one row per prefix; a state is its own logits.

    Fulfils the engine's side of the contract without a network, so that every path of a decoder can be enumerated, many
    paths at once, each a sample of the batch. `normed` puts an RMS norm before the logits, which chain heads need.
    """

    adapter = "table"

    def __init__(
        self, grid: tuple[int, int], codes: int, seed: int = 0, spread: float = 1.5, normed: bool = False
    ) -> None:
        super().__init__()
        self.spread, self.normed = spread, normed
        self.grid, self.image_vocab_size, self.hidden_size, self.name = TokenGrid(*grid), codes, codes, "table"
        generator = torch.Generator().manual_seed(seed)
        T = self.grid.positions
        # Row of a prefix: prefixes of length n start at first[n], in base `codes`.
        self.first = [sum(codes**m for m in range(n)) for n in range(T + 1)]
        self.table = spread * torch.randn(self.first[T], codes, generator=generator, dtype=torch.float64)
        self.table = torch.cat([self.table, torch.zeros(1, codes, dtype=torch.float64)])  # behind the picture's end
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)

    layers = ()

    def prompt_ids(self, prompts: Sequence[str | None]) -> list[Tensor]:
        return [torch.zeros(1, dtype=torch.long) for _ in prompts]

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens, self.image_vocab_size).double()

    def embed_ids(self, ids: Tensor) -> Tensor:
        raise AssertionError("a table has no vocabulary ids")

    def structure_ids(self) -> list[int]:
        return []

    def trunk(self, embeds: Tensor, positions: Tensor, mask: Tensor | None, cache: object) -> Tensor:
        raise AssertionError("a table has no trunk")

    def identity(self) -> dict[str, Tensor]:
        return {"table": self.table}

    @classmethod
    def from_pretrained(cls, folder: object, **settings: object) -> "TableBackbone":
        raise AssertionError("a table is not loaded")

    def norm(self, h: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(h, h.shape[-1:], eps=1e-12) if self.normed else h

    def project(self, h: Tensor) -> Tensor:
        return self.spread * h if self.normed else h

    def row(self, prefix: Sequence[int]) -> int:
        """Place in the table; behind the picture's end the last row."""
        if len(prefix) >= self.grid.positions:
            return len(self.table) - 1
        code = 0
        for token in prefix:
            code = code * self.image_vocab_size + token
        return self.first[len(prefix)] + code

    def state_of(self, prefix: Sequence[int]) -> Tensor:
        return self.table[self.row(prefix)]

    def start(self, prompts: Sequence[str], guidance: float = 1.0) -> tuple[TableState, Tensor]:  # type: ignore[override]
        return TableState([[] for _ in prompts]), self.table[:1].expand(1, len(prompts), 1, -1)

    def forward(self, state: TableState, tokens: Tensor, first: list[int]) -> Tensor:  # type: ignore[override]
        rows = []
        for b, row in enumerate(tokens.tolist()):
            fed = state.fed[b]
            assert len(fed) == first[b], "the cache must hold exactly what comes before the window"
            for token in row:
                fed.append(token)
                rows.append(self.row(fed))
        return self.table[rows].view(1, *tokens.shape, -1)

    def rollback(self, state: TableState, keep: list[int]) -> None:  # type: ignore[override]
        for b, k in enumerate(keep):
            assert 0 <= k <= len(state.fed[b])
            del state.fed[b][k:]

    def law(self, sampling: Sampling) -> Law:
        """The exact distribution over whole pictures, by the chain rule."""
        law: Law = {(): 1.0}
        for _ in range(self.grid.positions):
            step: Law = {}
            for prefix, weight in law.items():
                p = sampling.probabilities(self.logits(self.state_of(prefix))[None])
                step |= {(*prefix, v): weight * float(p[v]) for v in range(self.image_vocab_size) if p[v] > 0}
            law = step
        return law


def markov_table(grid: tuple[int, int], codes: int) -> TableBackbone:
    """A normed table in which only the token before counts: (codes, codes) logits in `left_logits`."""
    backbone = TableBackbone(grid, codes, normed=True)
    backbone.left_logits = backbone.table[1 : codes + 1].clone()
    for n in range(1, grid[0] * grid[1]):
        rows = backbone.table[backbone.first[n] : backbone.first[n] + codes**n]
        rows.copy_(backbone.left_logits.repeat(codes ** (n - 1), 1))
    return backbone


def network_law(backbone: Backbone, sampling: Sampling, prompt: str) -> Law:
    """The same for a network: every picture there is, teacher-forced at once, without a cache."""
    V, (H, W) = backbone.image_vocab_size, (backbone.grid.height, backbone.grid.width)
    pictures = torch.tensor(list(itertools.product(range(V), repeat=H * W))).view(-1, H, W)
    branches: list[str | None] = [prompt] if sampling.guidance == 1 else [prompt, None]
    with torch.inference_mode():
        h = torch.stack([backbone.states(pictures, [branch] * len(pictures))[0] for branch in branches])
        p = sampling.probabilities(backbone.logits(h)).gather(-1, pictures[..., None]).flatten(1).prod(1)
    found = zip(pictures.flatten(1).tolist(), p.tolist(), strict=True)
    return {tuple(picture): weight for picture, weight in found if weight > 0}


@dataclass
class LocalState:
    tokens: Tensor


class LocalBackbone(TableBackbone):
    """Flat pictures with local structure: p depends on the tokens to the left and above, both drawn from tables."""

    def __init__(self, grid: tuple[int, int], codes: int, spread: float = 0.9) -> None:
        super().__init__((1, 1), codes)
        self.grid = TokenGrid(*grid)
        generator = torch.Generator().manual_seed(0)
        scale = spread / math.sqrt(2)
        # Row `codes` is for a neighbour outside the picture.
        self.left, self.above = scale * torch.randn(2, codes + 1, codes, generator=generator, dtype=torch.float64)

    def state_at(self, tokens: Tensor, position: Tensor) -> Tensor:
        """tokens (B, T), position (B, L) -> (B, L, V) logits there."""
        W, T = self.grid.width, self.grid.positions
        position = position.clamp(max=T - 1)
        none = torch.full_like(position, self.image_vocab_size)
        left = torch.where(position % W > 0, tokens.gather(1, (position - 1).clamp(min=0)), none)
        above = torch.where(position >= W, tokens.gather(1, (position - W).clamp(min=0)), none)
        return self.left[left] + self.above[above]

    def start(self, prompts: Sequence[str], guidance: float = 1.0) -> tuple[LocalState, Tensor]:  # type: ignore[override]
        tokens = torch.zeros(len(prompts), 2 * self.grid.positions, dtype=torch.long)
        return LocalState(tokens), self.state_at(tokens, torch.zeros_like(tokens[:, :1]))[None]

    def forward(self, state: LocalState, tokens: Tensor, first: list[int]) -> Tensor:  # type: ignore[override]
        position = torch.tensor(first)[:, None] + torch.arange(tokens.shape[1])
        state.tokens.scatter_(1, position, tokens)
        return self.state_at(state.tokens, position + 1)[None]

    def rollback(self, state: LocalState, keep: list[int]) -> None:  # type: ignore[override]
        """Nothing: what is fed again overwrites, and nobody looks ahead."""


class ArbitraryHeads(OffsetHeads):
    """Heads that predict what they like: a fixed random function of offset and source token."""

    def __init__(self, backbone: Backbone, config: HeadsConfig, seed: int = 0) -> None:
        MTPHeads.__init__(self, config, TrainedOn.of(backbone))
        generator = torch.Generator().manual_seed(seed)
        V = backbone.image_vocab_size
        self.rows = {o: 2 * torch.randn(V, V, generator=generator, dtype=torch.float64) for o in config.offsets}

    def forward(self, h: Tensor, e: Tensor, offset: Offset) -> Tensor:
        return (e.double() @ self.rows[offset]).expand_as(h)


class TwistedHeads(OffsetHeads):
    """Heads that know the table and say something else: the states of the target cell (the mean over what may stand in
    between), changed by `twist`."""

    def __init__(self, backbone: TableBackbone, config: HeadsConfig, twist: Callable[[Tensor], Tensor]) -> None:
        MTPHeads.__init__(self, config, TrainedOn.of(backbone))
        self.known, self.twist = backbone, twist

    def forward(self, h: Tensor, e: Tensor, offset: Offset) -> Tensor:
        b = self.known
        V, T, back = b.image_vocab_size, b.grid.positions, offset[0] * b.grid.width + offset[1]
        rows = (h[..., None, :] == b.table).all(-1).int().argmax(-1)
        tokens = e.expand_as(h).argmax(-1)
        found = []
        for row, token in zip(rows.flatten().tolist(), tokens.flatten().tolist(), strict=True):
            n = max(m for m in range(T + 1) if b.first[m] <= row)  # length of the source's prefix
            if n + back >= T:
                found.append(torch.zeros(V, dtype=torch.float64))
                continue
            low = b.first[n + back] + ((row - b.first[n]) * V + token) * V ** (back - 1)
            found.append(b.table[low : low + V ** (back - 1)].mean(0))
        return self.twist(torch.stack(found).view(h.shape))


def reversed_logits(h: Tensor) -> Tensor:
    return -h


def zero_at_the_mode(h: Tensor) -> Tensor:
    return h.scatter(-1, h.argmax(-1, keepdim=True), -torch.inf)


def random_chain_heads(backbone: Backbone, spread: float = 3.0, seed: int = 0, **config: Any) -> MTPHeads:
    """Chain heads with arbitrary weights, large enough for every input to show."""
    heads = (
        new_heads(HeadsConfig(kind="chain", **config), backbone, seed).requires_grad_(False).to(backbone.dtype).eval()
    )
    for p in heads.parameters():
        p.mul_(spread)
    return heads


class Path:
    """One sample's choices: a list to follow, then the first branch each time, noting the others."""

    def __init__(self, choices: list[int]) -> None:
        self.choices, self.weight = choices, 1.0
        self.taken: list[int] = []
        self.open: list[list[int]] = []

    def choose(self, options: list[tuple[int, float]]) -> int:
        # A chance of rounding's size is there in one batch and gone in another, and would shift the choices after it.
        options = [(v, w) for v, w in options if w > 1e-13]
        if len(options) == 1:
            return options[0][0]
        at = len(self.taken)
        if at < len(self.choices):
            value = self.choices[at]
        else:
            value = options[0][0]
            self.open += [[*self.taken, v] for v, _ in options[1:]]
        self.taken.append(value)
        self.weight *= dict(options)[value]
        return value


class Replay:
    """A random source that follows one path per sample through the door of the production decoders.

    `share` samples at a time walk one path together: the path of a joint law. Positions from `undrafted` on get no
    draft: what is drawn there while drafting fills up a batch that is not in step, and is no branch of the path.
    """

    def __init__(self, paths: Sequence[list[int]], undrafted: int | None = None, share: int = 1) -> None:
        self.paths = [Path(list(choices)) for choices in paths]
        self.undrafted, self.share = undrafted, share

    def _rows(self, where: Where) -> list[Path]:
        return [self.paths[s // self.share] for s in where.sample]

    def accept(self, probability: Tensor, where: Where) -> Tensor:
        rows = [[min(1.0, a) if a == a else 0.0 for a in row] for row in probability.tolist()]
        chosen = [
            [path.choose([(1, a), (0, 1 - a)]) == 1 for a in row]
            for path, row in zip(self._rows(where), rows, strict=True)
        ]
        return torch.tensor(chosen).view(probability.shape)

    def draw(self, weights: Tensor, where: Where, needed: Tensor | None = None) -> Tensor:
        asked = torch.ones(weights.shape[:2], dtype=torch.bool) if needed is None else needed.clone()
        if self.undrafted is not None and where.visit % 2:
            asked &= torch.as_tensor(where.position) < self.undrafted
        drawn = []
        for path, rows, row_asked in zip(self._rows(where), weights.tolist(), asked.tolist(), strict=True):
            for row, wanted in zip(rows, row_asked, strict=True):
                total = sum(row)
                wanted = wanted and total > 0
                drawn.append(path.choose([(v, w / total) for v, w in enumerate(row)]) if wanted else 0)
        return torch.tensor(drawn).view(weights.shape[:-1])

    def gumbel(self, like: Tensor, where: Where) -> Tensor:
        raise AssertionError("continuous noise cannot be enumerated")


def enumerate_law(
    backbone: Backbone,
    make: Callable[[], Policy],
    sampling: Sampling,
    heads: MTPHeads | None = None,
    tokenizer: object = None,
    batch: int = 400,
    share: int = 1,
    prompt: str = "x",
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every path of the production decoder, as (picture, chance); many at once, each a sample of one batch.

    With `share` samples on a path the pictures come one behind the other.
    """
    pending: list[list[int]] = [[]]
    while pending:
        policy = make()
        undrafted = backbone.grid.positions - 1 if isinstance(policy, CoupledSSD) else None
        source = Replay([pending.pop() for _ in range(min(batch, len(pending)))], undrafted, share)
        prompts = [prompt] * len(source.paths) * share
        result = run(backbone, prompts, policy, sampling, heads, source=source, tokenizer=tokenizer)  # type: ignore[arg-type]
        pictures = result.tokens.view(len(source.paths), -1).tolist()
        for path, picture in zip(source.paths, pictures, strict=True):
            pending += path.open
            yield tuple(picture), path.weight


def total_variation(paths: Iterable[tuple[tuple[int, ...], float]], law: Mapping[tuple[int, ...], float]) -> float:
    found: Law = {}
    for picture, weight in paths:
        found[picture] = found.get(picture, 0.0) + weight
    assert abs(sum(found.values()) - 1) < 1e-9, "the paths do not add up to 1"
    return 0.5 * sum(abs(found.get(k, 0.0) - law.get(k, 0.0)) for k in found.keys() | law.keys())
