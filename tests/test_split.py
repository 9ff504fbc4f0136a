"""Epochs divided among readers: whatever the shards, ranks, workers and the points where a run stops and resumes."""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from draftgrid.data.config import StreamConfig
from draftgrid.data.module import TokenDataModule
from draftgrid.data.shards import Manifest, Shard
from draftgrid.data.stream import ShardSet, Split, TokenStream, cut, picks, share, total
from tests.data_fixtures import TOKENIZER, all_keys, write_set


def paper_set(sizes: list[int]) -> ShardSet:
    """A shard set nobody reads."""
    shards = tuple(Shard(f"shard-{i:06d}.tar", n, 0, str(i)) for i, n in enumerate(sizes))
    return ShardSet("x", Manifest((1, 1), "", 2, "", "", "train", shards))


def consumed(split: Split, sets: list[ShardSet], batches: int, seed: int) -> Counter[tuple[int, int, str, int]]:
    """(set, epoch, shard, number) of every sample all ranks have had after so many batches each."""
    found: Counter[tuple[int, int, str, int]] = Counter()
    weights = [s.weight for s in sets]
    for reader in range(split.readers):
        n = split.had(reader % split.workers, batches) * split.batch_size
        counts = np.bincount(picks(0, n, weights), minlength=len(sets))
        for number, shards in enumerate(sets):
            need = int(counts[number])
            parts = split.parts(number, shards.size, reader, 0)
            while need:
                epoch, spans = next(parts)
                spans = cut(spans, 0, need)
                need -= total(spans)
                for shard, numbers in shards.order(spans, seed, epoch):
                    found.update((number, epoch, shard.file, int(i)) for i in numbers)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_however_often_a_run_stops_and_is_divided_again_no_epoch_holds_a_sample_twice_and_few_are_missing(
    seed: int,
) -> None:
    rng = random.Random(seed)
    sets = [
        paper_set([rng.randint(0, 9) for _ in range(rng.randint(1, 6))] + [16]) for _ in range(rng.choice([1, 1, 2]))
    ]
    for s in sets:
        s.weight = rng.choice([1.0, 0.3, 2.5])
    seen: Counter[tuple[int, int, str, int]] = Counter()
    split, slack = Split(), 0
    for _ in range(rng.randint(1, 5)):
        split = Split(rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 5), split.left)
        slack += split.readers
        batches = rng.randint(0, 60)
        seen += consumed(split, sets, batches, seed)
        split = replace(split, left=split.after(batches, sets))
    assert max(seen.values(), default=1) == 1
    for number, s in enumerate(sets):
        epochs = Counter(epoch for n, epoch, _, _ in seen if n == number)
        over = min(split.left[number])
        assert all(s.size - slack < epochs[epoch] <= s.size for epoch in range(over))
        left = {e: total(spans) for e, spans in split.left[number].items()}
        assert all(epochs[e] + n <= s.size and epochs[e] + n > s.size - slack for e, n in left.items())


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_is_what_was_not_consumed(seed: int) -> None:
    """Unless the work is divided again, nothing but the rest of a finished epoch is ever lost."""
    rng = random.Random(seed)
    sets = [paper_set([rng.randint(1, 9) for _ in range(4)])]
    split = Split(rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 3))
    for batches in range(12):
        had, left = consumed(split, sets, batches, 0), split.after(batches, sets)[0]
        for epoch, spans in left.items():
            rest = {
                (0, epoch, shard.file, int(i)) for shard, numbers in sets[0].order(spans, 0, epoch) for i in numbers
            }
            assert not rest & had.keys()
            assert len(rest) + sum(e == epoch for _, e, _, _ in had) == sets[0].size


def test_a_share_is_contiguous_equal_and_leaves_less_than_one_a_reader() -> None:
    spans = [(3, 7), (10, 11), (20, 29)]
    parts = [share(spans, r, 4) for r in range(4)]
    assert parts == [[(3, 6)], [(6, 7), (10, 11), (20, 21)], [(21, 24)], [(24, 27)]]
    assert cut(spans, 12, 14) == [(27, 29)] and cut(spans, 5, 5) == []


def test_sets_are_mixed_by_their_weights_evenly_from_the_start() -> None:
    weights = [1.0, 0.5, 2.5]
    for n in (40, 400, 4000):
        counts = np.bincount(picks(0, n, weights), minlength=3) / n
        assert np.abs(counts - np.array([0.25, 0.125, 0.625])).max() < 3 / n + 0.02
    assert picks(17, 30, weights).tolist() == picks(0, 30, weights)[17:].tolist()


