"""Chameleon's picture tokenizer out of tiny checkpoints in Meta's layout and in transformers', against transformers'
encoder and against the decoder written a second time, as a function of the checkpoint's names."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import conv2d, group_norm
from transformers import ChameleonImageProcessorPil, ChameleonVQVAE, ChameleonVQVAEConfig

from draftgrid.data.encode import EncodeConfig, run
from draftgrid.data.shards import read_manifest
from draftgrid.data.sources import pixels
from draftgrid.heads.tokenizers import ChameleonVQ, load_tokenizer
from draftgrid.heads.tokenizers.vqgan import Sizes, new_vqgan
from tests.data_fixtures import write_pictures
from tests.published_lumina import VQ, State, vqgan_state, write_lumina, write_vqgan

ATTENTIVE = {
    "ch": 32,
    "ch_mult": [1, 1, 2],
    "num_res_blocks": 2,
    "z_channels": 8,
    "attn_resolutions": [8],
    "resolution": 16,
}
"""Three levels, of which the middle one has attentions."""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vqgan(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(1))


def transformers_vq(state: State, dd: dict, codes: int = 24) -> ChameleonVQVAE:
    """transformers' encoder and codebook with these weights."""
    model = ChameleonVQVAE(
        ChameleonVQVAEConfig(
            embed_dim=8,
            num_embeddings=codes,
            latent_channels=dd["z_channels"],
            base_channels=dd["ch"],
            channel_multiplier=dd["ch_mult"],
            num_res_blocks=dd["num_res_blocks"],
            attn_resolutions=dd["attn_resolutions"],
            resolution=dd["resolution"],
        )
    ).eval()
    model.load_state_dict({k: v for k, v in state.items() if not k.startswith("decoder.")})
    return model


