"""The training stream: every sample once an epoch, the same order every time, and resume to the very next batch."""

import io
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from draftgrid.data.config import StreamConfig
from draftgrid.data.module import TokenDataModule
from draftgrid.data.shards import Manifest, Sample, write_shard
from draftgrid.data.stream import Batch, FiniteStream, ShardSet, Split, TokenStream
from draftgrid.heads.prompts import Unconditional
from tests.data_fixtures import TOKENIZER, all_keys, sample, write_set


def stream_of(
    folder: Path,
    manifest: Manifest,
    batch_size: int,
    seed: int = 0,
    caption_dropout: float = 0.0,
    rank: int = 0,
    world: int = 1,
    start: int = 0,
) -> TokenStream:
    return TokenStream(
        [ShardSet(str(folder), manifest)], Split(world, 1, batch_size), seed, caption_dropout, rank, start
    )


def dropped_keys(batch: Batch) -> list[str]:
    return [k for k, c in zip(batch.keys, batch.captions, strict=True) if isinstance(c, Unconditional)]


def take(stream: TokenStream | FiniteStream, count: int | None = None, workers: int = 0) -> list[Batch]:
    if isinstance(stream, TokenStream):
        stream.split = replace(stream.split, workers=max(1, workers))
    return list(itertools.islice(DataLoader(stream, batch_size=None, num_workers=workers), count))


def keys(batches: list[Batch]) -> list[str]:
    return [key for batch in batches for key in batch.keys]


def same(a: Batch, b: Batch) -> bool:
    return torch.equal(a.tokens, b.tokens) and (a.captions, a.keys, a.broken) == (b.captions, b.keys, b.broken)


def test_a_batch_holds_the_codes_and_captions_of_its_keys(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, write_set(tmp_path, [4, 3], grid=(2, 5)), batch_size=3)
    for batch in take(stream, 5):
        assert batch.tokens.shape == (3, 2, 5)
        assert batch.tokens.dtype == torch.int64
        for tokens, caption, key in zip(batch.tokens, batch.captions, batch.keys, strict=True):
            shard, index = int(key[1]), int(key[3:])
            assert tokens.tolist() == sample(shard, index, (2, 5)).tokens.tolist()
            assert caption == f"caption {shard} {index}"


def test_shards_are_webdataset_tars(tmp_path: Path) -> None:
    import webdataset as wds

    write_set(tmp_path, [4])
    with open(tmp_path / "shard-000000.tar", "rb") as stream:
        files = wds.tariterators.tar_file_iterator(stream)
        rows = list(wds.tariterators.group_by_keys({**f, "__url__": "x"} for f in files))
    assert [row["__key__"] for row in rows] == all_keys([4])
    for i, row in enumerate(rows):
        assert np.load(io.BytesIO(row["tokens.npy"])).tolist() == sample(0, i).tokens.tolist()
        assert row["txt"].decode() == f"caption 0 {i}" and json.loads(row["json"]) == {"file": "x.png"}


