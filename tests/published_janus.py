"""A tiny Janus-Pro on disk in the published layout of deepseek-community/Janus-Pro-7B, written name by name.

Not save_pretrained's: a loader is tested against what users have. Sources:
* names and shapes of the weights, the chat template, "lm_head.weight" apart from the embedding: transformers,
  src/transformers/models/janus/convert_janus_weights_to_hf.py, which made the published checkpoint; its strict load
  into JanusForConditionalGeneration says that no other name is there;
* config.json: the same script (what it takes over and what it leaves to defaults), with the numbers of
  huggingface.co/deepseek-ai/Janus-Pro-7B (config.json: 30 layers, 102400 words, 16384 codes of 8 numbers, aligner, head
  and hidden size 4096) and the key names of hf-internal-testing/tiny-processor-janus, a copy of Janus-Pro-1B's;
* preprocessor_config.json: huggingface.co/deepseek-community/Janus-Pro-7B itself;
* generation_config.json: loulou2/tiny_janus and pruna-test/tiny_janus, cut from Janus-Pro-1B: guidance_scale 5, BOS
  100000, EOS 100001, pad 100015, generation_kwargs.boi_token_id 100016;
* tokenizer files: file list of hf-internal-testing/tiny-processor-janus; special tokens of deepseek-ai/Janus-Pro-7B's
  special_tokens_map.json; a byte-level BPE under the class name LlamaTokenizer(Fast), which transformers 5 takes at its
  word (huggingface/transformers issue 45488).
deepseek-community/Janus-Pro-7B's own config.json, generation_config.json and tokenizer files could not be seen.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.published import save, write

State = dict[str, Tensor]
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
BOI, EOI, IMAGE = "<begin_of_image>", "<end_of_image>", "<image_placeholder>"
SPECIAL = [BOS, EOS, PAD, BOI, EOI, IMAGE, "<|User|>", "<|Assistant|>"]
CHAT_TEMPLATE = (
    "{%set seps=['\n\n','<｜end▁of▁sentence｜>']%}{%set i=0%}{%for message in messages%}"
    "{%if message['role']|lower=='user'%}<|User|>: {%elif message['role']|lower=='assistant'%}<|Assistant|>:"
    "{%if not (loop.last and not add_generation_prompt and message['content'][0]['type']=='text' and "
    "message['content'][0]['text']=='')%} {%endif%}{%else%}{{message['role'].capitalize()}}: {%endif%}"
    "{%for content in message['content']%}{%if content['type']=='image'%}{%if not loop.first%}{{'\n'}}{%endif%}"
    "<image_placeholder>{%if not loop.last%}{{'\n'}}{%endif%}{%elif content['type']=='text'%}"
    "{%set text=content['text']%}{%if loop.first%}{%set text=text.lstrip()%}{%endif%}"
    "{%if loop.last%}{%set text=text.rstrip()%}{%endif%}"
    "{%if not loop.first and message['content'][loop.index0-1]['type']=='text'%}{{' '+text}}{%else%}{{text}}{%endif%}"
    "{%endif%}{%endfor%}{%if not loop.last or add_generation_prompt%}{%if message['role']|lower=='user'%}{{seps[0]}}"
    "{%else%}{{seps[1]}}{%endif%}{%endif%}{%endfor%}{%if add_generation_prompt%}<|Assistant|>:{%endif%}"
)
FULL: dict[str, Any] = {
    "vocab": 102400,
    "hidden": 4096,
    "mlp": 11008,
    "layers": 30,
    "heads": 32,
    "codes": 16384,
    "side": 24,
    "code": 8,
    "vision": 1024,
    "vision_layers": 24,
    "vision_heads": 16,
    "channels": 128,
    "latent": 256,
    "multiplier": [1, 1, 2, 2, 4],
    "blocks": 2,
    "ids": {BOS: 100000, EOS: 100001, PAD: 100015, BOI: 100016, IMAGE: 100581},
}
"""The published sizes, for config.json alone."""


def tiny(side: int, codes: int) -> dict[str, Any]:
    vocabulary = {name: i for i, name in enumerate([*byte_alphabet(), *SPECIAL])}
    return {
        "vocab": len(vocabulary),
        "hidden": 32,
        "mlp": 48,
        "layers": 2,
        "heads": 4,
        "codes": codes,
        "side": side,
        "code": 8,
        "vision": 16,
        "vision_layers": 1,
        "vision_heads": 2,
        "channels": 32,
        "latent": 32,
        "multiplier": [1, 1, 1, 1, 2],
        "blocks": 1,
        "ids": {name: vocabulary[name] for name in (BOS, EOS, PAD, BOI, IMAGE)},
    }


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, 'Ġ' for a space among them."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def config(size: dict[str, Any]) -> dict[str, Any]:
    """config.json: what the conversion script wrote, transformers 4.52 (no tie_word_embeddings at the top)."""
    ids = size["ids"]
    return {
        "architectures": ["JanusForConditionalGeneration"],
        "image_token_id": ids[IMAGE],
        "model_type": "janus",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": ids[BOS],
            "eos_token_id": ids[EOS],
            "head_dim": size["hidden"] // size["heads"],
            "hidden_act": "silu",
            "hidden_size": size["hidden"],
            "initializer_range": 0.02,
            "intermediate_size": size["mlp"],
            "max_position_embeddings": 16384,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": size["heads"],
            "num_hidden_layers": size["layers"],
            "num_key_value_heads": size["heads"],
            "pad_token_id": ids[PAD],
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": size["vocab"],
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.52.0.dev0",
        "vision_config": {
            "attention_bias": True,
            "attention_dropout": 0.0,
            "depth": 2,
            "hidden_act": "gelu",
            "hidden_dropout_rate": 0.0,
            "hidden_size": size["vision"],
            "image_size": 16 * size["side"],
            "initializer_range": 0.02,
            "layer_norm_eps": 1e-06,
            "mlp_ratio": 4.0,
            "model_type": "janus_vision_model",
            "num_attention_heads": size["vision_heads"],
            "num_channels": 3,
            "num_hidden_layers": size["vision_layers"],
            "num_image_tokens": size["side"] ** 2,
            "patch_size": 16,
            "projection_dim": size["hidden"],
            "projection_dropout": 0.0,
            "use_qk_norm": False,
        },
        "vq_config": {
            "base_channels": size["channels"],
            "channel_multiplier": size["multiplier"],
            "depth": 2,
            "double_latent": False,
            "dropout": 0.0,
            "embed_dim": size["code"],
            "hidden_act": "gelu",
            "image_token_embed_dim": size["hidden"],
            "in_channels": 3,
            "initializer_range": 0.02,
            "latent_channels": size["latent"],
            "model_type": "janus_vqgan",
            "num_embeddings": size["codes"],
            "num_hidden_layers": 2,
            "num_patches": size["side"],
            "num_res_blocks": size["blocks"],
            "out_channels": 3,
            "projection_dim": size["hidden"],
        },
    }


def shapes(size: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint. Published: 1,018 of them."""
    D, V, M = size["hidden"], size["vocab"], size["mlp"]
    yield "lm_head.weight", (V, D)
    yield "model.language_model.embed_tokens.weight", (V, D)
    yield "model.language_model.norm.weight", (D,)
    for i in range(size["layers"]):
        layer = f"model.language_model.layers.{i}."
        yield from ((f"{layer}self_attn.{x}_proj.weight", (D, D)) for x in "qkvo")
        yield from ((f"{layer}mlp.{x}_proj.weight", (M, D)) for x in ("gate", "up"))
        yield f"{layer}mlp.down_proj.weight", (D, M)
        yield from ((f"{layer}{x}_layernorm.weight", (D,)) for x in ("input", "post_attention"))
    yield "model.generation_embeddings.weight", (size["codes"], size["code"])
    yield from linear("model.generation_aligner.fc1", D, size["code"])
    yield from linear("model.generation_aligner.hidden_layers.0", D, D)
    yield from linear("model.generation_head.proj_out", D, D)
    yield from linear("model.generation_head.vision_head", size["codes"], D)
    yield from understanding(size)
    yield from picture_tokenizer(size)


