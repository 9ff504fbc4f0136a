"""Lumina-mGPT (Alpha-VLLM, arXiv 2408.02657): Meta's Chameleon, finetuned, through transformers' Chameleon classes.

Sequence: <s>, the request as text, end of turn, image start, two size tokens (pairs of rows, then pairs of columns);
then rows of W codes, each ended by the new-line token. h[0, 0] is the state at the second size token. Without a caption
the sequence begins at image start, at position 0. Source: github.com/Alpha-VLLM/Lumina-mGPT, item_processor.py (tokens)
and inference_solver.py (unconditional branch). The class masks image logits in its forward, so logits here come from
the states and the LM head.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftgrid.heads.backbones.transformer import VocabularyBackbone, load_text_tokenizer
from draftgrid.heads.grid import TokenGrid
from draftgrid.heads.weights import Loaded, read_tensors

PIXELS = 16
"""Side of the square of pixels a code stands for."""
TEMPLATE = "Generate an image of {width}x{height} according to the following prompt:\n{prompt}"
"""The request of its public examples (generate_examples/generate.py); sizes in pixels."""
BOS, TURN_END, IMAGE_START, ROW_END = "<s>", "<reserved08706>", "<racm3:break>", "<reserved08799>"
SIZE = "<reserved{:05d}>"
"""Size token of n pairs of rows or columns, with 8800 + n."""
NORM = re.compile(r"\.self_attn\.[qk]_norm\.(weight|bias)$")


@torch.no_grad()
def expand_norms(loaded: Loaded, folder: Path) -> None:
    """Give every head its q_norm and k_norm, which checkpoints keep once per model-parallel rank: (1, head_dim) in the
    7B. Those for which that works are no longer misshapen."""
    wanted = {name for name in loaded.misshapen if NORM.search(name)}
    stored = read_tensors(folder, wanted.__contains__) if wanted else {}
    parameters = dict(loaded.model.named_parameters())
    for name, own in stored.items():
        rows = parameters[name]
        if own.ndim == 2 and own.shape[1] == rows.shape[1] and rows.shape[0] % own.shape[0] == 0:
            rows.copy_(own.repeat_interleave(rows.shape[0] // own.shape[0], dim=0))
            loaded.misshapen.remove(name)


class LuminaBackbone(VocabularyBackbone):
    adapter = "lumina_mgpt"
    model_class, like = "ChameleonForConditionalGeneration", "Alpha-VLLM/Lumina-mGPT-7B-768"
    load_processor, mend = staticmethod(partial(load_text_tokenizer, like=like)), staticmethod(expand_norms)

    def __init__(self, model: Any, processor: Any, grid: tuple[int, int] = (48, 48), name: str = "lumina_mgpt") -> None:
        """`processor` is the text tokenizer, or a processor that holds one. Raises ValueError for an odd grid."""
        super().__init__()
        self.model, self.processor, self.name = model, processor, name
        self.text = model.model
        self.hidden_size = model.config.hidden_size
        self.grid = TokenGrid(*grid, row_end=1)
        if grid[0] % 2 or grid[1] % 2:
            raise ValueError(f"grid is {grid[0]}x{grid[1]}; size tokens count pairs, so both numbers must be even")
        words = model.config.vocabulary_map or {}
        self._header = [IMAGE_START, *(SIZE.format(8800 + n // 2) for n in grid)]
        lacking = [n for n in (BOS, TURN_END, ROW_END, *self._header) if n not in words]
        if lacking:
            why = "is it a Lumina-mGPT, and grid one of its?"
            raise ValueError(f"{name}: config.vocabulary_map lacks {lacking}; {why}")
        self._words = words
        self.take_codes(image_codes(words))

    def prompt_ids(self, prompts: Sequence[str | None]) -> list[Tensor]:
        header = [self._words[name] for name in self._header]
        return [torch.tensor(header if p is None else self._request(p) + header) for p in prompts]

    def _request(self, prompt: str) -> list[int]:
        width, height = self.grid.width * PIXELS, self.grid.height * PIXELS
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        text = TEMPLATE.format(width=width, height=height, prompt=prompt) + TURN_END
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids[-1] != self._words[TURN_END]:
            raise ValueError(f"{self.name}: its tokenizer reads {TURN_END} as {ids[-1]}, not {self._words[TURN_END]}")
        return [self._words[BOS], *ids]  # config.bos_token_id is another token's in the published checkpoints

    def structure_ids(self) -> list[int]:
        return [self._words[ROW_END]]


def image_codes(words: dict[str, int]) -> dict[int, int]:
    """code -> vocabulary id, of the names 'IMGIMG', the code's decimal digits as letters A..J, 'Z'."""
    digits = str.maketrans("ABCDEFGHIJ", "0123456789")
    found = ((re.fullmatch(r"IMGIMG([A-J]+)Z", name), id) for name, id in words.items())
    return {int(name[1].translate(digits)): id for name, id in found if name}