def as_checkpoint(folder: Path, state: State, rescale: float | None = 0.0078) -> Path:
    """What a Chameleon checkpoint of transformers holds of it: no decoder, `model.vqmodel.` before every name."""
    folder.mkdir()
    weights = {f"model.vqmodel.{k}": v for k, v in state.items() if not k.startswith("decoder.")}
    save_file({**weights, "lm_head.weight": torch.zeros(5, 2)}, folder / "model.safetensors")
    vq = transformers_vq(state, VQ).config.to_dict()
    (folder / "config.json").write_text(json.dumps({"model_type": "chameleon", "vq_config": vq}))
    if rescale:
        ones, size = [1.0] * 3, {"height": 32, "width": 32}
        processor = {"image_mean": ones, "image_std": ones, "rescale_factor": rescale, "crop_size": size}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def drawn(state: State, dd: dict, codes: Tensor) -> Tensor:
    """The pixel decoder again, from names and numbers alone: (B, H, W) codes -> (B, 3, h, w) before it is clamped."""

    def conv(x: Tensor, name: str) -> Tensor:
        weight = state[f"{name}.weight"]
        return conv2d(x, weight, state[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def norm(x: Tensor, name: str) -> Tensor:
        return group_norm(x, 32, state[f"{name}.weight"], state[f"{name}.bias"], eps=1e-6)

    def swish(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def block(x: Tensor, name: str) -> Tensor:
        y = conv(swish(norm(x, f"{name}.norm1")), f"{name}.conv1")
        y = conv(swish(norm(y, f"{name}.norm2")), f"{name}.conv2")
        return y + (conv(x, f"{name}.nin_shortcut") if f"{name}.nin_shortcut.weight" in state else x)

    def attention(x: Tensor, name: str) -> Tensor:
        B, C, H, W = x.shape
        q, k, v = (conv(norm(x, f"{name}.norm"), f"{name}.{part}").view(B, C, H * W) for part in "qkv")
        weights = (torch.einsum("bci,bcj->bij", q, k) / C**0.5).softmax(-1)
        return x + conv(torch.einsum("bij,bcj->bci", weights, v).view(B, C, H, W), f"{name}.proj_out")

    x = state["quantize.embedding.weight"][codes].permute(0, 3, 1, 2)
    x = conv(conv(x, "post_quant_conv"), "decoder.conv_in")
    x = block(attention(block(x, "decoder.mid.block_1"), "decoder.mid.attn_1"), "decoder.mid.block_2")
    for level in reversed(range(len(dd["ch_mult"]))):
        for i in range(dd["num_res_blocks"] + 1):
            x = block(x, f"decoder.up.{level}.block.{i}")
            if dd["resolution"] // 2**level in dd["attn_resolutions"]:
                x = attention(x, f"decoder.up.{level}.attn.{i}")
        if level:
            x = conv(x.repeat_interleave(2, 2).repeat_interleave(2, 3), f"decoder.up.{level}.upsample.conv")
    return conv(swish(norm(x, "decoder.norm_out")), "decoder.conv_out")


@pytest.mark.parametrize("dd", [VQ, ATTENTIVE])
def test_codes_are_transformers_and_pixels_the_second_decoders(dd: dict, images: Tensor, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vqgan(tmp_path, dd=dd))
    patch = 2 ** (len(dd["ch_mult"]) - 1)
    assert isinstance(tokenizer, ChameleonVQ) and tokenizer.decodes
    assert (tokenizer.patch, tokenizer.codebook_size, tokenizer.image_size) == (patch, 24, 16)
    state = vqgan_state(dd=dd)
    codes = tokenizer.encode(images)
    with torch.no_grad():
        expected = transformers_vq(state, dd).encode(images * 2 - 1, return_dict=True).image_tokens
    assert codes.shape == (2, 16 // patch, 24 // patch) and len(codes.unique()) > 3
    assert torch.equal(codes.flatten(), expected)
    pictures = tokenizer.decode(codes)
    assert pictures.shape == (2, 3, 16, 24)
    torch.testing.assert_close(pictures, ((drawn(state, dd, codes).clamp(-1, 1) + 1) / 2), rtol=1e-4, atol=1e-5)
    assert ((pictures > 0) & (pictures < 1)).float().mean() > 0.05


def test_a_checkpoint_of_transformers_encodes_as_transformers_and_says_what_drawing_needs(tmp_path: Path) -> None:
    """Through its image processor, which maps 255 to .989 and not to 1."""
    state = vqgan_state()
    tokenizer = load_tokenizer(as_checkpoint(tmp_path / "model", state))
    write_pictures(tmp_path, 1, size=32)
    picture = Image.open(tmp_path / "000.png")
    inputs = ChameleonImageProcessorPil(do_resize=False, do_center_crop=False)(picture, return_tensors="pt")
    with torch.no_grad():
        expected = transformers_vq(state, VQ).encode(inputs["pixel_values"], return_dict=True).image_tokens
    codes = tokenizer.encode(pixels([picture]))
    assert codes.flatten().tolist() == expected.tolist() and len(codes.unique()) > 3
    assert tokenizer.image_size == 32 and not tokenizer.decodes
    with pytest.raises(
        ValueError, match=r"no pixel decoder .*set tokenizer .*vqgan\.ckpt and vqgan\.yaml.*Chameleon release$"
    ):
        tokenizer.decode(codes)


def test_meta_s_file_adds_the_decoder_and_changes_no_code(release: Path, images: Tensor, tmp_path: Path) -> None:
    folder = as_checkpoint(tmp_path / "model", vqgan_state())
    without, whole = load_tokenizer(folder), load_tokenizer(release)
    codes = whole.encode(images)
    for file in ("vqgan.ckpt", "vqgan.yaml"):
        (folder / file).write_bytes((release / file).read_bytes())
    beside, told = load_tokenizer(folder), ChameleonVQ.from_pretrained(tmp_path / "model", release / "vqgan.ckpt")
    for tokenizer in (beside, told, load_tokenizer(release / "vqgan.ckpt")):
        assert tokenizer.decodes and torch.equal(tokenizer.decode(codes), whole.decode(codes))
    assert beside.fingerprint == told.fingerprint == without.fingerprint
    assert whole.fingerprint != without.fingerprint, "another normalisation gives other codes"
    exact = load_tokenizer(as_checkpoint(tmp_path / "exact", vqgan_state(), rescale=None))
    assert exact.fingerprint == whole.fingerprint and torch.equal(exact.encode(images), codes)
    other = write_vqgan(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="was trained for another codebook"):
        ChameleonVQ.from_pretrained(folder, other)


@pytest.mark.parametrize("pixels", [True, False])
def test_a_tokenizer_saved_and_loaded_again_is_the_same_one(
    pixels: bool, release: Path, images: Tensor, tmp_path: Path
) -> None:
    first = load_tokenizer(release if pixels else as_checkpoint(tmp_path / "model", vqgan_state()))
    first.image_size = 48
    first.save_pretrained(tmp_path / "image_tokenizer")
    second = load_tokenizer(tmp_path)
    codes = first.encode(images)
    assert torch.equal(second.encode(images), codes) and second.decodes == pixels
    assert (second.image_size, second.patch, second.fingerprint) == (48, 2, first.fingerprint)
    if pixels:
        assert torch.equal(second.decode(codes), first.decode(codes))
        assert second.pil(codes)[0].size == (24, 16)


class TestErrors:
    def rewritten(self, folder: Path, **changes: Tensor | None) -> Path:
        """The release with some tensors added, replaced or (None) left out."""
        state = vqgan_state() | changes
        torch.save(
            {"state_dict": {k: v for k, v in state.items() if v is not None}}, write_vqgan(folder) / "vqgan.ckpt"
        )
        return folder

    def test_a_missing_and_an_unknown_key_are_named_and_the_loss_network_is_not_missed(self, tmp_path: Path) -> None:
        lost = "decoder.up.1.upsample.conv.bias"
        with pytest.raises(ValueError, match=r"missing \['decoder\.up\.1\.upsample\.conv\.bias'\], unknown \[\]"):
            load_tokenizer(self.rewritten(tmp_path / "a", **{lost: None}))
        with pytest.raises(ValueError, match=r"missing \[\], unknown \['encoder\.typo'\]"):
            load_tokenizer(self.rewritten(tmp_path / "b", **{"encoder.typo": torch.zeros(1)}))
        assert load_tokenizer(
            self.rewritten(tmp_path / "c", **{"loss.discriminator.main.0.bias": torch.zeros(1)})
        ).decodes

    def test_another_size_is_one_sentence(self, tmp_path: Path) -> None:
        folder = self.rewritten(tmp_path / "a", **{"quant_conv.bias": torch.zeros(9)})
        with pytest.raises(ValueError, match=r"^[^\n]*misshapen [^\n]*quant_conv\.bias is \(9,\), not \(8,\)[^\n]*$"):
            load_tokenizer(folder)

    def test_files_that_are_missing_or_no_checkpoints_are_named(self, tmp_path: Path) -> None:
        folder = write_vqgan(tmp_path / "a")
        (folder / "vqgan.yaml").write_text("model: 3")
        with pytest.raises(ValueError, match=r"vqgan\.yaml does not describe a VQGAN"):
            load_tokenizer(folder)
        (folder / "vqgan.yaml").unlink()
        with pytest.raises(ValueError, match=r"vqgan\.yaml is missing: set tokenizer"):
            load_tokenizer(folder)
        folder = write_vqgan(tmp_path / "b")
        (folder / "vqgan.ckpt").write_bytes(b"no checkpoint")
        with pytest.raises(ValueError, match=r"^[^\n]*vqgan\.ckpt cannot be read as a checkpoint of tensors: [^\n]*$"):
            load_tokenizer(folder)

    def test_a_lumina_checkpoint_holds_no_tokenizer_and_that_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(
            ValueError, match=r"holds no weights of a picture tokenizer .*: set tokenizer \(in a recipe"
        ):
            load_tokenizer(write_lumina(tmp_path))

    def test_pictures_must_divide_into_patches(self, release: Path) -> None:
        with pytest.raises(ValueError, match="does not divide into 2x2"):
            load_tokenizer(release).encode(torch.zeros(1, 3, 15, 16))


def test_a_folder_of_pictures_is_encoded_with_meta_s_release(release: Path, tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path / "pictures", 3, size=40)
    keys = {"source": f"folder:{pictures}", "tokenizer": str(release), "split": "all", "out": str(tmp_path / "out")}
    run(EncodeConfig(**keys, size="32", shards=1))
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.grid, manifest.codes, manifest.samples) == ((16, 16), 24, 3)
    assert manifest.tokenizer == load_tokenizer(release).fingerprint


def test_at_full_size_it_has_the_published_codes_patches_and_weights() -> None:
    """huggingface.co counts 7.04 B for nopperl/chameleon-7b-hf, which has this encoder, and 7.01 B for
    Lumina-mGPT-7B-768-Omni, which has not."""
    model = new_vqgan(Sizes(), pixels=False)
    assert (model.sizes.codes, model.sizes.patch) == (8192, 16)
    assert model.quantize.embedding.weight.shape == (8192, 256)
    ours = sum(p.numel() for p in model.parameters())
    with torch.device("meta"):
        assert ours == sum(p.numel() for p in ChameleonVQVAE(ChameleonVQVAEConfig()).parameters())
    assert 0.02e9 < ours < 0.04e9
    assert all(p.is_meta for p in model.parameters())
