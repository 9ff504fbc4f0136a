"""The patch quantizer: codes <-> pixels, files, fitting."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from draftgrid.heads.tokenizers import PatchVQ, load_tokenizer
from tests.data_fixtures import codes_by_hand, tiny_tokenizer


@pytest.mark.parametrize("grid", [(4, 4), (2, 5), (5, 2), (1, 7)])
def test_decoded_tokens_encode_to_themselves(grid: tuple[int, int]) -> None:
    tokenizer = tiny_tokenizer(codes=50)
    tokens = torch.randint(0, 50, (3, *grid), generator=torch.Generator().manual_seed(1))
    pictures = tokenizer.decode(tokens)
    assert pictures.shape == (3, 3, 4 * grid[0], 4 * grid[1])
    assert torch.equal(tokenizer.encode(pictures), tokens)


def test_codes_that_differ_by_one_grey_level_of_one_pixel_stay_apart() -> None:
    base = torch.full((48,), 128 / 255)
    codebook = torch.stack([base] + [base.index_add(0, torch.tensor([i]), torch.tensor([1 / 255])) for i in range(48)])
    tokenizer = PatchVQ(codebook, patch=4, image_size=16)
    tokens = torch.arange(49).view(1, 7, 7)
    assert torch.equal(tokenizer.encode(tokenizer.decode(tokens)), tokens)


def test_a_picture_file_gets_the_nearest_code_of_every_patch(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    encoded = tokenizer.encode(torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255)
    assert encoded.shape == (1, 2, 5)
    assert encoded[0].tolist() == codes_by_hand(tmp_path / "a.png", tokenizer.codebook.numpy()).tolist()


def test_pixels_of_a_handmade_codebook_land_in_their_places() -> None:
    """Patch 2: code 0 is red, 1 green, 2 blue, 3 has another value in each of its pixels."""
    red, green, blue = ([1.0] * 4 + [0.0] * 8, [0.0] * 4 + [1.0] * 4 + [0.0] * 4, [0.0] * 8 + [1.0] * 4)
    steps = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0]
    tokenizer = PatchVQ(torch.tensor([red, green, blue, steps]), patch=2, image_size=4)
    picture = tokenizer.decode(torch.tensor([[[0, 1, 3], [2, 3, 0]]]))[0]  # 2 rows of 3 patches: 4 x 6 pixels
    assert picture.shape == (3, 4, 6)
    assert picture[:, 0, 0].tolist() == [1, 0, 0]
    assert picture[:, 1, 3].tolist() == [0, 1, 0]
    assert picture[:, 3, 1].tolist() == [0, 0, 1]
    assert picture[:, 3, 5].tolist() == [1, 0, 0]
    for top, left in ((0, 4), (2, 2)):  # code 3, flattened as (channel, row, column)
        block = picture[:, top : top + 2, left : left + 2].flatten()
        np.testing.assert_allclose(block.numpy(), steps, atol=1e-6)


def test_pil_pictures_are_as_wide_and_coloured_as_the_grid_says() -> None:
    white, black = [1.0] * 12, [0.0] * 12
    tokenizer = PatchVQ(torch.tensor([white, black]), patch=2, image_size=4)
    (picture,) = tokenizer.pil(torch.tensor([[[0, 1, 1], [1, 1, 0]]]), scale=3)
    assert picture.size == (18, 12)  # PIL says width first
    assert picture.getpixel((0, 0)) == (255, 255, 255)
    assert picture.getpixel((17, 11)) == (255, 255, 255)
    assert picture.getpixel((17, 0)) == (0, 0, 0)


def test_saved_and_loaded_tokenizer_is_the_same_one(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "backbone" / "image_tokenizer")
    images = torch.rand(2, 3, 16, 16)
    for folder in (tmp_path / "plain", tmp_path / "backbone"):
        loaded = load_tokenizer(folder)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert (loaded.patch, loaded.image_size, loaded.codebook_size) == (4, 16, 32)
        assert torch.equal(loaded.encode(images), tokenizer.encode(images))


def test_another_codebook_or_order_of_codes_has_another_fingerprint() -> None:
    tokenizer = tiny_tokenizer()
    nudged = tokenizer.codebook.clone()
    nudged[3, 5] += 1e-3
    others = [PatchVQ(nudged, 4, 16), PatchVQ(tokenizer.codebook.flip(0), 4, 16), tiny_tokenizer(codes=31)]
    prints = {t.fingerprint for t in [tokenizer, *others]}
    assert len(prints) == 4
    assert tiny_tokenizer().fingerprint == tokenizer.fingerprint


def test_a_folder_without_a_known_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"image_tokenizer": "vqgan9000"}')
    with pytest.raises(ValueError, match=r"'vqgan9000'; known: patch_vq"):
        load_tokenizer(tmp_path)


def test_a_picture_that_does_not_divide_into_patches_is_refused_by_its_size() -> None:
    with pytest.raises(ValueError, match=r"\(16, 18\).*4x4"):
        tiny_tokenizer().encode(torch.zeros(1, 3, 16, 18))


def test_a_codebook_of_the_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(8, 47\).*48"):
        PatchVQ(torch.zeros(8, 47), patch=4, image_size=16)


def squares() -> torch.Tensor:
    """(64, 3, 16, 16): white pictures with one coloured square each."""
    rng = np.random.default_rng(0)
    images = torch.ones(64, 3, 16, 16)
    for image in images:
        y, x = rng.integers(0, 12, 2)
        image[:, y : y + 6, x : x + 6] = torch.tensor(rng.integers(0, 4, 3) / 4, dtype=torch.float32)[:, None, None]
    return images


def test_fitting_is_deterministic_and_depends_on_the_seed() -> None:
    images = squares()
    first = PatchVQ.fit(images, codes=16, steps=5, seed=3)
    assert torch.equal(first.codebook, PatchVQ.fit(images, codes=16, steps=5, seed=3).codebook)
    assert not torch.equal(first.codebook, PatchVQ.fit(images, codes=16, steps=5, seed=4).codebook)


def test_fitted_codes_reconstruct_better_than_random_ones() -> None:
    images = squares()

    def error(tokenizer: PatchVQ) -> float:
        return float((tokenizer.decode(tokenizer.encode(images)) - images).square().mean())

    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 48)
    fitted = error(PatchVQ.fit(images, codes=16, steps=10))
    for seed in range(5):
        drawn = patches[torch.randperm(len(patches), generator=torch.Generator().manual_seed(seed))[:16]]
        assert fitted < error(PatchVQ(drawn, 4, 16))
        assert fitted < 0.5 * error(tiny_tokenizer(codes=16, seed=seed))


def test_too_few_distinct_patches_for_the_codes_are_counted_in_the_error() -> None:
    with pytest.raises(ValueError, match="1 distinct patches are too few for 8 codes"):
        PatchVQ.fit(torch.ones(2, 3, 16, 16), codes=8)
