"""Janus-Pro's picture tokenizer out of a checkpoint in the published layout, against the release's formula and
transformers' own decoder and processor."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import JanusImageProcessorPil

from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.tokenizers import JanusVQ, PatchVQ, load_tokenizer
from tests.published_janus import load_theirs, save, write_janus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_janus(tmp_path_factory.mktemp("janus") / "Janus-Pro-7B")


@pytest.fixture(scope="module")
def theirs(folder: Path):
    return load_theirs(folder)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def test_codes_are_the_nearest_by_angle_as_in_the_release(folder: Path, theirs, images: Tensor) -> None:
    """janus/models/vq_model.py: state and codebook normalised, then the smallest squared distance.

    transformers' own encode does not normalise, and finds other codes where vectors differ in length.
    """
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, JanusVQ)
    vq = theirs.model.vqmodel
    with torch.no_grad():
        theirs_out = vq.encode(2 * images - 1)
        z = vq.quant_conv(theirs_out.last_hidden_state)
    unit = z / z.square().sum(1, keepdim=True).sqrt()
    book = vq.quantize.embedding.weight
    book = book / book.square().sum(1, keepdim=True).sqrt()
    distance = (unit[:, None] - book[None, :, :, None, None]).square().sum(2)  # (B, K, H, W)
    codes = tokenizer.encode(images)
    assert torch.equal(codes, distance.argmin(1)) and len(codes.unique()) > 3
    assert not torch.equal(codes.flatten(), theirs_out.image_tokens)


def test_pictures_are_those_of_transformers_model_and_processor(folder: Path, theirs) -> None:
    tokenizer = load_tokenizer(folder)
    codes = torch.randint(24, (2, 4, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pixels = theirs.decode_image_tokens(codes.flatten(1))
    own = JanusImageProcessorPil.from_pretrained(folder)
    expected = own.postprocess(list(pixels.permute(0, 3, 1, 2)), return_tensors="PIL.Image.Image")["pixel_values"]
    for mine, picture in zip(tokenizer.pil(codes), expected, strict=True):
        assert mine.size == picture.size == (64, 64)
        apart = np.asarray(mine, dtype=int) - np.asarray(picture, dtype=int)
        assert np.abs(apart).max() <= 1  # they cut off where this rounds
        assert len(np.unique(np.asarray(mine))) > 20


class Up(nn.Module):
    """(B, C, h, w) -> (B, 3, 16 h, 16 w): the first three numbers of a code as a square of one colour."""

    def forward(self, z: Tensor) -> Tensor:
        return z[:, :3].repeat_interleave(16, 2).repeat_interleave(16, 3) * 0.5


class Down(nn.Module):
    """Back again."""

    def forward(self, images: Tensor) -> Tensor:
        return images[:, :, ::16, ::16]


class Pad(nn.Module):
    """(B, 3, h, w) -> (B, 8, h, w): the codebook's other numbers are 0."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 0, 0, 0, 5))


def test_a_picture_comes_back_from_a_tokenizer_that_can_bring_it_back(folder: Path) -> None:
    """decode then encode is the identity where the two nets are each other's inverse: codes lie in their places."""
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, JanusVQ)
    model = tokenizer.model
    model.decoder, model.encoder, model.quant_conv, model.post_quant_conv = Up(), Down(), Pad(), nn.Identity()
    with torch.no_grad():
        model.quantize.embedding.weight[:, 3:] = 0
    for grid in ((2, 5), (5, 2), (1, 7)):
        codes = torch.randint(24, (2, *grid), generator=torch.Generator().manual_seed(0))
        assert torch.equal(tokenizer.encode(tokenizer.decode(codes)), codes)
        assert tokenizer.pil(codes)[0].size == (16 * grid[1], 16 * grid[0])


def test_non_square_grids_are_decoded_the_right_way_up(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    codes = torch.randint(24, (1, 2, 5), generator=torch.Generator().manual_seed(0))
    assert tokenizer.decode(codes).shape == (1, 3, 32, 80)
    assert tokenizer.encode(tokenizer.decode(codes)).shape == (1, 2, 5)


def test_saved_and_loaded_again_it_is_the_same_one(folder: Path, images: Tensor, tmp_path: Path) -> None:
    first = load_tokenizer(folder)
    first.save_pretrained(tmp_path / "image_tokenizer")
    second = load_tokenizer(tmp_path)
    assert torch.equal(first.encode(images), second.encode(images))
    assert (second.fingerprint, second.image_size, second.patch) == (first.fingerprint, 64, 16)


def test_what_decides_about_codes_is_in_the_fingerprint(folder: Path) -> None:
    first = load_tokenizer(folder)
    others = [load_tokenizer(folder) for _ in range(3)]
    with torch.no_grad():
        others[0].model.quant_conv.bias[0] += 1  # type: ignore[attr-defined]
        others[1].mean[0] += 0.1  # type: ignore[attr-defined]
        others[2].model.quantize.embedding.weight[0, 0] += 1  # type: ignore[attr-defined]
    assert len({first.fingerprint, *(t.fingerprint for t in others)}) == 4


def test_the_language_model_is_not_read(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "b")
    state = {k: v for k, v in load_file(folder / "model.safetensors").items() if "vqmodel" in k}
    save(tmp_path / "b", state)
    assert load_tokenizer(tmp_path / "b").fingerprint == load_tokenizer(folder).fingerprint
    lost = state.pop("model.vqmodel.quant_conv.bias")
    save(tmp_path / "b", {**state, "model.vqmodel.quant_conv.typo": lost})
    with pytest.raises(ValueError, match=r"missing \['quant_conv\.bias'\], unknown \['quant_conv\.typo'\]"):
        load_tokenizer(tmp_path / "b")
    save(tmp_path / "b", {"lm_head.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="holds no weights of a picture tokenizer"):
        load_tokenizer(tmp_path / "b")


def test_pictures_that_do_not_divide_are_refused_and_codes_must_fit_the_backbone(folder: Path) -> None:
    with pytest.raises(ValueError, match="does not divide into 16x16"):
        load_tokenizer(folder).encode(torch.zeros(1, 3, 40, 64))
    backbone = load_backbone(folder, adapter="janus_pro")
    backbone.check_codes(load_tokenizer(folder).codebook_size)
    with pytest.raises(ValueError, match="has 25 codes, the backbone 24"):
        backbone.check_codes(PatchVQ(torch.rand(25, 12), 2, 8).codebook_size)


def test_a_picture_file_is_encoded_as_the_processor_would_prepare_it(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    own = JanusImageProcessorPil.from_pretrained(folder)
    prepared = own(picture, return_tensors="pt")["pixel_values"]
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, JanusVQ)
    z = tokenizer.model.quant_conv(tokenizer.model.encoder(prepared)).permute(0, 2, 3, 1)
    nearest = nn.functional.normalize(z, dim=-1) @ tokenizer.codebook.T
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
    assert torch.equal(tokenizer.encode(images), nearest.argmax(-1))
