"""A tiny Lumina-mGPT on disk in the layout its authors published, and a tiny picture tokenizer in Meta's.

Written name by name from the public sources below, not with save_pretrained, so that a loader is tested against what
users have. All of them seen at github.com/Alpha-VLLM/Lumina-mGPT and github.com/facebookresearch/chameleon:
* names and shapes of the weights, q_norm and k_norm stored once per model-parallel rank, (1, head_dim) for the 7B:
  lumina_mgpt/model/chameleon/convert_chameleon_weights_to_hf.py and modeling_chameleon.py;
* no `vqmodel.` in the weights: finetune_solver.py deletes it before training, and issues 27 and 32 of that repository
  show its keys missing from the 7B-512 and 7B-768-Omni checkpoints;
* config.json: the keys of huggingface.co/sihwanpark/LANTERN-Lumina-mGPT-7B-768, a copy of the 7B-768 config with one
  layer; the vocabulary map: the same converter, which names <reserved08707> "<image>";
* files: two safetensors with an index; the hub's file list of Lumina-mGPT-7B-512;
* ids of the real vocabulary (<s> 0, <pad> 1, </s> 2, <unk> 3, codes 4..8195, <eoss> 8196, <racm3:break> 8197,
  <reservedNNNNN> NNNNN + 4): inference_solver.py and item_processor.py. Here the order is kept and the gaps are not.
* vqgan.ckpt, {"state_dict": ...}, and vqgan.yaml: chameleon/inference/vqgan.py and image_tokenizer.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from torch import Tensor

from tests.published import save

State = dict[str, Tensor]
SIZES = range(1, 7)
"""Pairs of rows, or of columns, that have a size token here."""


def code_name(code: int) -> str:
    """'IMGIMG', the code's digits as letters A..J, 'Z'."""
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(d)] for d in str(code)) + "Z"


def special_names(codes: int) -> list[str]:
    return [
        *("<s>", "<pad>", "</s>", "<unk>"),
        *(code_name(c) for c in range(codes)),
        *("<eoss>", "<racm3:break>", "<reserved08706>", "<image>", "<reserved08799>"),
        *(f"<reserved{8800 + n:05d}>" for n in SIZES),
    ]


def vocabulary(codes: int) -> dict[str, int]:
    """Special names first, as published, then printable ASCII."""
    letters = [chr(c) for c in range(32, 127)] + ["\n"]
    return {name: i for i, name in enumerate([*special_names(codes), *letters])}


def language_model(vocab: int, hidden: int, layers: int, heads: int, wide: int, ranks: int, seed: int) -> State:
    """Every tensor of the published checkpoint, weights far from flat so that contexts matter."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0, centre: float = 0.0) -> Tensor:
        return centre + scale * torch.randn(*shape, generator=generator)

    D, scale = hidden, 1.5 * hidden**-0.5
    state = {
        "model.embed_tokens.weight": random(vocab, D),
        "model.norm.weight": random(D, scale=0.3, centre=1.0),
        "lm_head.weight": random(vocab, D, scale=scale),
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            state[f"{layer}self_attn.{name}.weight"] = random(D, D, scale=scale)
        for name in ("q_norm", "k_norm"):
            state[f"{layer}self_attn.{name}.weight"] = random(ranks, D // heads, scale=0.3, centre=1.5)
            state[f"{layer}self_attn.{name}.bias"] = random(ranks, D // heads, scale=0.3)
        for name, shape in (("gate_proj", (wide, D)), ("up_proj", (wide, D)), ("down_proj", (D, wide))):
            state[f"{layer}mlp.{name}.weight"] = random(*shape, scale=scale)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{layer}{name}.weight"] = random(D, scale=0.3, centre=1.0)
    return state


def config_json(
    vocabulary_map: dict[str, int], hidden: int, layers: int, heads: int, wide: int, ranks: int
) -> dict[str, object]:
    """The published config.json, but for its sizes."""
    return {
        "architectures": ["ChameleonForConditionalGeneration"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,  # sic: the vocabulary's <s> is 0, and the model was trained with it
        "dropout": 0.05,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": wide,
        "mask_image_logits": False,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_parallel_size": ranks,
        "model_type": "chameleon",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "swin_norm": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.3",
        "use_cache": True,
        "vocab_size": len(vocabulary_map),
        "vocabulary_map": vocabulary_map,
        "vq_config": {
            "attn_resolutions": [],
            "ch": 128,
            "ch_mult": [1, 1, 2, 2, 4],
            "model_type": "chameleon_vqgan",
            "n_embed": 8192,
            "out_ch": 3,
            "out_channels": 3,
        },
    }


def write_tokenizer(folder: Path, words: dict[str, int]) -> None:
    """A BPE without merges: every character is a token, as every special name is.

    What the real tokenizer.json splits text at is not known here. This one keeps the text as it is, which
    transformers' LlamaTokenizer, the class named in the published tokenizer_config.json, would not.
    """
    from tokenizers import AddedToken, Tokenizer, models

    core = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    core.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in words if len(n) > 1])
    core.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    settings = {**named, "sep_token": "<reserved08706>", "legacy": False, "tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps(named))


def write_lumina(
    folder: Path,
    *,
    codes: int = 24,
    shards: int = 1,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    ranks: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """The whole folder; `ranks` is 1 as in the 7B, or as many as q_norm has rows. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    words, wide = vocabulary(codes), 3 * hidden // 2
    state = language_model(len(words), hidden, layers, heads, wide, ranks, seed)
    save(folder, {name: tensor.to(dtype) for name, tensor in state.items()}, shards)
    config = config_json(words, hidden, layers, heads, wide, ranks)
    (folder / "config.json").write_text(json.dumps(config))
    generation = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.43.3"}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(folder, words)
    return folder