def test_order_is_a_function_of_the_seed(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [5, 5, 5, 5])

    def order(seed: int) -> list[str]:
        return keys(take(stream_of(tmp_path, manifest, 4, seed), 15))

    assert order(0) == order(0)
    assert order(1) == order(1)
    assert order(0)[:20] != order(1)[:20]
    # Three epochs, each in another order.
    epochs = [order(0)[20 * e : 20 * e + 20] for e in range(3)]
    assert all(sorted(epoch) == all_keys([5, 5, 5, 5]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != sorted(epochs[0])


def test_the_seed_orders_the_shards_and_drops_captions_too(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [5] * 8)
    shard_orders, dropped = set(), set()
    for seed in range(4):
        epoch = take(stream_of(tmp_path, manifest, 5, seed, caption_dropout=0.5), 8)
        shard_orders.add(tuple(batch.keys[0][1] for batch in epoch))
        dropped.add(frozenset(k for b in epoch for k in dropped_keys(b)))
    assert len(shard_orders) == len(dropped) == 4


SETS = [[7, 3, 1], [5, 5, 5], [9], [4, 4, 4, 4, 4, 4, 4, 4, 4], [1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize("sizes", SETS)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 3), (2, 0), (2, 4)])
def test_an_epoch_is_divided_in_equal_parts_and_leaves_less_than_one_sample_a_reader(
    tmp_path: Path, sizes: list[int], ranks: int, workers: int
) -> None:
    manifest = write_set(tmp_path, sizes)
    each = max(workers, 1)
    readers, part = ranks * each, sum(sizes) // (ranks * each)
    seen: list[str] = []
    for rank in range(ranks):
        seen += keys(take(stream_of(tmp_path, manifest, 1, seed=3, rank=rank, world=ranks), part * each, workers))
    assert len(set(seen)) == len(seen) == part * readers > sum(sizes) - readers
    assert set(seen) <= set(all_keys(sizes))


def test_every_rank_makes_equal_steps_and_none_hangs(tmp_path: Path) -> None:
    """3 shards of 7, 3 and 1 samples, 2 ranks x 4 workers: any number of full batches on either rank."""
    manifest = write_set(tmp_path, [7, 3, 1])
    steps = []
    for rank in range(2):
        batches = take(stream_of(tmp_path, manifest, 3, rank=rank, world=2), 25, workers=4)
        assert all(len(batch.keys) == 3 for batch in batches)
        steps.append(len(batches))
    assert steps == [25, 25]


def test_over_many_epochs_no_sample_is_favoured(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [4, 4, 3])
    counts: Counter[str] = Counter()
    for rank in range(2):
        counts.update(keys(take(stream_of(tmp_path, manifest, 1, rank=rank, world=2), 5 * 100)))
    # 100 epochs of 10, each without another sample: 91 of each, with a standard deviation of 2.9.
    assert set(counts) == set(all_keys([4, 4, 3])) and sum(counts.values()) == 1000
    assert min(counts.values()) >= 80


@pytest.mark.parametrize("sizes", [[7, 3, 1], [2] * 9])
def test_a_loader_with_workers_hands_out_the_readers_batches_in_turn(tmp_path: Path, sizes: list[int]) -> None:
    """Rank 1 of 2 with 3 workers reads what readers 3, 4, 5 of 6 read in one process each."""
    manifest = write_set(tmp_path, sizes)
    loaded = take(stream_of(tmp_path, manifest, 2, seed=5, caption_dropout=0.3, rank=1, world=2), 12, workers=3)
    for worker in range(3):
        alone = take(stream_of(tmp_path, manifest, 2, seed=5, caption_dropout=0.3, rank=3 + worker, world=6), 4)
        assert all(same(a, b) for a, b in zip(loaded[worker::3], alone, strict=True))


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_a_resumed_stream_goes_on_with_the_very_next_batch(tmp_path: Path, workers: int) -> None:
    """Over several epochs, captions dropped and a broken sample counted: bit for bit."""
    manifest = write_set(tmp_path, [7, 3, 1, 6])
    odd = [sample(3, i) if i != 2 else Sample("s3-bad", np.zeros((3, 4), dtype=int), "c") for i in range(6)]
    shards = (*manifest.shards[:3], write_shard(tmp_path / "shard-000003.tar", odd, 64))
    manifest = replace(manifest, shards=shards)

    def stream(start: int) -> TokenStream:
        return stream_of(tmp_path, manifest, 2, seed=11, caption_dropout=0.4, rank=1, world=2, start=start)

    whole = take(stream(0), 40, workers)
    assert sum(isinstance(c, Unconditional) for b in whole for c in b.captions) > 10
    assert sum(b.broken for b in whole) > 1
    assert len({k for b in whole for k in b.keys}) < len(keys(whole)) / 2  # several epochs
    for start in (1, 2, 3, 4, 5, 17, 30):
        resumed = take(stream(start), 10, workers)
        assert all(same(a, b) for a, b in zip(resumed, whole[start : start + 10], strict=True)), start


def test_captions_are_dropped_in_their_share_and_always_the_same(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [50, 50])

    def captions(share: float) -> list[str | Unconditional]:
        return [c for b in take(stream_of(tmp_path, manifest, 10, 0, share), 40) for c in b.captions]

    dropped = [isinstance(c, Unconditional) for c in captions(0.25)]
    # 400 draws: a share of .25 has a standard deviation of .022
    assert abs(sum(dropped) / 400 - 0.25) < 0.07
    assert captions(0.25) == captions(0.25)
    assert not any(isinstance(c, Unconditional) for c in captions(0.0))
    assert all(isinstance(c, Unconditional) for c in captions(1.0))


def test_another_epoch_drops_other_captions(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [60])
    batches = take(stream_of(tmp_path, manifest, 60, caption_dropout=0.5), 2)
    first, second = (set(dropped_keys(b)) for b in batches)
    assert first and second and first != second


def cut(path: Path, samples: int) -> None:
    """Cut the tar in the middle of the codes of sample number `samples`: 3 files of 2 blocks of 512 bytes a sample."""
    content = path.read_bytes()
    path.write_bytes(content[: samples * 6 * 512 + 512 + 100])


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_lost_in_a_truncated_tar_are_skipped_and_counted(tmp_path: Path, workers: int) -> None:
    manifest = write_set(tmp_path, [200, 200])
    cut(tmp_path / "shard-000001.tar", 199)
    stream = stream_of(tmp_path, manifest, batch_size=1)
    batches = take(stream, 800, workers)
    lost = set(all_keys([200, 200])) - set(keys(batches))
    assert 1 <= len(lost) <= 2
    assert lost <= {"s1-198", "s1-199"}
    # Two epochs of what is left, whoever reads them; the losses of the epoch that has just begun may be among them.
    assert sum(b.broken for b in batches) in (2 * len(lost), 3 * len(lost))


def test_a_batch_of_which_nothing_can_be_read_gets_a_stand_in(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [3])
    (tmp_path / "shard-000000.tar").write_bytes((tmp_path / "shard-000000.tar").read_bytes()[: 2 * 6 * 512])
    batches = take(stream_of(tmp_path, manifest, batch_size=1), 2 * 30)
    assert sum(b.broken for b in batches) == 20  # once an epoch
    assert all(len(b.keys) == 1 for b in batches) and set(keys(batches)) == {"s0-000", "s0-001"}


def test_one_broken_sample_of_a_small_set_is_no_reason_to_stop_in_any_epoch(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [10])
    (tmp_path / "shard-000000.tar").write_bytes((tmp_path / "shard-000000.tar").read_bytes()[: 9 * 6 * 512])
    assert len(take(stream_of(tmp_path, manifest, batch_size=9), 50)) == 50


@pytest.mark.parametrize("workers", [0, 2])
def test_over_one_percent_of_broken_samples_stops_and_names_the_file(tmp_path: Path, workers: int) -> None:
    manifest = write_set(tmp_path, [20, 20])
    cut(tmp_path / "shard-000001.tar", 10)
    with pytest.raises(ValueError, match=r"samples are broken, more than 1 %; last: .*shard-000001\.tar"):
        take(stream_of(tmp_path, manifest, batch_size=1), 100, workers)


def test_a_missing_shard_stops_and_is_named(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [20, 20])
    (tmp_path / "shard-000001.tar").unlink()
    with pytest.raises(ValueError, match=r"shard .*shard-000001\.tar is missing"):
        take(stream_of(tmp_path, manifest, batch_size=1), 100)


def with_bad(folder: Path, bad: np.ndarray, count: int = 2) -> Manifest:
    """A shard of 8 good samples and `count` with these codes."""
    good = [sample(0, i) for i in range(8)]
    manifest = write_set(folder, [1])
    shard = write_shard(
        folder / "shard-000000.tar", [*good, *(Sample(f"bad{i}", bad, "c") for i in range(count))], 1 << 16
    )
    return replace(manifest, shards=(shard,))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (np.zeros((0, 4), dtype=int), r"sample bad\d: no image tokens"),
        (np.zeros((4, 5), dtype=int), r"sample bad\d: tokens are \(4, 5\), not \(4, 4\)"),
        (np.zeros((16,), dtype=int), r"sample bad\d: no image tokens: array of shape \(16,\)"),
        (np.full((4, 4), 64), r"sample bad\d: tokens reach from 64 to 64, not below 64 codes"),
    ],
)
def test_a_sample_without_fitting_tokens_is_named_and_never_trained_on(
    tmp_path: Path, bad: np.ndarray, said: str
) -> None:
    manifest = with_bad(tmp_path, bad)
    with pytest.raises(ValueError, match=said):
        take(stream_of(tmp_path, manifest, batch_size=1), 100)
    (tmp_path / "single").mkdir()
    manifest = with_bad(tmp_path / "single", bad, count=1)
    batches = take(stream_of(tmp_path / "single", manifest, batch_size=4), 10)
    assert not any(key.startswith("bad") for key in keys(batches))
    assert sum(batch.broken for batch in batches) >= 4
    (validation,) = take(FiniteStream(ShardSet(tmp_path / "single", manifest), 100, 0, 1))
    assert (len(validation.keys), validation.broken) == (8, 1)


