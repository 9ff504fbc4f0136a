"""Chameleon's picture tokenizer (Meta, arXiv 2405.09818), which Lumina-mGPT speaks too: 8192 codes of 16 x 16 pixels.

Read from Meta's own release (vqgan.ckpt with vqgan.yaml, in its folder tokenizer/), which encodes and draws, or from a
Chameleon checkpoint of transformers, which has no pixel decoder and encodes only, until vqgan.ckpt lies beside it. The
published Lumina-mGPT checkpoints have neither.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self

import torch
import yaml
from torch import Tensor

from draftgrid.common.files import atomic, write_json
from draftgrid.heads.tokenizers.learned import LearnedTokenizer, fill, normalisation, picture_side, read_checkpoint
from draftgrid.heads.tokenizers.patch_vq import nearest_code
from draftgrid.heads.tokenizers.vqgan import VQGAN, Sizes, new_vqgan

CHECKPOINT, YAML = "vqgan.ckpt", "vqgan.yaml"
ADVICE = (
    f"set tokenizer (in a recipe backbone.tokenizer) to the folder of {CHECKPOINT} and {YAML}, tokenizer/ of Meta's "
    "Chameleon release"
)
BOTH = {"blocks": "num_res_blocks", "code_size": "embed_dim", "attention": "attn_resolutions"}
META = BOTH | {"channels": "ch", "multipliers": "ch_mult", "latent": "z_channels", "codes": "n_embed"}
TRANSFORMERS = BOTH | {"channels": "base_channels", "multipliers": "channel_multiplier"}
TRANSFORMERS |= {"latent": "latent_channels", "codes": "num_embeddings"}
"""What our sizes are called in vqgan.yaml and in transformers' config.json; a name not listed is the same."""
State = dict[str, Tensor]


class ChameleonVQ(LearnedTokenizer):
    model_types = ("chameleon", "chameleon_vqgan")

    def __init__(self, model: VQGAN, mean: list[float], std: list[float], image_size: int) -> None:
        """`mean` and `std` per channel: what pictures in [0, 1] are normalised with; 0.5 is Meta's own."""
        super().__init__(model, mean, std, image_size, model.sizes.patch)

    @property
    def decodes(self) -> bool:
        return self.model.decoder is not None

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Tensor:
        return nearest_code(self.model.latents(self.normalised(images)), self.codebook)

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        """Raises ValueError if there is no pixel decoder."""
        if not self.decodes:
            raise ValueError(f"this image tokenizer has no pixel decoder and only encodes: {ADVICE}")
        return (self.model.draw(tokens.to(self.mean.device)) / 2 + 0.5).clamp(0, 1)

    def save_pretrained(self, folder: str | Path) -> None:
        from safetensors.torch import save

        folder, sizes = Path(folder), asdict(self.model.sizes)
        with atomic(folder / "model.safetensors") as temporary:
            state = {k: v.contiguous() for k, v in self.model.state_dict().items()}
            temporary.write_bytes(save(state, metadata={"format": "pt"}))
        config = {"model_type": "chameleon_vqgan", **{TRANSFORMERS.get(k, k): v for k, v in sizes.items()}}
        write_json(folder / "config.json", config)
        self.write_processor(folder, rescale_factor=1 / 255)

    @classmethod
    def from_pretrained(cls, folder: str | Path, decoder: str | Path | None = None) -> Self:
        """`folder` is one of the two kinds above, or vqgan.ckpt itself; `decoder` is vqgan.ckpt or its folder.

        Raises ValueError if weights are absent, lack a key, have one too many or another size, and if the decoder
        belongs to another codebook.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            sizes, state = read_release(folder)
            return cls(fill(new_vqgan(sizes), state, folder), [0.5] * 3, [0.5] * 3, sizes.resolution)
        config, state = read_checkpoint(folder, "chameleon", f": {ADVICE}")
        sizes = sizes_of(config, TRANSFORMERS)
        if decoder is None and (folder / CHECKPOINT).is_file():
            decoder = folder
        if decoder is not None:
            state |= decoder_of(Path(decoder), state)
        pixels = any(name.startswith("decoder.") for name in state)
        mean, std, side = normalisation(folder, sizes.resolution)
        return cls(fill(new_vqgan(sizes, pixels), state, folder), mean, std, picture_side(folder, sizes.patch, side))


def sizes_of(config: dict[str, Any], names: dict[str, str]) -> Sizes:
    """Raises ValueError for a kind of VQGAN that Chameleon's is not."""
    if config.get("double_z") or config.get("double_latent"):
        raise ValueError("a VQGAN with double_z (double_latent) true is not Chameleon's")
    named = {field.name: names.get(field.name, field.name) for field in fields(Sizes)}
    # transformers leaves out what equals its defaults, and has null for no attention.
    found: dict[str, Any] = {ours: config[theirs] for ours, theirs in named.items() if config.get(theirs) is not None}
    return Sizes(**found)


def read_release(path: Path) -> tuple[Sizes, State]:
    """vqgan.ckpt, or the folder it lies in beside vqgan.yaml. Raises ValueError."""
    file = path / CHECKPOINT if path.is_dir() else path
    described = file.with_name(YAML)
    for needed in (file, described):
        if not needed.is_file():
            raise ValueError(f"{needed} is missing: {ADVICE}")
    try:
        params = yaml.safe_load(described.read_text())["model"]["params"]
        sizes = sizes_of(params | params["ddconfig"], META)
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"{described} does not describe a VQGAN: {' '.join(repr(error).split())}") from None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
    except Exception as error:  # torch raises what its unpickler and its zip reader raise
        raise ValueError(f"{file} cannot be read as a checkpoint of tensors: {str(error).splitlines()[0]}") from None
    return sizes, {k: v.float() for k, v in state.items() if not k.startswith("loss.")}  # what only its training needs


def decoder_of(path: Path, encoder: State) -> State:
    """The pixel decoder out of Meta's release. Raises ValueError if it draws the codes of another codebook."""
    state, name = read_release(path)[1], "quantize.embedding.weight"
    ours, theirs = encoder.get(name), state.get(name)
    if ours is None or theirs is None or not torch.equal(ours.bfloat16(), theirs.bfloat16()):
        raise ValueError(f"the pixel decoder in {path} was trained for another codebook than this tokenizer's")
    return {k: v for k, v in state.items() if k.startswith(("decoder.", "post_quant_conv."))}