def mixed(tmp_path: Path, **settings) -> TokenDataModule:
    write_set(tmp_path / "a" / "train", [30, 20, 25])
    write_set(tmp_path / "a" / "validation", [2])
    write_set(tmp_path / "b", [12, 9])
    config = StreamConfig(dir=str(tmp_path / "a"), mix={str(tmp_path / "b"): 0.5}, **settings)
    return TokenDataModule(config, TOKENIZER, (4, 4), seed=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mix_names_each_samples_origin_and_gives_each_set_its_share(tmp_path: Path, workers: int) -> None:
    module = mixed(tmp_path, batch_size=6, workers=workers)
    batches = list(itertools.islice(module.train_dataloader(), 20))
    origins = Counter(origin for b in batches for origin in b.origins)
    assert {k: v / 120 for k, v in origins.items()} == {
        str(tmp_path / "a" / "train"): pytest.approx(2 / 3, abs=0.02),
        str(tmp_path / "b"): pytest.approx(1 / 3, abs=0.02),
    }
    own = [k for b in batches for k, o in zip(b.keys, b.origins, strict=True) if o.endswith("b")]
    assert {k for k in own} == set(all_keys([12, 9])) and max(Counter(own).values()) <= 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [1, 7, 16, 23])
def test_a_module_goes_on_from_its_saved_state(tmp_path: Path, workers: int, batches: int) -> None:
    """The state survives JSON; at the same world size the very next batches follow."""
    module = mixed(tmp_path, batch_size=3, workers=workers)
    whole = list(itertools.islice(module.train_dataloader(), batches + 12))
    state = module.state_dict() | {"batches": batches}
    again = mixed(tmp_path, batch_size=3, workers=workers)
    again.load_state_dict(json.loads(json.dumps(state)))
    for a, b in zip(itertools.islice(again.train_dataloader(), 12), whole[batches:], strict=True):
        assert (a.keys, a.captions, a.origins, a.tokens.tolist()) == (b.keys, b.captions, b.origins, b.tokens.tolist())
    assert again.state_dict()["batches"] == batches


def test_at_another_world_size_the_rest_of_the_epoch_comes_first(tmp_path: Path) -> None:
    write_set(tmp_path / "train", [8, 8, 8])
    write_set(tmp_path / "validation", [2])
    shards = ShardSet(
        str(tmp_path / "train"), TokenDataModule(config(tmp_path), TOKENIZER, (4, 4)).train_sets[0].manifest
    )
    seen = []
    for rank in range(2):
        stream = TokenStream([shards], Split(2, 1, 2), rank=rank)
        seen += [k for b in itertools.islice(DataLoader(stream, batch_size=None), 3) for k in b.keys]
    module = TokenDataModule(config(tmp_path, batch_size=4), TOKENIZER, (4, 4))
    old = Split(2, 1, 2, ({0: [(0, 24)]},))
    module.split = old
    module.load_state_dict(json.loads(json.dumps(module.state_dict() | {"batches": 3})))
    assert "the checkpoint is of 2 ranks x 1 workers and batches of 2" in module.notes[0]
    assert "12 samples" in module.notes[0]
    rest = [k for b in itertools.islice(module.train_dataloader(), 3) for k in b.keys]
    assert len(seen) == len(rest) == 12 and sorted(seen + rest) == all_keys([8, 8, 8])


def config(folder: Path, **settings) -> StreamConfig:
    return StreamConfig(dir=str(folder), **{"workers": 0, **settings})


def test_changed_data_is_noticed_when_a_run_goes_on(tmp_path: Path) -> None:
    write_set(tmp_path / "train", [8, 8])
    write_set(tmp_path / "validation", [2])
    state = TokenDataModule(config(tmp_path), TOKENIZER, (4, 4)).state_dict()
    write_set(tmp_path / "train", [8, 9])
    with pytest.raises(ValueError, match=r"the checkpoint was reading .*digest .*bring that back"):
        TokenDataModule(config(tmp_path), TOKENIZER, (4, 4)).load_state_dict(state)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(tmp_path: Path, weight: float) -> None:
    with pytest.raises(ValueError, match=r"data\.mix is .*; use a finite number above 0"):
        config(tmp_path, mix={"x": weight}).check()