def write_lumina_config(folder: Path, layers: int = 32) -> Path:
    """config.json of the 7B at its published sizes, and nothing else. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {f"<reserved{8800 + n:05d}>": 8804 + n for n in range(1, 129)}
    words = {name: i for name, i in vocabulary(8192).items() if name not in places} | places
    config = config_json(words, hidden=4096, layers=layers, heads=32, wide=11_008, ranks=1) | {"vocab_size": 65_536}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


VQ = {"ch": 32, "ch_mult": [1, 2], "num_res_blocks": 1, "z_channels": 8, "attn_resolutions": [], "resolution": 16}


def vqgan_shapes(codes: int, dim: int, dd: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor of vqgan.ckpt's state_dict."""

    def conv(name: str, out: int, into: int, side: int = 3) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (out, into, side, side)
        yield f"{name}.bias", (out,)

    def norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)

    def block(name: str, into: int, out: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from norm(f"{name}.norm1", into)
        yield from conv(f"{name}.conv1", out, into)
        yield from norm(f"{name}.norm2", out)
        yield from conv(f"{name}.conv2", out, out)
        if into != out:
            yield from conv(f"{name}.nin_shortcut", out, into, 1)

    def attention(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from norm(f"{name}.norm", width)
        for part in ("q", "k", "v", "proj_out"):
            yield from conv(f"{name}.{part}", width, width, 1)

    def middle(side: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from block(f"{side}.mid.block_1", width, width)
        yield from attention(f"{side}.mid.attn_1", width)
        yield from block(f"{side}.mid.block_2", width, width)

    widths, z, res = [dd["ch"] * m for m in dd["ch_mult"]], dd["z_channels"], dd["num_res_blocks"]
    last, sides = len(widths) - 1, [dd["resolution"] >> i for i in range(len(widths))]
    yield from conv("encoder.conv_in", widths[0], 3)
    width = dd["ch"]
    for i, out in enumerate(widths):
        for j in range(res):
            yield from block(f"encoder.down.{i}.block.{j}", width, out)
            width = out
            if sides[i] in dd["attn_resolutions"]:
                yield from attention(f"encoder.down.{i}.attn.{j}", width)
        if i < last:
            yield from conv(f"encoder.down.{i}.downsample.conv", width, width)
    yield from middle("encoder", width)
    yield from norm("encoder.norm_out", width)
    yield from conv("encoder.conv_out", z, width)
    yield from conv("decoder.conv_in", width, z)
    yield from middle("decoder", width)
    for i in reversed(range(len(widths))):
        for j in range(res + 1):
            yield from block(f"decoder.up.{i}.block.{j}", width, widths[i])
            width = widths[i]
            if sides[i] in dd["attn_resolutions"]:
                yield from attention(f"decoder.up.{i}.attn.{j}", width)
        if i:
            yield from conv(f"decoder.up.{i}.upsample.conv", width, width)
    yield from norm("decoder.norm_out", width)
    yield from conv("decoder.conv_out", 3, width)
    yield "quantize.embedding.weight", (codes, dim)
    yield from conv("quant_conv", dim, z, 1)
    yield from conv("post_quant_conv", z, dim, 1)


def vqgan_state(codes: int = 24, dim: int = 8, dd: dict | None = None, seed: int = 0) -> State:
    """Random weights under Meta's names."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in vqgan_shapes(codes, dim, dd or VQ):
        value = torch.randn(*shape, generator=generator)
        if len(shape) > 2:
            value *= 1.5 * (shape[1] * shape[2] * shape[3]) ** -0.5
        elif "norm" in name and name.endswith("weight"):
            value = 1 + 0.3 * value
        elif name.endswith("bias"):
            value *= 0.1
        state[name] = value
    return state


def write_vqgan(folder: Path, *, codes: int = 24, dim: int = 8, dd: dict | None = None, seed: int = 0) -> Path:
    """vqgan.yaml and vqgan.ckpt as they come in tokenizer/ of Meta's release. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    ddconfig = {"double_z": False, "in_channels": 3, "out_ch": 3, "dropout": 0.0, **(dd or VQ)}
    params = {"embed_dim": dim, "n_embed": codes, "ckpt_path": "x", "ddconfig": ddconfig, "lossconfig": {"target": "x"}}
    (folder / "vqgan.yaml").write_text(yaml.safe_dump({"model": {"target": "x.VQModel", "params": params}}))
    torch.save({"state_dict": vqgan_state(codes, dim, dd, seed)}, folder / "vqgan.ckpt")
    return folder
