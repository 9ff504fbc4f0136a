"""A tiny Emu3 on disk in the published layout of BAAI/Emu3-Gen-hf, written name by name.

Not save_pretrained's: a loader is tested against what users have. Sources:
* names and shapes of the weights ("text_model.model.", "text_model.lm_head.", "vqmodel."): transformers 4.48's
  src/transformers/models/emu3/convert_emu3_weights_to_hf.py, which made the published checkpoint with a strict load, so
  that no other name is there; later versions of transformers rename them while loading (conversion_mapping.py);
* files, 8 safetensors of 35.05 GB in all, so fp32: file list of huggingface.co/BAAI/Emu3-Gen-hf;
* config.json (6.55 MB, not seen): what that script takes over and leaves to the class's defaults, with the numbers of
  config.json of huggingface.co/BAAI/Emu3-Chat and of lodrick-the-lafted/Emu3-Gen-12B, made of Emu3-Gen (vocabulary
  184622, max_position_embeddings 9216 in the latter, image_area 518400, BOS 151849, EOS 151850, pad 151643, end of row
  151846, image token, start, end 151851..151853), and of BAAI/Emu3-VisionTokenizer;
* generation_config.json: the same script (do_sample, top_k 2048, max_new_tokens 50000), whose output has the published
  file's 161 bytes;
* preprocessor_config.json, special_tokens_map.json: huggingface.co/BAAI/Emu3-Gen-hf itself;
* tokenizer_config.json: the end of the published one (commit 947e93e); its head, a list of all special tokens, from the
  script. tokenizer.json, merges.txt, chat_template.json: the script; ids in the order of
  github.com/baaivision/Emu3, emu3/mllm/tokenization_emu3.py, without its gaps.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.published import save, write

State = dict[str, Tensor]
Named = Iterator[tuple[str, tuple[int, ...]]]
PAD, BOS, EOS = "<|endoftext|>", "<|extra_203|>", "<|extra_204|>"
EXTRA = {
    "boi_token": "<|image start|>",
    "eof_token": "<|extra_201|>",
    "eoi_token": "<|image end|>",
    "image_token": "<image>",
    "image_wrapper_token": "<|image token|>",
}
SPECIAL = [
    *(PAD, "<|im_start|>", "<|im_end|>", "<image>"),  # "<image>" has the place of <|extra_0|>
    *(f"<|extra_{n}|>" for n in range(200, 205)),
    *("<|image token|>", "<|image start|>", "<|image end|>"),
]
MERGES = [("Ġ", "a"), ("r", "e"), ("re", "d"), ("Ġ", "red"), ("l", "e"), ("p", "p")]
FULL: dict[str, Any] = {
    "vocab": 184_622,
    "hidden": 4096,
    "mlp": 14_336,
    "layers": 32,
    "heads": 32,
    "kv": 8,
    "codes": 32_768,
    "channels": 256,
    "multiplier": [1, 2, 2, 4],
    "blocks": 2,
    "ids": {PAD: 151_643, "<image>": 151_646, "<|extra_200|>": 151_846, BOS: 151_849, EOS: 151_850},
    "first": 151_854,
}
"""The published sizes, for config.json and the names alone."""


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, 'Ġ' for a space among them."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def visual(code: int) -> str:
    return f"<|visual token {code:06d}|>"


def vocabulary(codes: int) -> dict[str, int]:
    """Text, then special tokens, then codes in order, as published."""
    words = [*byte_alphabet(), *("".join(pair) for pair in MERGES), *SPECIAL, *map(visual, range(codes))]
    return {word: i for i, word in enumerate(words)}


def tiny(codes: int) -> dict[str, Any]:
    words = vocabulary(codes)
    return {
        "vocab": len(words),
        "hidden": 32,
        "mlp": 48,
        "layers": 2,
        "heads": 4,
        "kv": 2,
        "codes": codes,
        "channels": 32,
        "multiplier": [1, 1, 1, 2],
        "blocks": 1,
        "ids": words,
        "first": words[visual(0)],
    }


def config(size: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4.48 wrote it."""
    ids = size["ids"]
    codes = {visual(c): size["first"] + c for c in range(size["codes"])}
    return {
        "architectures": ["Emu3ForConditionalGeneration"],
        "model_type": "emu3",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.1,
            "bos_token_id": ids[BOS],
            "eos_token_id": ids[EOS],
            "hidden_act": "silu",
            "hidden_size": size["hidden"],
            "initializer_range": 0.02,
            "intermediate_size": size["mlp"],
            "max_position_embeddings": 9216,
            "mlp_bias": False,
            "model_type": "emu3_text_model",
            "num_attention_heads": size["heads"],
            "num_hidden_layers": size["layers"],
            "num_key_value_heads": size["kv"],
            "pad_token_id": ids[PAD],
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 1000000.0,
            "use_cache": True,
            "vocab_size": size["vocab"],
        },
        "torch_dtype": "float32",
        "transformers_version": "4.48.0.dev0",
        "vocabulary_map": {k: v for k, v in ids.items() if not k.startswith("<|visual")} | codes,
        "vq_config": {
            "attn_resolutions": [3],
            "base_channels": size["channels"],
            "channel_multiplier": size["multiplier"],
            "codebook_size": size["codes"],
            "double_latent": False,
            "embed_dim": 4,
            "hidden_size": size["channels"] * size["multiplier"][-1],
            "in_channels": 3,
            "latent_channels": 4,
            "model_type": "emu3_vqgan",
            "num_attention_heads": 1,
            "num_res_blocks": size["blocks"],
            "out_channels": 3,
            "temporal_downsample_factor": 4,
        },
    }


