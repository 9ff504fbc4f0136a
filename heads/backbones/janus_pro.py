"""Janus-Pro (DeepSeek, arXiv 2501.17811) through transformers' JanusForConditionalGeneration.

Prompt: BOS, the chat template's user turn and an opened assistant turn, begin-of-image; then the codes of the picture
row after row, no structure tokens. h[0, 0] is the state at begin-of-image. A code's input embedding is its vector of
`generation_embeddings` passed through an MLP, the aligner; the image head is an MLP too. The unconditional branch is
the prompt itself with pad tokens in place of all but BOS and begin-of-image. Source: github.com/deepseek-ai/Janus,
generation_inference.py, and transformers' generate(generation_mode="image"), which does the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftgrid.heads.backbones.transformer import TransformerBackbone, load_text_tokenizer
from draftgrid.heads.grid import TokenGrid
from draftgrid.heads.prompts import Prompt, Unconditional

LIKE = "deepseek-community/Janus-Pro-7B"
UNUSED = ("lm_head", "model.vision_model", "model.aligner", "model.vqmodel")
"""What drawing never reads: the text's LM head, the tower that looks at pictures, and the picture tokenizer."""


def load_processor(folder: Path) -> Any:
    """transformers' own. Raises ValueError for a folder without tokenizer.json, chat template or image tokens."""
    from transformers import JanusImageProcessorPil, JanusProcessor

    tokenizer = load_text_tokenizer(folder, LIKE)
    lacking = [n for n in ("image_token", "boi_token", "eoi_token", "chat_template") if not getattr(tokenizer, n, None)]
    if lacking:
        raise ValueError(f"{folder}: tokenizer_config.json and chat_template.jinja lack {', '.join(lacking)}")
    return JanusProcessor(JanusImageProcessorPil(), tokenizer, chat_template=tokenizer.chat_template)


class JanusProBackbone(TransformerBackbone):
    adapter = "janus_pro"
    model_class, like = "JanusForConditionalGeneration", LIKE
    load_processor = staticmethod(load_processor)
    linear_head = False

    def __init__(
        self, model: Any, processor: Any, grid: tuple[int, int] | None = None, name: str = "janus_pro"
    ) -> None:
        """`grid` None is the checkpoint's own, 24x24. Raises ValueError for a model of another family."""
        super().__init__()
        parts: Any = getattr(model, "model", None)
        if not hasattr(parts, "generation_head") or not hasattr(parts, "language_model"):
            raise ValueError(f"{name}: {type(model).__name__} is no JanusForConditionalGeneration")
        self.model, self.processor, self.name = model, processor, name
        self.text = parts.language_model
        vision = model.config.vision_config
        side = vision.image_size // vision.patch_size
        self.grid = TokenGrid(*(grid or (side, side)))
        self.hidden_size = model.config.text_config.hidden_size
        self.image_vocab_size = model.config.vq_config.num_embeddings

    @staticmethod
    def lighten(model: Any) -> None:
        """Removes 0.82 billion of Janus-Pro-7B's 7.41 billion parameters."""
        for path in UNUSED:
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, nn.Identity())

    def prompt_ids(self, prompts: Sequence[str | None]) -> list[Tensor]:
        tokenizer = self.processor.tokenizer
        turns = [[{"role": "user", "content": [{"type": "text", "text": p or ""}]}] for p in prompts]
        texts = self.processor.apply_chat_template(turns, add_generation_prompt=True)
        found = []
        for prompt, text in zip(prompts, texts, strict=True):
            ids = self.processor(text=[text], generation_mode="image", return_tensors="pt")["input_ids"][0]
            if ids[-1] != tokenizer.convert_tokens_to_ids(tokenizer.boi_token):
                raise ValueError(f"{self.name}: the prompt ends with id {int(ids[-1])}, which is not begin-of-image")
            if ids[0] != tokenizer.bos_token_id:  # a tokenizer saved without its habit of adding it
                ids = torch.cat([ids.new_tensor([tokenizer.bos_token_id]), ids])
            found.append(self.padded(ids) if prompt is None else ids)
        return found

    def ids_of(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        rows = self.prompt_ids([p.caption if isinstance(p, Unconditional) else p for p in prompts])
        return [self.padded(r) if isinstance(p, Unconditional) else r for p, r in zip(prompts, rows, strict=True)]

    def padded(self, ids: Tensor) -> Tensor:
        """(L,) ids of a prompt -> its unconditional prompt: pad tokens for all but BOS and begin-of-image, the last."""
        text = self.model.config.text_config
        if text.pad_token_id is None:
            raise ValueError(f"{self.name}: config.text_config.pad_token_id is not set; guidance pads with it")
        return torch.where((ids == text.bos_token_id) | (ids == ids[-1]), ids, text.pad_token_id)

    def structure_ids(self) -> list[int]:
        return []

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.prepare_embeddings_for_image_generation(tokens)

    def project(self, h: Tensor) -> Tensor:
        return self.model.model.generation_head(h)

    def identity(self) -> dict[str, Tensor]:
        """Embedding, aligner and head are the whole way from a code to a state and from a state to a code."""
        parts = self.model.model
        modules = {
            "embedding": parts.generation_embeddings,
            "aligner": parts.generation_aligner,
            "image_head": parts.generation_head,
            "final_norm": self.text.norm,
        }
        return {f"{part}.{name}": p for part, module in modules.items() for name, p in module.named_parameters()}
