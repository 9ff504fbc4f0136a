"""Pictures and captions: what is opened, what is listed, how it is split."""

import json
import struct
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from draftgrid.data.sources import EmojiSource, FolderSource, Item, open_picture, open_source, read_prompts
from tests.data_fixtures import write_pictures

SPLITS = ("train", "validation", "test")


def opened(path: Path, size: int = 16, **settings) -> np.ndarray:
    """(size, size, 3) uint8."""
    picture = open_picture(Item("k", "c", path, **settings), size)
    assert picture.mode == "RGB"
    return np.asarray(picture)


def test_a_palette_picture_with_transparency_lies_on_white(tmp_path: Path) -> None:
    picture = Image.new("P", (16, 16), 0)
    picture.putpalette([0, 0, 0, 255, 0, 0])
    picture.paste(1, (0, 0, 16, 8))  # upper half red, lower half the transparent black
    picture.save(tmp_path / "a.png", transparency=0)
    pixels = opened(tmp_path / "a.png")
    assert (pixels[:7] == [255, 0, 0]).all()
    assert (pixels[9:] == 255).all()


def test_half_transparent_pixels_are_mixed_with_white(tmp_path: Path) -> None:
    Image.new("RGBA", (16, 16), (0, 0, 0, 51)).save(tmp_path / "a.png")  # 51 / 255 = a fifth of black
    assert np.abs(opened(tmp_path / "a.png").astype(int) - 204).max() <= 1


@pytest.mark.parametrize(("orientation", "turn"), [(1, 0), (3, 180), (6, 90), (8, 270)])
def test_an_exif_rotated_photo_is_upright(tmp_path: Path, orientation: int, turn: int) -> None:
    """A viewer turns the stored picture clockwise by 180, 90 or 270 degrees; so it is stored turned the other way."""
    upright = Image.new("RGB", (16, 16), (0, 0, 255))
    upright.paste((255, 0, 0), (0, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright.rotate(turn).save(tmp_path / "a.jpg", exif=exif, quality=95, subsampling=0)  # counter-clockwise
    pixels = opened(tmp_path / "a.jpg").astype(int)
    assert (pixels[:6, :, 0] > 200).all() and (pixels[:6, :, 2] < 60).all()
    assert (pixels[10:, :, 2] > 200).all() and (pixels[10:, :, 0] < 60).all()


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_a_16_bit_grey_picture_keeps_its_tones(tmp_path: Path, name: str) -> None:
    values = np.linspace(0, 65535, 256).reshape(16, 16).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / name)
    pixels = opened(tmp_path / name).astype(float)
    assert np.abs(pixels - (values / 257)[..., None]).max() <= 0.5


def test_grey_bitonal_and_grey_alpha_pictures_are_read(tmp_path: Path) -> None:
    Image.new("L", (16, 16), 77).save(tmp_path / "l.png")
    Image.new("1", (16, 16), 1).save(tmp_path / "one.png")
    Image.new("LA", (16, 16), (0, 0)).save(tmp_path / "la.png")
    assert (opened(tmp_path / "l.png") == 77).all()
    assert (opened(tmp_path / "one.png") == 255).all()
    assert (opened(tmp_path / "la.png") == 255).all()


@pytest.mark.parametrize("name", ["a.jpg", "a.tif"])
def test_a_cmyk_picture_has_its_printed_colour(tmp_path: Path, name: str) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / name)  # magenta and yellow ink: red
    assert np.abs(opened(tmp_path / name).astype(int) - [255, 0, 0]).max() <= 3


def test_a_wide_picture_is_cropped_to_its_centre(tmp_path: Path) -> None:
    wide = Image.new("RGB", (48, 16), (255, 0, 0))
    wide.paste((0, 255, 0), (16, 0, 32, 16))
    wide.save(tmp_path / "a.png")
    assert (opened(tmp_path / "a.png") == [0, 255, 0]).all()


def test_a_wide_picture_is_padded_with_white(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20), (10, 20, 30)).save(tmp_path / "a.png")
    picture = np.asarray(open_picture(Item("a", "", tmp_path / "a.png"), 20, "pad"))
    assert (picture[:5] == 255).all() and (picture[15:] == 255).all()
    assert (picture[5:15] == (10, 20, 30)).all()


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_of_an_animated_picture_the_first_frame_is_taken(tmp_path: Path, kind: str) -> None:
    first, second = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
    first.save(tmp_path / f"a.{kind}", save_all=True, append_images=[second], duration=100)
    picture = np.asarray(open_picture(Item("a", "", tmp_path / f"a.{kind}"), 8)).astype(int)
    assert np.abs(picture - np.array([255, 0, 0])).max() <= 3


