"""Emu3 (BAAI, arXiv 2409.18869) through transformers' Emu3ForConditionalGeneration.

Prompt: BOS, caption, begin-of-image, "H*W" as text, image-token marker; then rows of W codes, each ended by
`<|extra_200|>`. h[0, 0] is the state at the image-token marker.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftgrid.heads.backbones.transformer import VocabularyBackbone
from draftgrid.heads.grid import TokenGrid

NEGATIVE_PROMPT = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
"""The negative prompt of Emu3's published generation example; guidance uses it as the unconditional branch."""
ROW_END = "<|extra_200|>"
VISUAL = re.compile(r"<\|visual token (\d+)\|>")


def load_processor(folder: Path) -> Any:
    from transformers import AutoTokenizer, Emu3ImageProcessor, Emu3Processor

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Emu3Processor(Emu3ImageProcessor(), tokenizer)


class Emu3Backbone(VocabularyBackbone):
    adapter = "emu3"
    model_class, like = "Emu3ForConditionalGeneration", "BAAI/Emu3-Gen-hf"
    load_processor = staticmethod(load_processor)

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
        codes = {int(found[1]): v for k, v in vocabulary.items() if (found := VISUAL.fullmatch(k))}
        if not codes or ROW_END not in vocabulary:
            what = f"'<|visual token ...|>' or {ROW_END!r}"
            raise ValueError(f"{name}: config.vocabulary_map lacks {what}; is it an Emu3?")
        self.take_codes(codes)
        self._row_end = vocabulary[ROW_END]

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
