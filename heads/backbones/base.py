"""The contract every backbone fulfils, written once; an adapter says only where its family differs.

A backbone maps prompts and image tokens to hidden states h (before the final norm) aligned with the grid: h[y, x] is
the state whose LM-head output is the distribution of the token at (y, x). It is frozen and always in eval mode.
Image tokens are codes 0..V-1 everywhere outside an adapter; only adapters know vocabulary ids.
"""

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from draftgrid.heads.backbones.graphs import Recorded
from draftgrid.heads.backbones.registry import family_of
from draftgrid.heads.grid import TokenGrid
from draftgrid.heads.prompts import Prompt, unconditional_prompts

if TYPE_CHECKING:  # it needs transformers, which nothing but decoding does
    from draftgrid.heads.backbones.cache import RaggedCache

CARD = "draftgrid.json"
"""A file beside the weights that names the adapter, the grid and the unconditional prompt of a checkpoint."""


@dataclass
class DecodeState:
    """What decoding keeps between forwards. Rows are the B samples of each of the G guidance branches."""

    cache: "RaggedCache"
    branches: int
    """G: 2 with guidance (conditional rows first, then unconditional), else 1."""
    prompt_lengths: list[int]
    """(G * B,) tokens of each row's prompt; image slot s is written at prompt_length + s."""
    slots: list[int]
    """(B,) sequence slots kept after the prompt."""
    turn: int = 0
    """Which of the cache's pictures this is."""


def padded(rows: Sequence[Tensor]) -> Tensor:
    """(L, D) each -> (R, longest L, D), with zeros after a row's end."""
    longest = max(map(len, rows))
    return torch.stack([nn.functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows])


