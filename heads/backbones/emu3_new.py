"""A new, untrained backbone of the Emu3 architecture at any size, with a word-level text tokenizer.

The demo's backbone starts here, and so do the tests' tiny checkpoints: transformers' own classes, in the file layout
that `from_pretrained` reads.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch

from draftgrid.heads.backbones.emu3 import ROW_END, Emu3Backbone
from draftgrid.heads.config import Emu3Size

STANDARD = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
EXTRA = {
    "image_token": "<image>",
    "boi_token": "<|image start|>",
    "eoi_token": "<|image end|>",
    "image_wrapper_token": "<|image token|>",
    "eof_token": "<|extra_201|>",
}


def word_tokenizer(captions: Iterable[str], codes: int):
    """A lower-casing word-level tokenizer whose vocabulary is every word of `captions`, digits, '*', and the codes."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {w for c in captions for w in re.findall(r"\w+|[^\w\s]+", c.lower())}
    words |= {str(n) for n in range(1, 33)} | {"*", ","}
    special = [*STANDARD.values(), *EXTRA.values(), ROW_END]
    visual = [f"<|visual token {c:06d}|>" for c in range(codes)]
    vocabulary = {w: i for i, w in enumerate([*special, *sorted(words - set(special)), *visual])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=STANDARD["unk_token"]))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, extra_special_tokens=EXTRA, **STANDARD)
    return tokenizer, vocabulary


def new_emu3(
    captions: Iterable[str],
    codes: int,
    grid: tuple[int, int],
    size: Emu3Size | None = None,
    seed: int = 0,
    attention: str = "sdpa",
    device: str = "cpu",
) -> Emu3Backbone:
    """An Emu3 with random weights (fp32, trainable), `codes` image codes, and the words of `captions`."""
    import transformers

    size = size or Emu3Size()
    tokenizer, vocabulary = word_tokenizer(captions, codes)
    text = transformers.Emu3TextConfig(
        vocab_size=len(vocabulary),
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        attention_dropout=size.dropout,
        max_position_embeddings=9216,
        pad_token_id=vocabulary["<pad>"],
        bos_token_id=vocabulary["<bos>"],
        eos_token_id=vocabulary["<eos>"],
    )
    small: dict[str, Any] = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "hidden_size": 32}
    pixels = transformers.Emu3VQVAEConfig(codebook_size=codes, attn_resolutions=[], **small)
    config = transformers.Emu3Config(text_config=text, vq_config=pixels, vocabulary_map=vocabulary)
    config._attn_implementation = attention
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = transformers.Emu3ForConditionalGeneration(config)
    model.model.vqmodel = torch.nn.Identity()
    processor = transformers.Emu3Processor(transformers.Emu3ImageProcessor(), tokenizer)
    return Emu3Backbone(model, processor, grid=grid, unconditional="")
