"""The Gumbel couplings, which no enumeration can walk through, by chi-square and by oracles; invariants of every step;
and the order of the decoders' step counts on a flat model."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from draftgrid.eval.decoders import DECODERS, Sampling, decode, make_policy
from draftgrid.eval.decoders.engine import Canvas, Policy, run
from draftgrid.eval.decoders.jacobi import INITIAL, SCD, SJD
from draftgrid.eval.decoders.kernels import gumbel_argmax, transport
from draftgrid.eval.decoders.randomness import SeededSource, Where
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.grid import TokenGrid
from draftgrid.heads.mtp import MTPHeads, new_heads
from draftgrid.heads.tokenizers import PatchVQ
from tests.tiny import CAPTIONS, ArbitraryHeads, LocalBackbone, TableBackbone, random_chain_heads, tiny_emu3

PLAIN = Sampling()


def chi_square(
    backbone: TableBackbone, make: Callable[[], Policy], heads: MTPHeads | None, count: int, source: SeededSource
) -> float:
    """Chance that samples of the backbone's own law would look at least as far from it."""
    batch, law = 5000, backbone.law(PLAIN)
    observed = dict.fromkeys(law, 0)
    for start in range(0, count, batch):
        samples = range(start, start + batch)
        result = run(backbone, ["x"] * batch, make(), PLAIN, heads, samples=samples, source=source)
        for picture in result.tokens.flatten(1).tolist():
            observed[tuple(picture)] += 1
    pairs = [(observed[k], p * count) for k, p in law.items()]
    rare = [(o, e) for o, e in pairs if e < 5]
    pairs = [(o, e) for o, e in pairs if e >= 5] + [(sum(o for o, _ in rare), max(sum(e for _, e in rare), 1e-9))]
    statistic = torch.tensor(sum((o - e) ** 2 / e for o, e in pairs), dtype=torch.float64)
    return float(1 - torch.special.gammainc(torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64), statistic / 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scd", "ssd_coupled with offset heads", "ssd_coupled with chain heads"])
def test_the_gumbel_coupling_has_the_law_by_chi_square(name: str) -> None:
    """50,000 samples over 81 pictures; a first failure is tried again with four times as many and another seed."""
    chain = name.endswith("chain heads")
    backbone = TableBackbone((2, 2), 3, normed=chain)
    heads = random_chain_heads(backbone) if chain else ArbitraryHeads(backbone, HeadsConfig(right=1, down=1))

    def make() -> Policy:
        return make_policy(name.split()[0], window=3, coupling="gumbel")

    def chance(count: int, seed: int) -> float:
        return chi_square(backbone, make, None if name == "scd" else heads, count, SeededSource(seed))

    assert chance(50_000, 0) > 1e-4 or chance(200_000, 1) > 1e-4


def test_noise_shared_between_positions_is_seen_by_chi_square() -> None:
    """The mutant of published code: one noise vector for all positions."""

    class Shared(SeededSource):
        def gumbel(self, like: Tensor, where: Where) -> Tensor:
            return super().gumbel(like, Where(where.sample, np.zeros_like(where.position), where.visit))

    backbone = TableBackbone((2, 2), 3)
    assert chi_square(backbone, lambda: SCD(3, coupling="gumbel"), None, 20_000, Shared(0)) < 1e-6


def test_accept_numbers_without_the_visit_in_their_key_are_seen_by_chi_square() -> None:
    class Forgetful(SeededSource):
        def uniform(self, where: Where) -> np.ndarray:
            return super().uniform(Where(where.sample, where.position, 0, where.purpose))

    backbone = TableBackbone((1, 6), 2, spread=2.0)
    assert chi_square(backbone, lambda: SCD(6), None, 20_000, Forgetful(0)) < 1e-6


class TestGumbelFixedPoint:
    def ar_with_noise(self, backbone: TableBackbone, count: int) -> Tensor:
        """argmax(log p + g), one token after the other, straight from the table."""
        T, source = backbone.grid.positions, SeededSource(7)
        pictures = torch.zeros(count, T, dtype=torch.long)
        for i in range(T):
            rows = torch.stack([backbone.state_of(prefix[:i]) for prefix in pictures.tolist()])
            where = Where(range(count), np.full((count, 1), i), 0)
            g = source.gumbel(rows[:, None], where)[:, 0].log()
            pictures[:, i] = (rows.log_softmax(-1) + g).argmax(-1)
        return pictures

    def test_it_is_ar_token_for_token_for_a_thousand_seeds_any_window_and_any_initial_token(self) -> None:
        backbone, count = TableBackbone((2, 3), 3), 1000
        expected = self.ar_with_noise(backbone, count)
        for window, initial in itertools.product([1, 2, 3, 7, 6], INITIAL):
            policy = make_policy("gumbel_fixed_point", window=window, initial=initial)
            drawn = run(backbone, ["x"] * count, policy, PLAIN, source=SeededSource(7)).tokens
            assert torch.equal(drawn.flatten(1), expected), (window, initial)


def test_gumbel_collisions_follow_their_formula_and_its_bounds() -> None:
    """P(same) = sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x), between (1 - TV) / (1 + TV) and 1 - TV."""

    def formula(p: Tensor, q: Tensor) -> Tensor:
        p, q = p[:, None], q[:, None]
        return (1 / torch.maximum(p / p.mT, q / q.mT).sum(-1)).sum(-1)

    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(20_000, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    overlap = torch.minimum(p, q).sum(-1)
    assert (overlap / (2 - overlap) - 1e-12 <= formula(p, q)).all() and (formula(p, q) <= overlap + 1e-12).all()
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    noise = SeededSource(0).gumbel(torch.empty(1, 1_000_000, 3), Where([0], np.arange(1_000_000)[None], 0))
    same = (gumbel_argmax(p, noise) == gumbel_argmax(q, noise)).float().mean().item()
    assert float(formula(p[None], q[None])) == pytest.approx(0.6308, abs=1e-4)
    assert same == pytest.approx(0.6308, abs=3e-3)


def test_two_transports_one_after_the_other_still_end_in_p() -> None:
    """q -> r -> p: a record that stayed behind at q would show in the counts."""
    count, source = 100_000, SeededSource(0)
    q, r, p = (torch.tensor(x) for x in ([0.7, 0.2, 0.1], [0.2, 0.2, 0.6], [0.3, 0.5, 0.2]))
    where = [Where([0], np.arange(count)[None], visit) for visit in range(3)]
    y = source.draw(q.expand(1, count, 3).contiguous(), where[0])
    for before, after, w in ((q, r, where[1]), (r, p, where[2])):
        y, _ = transport(y, before.expand(1, count, 3), after.expand(1, count, 3), source, w)
    observed = torch.bincount(y[0], minlength=3)
    assert ((observed - p * count) ** 2 / (p * count)).sum() < 25  # 2 degrees of freedom: chance below 1e-5


def test_positions_of_equal_p_are_uncorrelated() -> None:
    """Window 1, every p the same: a noise table that is not moved on would give equal neighbours."""

    class Flat(TableBackbone):
        def logits(self, h: Tensor) -> Tensor:
            return torch.zeros_like(h)

    for coupling in ("gumbel", "maximal"):
        tokens = run(Flat((1, 8), 2), ["x"] * 4000, SCD(1, coupling=coupling), PLAIN).tokens[:, 0].float()
        for i in range(7):
            assert abs(np.corrcoef(tokens[:, i], tokens[:, i + 1])[0, 1]) < 0.07


@pytest.fixture(scope="module")
def world():
    backbone = tiny_emu3((3, 4))
    heads = {
        "offsets": new_heads(HeadsConfig(right=2, down=2), backbone),
        "chain": random_chain_heads(backbone, spread=1.0),
    }
    vq = PatchVQ(torch.rand(24, 12, generator=torch.Generator().manual_seed(0)), patch=2, image_size=8)
    return backbone, heads, vq


CASES = [(name, {}) for name in DECODERS] + [
    ("scd", {"coupling": "gumbel", "window": 5}),
    ("scd", {"initial": "above", "window": 3}),
    ("sjd", {"initial": "onehot", "window": 30}),
    ("ssd_coupled", {"coupling": "maximal", "window": 6}),
    ("ssd_coupled", {"window": 9, "sweeps": 0, "uniform": 0.1}),
    ("ssd", {"rounds": 2, "rows_in_flight": 3}),
]


def of_kind(heads: dict[str, MTPHeads], decoder: str) -> list[MTPHeads | None]:
    return [heads[kind] for kind in DECODERS[decoder].drafts_with] or [None]


@pytest.mark.parametrize("decoder,settings", [(n, s | ({"neighbours": 3} if n == "lantern" else {})) for n, s in CASES])
class TestEveryDecoder:
    def test_a_sample_does_not_depend_on_its_batch(self, world, decoder: str, settings: dict) -> None:
        """Prompts of three lengths, guidance on, samples that progress at their own pace."""
        backbone, heads, vq = world
        for mine in of_kind(heads, decoder):
            more = {"decoder": decoder, "guidance": 2.0, "tokenizer": vq, **settings}
            together = decode(backbone, CAPTIONS, mine, **more)
            for b, prompt in enumerate(CAPTIONS):
                alone = decode(backbone, [prompt], mine, samples=[b], **more)
                assert torch.equal(alone.tokens[0], together.tokens[b])
                assert alone.stats.steps == [together.stats.steps[b]] == [alone.stats.nfe]

    def test_same_seed_same_tokens_other_seed_other_tokens(self, world, decoder: str, settings: dict) -> None:
        backbone, heads, vq = world
        mine = of_kind(heads, decoder)[0]
        one, two, other = (
            decode(backbone, ["blue"], mine, decoder=decoder, seed=s, tokenizer=vq, **settings).tokens
            for s in (5, 5, 6)
        )
        assert torch.equal(one, two) and not torch.equal(one, other)

    def test_what_holds_at_every_step(self, world, decoder: str, settings: dict) -> None:
        """Committed tokens never change, commits add up, the cache holds what is final, records are laws."""
        backbone, heads, vq = world
        grid: TokenGrid = backbone.grid
        policy = make_policy(decoder, **settings)
        seen: list[tuple[list[int], Tensor]] = [([0] * 3, torch.zeros(3, grid.positions, dtype=torch.long))]

        def check(canvas: Canvas) -> None:
            before, tokens = seen[-1]
            for b, (was, n) in enumerate(zip(before, canvas.committed, strict=True)):
                assert torch.equal(canvas.tokens[b, :was], tokens[b, :was])
                assert n >= was and n + canvas.ahead[b] <= grid.positions
                assert 0 <= canvas.cached[b] < max(n, 1)
                if isinstance(policy, SJD):
                    assert n == was == grid.positions or 1 <= n - was <= max(policy.window, 6)
                    assert canvas.cached[b] == n - 1
                    record = policy.proposal[b, : canvas.ahead[b]]
                    torch.testing.assert_close(record.sum(-1), torch.ones(len(record)), atol=1e-5, rtol=0)
                    drafts = canvas.tokens[b, n : n + canvas.ahead[b], None]
                    assert (record.gather(-1, drafts) > 0).all()
            seen.append((list(canvas.committed), canvas.tokens.clone()))

        draft = policy.draft
        policy.draft = lambda canvas: (draft(canvas), check(canvas))[0]  # type: ignore[method-assign]
        result = run(backbone, CAPTIONS, policy, PLAIN, of_kind(heads, decoder)[0], tokenizer=vq)
        assert seen[-1][0] == [grid.positions] * 3 and len(seen) == result.stats.nfe + 1
        assert int(result.tokens.min()) >= 0 and int(result.tokens.max()) < backbone.image_vocab_size


@pytest.mark.parametrize("decoder,settings", [case for case in CASES if DECODERS[case[0]].exact])
@pytest.mark.parametrize("grid", [(2, 5), (5, 2), (1, 7)])
def test_every_shape_of_picture_is_filled_and_greedy_is_greedy_ar(
    world, decoder: str, settings: dict, grid: tuple[int, int]
) -> None:
    """At temperature 0 an exact decoder has one picture to draw, whatever its heads say."""
    backbone, vq = tiny_emu3(grid), world[2]
    heads = {
        "offsets": new_heads(HeadsConfig(right=min(2, grid[1] - 1), down=min(2, grid[0] - 1)), backbone),
        "chain": random_chain_heads(backbone, spread=1.0),
    }
    greedy = decode(backbone, ["blue"], decoder="ar", temperature=0).tokens
    for mine in of_kind(heads, decoder):
        drawn = decode(backbone, ["blue"], mine, decoder=decoder, temperature=0, tokenizer=vq, **settings)
        assert torch.equal(drawn.tokens, greedy) and drawn.tokens.shape == (1, *grid)


def test_initial_tokens_are_accepted_as_often_as_their_distributions_overlap() -> None:
    """One draft, at position 1: the share accepted is 1 - TV(q, p) within 3 sigma."""
    backbone, count = TableBackbone((1, 3), 3), 5000
    heads = ArbitraryHeads(backbone, HeadsConfig(right=1, down=0))
    result = run(backbone, ["x"] * count, make_policy("ssd_coupled", window=2), PLAIN, heads)
    p0 = backbone.state_of([]).softmax(-1)
    overlap = sum(
        float(p0[x]) * float(torch.minimum(backbone.state_of([x]).softmax(-1), heads.rows[0, 1][x].softmax(-1)).sum())
        for x in range(3)
    )
    hits, tests = result.stats.cells[0, 0, 1], result.stats.cells[1, 0, 1]
    assert tests == count and abs(float(hits / tests) - overlap) < 3 * (overlap * (1 - overlap) / count) ** 0.5


@pytest.mark.slow
def test_coupling_beats_redrawing_and_uniform_records_beat_certain_ones_on_a_flat_model() -> None:
    backbone = LocalBackbone((12, 12), 64)

    def steps(decoder: str, **settings: object) -> float:
        steps = decode(backbone, ["x"] * 6, decoder=decoder, **settings).stats.steps
        return sum(steps) / len(steps)

    sjd = {w: steps("sjd", window=w) for w in (8, 16, 32)}
    scd = {w: steps("scd", window=w) for w in (8, 16, 32)}
    assert scd[16] < 0.8 * sjd[16] and scd[32] < 0.8 * sjd[32] and scd[32] < scd[16] < scd[8]
    assert abs(sjd[32] - sjd[16]) < 0.2 * sjd[16], sjd
    assert steps("scd", window=16, initial="onehot") > scd[16]
    assert steps("scd", window=32, coupling="gumbel") < 0.8 * sjd[32]