def shapes(size: dict[str, Any]) -> Named:
    """Every tensor of the checkpoint. Published: 786 of them."""
    D, V, M = size["hidden"], size["vocab"], size["mlp"]
    narrow = D // size["heads"] * size["kv"]
    yield "text_model.lm_head.weight", (V, D)
    yield "text_model.model.embed_tokens.weight", (V, D)
    yield "text_model.model.norm.weight", (D,)
    for i in range(size["layers"]):
        layer = f"text_model.model.layers.{i}."
        for x, out in (("q", D), ("k", narrow), ("v", narrow), ("o", D)):
            yield f"{layer}self_attn.{x}_proj.weight", (out, D)
        yield from ((f"{layer}mlp.{x}_proj.weight", (M, D)) for x in ("gate", "up"))
        yield f"{layer}mlp.down_proj.weight", (D, M)
        yield from ((f"{layer}{x}_layernorm.weight", (D,)) for x in ("input", "post_attention"))
    for side in (encoder, decoder):
        yield from ((f"vqmodel.{name}", shape) for name, shape in side(size))
    yield "vqmodel.quantize.embedding.weight", (size["codes"], 4)
    for name in ("quant_conv", "post_quant_conv"):
        yield from weighted(f"vqmodel.{name}.conv", 4, 4, 3, 1, 1)


def weighted(name: str, *shape: int) -> Named:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def plain_norm(name: str, width: int) -> Named:
    yield from weighted(name, width)


def spatial_norm(name: str, width: int) -> Named:
    """The decoder's, which reads the codes' vectors."""
    yield from weighted(f"{name}.norm_layer", width)
    yield from weighted(f"{name}.conv_y", width, 4, 1, 1)
    yield from weighted(f"{name}.conv_b", width, 4, 1, 1)


def residual(name: str, out: int, inputs: int, norm: Any) -> Named:
    yield from norm(f"{name}.norm1", inputs)
    yield from weighted(f"{name}.conv1", out, inputs, 3, 3)
    yield from norm(f"{name}.norm2", out)
    yield from weighted(f"{name}.conv2", out, out, 3, 3)
    if out != inputs:
        yield from weighted(f"{name}.nin_shortcut", out, inputs, 1, 1)


def attention(name: str, norm_name: str, width: int, norm: Any) -> Named:
    for x in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield from weighted(f"{name}.{x}", width, width)
    yield from norm(norm_name, width)


def middle(side: str, width: int, norm: Any) -> Named:
    for block in ("block_1", "block_2"):
        yield from residual(f"{side}.middle_block.{block}", width, width, norm)
    yield from attention(f"{side}.middle_block.attn_1", f"{side}.middle_block.attn_norm", width, norm)


def over_time(side: str, kernel: int, blocks: int) -> Named:
    """What mixes the four frames that a still picture is repeated to."""
    for i in range(2):
        yield from weighted(f"{side}.time_conv.{i}.conv.conv", 4, 4, kernel, 3, 3)
    for i in range(blocks):
        for j in (1, 2):
            name = f"{side}.time_res_stack.{i}"
            yield from weighted(f"{name}.norm{j}", 4)
            yield from ((f"{name}.norm{j}.running_{x}", (4,)) for x in ("mean", "var"))
            yield f"{name}.norm{j}.num_batches_tracked", ()
            yield from weighted(f"{name}.conv{j}.conv", 4, 4, 3, 3, 3)


def encoder(size: dict[str, Any]) -> Named:
    widths = [size["channels"] * m for m in size["multiplier"]]
    width = size["channels"]
    yield from weighted("encoder.conv_in", width, 3, 3, 3)
    for level, out in enumerate(widths):
        name = f"encoder.down_block.down.{level}"
        for i in range(size["blocks"]):
            yield from residual(f"{name}.block.{i}", out, width, plain_norm)
            width = out
            if level == 3:
                yield from attention(f"{name}.attn.{i}", f"{name}.attn_norms.{i}", out, plain_norm)
        if level < len(widths) - 1:
            yield from weighted(f"{name}.downsample.conv", out, out, 3, 3)
    yield from middle("encoder", width, plain_norm)
    yield from plain_norm("encoder.norm_out", width)
    yield from weighted("encoder.conv_out", 4, width, 3, 3)
    yield from over_time("encoder", 4, size["blocks"])


