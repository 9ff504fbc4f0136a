"""A new, untrained backbone of the Emu3 architecture at any size, with a word-level text tokenizer.

The demo's backbone starts here, and so do the tests' tiny checkpoints: transformers' own classes, in the file layout
that `from_pretrained` reads.
"""

import re
from collections.abc import Iterable

import torch

from draftgrid.heads.backbones.emu3 import ROW_END, Emu3Backbone
from draftgrid.heads.config import Emu3Size

SPECIAL = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
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
    special = [*SPECIAL.values(), ROW_END]
    visual = [f"<|visual token {c:06d}|>" for c in range(codes)]
    vocabulary = {w: i for i, w in enumerate([*special, *sorted(words - set(special)), *visual])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    standard = {k: v for k, v in SPECIAL.items() if k in {"bos_token", "eos_token", "pad_token", "unk_token"}}
    extra = {k: v for k, v in SPECIAL.items() if k not in standard}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, extra_special_tokens=extra, **standard)
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
    from transformers import (
        Emu3Config,
        Emu3ForConditionalGeneration,
        Emu3ImageProcessor,
        Emu3Processor,
        Emu3TextConfig,
        Emu3VQVAEConfig,
    )

    size = size or Emu3Size()
    tokenizer, vocabulary = word_tokenizer(captions, codes)
    text = Emu3TextConfig(
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
    pixels = Emu3VQVAEConfig(
        codebook_size=codes,
        base_channels=32,
        channel_multiplier=[1],
        num_res_blocks=1,
        attn_resolutions=[],
        hidden_size=32,
    )
    config = Emu3Config(text_config=text, vq_config=pixels, vocabulary_map=vocabulary)
    config._attn_implementation = attention
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = Emu3ForConditionalGeneration(config)
    model.model.vqmodel = torch.nn.Identity()
    return Emu3Backbone(model, Emu3Processor(Emu3ImageProcessor(), tokenizer), grid=grid, unconditional="", name="emu3")