def understanding(size: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The SigLIP tower and its aligner, which drawing does not use."""
    E, vision = size["vision"], "model.vision_model."
    yield f"{vision}embeddings.patch_embedding.weight", (E, 3, 16, 16)
    yield f"{vision}embeddings.patch_embedding.bias", (E,)
    yield f"{vision}embeddings.position_embedding.weight", (size["side"] ** 2, E)
    for i in range(size["vision_layers"]):
        layer = f"{vision}encoder.layers.{i}."
        for x in ("q_proj", "k_proj", "v_proj", "projection_layer"):
            yield from linear(f"{layer}self_attn.{x}", E, E)
        yield from linear(f"{layer}mlp.fc1", 4 * E, E)
        yield from linear(f"{layer}mlp.fc2", E, 4 * E)
        yield from norm(f"{layer}layer_norm1", E)
        yield from norm(f"{layer}layer_norm2", E)
    yield from norm(f"{vision}post_layernorm", E)
    yield from linear("model.aligner.fc1", size["hidden"], E)
    yield from linear("model.aligner.hidden_layers.0", size["hidden"], size["hidden"])


def picture_tokenizer(size: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """LlamaGen's VQ-16 (arXiv 2406.06525): attention at the coarsest level and in the middle."""
    ch, widths, vq = size["channels"], [size["channels"] * m for m in size["multiplier"]], "model.vqmodel."
    last, top = len(widths) - 1, widths[-1]
    yield f"{vq}quantize.embedding.weight", (size["codes"], size["code"])
    yield from conv(f"{vq}quant_conv", size["code"], size["latent"], 1)
    yield from conv(f"{vq}post_quant_conv", size["latent"], size["code"], 1)
    yield from conv(f"{vq}encoder.conv_in", ch, 3, 3)
    width = ch
    for level, out in enumerate(widths):
        for i in range(size["blocks"]):
            yield from residual(f"{vq}encoder.down.{level}.block.{i}", out, width)
            width = out
            if level == last:
                yield from attention(f"{vq}encoder.down.{level}.attn.{i}", out)
        if level < last:
            yield from conv(f"{vq}encoder.down.{level}.downsample.conv", out, out, 3)
    yield from conv(f"{vq}encoder.conv_out", size["latent"], top, 3)
    yield from conv(f"{vq}decoder.conv_in", top, size["latent"], 3)
    width = top
    for level, out in enumerate(reversed(widths)):
        for i in range(size["blocks"] + 1):
            yield from residual(f"{vq}decoder.up.{level}.block.{i}", out, width)
            width = out
            if level == 0:
                yield from attention(f"{vq}decoder.up.{level}.attn.{i}", out)
        if level < last:
            yield from conv(f"{vq}decoder.up.{level}.upsample.conv", out, out, 3)
    yield from conv(f"{vq}decoder.conv_out", 3, ch, 3)
    for part, width in (("encoder", top), ("decoder", ch)):
        yield from norm(f"{vq}{part}.norm_out", width)
        yield from residual(f"{vq}{part}.mid.block_1", top, top)
        yield from attention(f"{vq}{part}.mid.attn_1", top)
        yield from residual(f"{vq}{part}.mid.block_2", top, top)


Named = Iterator[tuple[str, tuple[int, ...]]]


def linear(name: str, out: int, inputs: int) -> Named:
    yield f"{name}.weight", (out, inputs)
    yield f"{name}.bias", (out,)


def norm(name: str, width: int) -> Named:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def conv(name: str, out: int, inputs: int, kernel: int) -> Named:
    yield f"{name}.weight", (out, inputs, kernel, kernel)
    yield f"{name}.bias", (out,)


def residual(name: str, out: int, inputs: int) -> Named:
    yield from norm(f"{name}.norm1", inputs)
    yield from conv(f"{name}.conv1", out, inputs, 3)
    yield from norm(f"{name}.norm2", out)
    yield from conv(f"{name}.conv2", out, out, 3)
    if out != inputs:
        yield from conv(f"{name}.nin_shortcut", out, inputs, 1)


def attention(name: str, width: int) -> Named:
    yield from norm(f"{name}.norm", width)
    for x in ("q", "k", "v", "proj_out"):
        yield from conv(f"{name}.{x}", width, width, 1)


def weights(size: dict[str, Any], seed: int = 1) -> State:
    """Random, and far enough from zero that distributions are not flat and every input shows."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes(size):
        values = torch.randn(shape, generator=generator)
        if len(shape) > 1 and "embed" not in name:
            scale = 3.0 if "vision_head" in name else 1.0
            values *= scale * values[0].numel() ** -0.5
        elif "norm" in name and name.endswith("weight"):
            values = 1 + 0.3 * values
        elif len(shape) == 1:
            values *= 0.1
        state[name] = values
    return state


def write_tokenizer(folder: Path, size: dict[str, Any], tokenizer_class: str = "LlamaTokenizerFast") -> None:
    """Byte-level BPE without merges; BOS comes from the post-processor, where transformers 4 saved it."""
    vocabulary = {name: i for i, name in enumerate([*byte_alphabet(), *SPECIAL])}
    added = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    first = [{"SpecialToken": {"id": BOS, "type_id": 0}}]
    core = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[name], "content": name, **added} for name in SPECIAL],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [*first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [vocabulary[BOS]], "tokens": [BOS]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: i for name, i in vocabulary.items() if name not in SPECIAL},
            "merges": [],
        },
    }
    image = {"boi_token": BOI, "eoi_token": EOI, "image_token": IMAGE}
    standard = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    write(folder / "tokenizer.json", core)
    write(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "extra_special_tokens": image,
            "legacy": True,
            "model_max_length": 16384,
            **standard,
            **image,
            "processor_class": "JanusProcessor",
            "tokenizer_class": tokenizer_class,
            "unk_token": None,
            "use_default_system_prompt": True,
        },
    )
    write(folder / "special_tokens_map.json", {**standard, **image})


def write_config(folder: Path, size: dict[str, Any] | None = None) -> Path:
    """config.json alone, of the published size unless told."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", config(size or FULL))
    return folder


