"""What adapters on transformers' decoder-only text models share: the layers, the state before the final norm, and image
codes that are words of the text vocabulary. A family's adapter adds prompts and header and names the model's parts.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import CacheLayerMixin

from draftgrid.common.files import write_json
from draftgrid.heads.backbones.attention import own_attention
from draftgrid.heads.backbones.base import CARD, Backbone, ImageHead
from draftgrid.heads.backbones.cache import RaggedCache
from draftgrid.heads.weights import Loaded, load_model

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention of a decoding step. cuDNN's, torch's first choice on newer GPUs, makes a plan for every length of the cache
that it has not met, tens of milliseconds each: every step of AR has a new one."""


class TransformerBackbone(Backbone):
    """`text` is the text model: embed_tokens, rotary_emb, layers and norm, as all of transformers' Llama kin have."""

    model_class: ClassVar[str]
    """transformers' name of it."""
    like: ClassVar[str]
    """A published checkpoint of the family."""
    apart: ClassVar[tuple[str, ...]] = ()
    """What the names of weights begin with that are no part of the backbone, and may be absent."""
    load_processor: ClassVar[Any]
    text: Any
    compiled_layer: Callable[..., Tensor] | None = None

    @classmethod
    def from_pretrained(
        cls, folder: Path, dtype: torch.dtype | None = None, device_map: Any = None, **settings: Any
    ) -> Self:
        """Raises ValueError naming a missing, unknown or misshapen weight. Leaves out what drawing never reads."""
        import transformers

        loaded = load_model(getattr(transformers, cls.model_class), folder, cls.like, dtype, device_map)
        cls.mend(loaded, folder)
        model = loaded.check(folder, ignore=cls.apart)
        cls.lighten(model)
        return cls(model, cls.load_processor(folder), **{"name": folder.name, **settings})  # type: ignore[call-arg]

    @staticmethod
    def mend(loaded: Loaded, folder: Path) -> None:
        """Fill weights that a family's checkpoints keep in another shape."""

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.text.layers)

    def embed_ids(self, ids: Tensor) -> Tensor:
        return self.text.embed_tokens(ids)

    def trunk(self, embeds: Tensor, positions: Tensor, mask: Tensor | None, cache: RaggedCache | None) -> Tensor:
        if cache is not None:
            return self._layers(one_layer, embeds, positions, mask, cache)
        kept: list[Tensor] = []
        hook = self.text.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        try:
            with own_attention(self.text.config):
                self.text(inputs_embeds=embeds, position_ids=positions, attention_mask=mask, use_cache=False)
        finally:
            hook.remove()
        (h,) = kept
        return h

    def step(self, embeds: Tensor, positions: Tensor, mask: Tensor | None, cache: RaggedCache) -> Tensor:
        return self._layers(self.compiled_layer or one_layer, embeds, positions, mask, cache)

    def compile_layers(self) -> None:
        """One layer is compiled for all: they differ only in weights and cache, which are inputs."""
        # Windows of one token, batches of one row and other models in the process each need a graph of this function.
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, 32)
        self.compiled_layer = torch.compile(one_layer, dynamic=True)

    def _layers(
        self, call: Callable[..., Tensor], h: Tensor, positions: Tensor, mask: Tensor | None, cache: RaggedCache
    ) -> Tensor:
        """The text model's layers without its norm. The mask is ours, so the model need not plan one."""
        rotary = self.text.rotary_emb(h, position_ids=positions)
        with own_attention(self.text.config), sdpa_kernel(KERNELS) if h.is_cuda else nullcontext():
            for layer, own in zip(self.text.layers, cache.layers, strict=True):
                h = call(layer, h, positions, mask, rotary, own)
        return h

    def norm(self, h: Tensor) -> Tensor:
        return self.text.norm(h)


def load_text_tokenizer(folder: Path, like: str) -> Any:
    """tokenizer.json as it is: AutoTokenizer would follow tokenizer_config.json to a class with rules of its own.

    Raises ValueError, naming the checkpoint `like`, if there is none.
    """
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json; those of {like} serve the whole family")
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def one_layer(
    layer: nn.Module,
    h: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    rotary: tuple[Tensor, Tensor],
    cache: CacheLayerMixin,
) -> Tensor:
    """A decoder layer on (R, L, D) with its own layer of the cache, whatever its number in the model."""
    out = layer(h, attention_mask=mask, position_embeddings=rotary, position_ids=positions, cache=cache, use_cache=True)
    return out[0] if isinstance(out, tuple) else out  # Chameleon's layers wrap it


class VocabularyBackbone(TransformerBackbone):
    """Image codes are words of the text vocabulary: rows of its embedding and of its LM head."""

    apart = ("model.vqmodel.",)
    processor: Any
    unconditional: str | None = None
    image_ids: Tensor

    def save_pretrained(self, folder: str | Path) -> None:
        """Weights as they are, without those of the picture tokenizer, files of the processor, and draftgrid.json."""
        folder = Path(folder)
        state = {k: v for k, v in self.model.state_dict().items() if not k.startswith(self.apart)}
        self.model.save_pretrained(folder, state_dict=state)
        self.processor.save_pretrained(folder)
        grid = [self.grid.height, self.grid.width]
        write_json(folder / CARD, {"adapter": self.adapter, "grid": grid, "unconditional": self.unconditional})

    def take_codes(self, codes: Mapping[int, int]) -> None:
        """{code: vocabulary id} of the codes 0 .. V-1. Raises ValueError if there is none or one is left out."""
        if not codes or sorted(codes) != list(range(len(codes))):
            raise ValueError(f"{self.name}: config.vocabulary_map names {len(codes)} image tokens, or has gaps")
        self.image_vocab_size = len(codes)
        ids = torch.tensor([codes[c] for c in range(len(codes))])
        self.register_buffer("image_ids", ids, persistent=False)
        # The published vocabularies list codes in order, so image rows are one slice, a view and no copy.
        first = int(ids[0])
        self._rows = slice(first, first + len(ids)) if torch.equal(ids, torch.arange(len(ids)) + first) else None
        self.image_head = ImageHead(self.model.lm_head.weight, ids if self._rows is None else self._rows)

    def embed(self, tokens: Tensor) -> Tensor:
        ids = tokens + self._rows.start if self._rows else self.image_ids[tokens]
        return self.text.embed_tokens(ids)

    def project(self, h: Tensor) -> Tensor:
        return self.image_head(h)

    def identity(self) -> dict[str, Tensor]:
        rows = self._rows or self.image_ids
        return {
            "embedding": self.text.embed_tokens.weight[rows],
            "image_head": self.model.lm_head.weight[rows],
            "final_norm": self.text.norm.weight,
        }
