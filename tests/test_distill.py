"""Self-distillation: the backbone's own pictures as shards, one a prompt and the same bytes whatever interrupts."""

import os
import shutil
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftgrid.data import encode as encode_module
from draftgrid.data import verify
from draftgrid.data.config import StreamConfig
from draftgrid.data.encode import PARTS
from draftgrid.data.module import TokenDataModule
from draftgrid.data.shards import MANIFEST, Manifest, Sample, check_manifest, read_manifest
from draftgrid.eval import distill as distill_module
from draftgrid.eval.decoders import DecodeResult, decode
from draftgrid.eval.distill import check_exact
from draftgrid.eval.generate import GenerateConfig
from draftgrid.eval.generate import run as generate
from draftgrid.eval.setup import Loaded, parse_decoder
from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.mtp import MTPHeads, new_heads
from draftgrid.heads.tokenizers import load_tokenizer
from tests.conftest import World
from tests.data_fixtures import files, read_shard, write_set

PROMPTS = [f"{number} {thing}" for number in range(1, 11) for thing in ("red apple", "big dog")]
FORK = get_context("fork")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A forked child of a process whose thread pool has started would wait for it for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def keys(world: World) -> dict[str, object]:
    (world.root / "twenty.txt").write_text("\n".join(PROMPTS))
    return {
        "backbone": str(world.backbone),
        "prompts": str(world.root / "twenty.txt"),
        "decoder": "ar",
        "heads": "",
        "save": "shards",
        "shards": 3,
        "batch_size": 1,
        "device": "cpu",
    }


def draw(keys: dict[str, object], out: Path, **more: object) -> None:
    generate(GenerateConfig(**{**keys, **more}, out=str(out)))  # type: ignore[arg-type]


def samples_of(out: Path) -> list[Sample]:
    manifest = read_manifest(out)
    samples = [s for shard in manifest.shards for s in read_shard(out / shard.file, shard.samples)]
    assert all(isinstance(s, Sample) for s in samples)
    return samples  # type: ignore[return-value]


@pytest.fixture(scope="module")
def whole(keys: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run, by one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    draw(keys, out)
    torch.set_num_threads(threads)
    return out


def blocks(out: Path) -> list[str]:
    return sorted(p.name for p in (out / PARTS).glob("*") if not p.name.startswith("."))


def test_every_prompt_has_one_picture_of_its_own(whole: Path, world: World) -> None:
    samples = samples_of(whole)
    assert [s.caption for s in samples] == PROMPTS
    assert [s.key for s in samples] == [f"{i:08d}" for i in range(20)]
    assert [s.metadata for s in samples] == [{"source": "self", "number": i} for i in range(20)]
    assert len({s.tokens.tobytes() for s in samples}) == 20
    assert [shard.samples for shard in read_manifest(whole).shards] == [7, 7, 6]
    assert sorted(files(whole)) == ["manifest.json", "plan.json", *(f"shard-{i:06d}.tar" for i in range(3))]
    assert verify.verify(whole) == []
    check_manifest(whole, load_tokenizer(world.backbone).fingerprint, (4, 4))


@pytest.mark.parametrize(
    ("text", "batch_size", "settings"),
    [
        ("ar", 1, {}),
        ("ar", 8, {"guidance": 2.0, "temperature": 0.8, "top_k": 5, "top_p": 0.9}),
        ("scd:coupling=gumbel", 8, {}),
        ("ssd_coupled:window=4", 20, {"guidance": 2.0}),
    ],
)
def test_the_codes_are_what_the_decoder_draws_for_these_prompts_and_this_seed(
    keys: dict[str, object], world: World, tmp_path: Path, text: str, batch_size: int, settings: dict[str, float]
) -> None:
    backbone = load_backbone(world.backbone)
    heads = new_heads(HeadsConfig(right=2), backbone, seed=4)
    heads.save_pretrained(tmp_path / "heads")
    draft = MTPHeads.from_pretrained(tmp_path / "heads", backbone) if text.startswith("ssd") else None
    draw(keys, tmp_path / "out", decoder=text, heads=str(tmp_path / "heads"), batch_size=batch_size, seed=3, **settings)
    decoder = parse_decoder(text)
    expected = []
    for first in range(0, 20, batch_size):
        part = PROMPTS[first : first + batch_size]
        numbers = range(first, first + len(part))
        result = decode(
            backbone, part, draft, decoder=decoder.name, seed=3, samples=numbers, **settings, **decoder.settings
        )
        expected += result.tokens.tolist()
    assert [s.tokens.tolist() for s in samples_of(tmp_path / "out")] == expected


def test_the_manifest_says_how_the_backbone_was_sampled(keys: dict[str, object], world: World, tmp_path: Path) -> None:
    settings = {"guidance": 2.0, "temperature": 0.9, "top_k": 5, "top_p": 0.95, "seed": 3}
    draw(keys, tmp_path / "out", images=2, decoder="scd:window=4", **settings)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.sampling == settings | {
        "backbone": load_backbone(world.backbone).fingerprint,
        "decoder": "scd:window=4",
        "heads": {},
    }
    assert (manifest.source, manifest.split, manifest.codes, manifest.grid) == ("self:backbone", "train", 24, (4, 4))
    # Of 20 prompts the two that are spread evenly
    assert [s.caption for s in samples_of(tmp_path / "out")] == [PROMPTS[0], PROMPTS[10]]


def test_other_heads_are_told_from_these(keys: dict[str, object], world: World, tmp_path: Path) -> None:
    backbone = load_backbone(world.backbone)
    digests = []
    for seed in (0, 0, 1):
        new_heads(HeadsConfig(right=2), backbone, seed).save_pretrained(tmp_path / "heads")
        out = tmp_path / f"out{len(digests)}"
        draw(keys, out, images=1, decoder="ssd_coupled", heads=str(tmp_path / "heads"))
        digests.append(read_manifest(out).sampling["heads"]["offsets"])  # type: ignore[index]
    assert digests[0] == digests[1] != digests[2]


def test_one_prompt_is_drawn_as_often_as_it_is_asked_for(keys: dict[str, object], tmp_path: Path) -> None:
    draw(keys, tmp_path / "out", prompt="a red apple", images=5)
    samples = samples_of(tmp_path / "out")
    assert [s.caption for s in samples] == ["a red apple"] * 5
    assert len({s.tokens.tobytes() for s in samples}) == 5


def dying(count: int, function: Callable) -> Callable:
    """The function, whose call number `count` is the process's last."""
    calls = 0

    def wrapped(*arguments: object, **settings: object) -> object:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **settings)

    return wrapped


