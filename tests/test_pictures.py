"""What an encode makes of odd pictures: the codes of what a viewer shows, or a line in skipped.jsonl."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from draftgrid.data.encode import SKIPPED, encode
from draftgrid.data.shards import Manifest, Sample
from draftgrid.data.sources import open_source
from draftgrid.heads.tokenizers import PatchVQ
from tests.data_fixtures import read_shard, write_pictures

COLOURS = {"K": (0, 0, 0), "W": (255, 255, 255), "R": (255, 0, 0), "G": (0, 255, 0), "B": (0, 0, 255), "o": (128,) * 3}
"""Letter of every code: black, white, red, green, blue, grey."""


def plain_tokenizer() -> PatchVQ:
    """16x16 pictures become 4x4 letters, each the nearest plain colour."""
    colours = torch.tensor(list(COLOURS.values())).float() / 255
    return PatchVQ(colours.repeat_interleave(16, dim=1), 4, 16)


def painted(rows: list[str], side: int = 4) -> Image.Image:
    """One square of `side` pixels a letter."""
    cells = np.array([[COLOURS[letter] for letter in row] for row in rows], np.uint8)
    return Image.fromarray(cells.repeat(side, 0).repeat(side, 1))


def read(out: Path, manifest: Manifest) -> dict[str, list[str]]:
    """{file: rows of letters}"""
    found = {}
    for shard in manifest.shards:
        for sample in read_shard(out / shard.file, shard.samples):
            assert isinstance(sample, Sample)
            rows = ["".join(list(COLOURS)[code] for code in row) for row in sample.tokens]
            found[sample.metadata["file"]] = rows
    return found


def letters(path: Path, fit: str = "crop") -> list[str]:
    path.with_suffix(".txt").write_text("odd")
    out = path.parent / "out"
    manifest = encode(open_source(f"folder:{path.parent}"), plain_tokenizer(), out, "all", shards=1, fit=fit)
    assert manifest is not None
    return read(out, manifest)[path.name]


QUARTERS = ["RRGG", "RRGG", "BBKK", "BBKK"]


def cmyk(path: Path) -> None:
    painted(QUARTERS, 16).convert("CMYK").save(path, quality=95, subsampling=0)


def palette_with_transparency(path: Path) -> None:
    picture = painted(QUARTERS).convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    black = picture.getpixel((15, 15))
    picture.save(path, transparency=black)


def palette_with_an_alpha_each(path: Path) -> None:
    """Half-transparent black is grey."""
    picture = painted(QUARTERS).convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    alphas = [255] * 4
    alphas[picture.getpixel((15, 15))] = 127  # type: ignore[index]
    picture.save(path, transparency=bytes(alphas))


def grey_of_16_bits(path: Path) -> None:
    levels = np.array([[0, 0, 32768, 32768]] * 2 + [[65535, 65535, 32768, 32768]] * 2, np.uint16)
    Image.fromarray(levels.repeat(4, 0).repeat(4, 1)).save(path)


def turned(path: Path) -> None:
    """Stored lying on its side, with a note to turn it by 90 degrees."""
    exif = Image.Exif()
    exif[0x0112] = 6
    painted(QUARTERS, 16).rotate(90).save(path, exif=exif, quality=95, subsampling=0)


def animated(path: Path) -> None:
    frames = [painted(["WWWW"] * 4), painted(["KKKK"] * 4)]
    settings = {} if path.suffix == ".gif" else {"lossless": True}
    painted(QUARTERS).save(path, save_all=True, append_images=frames, duration=50, **settings)


def one_pixel(path: Path) -> None:
    Image.new("RGB", (1, 1), (0, 0, 255)).save(path)


def half_transparent(path: Path) -> None:
    picture = painted(QUARTERS).convert("RGBA")
    picture.putalpha(Image.fromarray(np.repeat(np.uint8([255] * 8 + [0] * 8)[:, None], 16, 1)))
    picture.save(path)


@pytest.mark.parametrize(
    ("name", "write", "rows"),
    [
        ("a.jpg", cmyk, QUARTERS),
        ("a.png", palette_with_transparency, ["RRGG", "RRGG", "BBWW", "BBWW"]),
        ("a.png", palette_with_an_alpha_each, ["RRGG", "RRGG", "BBoo", "BBoo"]),
        ("a.gif", palette_with_transparency, ["RRGG", "RRGG", "BBWW", "BBWW"]),
        ("a.png", grey_of_16_bits, ["KKoo", "KKoo", "WWoo", "WWoo"]),
        ("a.tif", grey_of_16_bits, ["KKoo", "KKoo", "WWoo", "WWoo"]),
        ("a.jpg", turned, QUARTERS),
        ("a.gif", animated, QUARTERS),
        ("a.webp", animated, QUARTERS),
        ("a.png", animated, QUARTERS),
        ("a.png", one_pixel, ["BBBB"] * 4),
        ("a.webp", half_transparent, ["RRGG", "RRGG", "WWWW", "WWWW"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else value if isinstance(value, str) else "",
)
def test_an_odd_picture_gets_the_codes_of_what_a_viewer_shows(
    tmp_path: Path, name: str, write: Callable[[Path], None], rows: list[str]
) -> None:
    write(tmp_path / name)
    assert letters(tmp_path / name) == rows


WIDE = ["RRGGBBKK"] * 4


def test_a_wide_picture_loses_its_sides_or_gains_white_bars(tmp_path: Path) -> None:
    for fit, rows in (("crop", ["GGBB"] * 4), ("pad", ["WWWW", "RGBK", "RGBK", "WWWW"])):
        folder = tmp_path / fit
        folder.mkdir()
        painted(WIDE).save(folder / "a.png")
        assert letters(folder / "a.png", fit) == rows


def test_a_tall_turned_picture_is_upright_before_it_is_made_square(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    for fit, rows in (("crop", ["GGGG", "GGGG", "BBBB", "BBBB"]), ("pad", ["WRRW", "WGGW", "WBBW", "WKKW"])):
        folder = tmp_path / fit
        folder.mkdir()
        upright = painted(["RRRR", "RRRR", "GGGG", "GGGG", "BBBB", "BBBB", "KKKK", "KKKK"])
        upright.rotate(-90, expand=True).save(folder / "a.png", exif=exif)
        assert letters(folder / "a.png", fit) == rows


def test_a_transparent_picture_is_padded_with_the_white_it_lies_on(tmp_path: Path) -> None:
    picture = painted(WIDE).convert("RGBA")
    picture.paste((0, 0, 0, 0), (0, 0, 8, 16))
    picture.save(tmp_path / "a.png")
    assert letters(tmp_path / "a.png", "pad") == ["WWWW", "WGBK", "WGBK", "WWWW"]


def cut_jpeg(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def swapped_ends(whole: bytes) -> bytes:
    return whole[::-1]


def web_page(_: bytes) -> bytes:
    return b"<html>404</html>"


@pytest.mark.parametrize("damage", [cut_jpeg, swapped_ends, web_page, lambda _: b""])
def test_a_damaged_picture_is_left_out_and_listed_and_the_others_keep_their_codes(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    folder = write_pictures(tmp_path / "pictures", 4)
    stream = io.BytesIO()
    painted(QUARTERS, 16).save(stream, "JPEG", quality=95)
    (folder / "broken.jpg").write_bytes(damage(stream.getvalue()))
    (folder / "broken.txt").write_text("a picture")
    source, out = open_source(f"folder:{folder}"), tmp_path / "out"
    manifest = encode(source, plain_tokenizer(), out, "all", shards=2, batch_size=2)
    assert manifest is not None and (manifest.samples, manifest.skipped) == (4, 1)
    (row,) = [json.loads(line) for line in (out / SKIPPED).read_text().splitlines()]
    assert row["key"].startswith("broken_jpg-")
    assert row["reason"].startswith(f"{folder / 'broken.jpg'} is not a readable picture: ")
    found = read(out, manifest)
    assert found.keys() == {"000.png", "001.png", "002.png", "003.png"}
    for name, rows in found.items():
        alone = tmp_path / name
        alone.mkdir()
        shutil.copy(folder / name, alone)
        assert letters(alone / name) == rows


def test_a_picture_under_a_wrong_name_is_read_for_what_it_is(tmp_path: Path) -> None:
    painted(QUARTERS).save(tmp_path / "a.jpg", "PNG")
    assert letters(tmp_path / "a.jpg") == QUARTERS