def test_a_picture_of_one_pixel_is_a_plain_surface(tmp_path: Path) -> None:
    Image.new("RGB", (1, 1), (9, 8, 7)).save(tmp_path / "a.png")
    picture = open_picture(Item("a", "", tmp_path / "a.png"), 8)
    assert (np.asarray(picture) == (9, 8, 7)).all() and picture.info["original_size"] == (1, 1)


def test_mirror_and_shift_move_pixels_where_they_say(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert (opened(tmp_path / "a.png") == pixels).all()
    assert (opened(tmp_path / "a.png", mirror=True) == pixels[:, ::-1]).all()
    moved = opened(tmp_path / "a.png", shift=(4, -2))  # right 4, up 2
    assert (moved[:14, 4:] == pixels[2:, :12]).all()
    assert (moved[14:] == 255).all() and (moved[:, :4] == 255).all()


def test_what_is_no_picture_is_refused_by_file_name(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("this is not a picture")
    (tmp_path / "empty.png").write_bytes(b"")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:2000])
    Image.fromarray(np.zeros((8, 8), dtype=np.float32)).save(tmp_path / "float.tif")
    for name in ("text.png", "empty.png", "cut.png", "float.tif", "missing.png"):
        with pytest.raises(ValueError, match=f"{name} is not a readable picture"):
            opened(tmp_path / name)


@pytest.mark.parametrize("error", [struct.error("bad EXIF"), TypeError("bad tag"), SyntaxError("broken PNG")])
def test_whatever_a_decoder_raises_on_a_damaged_file_the_file_is_named(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(_: Image.Image) -> Image.Image:
        raise error

    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    monkeypatch.setattr(ImageOps, "exif_transpose", damaged)
    with pytest.raises(ValueError, match=r"a\.png is not a readable picture: b"):
        opened(tmp_path / "a.png")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_damaged_anywhere_is_read_or_refused_but_never_a_crash(tmp_path: Path, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 255, (12, 12, 3), dtype=np.uint8)
    path = tmp_path / f"a.{kind.lower()}"
    Image.fromarray(pixels).save(path, kind, exif=exif)
    whole, rng = path.read_bytes(), np.random.default_rng(1)
    for trial in range(80):
        damaged = bytearray(whole[: rng.integers(len(whole))] if trial % 4 == 0 else whole)
        for _ in range(3):
            if damaged:
                damaged[rng.integers(min(len(damaged), 150))] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            opened(path)
        except ValueError as error:
            assert path.name in str(error)


@pytest.fixture(scope="module")
def emoji() -> dict[str, list[Item]]:
    return {split: EmojiSource().items(split) for split in SPLITS}


def concept(caption: str) -> str:
    """The caption without '(medium-)light|dark skin tone' and 'facing right', word by word."""
    words: list[str] = []
    for word in caption.split():
        words.append(word)
        if words[-2:] == ["skin", "tone"] and len(words) > 2:
            del words[-3:]
        if words[-2:] == ["facing", "right"]:
            del words[-2:]
    return " ".join(words).casefold()


def test_emoji_holds_3953_captioned_pictures_each_in_one_split(emoji: dict[str, list[Item]]) -> None:
    everything = [item for split in SPLITS for item in emoji[split]]
    assert len(everything) == 3953
    assert len({item.key for item in everything}) == 3953
    assert all(item.caption and "_" not in item.caption and item.path.is_file() for item in everything)


def test_emoji_splits_share_no_concept(emoji: dict[str, list[Item]]) -> None:
    places = defaultdict(set)
    for split in SPLITS:
        for item in emoji[split]:
            places[concept(item.caption)].add(split)
    assert [name for name, splits in places.items() if len(splits) > 1] == []
    assert len(places) < 2000  # about half of the pictures are variants of others
    for split, low, high in (("train", 0.82, 0.94), ("validation", 0.03, 0.1), ("test", 0.03, 0.1)):
        assert low < sum(splits == {split} for splits in places.values()) / len(places) < high


def test_emoji_copies_are_for_training_only_and_have_their_own_keys(emoji: dict[str, list[Item]]) -> None:
    source = EmojiSource(copies=8)
    train = source.items("train")
    assert len(train) == 8 * len(emoji["train"])
    assert len({item.key for item in train}) == len(train)
    originals = [item for item in train if not item.mirror and item.shift == (0, 0)]
    assert {item.key for item in emoji["train"]} <= {item.key for item in originals}
    assert all(max(map(abs, item.shift)) <= 4 for item in train)
    assert source.items("validation") == emoji["validation"]
    assert source.items("test") == emoji["test"]


def test_no_caption_that_a_mirror_would_falsify_is_mirrored() -> None:
    mirrored = {item.caption for item in EmojiSource(copies=8).items("train") if item.mirror}
    assert len(mirrored) > 1000
    words = (
        "left",
        "right",
        "clockwise",
        "button",
        "flag",
        "keycap",
        "letter",
        "o’clock",
        "waxing",
        "waning",
        "quarter",
    )
    assert [c for c in sorted(mirrored) if any(word in c.casefold() for word in words)] == []


def test_emoji_refuses_an_unknown_split_and_no_copy_at_all() -> None:
    with pytest.raises(ValueError, match="'dev'; emoji has train, validation, test"):
        EmojiSource().items("dev")
    with pytest.raises(ValueError, match="copies is 0"):
        EmojiSource(copies=0)


def png(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4)).save(path)
    return path