def decoder(size: dict[str, Any]) -> Named:
    widths = [size["channels"] * m for m in size["multiplier"]]
    width = widths[-1]
    yield from over_time("decoder", 3, size["blocks"])
    yield from weighted("decoder.conv_in", width, 4, 3, 3)
    yield from middle("decoder", width, spatial_norm)
    for level, out in reversed(list(enumerate(widths))):
        name = f"decoder.up_block.up.{level}"
        for i in range(size["blocks"] + 1):
            yield from residual(f"{name}.block.{i}", out, width, spatial_norm)
            width = out
            if level == 3:
                yield from attention(f"{name}.attn.{i}", f"{name}.attn_norms.{i}", out, spatial_norm)
        if level:
            yield from weighted(f"{name}.upsample.conv", out, out, 3, 3)
    yield from spatial_norm("decoder.norm_out", width)
    yield from weighted("decoder.conv_out", 3, width, 3, 3)


def weights(size: dict[str, Any], seed: int = 1) -> State:
    """Random, and far enough from zero that distributions are not flat and every input shows."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes(size):
        values = torch.randn(shape, generator=generator)
        if name.endswith("num_batches_tracked"):
            values = torch.tensor(7)
        elif name.endswith("running_var"):
            values = 1 + 0.3 * values.abs()
        elif len(shape) > 1 and "embed" not in name:
            values *= (3.0 if "lm_head" in name else 1.5) * values[0].numel() ** -0.5
        elif "norm" in name and name.endswith("weight"):
            values = 1 + 0.3 * values
        elif len(shape) == 1:
            values *= 0.1
        state[name] = values
    return state


def write_tokenizer(folder: Path, codes: int) -> None:
    """Byte-level BPE as the conversion script wrote it; every special token and code is an added token too."""
    words = vocabulary(codes)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [*SPECIAL, *map(visual, range(codes))]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    core = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": words[name], "content": name, **flags} for name in special],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "add_prefix_space": False},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": words,
            "merges": [" ".join(pair) for pair in MERGES],
        },
    }
    standard = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    write(folder / "tokenizer.json", core)
    write(folder / "vocab.json", words)
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in MERGES), "utf-8")
    write(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": {str(words[name]): {"content": name, **flags} for name in special},
            "clean_up_tokenization_spaces": False,
            **standard,
            **EXTRA,
            "extra_special_tokens": EXTRA,
            "model_max_length": 1000000000000000019884624838656,
            "padding_side": "left",
            "processor_class": "Emu3Processor",
            "tokenizer_class": "GPT2Tokenizer",
            "unk_token": PAD,
        },
    )
    plain = {k: v for k, v in flags.items() if k != "special"}
    named = {k: {"content": v, **plain} for k, v in standard.items()}
    write(folder / "special_tokens_map.json", {**named, **EXTRA, "unk_token": PAD})


def write_config(folder: Path, size: dict[str, Any] | None = None) -> Path:
    """config.json alone, of the published size unless told."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", config(size or FULL))
    return folder


def write_emu3(folder: Path, *, codes: int = 24, shards: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """The whole checkpoint, in one file of weights or in `shards` with an index. Returns the folder."""
    size = tiny(codes)
    write_config(folder, size)
    ids = size["ids"]
    generation = {
        "do_sample": True,
        "eos_token_id": ids[EOS],
        "max_new_tokens": 50000,
        "pad_token_id": ids[PAD],
        "top_k": 2048,
        "transformers_version": "4.48.0.dev0",
    }
    write(folder / "generation_config.json", generation)
    remote = "BAAI/Emu3-VisionTokenizer--image_processing_emu3visionvq.Emu3VisionVQImageProcessor"
    write(
        folder / "preprocessor_config.json",
        {
            "auto_map": {"AutoImageProcessor": remote},
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "Emu3ImageProcessor",
            "image_std": [0.5, 0.5, 0.5],
            "max_pixels": 1048576,
            "min_pixels": 262144,
            "processor_class": "Emu3Processor",
            "resample": 3,
            "rescale_factor": 0.00392156862745098,
            "size": {"max_pixels": 1048576, "min_pixels": 262144},
            "spatial_factor": 8,
        },
    )
    write(folder / "chat_template.json", {"chat_template": "{% for message in messages %}{{ message }}{% endfor %}"})
    write_tokenizer(folder, codes)
    save(folder, {k: v.to(dtype) if v.is_floating_point() else v for k, v in weights(size).items()}, shards)
    return folder