def killed(keys: dict[str, object], out: Path) -> None:
    process = FORK.Process(target=draw, args=(keys, out))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of all pictures drawn from now on."""
    numbers: list[int] = []
    plain = Loaded.draw

    def noted(self: Loaded, decoder: object, part: range, *more: object) -> DecodeResult:
        numbers.extend(part)
        return plain(self, decoder, part, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Loaded, "draw", noted)
    return numbers


def test_a_run_killed_after_7_of_20_goes_on_to_the_same_bytes(
    keys: dict[str, object], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Loaded, "draw", dying(8, Loaded.draw))
        killed(keys, out)
    assert blocks(out) == [f"block-{i:08d}.npy" for i in range(7)]
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        read_manifest(out)
    numbers = counted(monkeypatch)
    draw(keys, out)
    assert numbers == list(range(7, 20))
    assert files(out) == files(whole)


@pytest.mark.parametrize(("batch_size", "kept"), [(1, 7), (3, 6)])
def test_a_run_that_fails_after_7_of_20_draws_only_the_blocks_it_lacks(
    keys: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int, kept: int
) -> None:
    draw(keys, tmp_path / "whole", batch_size=batch_size)
    out, plain = tmp_path / "out", Loaded.draw

    def failing(self: Loaded, decoder: object, part: range, *more: object) -> DecodeResult:
        if part.stop > 7:
            raise RuntimeError("out of memory")
        return plain(self, decoder, part, *more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Loaded, "draw", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            draw(keys, out, batch_size=batch_size)
    assert blocks(out) == [f"block-{i:08d}.npy" for i in range(0, kept, batch_size)]
    numbers = counted(monkeypatch)
    draw(keys, out, batch_size=batch_size)
    assert numbers == list(range(kept, 20))
    assert [s.key for s in samples_of(out)] == [f"{i:08d}" for i in range(20)]
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.parametrize("point", ["in a block", "in a tar", "before the manifest", "behind the manifest"])
def test_a_kill_while_writing_leaves_no_trace(
    keys: dict[str, object], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        if point == "in a block":
            patch.setattr(np, "save", dying(4, np.save))
        elif point == "in a tar":
            patch.setattr(tarfile.TarFile, "addfile", dying(30, tarfile.TarFile.addfile))
        elif point == "before the manifest":
            patch.setattr(Manifest, "save", dying(1, Manifest.save))
        else:
            patch.setattr(distill_module, "read_manifest", dying(1, read_manifest))
            patch.setattr("shutil.rmtree", lambda *_, **__: None)
        killed(keys, out)
    assert (out / MANIFEST).is_file() == (point == "behind the manifest")
    draw(keys, out)
    assert files(out) == files(whole)


def test_a_finished_run_is_not_drawn_again(
    keys: dict[str, object], whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, numbers = files(whole), counted(monkeypatch)
    draw(keys, whole)
    assert numbers == [] and files(whole) == before
    assert f"20 samples in 3 shards: {whole}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"guidance": 2.0}, "guidance: 1.0 there, 2.0 here"),
        ({"decoder": "scd"}, "decoder: 'ar' there, 'scd' here"),
        ({"batch_size": 2}, "batch_size: 1 there, 2 here"),
        ({"shards": 2}, "shards: 3 there, 2 here"),
        ({"images": 19}, "prompts: '20:.*' there, '19:.*' here"),
    ],
)
@pytest.mark.parametrize("state", ["finished", "packing", "drawing"])
def test_other_settings_in_the_same_folder_are_refused(
    keys: dict[str, object],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    change: dict[str, object],
    named: str,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    held = {name: content for name, content in files(whole).items() if state == "finished" or name != MANIFEST}
    for name, content in held.items():
        if state != "drawing" or name == "plan.json":
            (out / name).write_bytes(content)
    if state != "finished":
        (out / PARTS).mkdir()
        np.save(out / PARTS / "block-00000000.npy", np.zeros((1, 4, 4), np.uint32))
    before = files(out)
    monkeypatch.setattr(Loaded, "draw", lambda *_, **__: pytest.fail("drawn"))
    with pytest.raises(ValueError, match=f"{out} holds .*{named}.*; choose another out, or overwrite=true"):
        draw(keys, out, **change)
    assert files(out) == before


def test_a_finetuned_backbone_is_not_taken_for_the_one_before(
    keys: dict[str, object], world: World, tmp_path: Path
) -> None:
    """Its embedding, LM head and final norm, and so its fingerprint, may be the same."""
    draw(keys, tmp_path / "out", images=2)
    before = files(tmp_path / "out")
    folder = tmp_path / "finetuned"
    shutil.copytree(world.backbone, folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    name = next(n for n in weights if "layers.0.mlp" in n)
    weights[name] = weights[name] * 1.01
    save_file(weights, file, {"format": "pt"})
    assert load_backbone(folder).fingerprint == load_backbone(world.backbone).fingerprint
    with pytest.raises(ValueError, match=r"holds another encode .*weights: '[0-9a-f]{16}' there, '[0-9a-f]{16}' here"):
        draw(keys, tmp_path / "out", images=2, backbone=str(folder))
    assert files(tmp_path / "out") == before


def test_overwriting_leaves_nothing_of_the_other(keys: dict[str, object], whole: Path, tmp_path: Path) -> None:
    draw(keys, tmp_path / "out", seed=1, shards=5)
    assert samples_of(tmp_path / "out")[0].tokens.tolist() != samples_of(whole)[0].tokens.tolist()
    draw(keys, tmp_path / "out", overwrite=True)
    assert files(tmp_path / "out") == files(whole)


def test_the_old_set_is_kept_until_the_new_one_stands(
    keys: dict[str, object], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    draw(keys, out)
    with monkeypatch.context() as patch:
        patch.setattr(Loaded, "draw", dying(8, Loaded.draw))
        process = FORK.Process(target=draw, args=(keys, out), kwargs={"seed": 1, "overwrite": True})
        process.start()
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(blocks(out)) == 7 and files(out / ".old") == files(whole)
    draw(keys, out, seed=1)
    draw(keys, tmp_path / "fresh", seed=1)
    assert files(out) == files(tmp_path / "fresh") != files(whole)


def test_process_0_waits_for_one_that_draws_and_not_for_a_dead_one(
    keys: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_module, "GIVE_UP", 1.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"out/\.parts/block-00000001\.npy is not finished, .* no sign for 1 s; see"):
        draw(keys, out, images=2)

    def slow() -> None:
        """Its block takes longer than process 0 waits without a sign; each of its four rows gives one."""
        os.environ["RANK"] = "1"
        plain = Loaded.draw

        def row_by_row(self: Loaded, decoder: object, part: range, seed: int, told: Callable | None) -> DecodeResult:
            def wait(*row: object) -> None:
                time.sleep(0.5)
                assert told is not None
                told(*row)

            return plain(self, decoder, part, seed, wait)  # type: ignore[arg-type]

        Loaded.draw = row_by_row  # type: ignore[method-assign, assignment]
        draw(keys, out, images=2)

    process = FORK.Process(target=slow)
    process.start()
    draw(keys, out, images=2)
    process.join(60)
    assert process.exitcode == 0
    monkeypatch.delenv("WORLD_SIZE")
    draw(keys, tmp_path / "alone", images=2)
    assert files(out) == files(tmp_path / "alone")


def test_a_folder_of_encoded_pictures_is_not_taken(keys: dict[str, object], tmp_path: Path) -> None:
    write_set(tmp_path / "out", [3])
    before = files(tmp_path / "out")
    with pytest.raises(ValueError, match=r"out holds .*; choose another out, or overwrite=true"):
        draw(keys, tmp_path / "out")
    assert files(tmp_path / "out") == before


@pytest.mark.parametrize("text", ["ssd:rounds=2", "gsd", "lantern:neighbours=3"])
def test_a_lossy_decoder_is_refused_by_name_before_anything_is_loaded(
    keys: dict[str, object], tmp_path: Path, text: str
) -> None:
    with pytest.raises(ValueError, match=rf"^decoder {text} is lossy: .* needs an exact one \(ar, scd, ssd_coupled"):
        draw(keys, tmp_path / "out", decoder=text, backbone="no such folder")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["ar", "sjd", "scd", "gumbel_fixed_point", "mtp1d", "ssd_coupled"])
def test_every_exact_decoder_may_draw(text: str) -> None:
    check_exact(parse_decoder(text))


def test_bad_settings_are_refused_by_their_value(keys: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shards is 0; use a finite number of at least 1"):
        draw(keys, tmp_path / "out", shards=0)
    with pytest.raises(ValueError, match="save is 'tars'; use pictures or shards"):
        draw(keys, tmp_path / "out", save="tars")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_two_processes_give_the_bytes_of_one_and_draw_half_each(
    keys: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    draw(keys, tmp_path / "one", batch_size=batch_size)
    out = tmp_path / "two"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    second = FORK.Process(target=draw, args=(keys, out), kwargs={"batch_size": batch_size})
    second.start()
    monkeypatch.setenv("RANK", "0")
    numbers = counted(monkeypatch)
    draw(keys, out, batch_size=batch_size)
    second.join(60)
    assert second.exitcode == 0
    assert files(out) == files(tmp_path / "one")
    assert numbers == [i for i in range(20) if i // batch_size % 2 == 0]


def test_a_process_that_is_late_to_see_the_end_does_not_draw_again(
    keys: dict[str, object], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1, restarted with its share done, looks at its blocks while process 0 finishes and removes them."""
    out, plain = tmp_path / "out", distill_module._block
    draw(keys, out)
    manifest = (out / MANIFEST).read_bytes()
    (out / MANIFEST).unlink()

    def meanwhile(folder: Path, numbers: range) -> Path:
        (out / MANIFEST).write_bytes(manifest)
        return plain(folder, numbers)

    monkeypatch.setattr(distill_module, "_block", meanwhile)
    monkeypatch.setattr(Loaded, "draw", lambda *_, **__: pytest.fail("drawn again"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    draw(keys, out)
    assert files(out) == files(whole)


def test_its_pictures_stream_beside_real_ones(whole: Path, world: World) -> None:
    config = StreamConfig(
        dir=str(world.data), mix={str(whole): 1.0}, batch_size=10, workers=0, caption_dropout=0.0, validation_samples=1
    )
    backbone = load_backbone(world.backbone)
    grid = (backbone.grid.height, backbone.grid.width)
    module = TokenDataModule(config, load_tokenizer(world.backbone).fingerprint, grid)
    drawn = {s.key: s for s in samples_of(whole)}
    seen = []
    for batch, _ in zip(module.train_dataloader(), range(5), strict=False):
        assert 4 <= batch.origins.count(str(whole)) <= 6
        for key, tokens, caption, origin in zip(batch.keys, batch.tokens, batch.captions, batch.origins, strict=True):
            if origin == str(whole):
                assert (tokens.tolist(), caption) == (drawn[key].tokens.tolist(), drawn[key].caption)
                seen.append(key)
    assert sorted(seen[:20]) == sorted(drawn)