def test_captions_come_from_metadata_and_from_sidecars(tmp_path: Path) -> None:
    png(tmp_path / "a.png")
    png(tmp_path / "sub" / "b.PNG")
    png(tmp_path / "c.png")
    png(tmp_path / "uncaptioned.png")
    png(tmp_path / "both.png")
    (tmp_path / "c.txt").write_text("  from a sidecar\n", encoding="utf-8")
    (tmp_path / "both.txt").write_text("not this one")
    (tmp_path / "notes.txt").write_text("of no picture")
    rows = [
        {"file_name": "a.png", "text": "from metadata"},
        {"file_name": "./sub/b.PNG", "caption": "by another name"},
        {"file_name": "both.png", "text": "metadata wins"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    captions = {i.path.relative_to(tmp_path).as_posix(): i.caption for i in FolderSource(tmp_path).items("all")}
    assert captions == {
        "a.png": "from metadata",
        "both.png": "metadata wins",
        "c.png": "from a sidecar",
        "sub/b.PNG": "by another name",
    }


def test_unusual_captions_survive(tmp_path: Path) -> None:
    """A byte-order mark, blank lines, Windows line ends, and a line separator within a caption."""
    png(tmp_path / "a.png")
    png(tmp_path / "b.png")
    png(tmp_path / "c.png")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    first = json.dumps({"file_name": "a.png", "text": "one\u2028two\x85 é"}, ensure_ascii=False)
    second = json.dumps({"file_name": "b.png", "text": "tab\there"})
    (tmp_path / "metadata.jsonl").write_bytes(f"\ufeff{first}\r\n\r\n{second}\r\n\r\n".encode())
    captions = [item.caption for item in FolderSource(tmp_path).items("all")]
    assert captions == ["one\u2028two\x85 é", "tab\there", "with a mark"]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"text": "no file name"}',
        '{"file_name": "b.png"}',
        '{"file_name": "b.png", "text": null}',
        "[1]",
        "3",
    ],
)
def test_a_bad_metadata_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    png(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metadata\.jsonl line 3 needs file_name and text"):
        FolderSource(tmp_path).items("all")


def test_a_picture_that_metadata_names_but_that_is_missing_is_not_passed_over(tmp_path: Path) -> None:
    png(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "a.png", "text": "here"}\n{"file_name": "gone.png", "text": "not here"}\n'
    )
    items = FolderSource(tmp_path).items("all")
    assert [item.caption for item in items] == ["here", "not here"]
    with pytest.raises(ValueError, match=r"gone\.png is not a readable picture"):
        open_picture(items[1], 16)


def test_keys_of_a_folder_are_unique_short_and_stable(tmp_path: Path) -> None:
    names = ["a b.png", "a_b.png", "a/b.png", "猫.png", "犬.png", "x" * 150 + "1.png", "x" * 150 + "2.png", "a.b.png"]
    for name in names:
        png(tmp_path / name).with_suffix(".txt").write_text(name)
    items = FolderSource(tmp_path).items("all")
    assert sorted(item.caption for item in items) == sorted(names)
    keys = {item.caption: item.key for item in items}
    assert len(set(keys.values())) == len(names)
    assert all(len(key) <= 80 and key.isascii() and "." not in key and "/" not in key for key in keys.values())
    png(tmp_path / "zzz.png").with_suffix(".txt").write_text("zzz")
    assert {i.caption: i.key for i in FolderSource(tmp_path).items("all") if i.caption != "zzz"} == keys