class ImageHead(nn.Module):
    """The rows of an LM head that stand for image tokens, as a module of its own that shares the weight."""

    index: Tensor | None

    def __init__(self, weight: nn.Parameter, rows: slice | Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.rows = rows if isinstance(rows, slice) else None  # a view and no copy
        self.register_buffer("index", None if isinstance(rows, slice) else rows, persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        rows = self.weight[self.index if self.rows is None else self.rows]
        # The weight may lie on another device than h, where a device map spread the model.
        return nn.functional.linear(h.to(rows.device), rows.to(h.dtype)).to(h.device)


class Backbone(nn.Module, ABC):
    """One frozen model. Subclasses set the attributes and write the abstract methods; the rest is common."""

    adapter: ClassVar[str]
    model: Any
    """The Hugging Face model."""
    grid: TokenGrid
    hidden_size: int
    image_vocab_size: int
    name: str
    revision: str | None = None
    compiled: bool = False
    _cache: "tuple[int, RaggedCache] | None" = None
    """(rows, cache) of the compiled forwards."""
    linear_head: bool = True
    """Whether `project` is a linear map: then a chain head's draft costs two small products a position."""

    # What an adapter writes ------------------------------------------------------------------------------------------

    @abstractmethod
    def prompt_ids(self, prompts: Sequence[str | None]) -> list[Tensor]:
        """One 1-D id tensor per prompt, ending with the last header token; None is the unconditional prompt."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Image codes (...,) -> input embeddings e (..., D)."""

    @abstractmethod
    def embed_ids(self, ids: Tensor) -> Tensor:
        """Vocabulary ids (of prompts and structure tokens) -> (..., D)."""

    @abstractmethod
    def structure_ids(self) -> list[int]:
        """The `grid.row_end` vocabulary ids that end a row."""

    @abstractmethod
    def trunk(self, embeds: Tensor, positions: Tensor, mask: Tensor | None, cache: "RaggedCache | None") -> Tensor:
        """(R, L, D) input embeddings -> (R, L, D) hidden states before the final norm."""

    @abstractmethod
    def norm(self, h: Tensor) -> Tensor:
        """(..., D) states before the final norm -> (..., D) after it."""

    @abstractmethod
    def project(self, h: Tensor) -> Tensor:
        """(..., D) states after the final norm -> (..., V) logits over the image vocabulary only.

        Call the module that owns the weight, as `ImageHead` does: only then do ZeRO-3 and FSDP gather its parts.
        """

    @abstractmethod
    def identity(self) -> dict[str, Tensor]:
        """The weights heads depend on: image rows of embedding and LM head, and the final norm."""

    def ids_of(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """`prompt_ids` of prompts; an adapter whose unconditional prompts depend on their captions overrides it."""
        return self.prompt_ids([p if isinstance(p, str) else None for p in prompts])

    @staticmethod
    def lighten(model: Any) -> None:
        """Remove what drawing never reads: the checkpoint's picture tokenizer; adapters may remove more."""
        for part in list(model.modules()):
            if "vqmodel" in part._modules:
                part.vqmodel = nn.Identity()

    def step(self, embeds: Tensor, positions: Tensor, mask: Tensor | None, cache: "RaggedCache") -> Tensor:
        """`trunk` while decoding: what `compile_decoding` records."""
        return self.trunk(embeds, positions, mask, cache)

    # What all share --------------------------------------------------------------------------------------------------

    def logits(self, h: Tensor) -> Tensor:
        """(..., D) states before the final norm -> (..., V): the model's own logits of image tokens."""
        return self.project(self.norm(h))

    def freeze(self) -> Self:
        self.requires_grad_(False)
        return self.train(False)

    def train(self, mode: bool = True) -> Self:
        """A frozen backbone stays in eval mode whatever a surrounding module asks for."""
        frozen = not any(p.requires_grad for p in self.parameters())
        return super().train(mode and not frozen)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over names, shapes and bf16 bytes of `identity()`: independent of library version and load dtype."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.identity().items()):
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
        return digest.hexdigest()

    def states(self, tokens: Tensor, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        """Teacher-forced states: tokens (B, H, W), one prompt each -> h, e, both (B, H, W, D), aligned as above.

        One causal forward over prompt and picture; padding comes after a row's end, where no state sees it.
        Raises ValueError if the tokens do not fit the grid or the vocabulary.
        """
        B, H, W = tokens.shape
        self.check_tokens(tokens)
        if len(prompts) != B:
            raise ValueError(f"{len(prompts)} prompts for {B} pictures")
        ids = self.ids_of(prompts)
        first = torch.zeros(B, 1, dtype=torch.long, device=tokens.device)
        picture = self._fed_embeds(tokens.flatten(1), first, self.grid.slots - 1, first)  # the last token is never fed
        rows = [torch.cat([self.embed_ids(i.to(self.device)).to(p), p]) for i, p in zip(ids, picture, strict=True)]
        embeds = padded(rows)
        h = self.trunk(embeds, torch.arange(embeds.shape[1], device=self.device)[None], None, None).to(self.device)
        last = torch.tensor([[len(i) - 1] for i in ids], device=self.device)
        where = last + self.grid.image_slots().to(self.device)
        return h.take_along_dim(where[..., None], 1).view(B, H, W, -1), self.embed(tokens)

    def check_codes(self, codes: int) -> None:
        """Raises ValueError unless an image tokenizer of so many codes fits the image vocabulary."""
        if codes != self.image_vocab_size:
            raise ValueError(f"the tokenizer has {codes} codes, the backbone {self.image_vocab_size}")

    def check_tokens(self, tokens: Tensor) -> None:
        _, H, W = tokens.shape
        if (self.grid.height, self.grid.width) != (H, W):
            raise ValueError(f"tokens are {H}x{W}, but the backbone's grid is {self.grid.height}x{self.grid.width}")
        if tokens.numel() == 0:
            raise ValueError("no image tokens in the batch")
        low, high = map(int, tokens.aminmax())
        if low < 0 or high >= self.image_vocab_size:
            raise ValueError(f"image tokens reach {low}..{high}; the backbone knows 0..{self.image_vocab_size - 1}")

    def compile_decoding(self) -> None:
        """Compile the layers with torch.compile and, on a GPU, record the whole step as a CUDA graph for each shape
        that is met again (`graphs.Recorded`), for every decoder. The prefill, whose length varies, is not compiled.

        The first forwards take seconds. The next picture reuses the cache, so a picture must be finished before it.
        """
        if not self.compiled:
            self.compiled = True
            self.compile_layers()
            devices = {p.device for p in self.parameters()}
            if len(devices) == 1 and self.device.type == "cuda":
                self.step = Recorded(self.step)  # type: ignore[method-assign]

    def compile_layers(self) -> None:
        """Compile what `step` spends its time in; an adapter may compile its layers instead."""
        self.step = torch.compile(self.step, dynamic=True)  # type: ignore[method-assign]

    def _new_cache(self, rows: int, longest: int) -> "RaggedCache":
        """Room for prompts of `longest` tokens and a picture; compiled forwards reuse their cache if it fits."""
        from draftgrid.heads.backbones.cache import RaggedCache

        # A ragged window is padded after its end; the pads need a place in the cache too.
        picture = 2 * self.grid.height * self.grid.stride
        if not self.compiled:
            return RaggedCache(self.num_layers, longest + picture)
        if self._cache is None or self._cache[0] != rows or self._cache[1].capacity < longest + picture:
            self._cache = rows, RaggedCache(self.num_layers, -(-longest // 128) * 128 + picture, static=True)
        self._cache[1].turn += 1
        return self._cache[1]

    @torch.inference_mode()
    def start(self, prompts: Sequence[str], guidance: float = 1.0) -> tuple[DecodeState, Tensor]:
        """Prefill: the prompts (and, with guidance != 1, the unconditional prompt of each) in one forward.

        Returns the state and h[0, 0] as (G, B, 1, D).
        """
        rows: list[Prompt] = [*prompts, *(unconditional_prompts(prompts) if guidance != 1 else ())]
        ids = self.ids_of(rows)
        B, lengths = len(prompts), [len(i) for i in ids]
        embeds = padded([self.embed_ids(i.to(self.device)) for i in ids]).to(self.device, self.dtype)
        cache = self._new_cache(len(rows), max(lengths))
        positions = cache.aim([0] * len(rows), max(lengths), self.device)
        h = self.trunk(embeds, positions, cache.mask(positions, self.dtype), cache).to(self.device)
        last = torch.tensor(lengths, device=self.device)[:, None, None] - 1
        state = DecodeState(cache, len(rows) // B, lengths, [0] * B, cache.turn)
        return state, h.take_along_dim(last, 1).view(state.branches, B, 1, -1)

    @torch.inference_mode()
    def forward(self, state: DecodeState, tokens: Tensor, first: list[int]) -> Tensor:
        """One step: feed L image tokens per sample and read the states after them.

        tokens (B, L) are the codes at positions first[b] .. first[b] + L - 1; the cache must hold exactly what precedes
        them (see `rollback`). Returns h (G, B, L, D) of positions first[b] + 1 .. first[b] + L. Structure tokens are
        fed with a row's last token. Raises ValueError if a later `start` of the compiled backbone took the cache.
        """
        (B, L), G, grid = tokens.shape, state.branches, self.grid
        if state.turn != state.cache.turn:
            raise ValueError("this picture's cache was taken by a later start(); compiled, finish one before the next")
        begin = [grid.slot(f) for f in first]
        assert begin == state.slots, f"cache holds {state.slots} slots, the window begins at {begin}"
        end = [grid.slot(f + L) for f in first]
        S = max(e - b for b, e in zip(begin, end, strict=True))
        start, at = torch.tensor([begin, first], device=self.device)[..., None]  # (B, 1) each
        embeds = self._fed_embeds(tokens, start, S, at)
        positions = state.cache.aim([p + begin[r % B] for r, p in enumerate(state.prompt_lengths)], S, self.device)
        mask = state.cache.mask(positions, self.dtype)
        # Padding lies beyond the picture's end, where a table of learned positions has no row.
        positions = positions.clamp(max=max(state.prompt_lengths) + grid.slots - 1)
        h = self.step(embeds if G == 1 else embeds.repeat(G, 1, 1), positions, mask, state.cache).to(self.device)
        state.slots = end
        if S > L:
            index = grid.slot(at + torch.arange(1, L + 1, device=self.device)) - 1 - start
            h = h.take_along_dim(index.repeat(G, 1)[..., None], 1)
        return h.view(G, B, L, -1)

    def rollback(self, state: DecodeState, keep: list[int]) -> None:
        """Forget what was fed after the first `keep[b]` image positions of sample b. Raises ValueError if too far."""
        slots = [self.grid.slot(k) for k in keep]
        if any(not 0 <= s <= held for s, held in zip(slots, state.slots, strict=True)):
            raise ValueError(f"rollback to {slots} slots, but the cache holds {state.slots}")
        state.slots = slots

    def _fed_embeds(self, tokens: Tensor, start: Tensor, count: int, first: Tensor) -> Tensor:
        """(B, L) codes -> (B, count, D) inputs from slot start[b] on, structure tokens in between.

        `first` (B, 1) is the position of tokens[:, 0]. Slots after the last token repeat it: padding nobody sees.
        """
        grid = self.grid
        slot = start + torch.arange(count, device=tokens.device)
        column = slot % grid.stride
        position = slot // grid.stride * grid.width + column.clamp(max=grid.width - 1)
        embeds = self.embed(tokens.gather(1, (position - first).clamp(0, tokens.shape[1] - 1)))
        if grid.row_end:
            table = self.embed_ids(torch.tensor(self.structure_ids(), device=tokens.device))
            row_end = table[(column - grid.width).clamp(min=0)]
            embeds = torch.where(grid.is_structure(slot)[..., None], row_end, embeds)
        return embeds

    @property
    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """The transformer layers: each has its entry of the cache, and FSDP shards them one by one."""

    @classmethod
    def from_model(cls, model: Any, processor: Any, **settings: Any) -> Self:
        """Wrap a model in memory (finetuned, quantised); it is frozen and put in eval mode.

        `Backbone.from_model` finds the adapter by config.model_type; `settings` are the adapter's (grid, name, ...).
        Raises ValueError for a model of no known family.
        """
        if inspect.isabstract(cls):
            return family_of(model).from_model(model, processor, **settings)
        return cls(model, processor, **settings).freeze()  # type: ignore[call-arg]

    @classmethod
    @abstractmethod
    def from_pretrained(
        cls, folder: Path, dtype: torch.dtype | None = None, device_map: Any = None, **settings: Any
    ) -> Self:
        """The checkpoint in a folder, not yet frozen; `dtype` None is its own.

        Raises ValueError naming a missing, unknown or misshapen weight.
        """