def test_a_reader_without_any_sample_says_so_instead_of_hanging(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [2, 1])
    for rank in range(3):
        assert len(take(stream_of(tmp_path, manifest, 1, rank=rank, world=3), 4)) == 4
    with pytest.raises(ValueError, match="holds 3 samples, fewer than the 5 readers"):
        stream_of(tmp_path, manifest, 1, rank=4, world=5)


def test_an_empty_shard_does_not_starve_the_reader_it_falls_to(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [4, 0, 4])
    seen = [keys(take(stream_of(tmp_path, manifest, 1, rank=rank, world=3), 2)) for rank in range(3)]
    assert all(len(read) == 2 for read in seen)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [0, 5])
def test_a_finite_stream_yields_every_sample_once_over_the_ranks(tmp_path: Path, world: int, limit: int) -> None:
    manifest = write_set(tmp_path, [7, 3, 1])
    expected = all_keys([7, 3, 1])[: limit or None]
    parts = [keys(take(FiniteStream(ShardSet(tmp_path, manifest), 2, rank, world, limit))) for rank in range(world)]
    assert sorted(itertools.chain(*parts)) == expected
    assert all(part == sorted(part) for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for batch in take(FiniteStream(ShardSet(tmp_path, manifest), 2, 0, world, limit)):
        assert None not in batch.captions
        assert batch.tokens.shape[1:] == (4, 4)


def test_a_finite_stream_counts_what_it_cannot_read(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [7, 5])
    cut(tmp_path / "shard-000000.tar", 6)
    batches = take(FiniteStream(ShardSet(tmp_path, manifest), 2, 0, 1))
    assert sum(b.broken for b in batches) == 1
    assert keys(batches) == [k for k in all_keys([7, 5]) if k != "s0-006"]


def test_a_finite_stream_that_cannot_read_more_than_one_percent_stops(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [7, 5])
    cut(tmp_path / "shard-000000.tar", 3)
    with pytest.raises(ValueError, match=r"samples are broken, more than 1 %; last: .*shard-000000\.tar"):
        take(FiniteStream(ShardSet(tmp_path, manifest), 2, 0, 1))


def config(folder: Path, **settings) -> StreamConfig:
    return StreamConfig(dir=str(folder), **settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_set(tmp_path / "train", [7, 3, 1])
    write_set(tmp_path / "validation", [2, 2])
    return tmp_path


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_caption_dropout_out_of_range_is_refused_by_its_value(folder: Path, share: float) -> None:
    with pytest.raises(ValueError, match=rf"data\.caption_dropout is {share}; use a number from 0 to 1"):
        TokenDataModule(config(folder, caption_dropout=share), TOKENIZER, (4, 4))


def test_bad_sizes_are_refused_by_their_value(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.validation_samples is -1"):
        TokenDataModule(config(folder, validation_samples=-1), TOKENIZER, (4, 4))
    with pytest.raises(ValueError, match="batch_size is 0"):
        TokenDataModule(config(folder, batch_size=0), TOKENIZER, (4, 4)).train_dataloader()


def test_both_shard_sets_are_checked_before_anything_is_read(folder: Path) -> None:
    other = "0" * 64
    with pytest.raises(ValueError, match=f"train was encoded by tokenizer {TOKENIZER[:12]}, .* uses {other[:12]}"):
        TokenDataModule(config(folder), other, (4, 4))
    replace(write_set(folder / "train", [7, 3, 1]), tokenizer=other).save(folder / "train")
    with pytest.raises(ValueError, match=f"validation was encoded by tokenizer {TOKENIZER[:12]}"):
        TokenDataModule(config(folder), other, (4, 4))
    with pytest.raises(ValueError, match="4x4 grids, but the backbone draws 16x16"):
        TokenDataModule(config(folder), other, (16, 16))
    with pytest.raises(ValueError, match=r"nowhere.train holds no token shards"):
        TokenDataModule(config(folder / "nowhere"), TOKENIZER, (4, 4))


def test_the_data_module_streams_its_folders(folder: Path) -> None:
    module = TokenDataModule(config(folder, batch_size=2, workers=2, caption_dropout=0.5), TOKENIZER, (4, 4), seed=4)
    loaded = list(itertools.islice(module.train_dataloader(), 8))
    direct = stream_of(folder / "train", module.train_sets[0].manifest, 2, seed=4, caption_dropout=0.5)
    assert all(same(a, b) for a, b in zip(loaded, take(direct, 8, workers=2), strict=True))
    assert keys(list(module.val_dataloader())) == all_keys([2, 2])
    tokens = module.sample_tokens(9)
    expected = [sample(0, i).tokens for i in range(7)] + [sample(1, i).tokens for i in range(2)]
    assert tokens.tolist() == np.stack(expected).tolist()
    assert len(module.sample_tokens(100)) == 11


def test_the_docs_way_to_read_shards_reads_them(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    write_set(tmp_path / "runs/data/emoji/train", [3, 2])
    # webdataset leaves files to be closed at exit, so in a process of its own
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    expected = [f"(4, 4) caption {s} {i} x.png" for s, n in enumerate((3, 2)) for i in range(n)]
    assert said.splitlines() == expected