def test_folder_splits_are_disjoint_complete_and_keep_equal_captions_together(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "pictures", 200, size=4)
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        row["text"] = f"caption {i // 2}"
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    source = FolderSource(folder)
    parts = {split: source.items(split) for split in SPLITS}
    every = [item.key for split in SPLITS for item in parts[split]]
    assert len(every) == len(set(every)) == 200
    assert {item.key for item in source.items("all")} == set(every)
    captions = {split: {item.caption for item in parts[split]} for split in SPLITS}
    assert sum(len(c) for c in captions.values()) == 100
    assert len(parts["train"]) > 160


def test_a_source_that_does_not_exist_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist"):
        open_source(f"folder:{tmp_path / 'nowhere'}")
    with pytest.raises(ValueError, match=r"source is 'emojy'; use emoji, folder:PATH"):
        open_source("emojy")
    with pytest.raises(ValueError, match="copies is 3"):
        open_source(f"folder:{tmp_path}", copies=3)
    with pytest.raises(ValueError, match="no captioned picture in split 'all'"):
        open_source(f"folder:{tmp_path}").count("all")
    with pytest.raises(ValueError, match=r"split is 'dev'; a folder has train, validation, test, all"):
        open_source(str(tmp_path)).items("dev")
    assert isinstance(open_source("emoji"), EmojiSource)


def test_prompts_come_from_lines_a_json_list_or_an_emoji_split(tmp_path: Path, emoji: dict[str, list[Item]]) -> None:
    (tmp_path / "p.txt").write_bytes("\ufeffa cat, a dog\r\n\r\n  [x] = é \n".encode())
    assert read_prompts(str(tmp_path / "p.txt")) == ["a cat, a dog", "[x] = é"]
    (tmp_path / "p.json").write_text('["one", " ", "two\\nlines"]')
    assert read_prompts(str(tmp_path / "p.json")) == ["one", "two\nlines"]
    assert read_prompts("emoji:test") == [item.caption for item in emoji["test"]]


def test_prompts_that_are_not_there_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompts is 'a red cat'; it is neither a text file nor emoji:"):
        read_prompts("a red cat")
    (tmp_path / "p.txt").write_text("\n  \n")
    with pytest.raises(ValueError, match=r"p\.txt holds no prompt"):
        read_prompts(str(tmp_path / "p.txt"))
    for content in ('{"a": 1}', "5", "[1, 2]"):
        (tmp_path / "p.json").write_text(content)
        with pytest.raises(ValueError, match=r"p\.json must hold a list of texts"):
            read_prompts(str(tmp_path / "p.json"))
    with pytest.raises(ValueError, match="split is 'dev'"):
        read_prompts("emoji:dev")


def test_only_line_ends_end_a_prompt_and_half_a_character_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("one\u2028two\fthree\r\nfour\x85\x0bfive\rsix".encode())
    assert read_prompts(str(tmp_path / "p.txt")) == ["one\u2028two\fthree", "four\x85\x0bfive", "six"]
    (tmp_path / "p.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"p\.txt is not UTF-8 text"):
        read_prompts(str(tmp_path / "p.txt"))
    (tmp_path / "p.json").write_text(r'["fine", "a \ud800 cat"]')
    with pytest.raises(ValueError, match=r"^.*p\.json prompt 2 holds '\\ud800', half of a surrogate pair; [^\n]*$"):
        read_prompts(str(tmp_path / "p.json"))
    (tmp_path / "p.json").write_text(r'["\ud83d\ude00"]')
    assert read_prompts(str(tmp_path / "p.json")) == ["\U0001f600"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "café".encode("latin-1"), r"a\.txt is not UTF-8 text"),
        (
            "metadata.jsonl",
            '{"file_name": "a.png", "text": "é"}'.encode("latin-1"),
            r"metadata\.jsonl is not UTF-8 text",
        ),
        ("metadata.jsonl", rb'{"file_name": "a.png", "text": "\ud800"}', r"metadata\.jsonl line 1 .* surrogate pair"),
    ],
)
def test_captions_that_are_no_text_are_refused_by_file(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    png(tmp_path / "a.png")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        FolderSource(tmp_path).items("all")


def test_hidden_files_are_passed_over_and_links_followed_once(tmp_path: Path) -> None:
    for name in (".hidden/1.png", "__MACOSX/2.png", "._3.png", "sub/.4.png", "sub/5.png"):
        png(tmp_path / "set" / name).with_suffix(".txt").write_text(name)
    png(tmp_path / "elsewhere" / "6.png").with_suffix(".txt").write_text("linked")
    (tmp_path / "set" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "sub" / "loop").symlink_to(tmp_path / "set" / "sub")
    assert [item.caption for item in FolderSource(tmp_path / "set").items("all")] == ["linked", "sub/5.png"]
