"""Emu3 (BAAI, arXiv 2409.18869) through transformers' Emu3ForConditionalGeneration.

Prompt: BOS, caption, begin-of-image, "H*W" as text, image-token marker; then rows of W codes, each ended by
`<|extra_200|>`. h[0, 0] is the state at the image-token marker.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbones.base import CARD, Backbone, ImageHead
from heads.backbones.cache import RaggedCache
from heads.files import write_json
from heads.grid import TokenGrid
from heads.weights import load_model

NEGATIVE_PROMPT = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
"""The negative prompt of Emu3's published generation example; guidance uses it as the unconditional branch."""
ROW_END = "<|extra_200|>"


class Emu3Backbone(Backbone):
    adapter = "emu3"
    text: Any
    image_ids: Tensor

    def __init__(
        self,
        model: Any,
        processor: Any,
        grid: tuple[int, int] = (90, 90),
        unconditional: str = NEGATIVE_PROMPT,
        name: str = "emu3",
    ) -> None:
        super().__init__()
        self.model, self.processor, self.name, self.unconditional = model, processor, name, unconditional
        self.text = model.model.text_model
        self.grid = TokenGrid(*grid, row_end=1)
        self.hidden_size = model.config.text_config.hidden_size
        vocabulary = model.config.vocabulary_map or {}
        codes = {int(k[-8:-2]): v for k, v in vocabulary.items() if k.startswith("<|visual token")}
        if not codes or ROW_END not in vocabulary:
            raise ValueError(
                f"{name}: config.vocabulary_map lacks '<|visual token ...|>' or {ROW_END!r}; is it an Emu3?"
            )
        if sorted(codes) != list(range(len(codes))):
            raise ValueError(
                f"{name}: config.vocabulary_map names {len(codes)} visual tokens with gaps in their numbers"
            )
        self.image_vocab_size = len(codes)
        ids = torch.tensor([codes[c] for c in range(len(codes))])
        self.register_buffer("image_ids", ids, persistent=False)
        # The published vocabulary lists visual tokens in order, so image rows are one slice, a view and no copy.
        first = int(ids[0])
        self._rows = slice(first, first + len(ids)) if torch.equal(ids, torch.arange(len(ids)) + first) else None
        self.image_head = ImageHead(model.lm_head.weight, ids if self._rows is None else self._rows)
        self._row_end = vocabulary[ROW_END]

    @classmethod
    def from_pretrained(
        cls, folder: Path, dtype: torch.dtype | None = None, device_map: Any = None, **settings: Any
    ) -> "Emu3Backbone":
        """Raises ValueError naming a key the weights lack or have too many; the picture tokenizer alone may be absent,
        and is let go of."""
        from transformers import Emu3ForConditionalGeneration

        loaded = load_model(Emu3ForConditionalGeneration, folder, "Emu3", dtype, device_map)
        model = loaded.check(folder, ignore="model.vqmodel.")
        cls.lighten(model)
        return cls(model, load_processor(folder), **{"name": folder.name, **settings})

    def save_pretrained(self, folder: str | Path) -> None:
        """Weights as they are (without a pixel decoder that was never loaded), processor files and draftgrid.json."""
        folder = Path(folder)
        state = {k: v for k, v in self.model.state_dict().items() if not k.startswith("model.vqmodel.")}
        self.model.save_pretrained(folder, state_dict=state)
        self.processor.save_pretrained(folder)
        card = {
            "adapter": self.adapter,
            "grid": [self.grid.height, self.grid.width],
            "unconditional": self.unconditional,
        }
        write_json(folder / CARD, card)

    @property
    def layers(self) -> int:
        return self.model.config.text_config.num_hidden_layers

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.text.layers)

    def prompt_ids(self, prompts: Sequence[str | None]) -> list[Tensor]:
        grid, scale = self.grid, self.processor.downsample_ratio
        texts = [self.unconditional if p is None else p for p in prompts]
        rows = self.processor(
            text=texts,
            return_for_image_generation=True,
            ratio=f"{grid.width}:{grid.height}",
            image_area=grid.positions * scale * scale,
        )
        size = rows.pop("image_sizes")[0]
        if list(size) != [grid.height, grid.width]:
            raise ValueError(f"the processor plans a {size[0]}x{size[1]} grid for {grid.height}x{grid.width}")
        return [torch.tensor(row) for row in rows["input_ids"]]

    def structure_ids(self) -> list[int]:
        return [self._row_end]

    def embed(self, tokens: Tensor) -> Tensor:
        ids = tokens + self._rows.start if self._rows else self.image_ids[tokens]
        return self.text.embed_tokens(ids)

    def embed_ids(self, ids: Tensor) -> Tensor:
        return self.text.embed_tokens(ids)

    def trunk(self, embeds: Tensor, positions: Tensor, mask: Tensor | None, cache: RaggedCache | None) -> Tensor:
        if cache is not None:
            return self._layers(embeds, positions, mask, cache)
        kept: list[Tensor] = []
        hook = self.text.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        try:
            self.text(inputs_embeds=embeds, position_ids=positions, attention_mask=mask, use_cache=False)
        finally:
            hook.remove()
        (h,) = kept
        return h

    def _layers(self, h: Tensor, positions: Tensor, mask: Tensor | None, cache: RaggedCache) -> Tensor:
        """The text model's layers without its norm. The mask is ours, so the model need not plan one; no hook, so that
        the step compiles to one graph."""
        rotary = self.text.rotary_emb(h, position_ids=positions)
        for layer in self.text.layers:
            h = layer(
                h,
                attention_mask=mask,
                position_embeddings=rotary,
                position_ids=positions,
                cache=cache,
                use_cache=True,
            )
        return h

    def _image_rows(self, weight: Tensor) -> Tensor:
        return weight[self._rows] if self._rows else weight[self.image_ids]

    def norm(self, h: Tensor) -> Tensor:
        return self.text.norm(h)

    def project(self, h: Tensor) -> Tensor:
        return self.image_head(h)

    def identity(self) -> dict[str, Tensor]:
        return {
            "embedding": self._image_rows(self.text.embed_tokens.weight),
            "image_head": self._image_rows(self.model.lm_head.weight),
            "final_norm": self.text.norm.weight,
        }


def load_processor(folder: Path) -> Any:
    from transformers import AutoTokenizer, Emu3ImageProcessor, Emu3Processor

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Emu3Processor(Emu3ImageProcessor(), tokenizer)