def write_janus(
    folder: Path, side: int = 4, codes: int = 24, shards: int = 1, dtype: torch.dtype = torch.float32
) -> Path:
    """The whole checkpoint, in one file of weights or in `shards` with an index."""
    size = tiny(side, codes)
    write_config(folder, size)
    ids = size["ids"]
    write(
        folder / "generation_config.json",
        {
            "_from_model_config": False,
            "bos_token_id": ids[BOS],
            "eos_token_id": ids[EOS],
            "generation_kwargs": {"boi_token_id": ids[BOI]},
            "guidance_scale": 5,
            "pad_token_id": ids[PAD],
            "transformers_version": "4.52.0.dev0",
        },
    )
    write(
        folder / "preprocessor_config.json",
        {
            "background_color": [127, 127, 127],
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "JanusImageProcessor",
            "image_std": [0.5, 0.5, 0.5],
            "min_size": 14,
            "processor_class": "JanusProcessor",
            "resample": 3,
            "rescale_factor": 0.00392156862745098,
            "size": {"height": 16 * side, "width": 16 * side},
        },
    )
    write(folder / "processor_config.json", {"num_image_tokens": side**2, "processor_class": "JanusProcessor"})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_tokenizer(folder, size)
    state = {name: value.to(dtype) for name, value in weights(size).items()}
    save(folder, state, shards)
    return folder


def load_theirs(folder: Path) -> Any:
    """transformers' own class on these files, fp32, with every part of it: they have all it wants and nothing else."""
    from transformers import JanusForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loaded: Any = JanusForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()
