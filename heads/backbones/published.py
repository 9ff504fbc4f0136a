"""config.json of the published checkpoints, as far as the shapes of a model follow from it.

So that a run can be planned, and the architecture made, without a checkpoint. Numbers and their sources: for Emu3
config.json of BAAI/Emu3-Chat and transformers' convert_emu3_weights_to_hf.py; for Janus-Pro config.json of
deepseek-ai/Janus-Pro-7B and convert_janus_weights_to_hf.py; for Lumina-mGPT item_processor.py and
convert_chameleon_weights_to_hf.py of github.com/Alpha-VLLM/Lumina-mGPT. What is not said is the default of
transformers' class. Of the vocabularies only the words an adapter looks up are here.
"""

from typing import Any

import torch


def emu3() -> dict[str, Any]:
    codes = {f"<|visual token {c:06d}|>": 151_854 + c for c in range(32_768)}
    return {
        "architectures": ["Emu3ForConditionalGeneration"],
        "model_type": "emu3",
        "text_config": {
            "bos_token_id": 151_849,
            "eos_token_id": 151_850,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "max_position_embeddings": 9216,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pad_token_id": 151_643,
            "rms_norm_eps": 1e-5,
            "vocab_size": 184_622,
        },
        "vocabulary_map": {"<image>": 151_646, "<|extra_200|>": 151_846, **codes},
        "vq_config": {
            "attn_resolutions": [3],
            "base_channels": 256,
            "channel_multiplier": [1, 2, 2, 4],
            "codebook_size": 32_768,
            "embed_dim": 4,
            "hidden_size": 1024,
            "latent_channels": 4,
            "num_res_blocks": 2,
            "temporal_downsample_factor": 4,
        },
    }


def janus_pro() -> dict[str, Any]:
    return {
        "architectures": ["JanusForConditionalGeneration"],
        "model_type": "janus",
        "text_config": {
            "bos_token_id": 100_000,
            "eos_token_id": 100_001,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "max_position_embeddings": 16_384,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 30,
            "num_key_value_heads": 32,
            "pad_token_id": 100_015,
            "rms_norm_eps": 1e-6,
            "vocab_size": 102_400,
        },
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 384,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "num_image_tokens": 576,
            "patch_size": 16,
            "projection_dim": 4096,
        },
        "vq_config": {
            "base_channels": 128,
            "channel_multiplier": [1, 1, 2, 2, 4],
            "embed_dim": 8,
            "image_token_embed_dim": 4096,
            "latent_channels": 256,
            "num_embeddings": 16_384,
            "num_patches": 24,
            "projection_dim": 4096,
        },
    }


def lumina_mgpt() -> dict[str, Any]:
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    codes = {f"IMGIMG{c}Z".translate(letters): 4 + c for c in range(8192)}
    reserved = {f"<reserved{n:05d}>": n + 4 for n in (8706, *range(8799, 8900))}
    return {
        "architectures": ["ChameleonForConditionalGeneration"],
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "max_position_embeddings": 4096,
        "model_parallel_size": 1,
        "model_type": "chameleon",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 65_536,
        "vocabulary_map": {"<s>": 0, **codes, "<racm3:break>": 8197, **reserved},
    }


CONFIGS = {"emu3": emu3, "janus_pro": janus_pro, "lumina_mgpt": lumina_mgpt}
"""By adapter."""
PUBLISHED = {
    "BAAI/Emu3-Gen-hf": emu3,
    "deepseek-community/Janus-Pro-7B": janus_pro,
    "Alpha-VLLM/Lumina-mGPT-7B-768": lumina_mgpt,
}
"""By hub id."""


def meta_model(config: dict[str, Any], where: str) -> Any:
    """transformers' own class on the meta device: all shapes, no numbers. Raises ValueError for an unknown config."""
    import transformers

    try:
        found = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
        kind = getattr(transformers, (found.architectures or ["?"])[0])
    except (ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"{where}: config.json names no model transformers knows: {reason}") from None
    with torch.device("meta"):
        return kind(found).requires_grad_(False)
