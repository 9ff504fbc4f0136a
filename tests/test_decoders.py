"""Decoders: the law of each by enumeration of the production class, step counts by hand, seeds, batches, oracles."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch

from draftgrid.eval.decoders import Sampling, default_decoder
from draftgrid.eval.decoders import decode as decode_by_default
from draftgrid.eval.decoders.ar import AR
from draftgrid.eval.decoders.engine import run
from draftgrid.eval.decoders.kernels import transport
from draftgrid.eval.decoders.randomness import SeededSource, Where
from draftgrid.eval.decoders.ssd import SSD
from draftgrid.eval.metrics.likelihood import likelihood
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.grid import Offset
from draftgrid.heads.mtp import new_heads
from tests.tiny import CAPTIONS, ArbitraryHeads, Replay, TableBackbone, enumerate_law, tiny_emu3, total_variation

decode = partial(decode_by_default, decoder="ssd")
SETTINGS = [Sampling(), Sampling(top_k=2), Sampling(temperature=0.5, top_p=0.9)]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_ar_has_the_law_of_the_table(sampling: Sampling) -> None:
    backbone = TableBackbone((2, 2), 3)
    assert total_variation(enumerate_law(backbone, AR, sampling), backbone.law(sampling)) < 1e-10


@pytest.mark.parametrize("grid,right,down", [((1, 3), 2, 1), ((2, 2), 1, 1), ((3, 2), 1, 1)])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_ssd_is_exact_once_rounds_reach_the_drafts_of_a_block(grid, right: int, down: int, sampling: Sampling) -> None:
    backbone = TableBackbone(grid, 2)
    heads = ArbitraryHeads(backbone, HeadsConfig(right=right, down=down))
    law = backbone.law(sampling)
    exact = total_variation(enumerate_law(backbone, lambda: SSD(rounds=right), sampling, heads), law)
    assert exact < 1e-10


def test_ssd_is_lossy_before_that_and_less_so_with_each_round() -> None:
    backbone = TableBackbone((1, 4), 2)
    heads = ArbitraryHeads(backbone, HeadsConfig(right=3, down=0))
    law = backbone.law(Sampling())
    tv = [total_variation(enumerate_law(backbone, lambda r=r: SSD(rounds=r), Sampling(), heads), law) for r in range(4)]
    assert tv[0] > tv[1] > tv[2] > 1e-3 and tv[3] < 1e-10, tv


def test_keeping_the_heads_record_in_later_rounds_would_not_converge() -> None:
    """The mutant: rounds that test against the head's q for ever. It must miss the law where SSD hits it."""

    class Stale(SSD):
        def verify(self, canvas, p) -> None:
            q = self.q
            super().verify(canvas, p)
            self.q = q

    backbone = TableBackbone((1, 4), 2)
    heads = ArbitraryHeads(backbone, HeadsConfig(right=3, down=0))
    law = backbone.law(Sampling())
    assert total_variation(enumerate_law(backbone, lambda: Stale(rounds=3), Sampling(), heads), law) > 1e-2


@pytest.mark.parametrize("staged", [0, 1])
def test_two_rows_at_once_are_a_distribution_too(staged: int) -> None:
    backbone = TableBackbone((3, 2), 2)
    heads = ArbitraryHeads(backbone, HeadsConfig(right=1, down=2))
    law = backbone.law(Sampling())
    tv = total_variation(enumerate_law(backbone, lambda: SSD(rounds=1, rows=2, staged=staged), Sampling(), heads), law)
    assert 1e-4 < tv < 0.5


def test_rounds_needed_for_two_joint_rows_make_them_exact() -> None:
    backbone = TableBackbone((3, 2), 2)
    heads = ArbitraryHeads(backbone, HeadsConfig(right=1, down=2))
    law = backbone.law(Sampling())
    assert total_variation(enumerate_law(backbone, lambda: SSD(rounds=3, rows=2), Sampling(), heads), law) < 1e-10


@pytest.fixture(scope="module")
def world_16x16():
    backbone = tiny_emu3((16, 16))
    return backbone, new_heads(HeadsConfig(), backbone)


@pytest.fixture(scope="module")
def world_3x4():
    backbone = tiny_emu3((3, 4))
    return backbone, new_heads(HeadsConfig(right=2, down=2), backbone)


class TestSteps:
    """Steps by the formula of the paper's method, prefill counted: 16x16, five heads right, two down."""

    @pytest.mark.parametrize(
        "settings,steps",
        [
            ({"decoder": "ar"}, 256),
            ({"rounds": 0}, 18),
            ({"rounds": 1}, 36),
            ({"rounds": 2}, 54),
            ({"rounds": 3}, 72),
            ({"rounds": 2, "rows": 2}, 33),
            ({"rounds": 5, "rows": 2, "staged": 4}, 3 * 6 + 7 * 10 + 6),
        ],
    )
    def test_steps(self, world_16x16, settings: dict, steps: int) -> None:
        backbone, heads = world_16x16
        result = decode(backbone, ["blue"], heads, **settings)
        assert result.stats.nfe == steps
        assert result.tokens.shape == (1, 16, 16)

    def test_structure_tokens_cost_no_forward(self, world_16x16) -> None:
        """AR feeds every token but the last once; what ends a row travels with its last token."""
        assert decode(world_16x16[0], ["blue"], decoder="ar").stats.tokens_forwarded == 255


def test_untrained_heads_are_still_corrected_to_greedy_ar_given_enough_rounds() -> None:
    backbone = tiny_emu3((3, 4))
    heads = new_heads(HeadsConfig(right=3, down=2), backbone)
    for prompt in CAPTIONS:
        picture = decode(backbone, [prompt], decoder="ar", temperature=0).tokens
        for settings in ({"rounds": 3}, {"rounds": 7, "rows": 2}, {"rounds": 7, "rows": 2, "staged": 3}):
            assert torch.equal(decode(backbone, [prompt], heads, temperature=0, **settings).tokens, picture)


@pytest.mark.parametrize("settings", [{"decoder": "ar"}, {"rounds": 2}, {"rounds": 1, "rows": 2}])
class TestSeeds:
    def test_same_seed_same_tokens_other_seed_other_tokens(self, world_3x4, settings: dict) -> None:
        backbone, heads = world_3x4
        one, two, other = (decode(backbone, ["blue"], heads, seed=s, **settings).tokens for s in (5, 5, 6))
        assert torch.equal(one, two) and not torch.equal(one, other)

    def test_a_sample_does_not_depend_on_its_batch(self, world_3x4, settings: dict) -> None:
        backbone, heads = world_3x4
        together = decode(backbone, CAPTIONS, heads, guidance=2.0, **settings).tokens
        for b, prompt in enumerate(CAPTIONS):
            alone = decode(backbone, [prompt], heads, guidance=2.0, samples=[b], **settings).tokens
            assert torch.equal(alone[0], together[b])
        assert not torch.equal(together[0], together[1])


def test_ar_of_a_network_follows_its_distribution() -> None:
    """Chi-square of the first two tokens over 4,000 seeded samples against the model's own probabilities."""
    backbone = tiny_emu3((1, 2), codes=4, spread=3.0)
    count = 4000
    tokens = decode(backbone, ["blue"] * count, decoder="ar").tokens.view(count, 2)
    cells = torch.tensor([[[a, b]] for a in range(4) for b in range(4)])
    p = backbone.logits(backbone.states(cells, ["blue"] * 16)[0])[:, 0].softmax(-1)
    expected = torch.stack([p[4 * a + b, 0, a] * p[4 * a + b, 1, b] for a in range(4) for b in range(4)]) * count
    observed = torch.bincount(tokens[:, 0] * 4 + tokens[:, 1], minlength=16)
    chi2 = ((observed - expected) ** 2 / expected).sum().item()
    assert chi2 < 50  # 15 degrees of freedom: chance below 1e-4


class TestKernels:
    def test_maximal_coupling_maps_q_to_p_and_keeps_one_minus_tv(self) -> None:
        """Every branch of `transport` itself, for random, sparse, equal and disjoint p and q."""
        generator = torch.Generator().manual_seed(0)
        cases = [(torch.rand(5, generator=generator), torch.rand(5, generator=generator)) for _ in range(20)]
        cases += [(torch.tensor([1.0, 0, 2, 0, 1]), torch.tensor([1.0, 1, 1, 1, 0]))]
        cases += [(torch.tensor([1.0, 2, 3, 0, 0]), torch.tensor([0.0, 0, 0, 1, 1])), (torch.ones(5), torch.ones(5))]
        for p, q in cases:
            p, q = p.double() / p.double().sum(), q.double() / q.double().sum()
            moved, kept_mass = torch.zeros(5, dtype=torch.float64), 0.0
            for y in q.nonzero().flatten().tolist():
                pending: list[list[int]] = [[]]
                while pending:
                    source = Replay([pending.pop()])
                    token, kept = transport(torch.tensor([[y]]), q[None, None], p[None, None], source, _where())
                    (path,) = source.paths
                    pending += path.open
                    moved[token.item()] += q[y] * path.weight
                    kept_mass += float(q[y]) * path.weight * bool(kept)
                    assert bool(kept) == (token.item() == y), "a rejected token always changes"
            torch.testing.assert_close(moved, p, rtol=0, atol=1e-12)
            assert abs(kept_mass - float(torch.minimum(p, q).sum())) < 1e-12

    def test_equal_distributions_keep_the_token_without_nan(self) -> None:
        for p in (torch.ones(4) / 4, torch.tensor([0.0, 1, 0, 0])):
            y = torch.tensor([[1]])
            nudged = torch.nextafter(p, torch.ones_like(p))
            for q in (p, nudged):
                tokens, kept = transport(y, q[None, None], p[None, None], _Fixed(1 - 2**-40), _where())
                assert tokens.item() == 1 and kept.item()

    def test_a_masked_token_is_never_drawn(self) -> None:
        weights = torch.rand(1, 1000, 50, generator=torch.Generator().manual_seed(0))
        weights[..., ::2] = 0
        weights[:, :500, -5:] = 0
        weights[:, :500, :5] = 0
        for visit in range(1000):
            where = Where([0], np.arange(1000), visit)
            drawn = SeededSource(1).draw(weights, where)
            assert (weights.gather(-1, drawn[..., None]) > 0).all()

    def test_draws_at_the_ends_of_the_unit_interval_have_weight(self) -> None:
        weights = torch.tensor([[[0.0, 0.3, 0.0, 0.7, 0.0]]])
        assert _Fixed(0.0).draw(weights, _where()).item() == 1
        assert _Fixed(1 - 2**-40).draw(weights, _where()).item() == 3

    def test_uniform_numbers_are_uniform_and_differ_by_every_part_of_their_key(self) -> None:
        where = Where(range(100), np.arange(1000), 3, "accept")
        u = SeededSource(7).uniform(where)
        counts, _ = np.histogram(u, 50, (0, 1))
        assert ((counts - 2000) ** 2 / 2000).sum() < 110  # 49 degrees of freedom
        assert u.shape == (100, 1000) and u.min() >= 0 and u.max() < 1
        changed = [
            SeededSource(8).uniform(where),
            SeededSource(-7).uniform(where),
            SeededSource(7).uniform(where.to("residual")),
            SeededSource(7).uniform(Where(where.sample, where.position, 4, "accept")),
            SeededSource(7).uniform(Where(range(1, 101), where.position, 3, "accept")),
            SeededSource(7).uniform(Where(where.sample, where.position + 1, 3, "accept")),
        ]
        for other in changed:
            assert (u != other).all()
            assert abs(np.corrcoef(u.flatten(), other.flatten())[0, 1]) < 0.02

    def test_pipeline_against_numpy_by_hand(self) -> None:
        c, u = torch.tensor([1.0, 2.0, 0.5, -1.0]), torch.tensor([0.5, 0.0, 1.0, 0.0])
        got = Sampling(guidance=3.0, temperature=2.0, top_k=3, top_p=0.8).probabilities(torch.stack([c, u]))
        z = [(b + 3 * (a - b)) / 2 for a, b in zip(c.tolist(), u.tolist(), strict=True)]
        kept = sorted(range(4), key=lambda i: -z[i])[:3]
        weights = {i: math.exp(z[i]) for i in kept}
        total = sum(weights.values())
        nucleus, mass = [], 0.0
        for i in kept:
            if mass >= 0.8:
                break
            nucleus.append(i)
            mass += weights[i] / total
        expected = [weights[i] / total / mass if i in nucleus else 0.0 for i in range(4)]
        torch.testing.assert_close(got, torch.tensor(expected))

    def test_greedy_is_one_hot(self) -> None:
        p = Sampling(temperature=0).probabilities(torch.tensor([[0.0, 3.0, 3.0]]))
        assert p.tolist() == [0.0, 1.0, 0.0]


class _Fixed(SeededSource):
    """Every uniform number is the same."""

    def __init__(self, u: float) -> None:
        super().__init__(0)
        self.u = u

    def uniform(self, where: Where):
        return np.full((len(where.sample), where.position.shape[-1]), self.u)


def _where() -> Where:
    return Where([0], np.zeros(1, np.int64), 0)


class TestRefusals:
    @pytest.mark.parametrize(
        "settings,message",
        [
            ({"rounds": -1}, "rounds is -1"),
            ({"rows": 3}, "rows is 3"),
            ({"staged": 2}, "staged is 2"),
            ({"temperature": -1.0}, "temperature is -1"),
            ({"top_k": -3}, "top_k is -3"),
            ({"top_p": 0.0}, "top_p is 0"),
            ({"decoder": "sssd"}, "unknown decoder 'sssd'. Did you mean 'ssd'"),
            ({"round": 2}, "no setting 'round'. Did you mean 'rounds'"),
            ({"decoder": "ar", "rounds": 2}, "decoder ar has no setting 'rounds'"),
        ],
    )
    def test_settings_out_of_range_are_named(self, settings: dict, message: str) -> None:
        backbone = TableBackbone((1, 3), 2)
        with pytest.raises(ValueError, match=message):
            decode(backbone, ["x"], ArbitraryHeads(backbone, HeadsConfig()), **settings)

    def test_no_heads_no_prompt_and_foreign_heads(self) -> None:
        backbone, other = TableBackbone((1, 3), 2), TableBackbone((1, 3), 2, seed=1)
        with pytest.raises(ValueError, match="decoder ssd drafts with heads"):
            decode(backbone, ["x"])
        with pytest.raises(ValueError, match="no prompt"):
            decode(backbone, [], decoder="ar")
        with pytest.raises(
            ValueError, match=re.escape(other.fingerprint[:16]) + ".*" + re.escape(backbone.fingerprint[:16])
        ):
            decode(backbone, ["x"], ArbitraryHeads(other, HeadsConfig()))

    def test_heads_that_reach_less_far_than_the_block(self) -> None:
        backbone = TableBackbone((3, 2), 2)
        with pytest.raises(ValueError, match="rows is 2, but the heads reach 1"):
            decode(backbone, ["x"], ArbitraryHeads(backbone, HeadsConfig(right=1, down=1)), rows=2)


def test_callback_sees_every_row_once_finished() -> None:
    backbone = tiny_emu3((4, 3))
    seen = []
    heads = new_heads(HeadsConfig(right=2), backbone)
    result = decode(backbone, ["blue"], heads, callback=lambda r, t: seen.append((r, t)))
    assert [r for r, _ in seen] == [1, 2, 3, 4]
    for rows, tokens in seen:
        assert torch.equal(tokens[:, :rows], result.tokens[:, :rows])


@pytest.mark.parametrize("grid", [(2, 5), (5, 2), (1, 7), (7, 1)])
@pytest.mark.parametrize("settings", [{"decoder": "ar"}, {"rounds": 2}, {"rounds": 1, "rows": 2}])
def test_non_square_grids_are_filled_row_by_row(grid, settings: dict) -> None:
    backbone = tiny_emu3(grid)
    right, down = min(3, grid[1] - 1), min(2, grid[0] - 1)
    heads = new_heads(HeadsConfig(right=right, down=down), backbone)
    greedy = decode(backbone, ["blue"], decoder="ar", temperature=0).tokens
    assert greedy.shape == (1, *grid)
    if settings.get("rows") == 2 and down < 2:
        settings = {"rounds": 1}
    if settings.get("decoder") != "ar":
        settings = {**settings, "rounds": 9}
    assert torch.equal(decode(backbone, ["blue"], heads, temperature=0, **settings).tokens, greedy)


def test_the_mix_is_splitmix64s_finalizer() -> None:
    """Both forms against the definition: Python's integers do not wrap unless told to."""
    from draftgrid.eval.decoders.randomness import _mix

    def by_hand(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    values = [0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF]
    assert [int(v) for v in _mix(np.array(values, np.uint64))] == [by_hand(v) for v in values]
    assert [_mix(v) for v in values] == [by_hand(v) for v in values]
    assert _mix(-1) == by_hand(2**64 - 1)


def test_guided_greedy_ar_takes_the_argmax_of_the_mixed_branches() -> None:
    """Guidance 3 in the decoder against two teacher-forced passes, cell by cell; it must differ from guidance 1."""
    backbone = tiny_emu3((3, 4))
    prompt = "a red apple"
    picture = decode(backbone, [prompt], decoder="ar", temperature=0, guidance=3.0).tokens
    c, u = (backbone.logits(backbone.states(picture, [p])[0]) for p in (prompt, None))
    assert torch.equal((u + 3 * (c - u)).argmax(-1), picture)
    assert not torch.equal(decode(backbone, [prompt], decoder="ar", temperature=0).tokens, picture)


def test_a_random_number_is_never_used_twice() -> None:
    """Every (sample, position, purpose, visit) a decoder asks for, over batches, rounds and blocks, is new."""
    seen: set[tuple] = set()

    class Watched(SeededSource):
        def uniform(self, where: Where):
            for sample, positions in zip(where.sample, where.position.tolist(), strict=True):
                for position in positions:
                    key = (sample, position, where.purpose, where.visit)
                    assert key not in seen, key
                    seen.add(key)
            return super().uniform(where)

    backbone = tiny_emu3((4, 4))
    heads = new_heads(HeadsConfig(right=3, down=2), backbone)
    for policy in (SSD(rounds=3), SSD(rounds=2, rows=2, staged=2), AR()):
        seen.clear()
        run(backbone, CAPTIONS, policy, Sampling(), heads, source=Watched(0))
        assert len(seen) >= 3 * 16


def test_heads_read_the_embedding_of_the_token_drawn_at_the_source_cell() -> None:
    """Heads that say 'the token of the source again': unverified rows must repeat the row above, blocks their first."""

    class Copy(ArbitraryHeads):
        def forward(self, h, e, offset: Offset):
            return 1000 * e.double().expand_as(h)

    backbone = TableBackbone((3, 4), 2)
    for sample in range(8):
        heads = Copy(backbone, HeadsConfig(right=2, down=1))
        ((first, *rest),) = decode(backbone, ["x"], heads, rounds=0, samples=[sample]).tokens.tolist()
        assert first[0] == first[1] == first[2]
        for row in rest:
            assert row[1:] == first[1:]


def test_ssd_with_top_k_below_the_vocabulary_is_exact_after_enough_rounds() -> None:
    backbone = TableBackbone((1, 3), 4)
    heads = ArbitraryHeads(backbone, HeadsConfig(right=2, down=0))
    sampling = Sampling(top_k=2, temperature=0.8)
    paths = enumerate_law(backbone, lambda: SSD(rounds=2), sampling, heads)
    assert total_variation(paths, backbone.law(sampling)) < 1e-10


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda b, h: decode(b, "red apple", h), "prompts is the text 'red apple'"),
        (lambda b, h: decode(b, ["x"], h, samples=[1, 2]), "samples has 2 numbers for 1 prompts"),
        (lambda b, h: decode(b, ["x"], h, rounds=1.5), "rounds is 1.5; use a whole number"),
        (lambda b, h: decode(b, ["x"], h.double()), "heads are torch.float64 on cpu, the backbone torch.float32"),
    ],
)
def test_wrong_calls_are_told(call, message: str) -> None:
    backbone = tiny_emu3((2, 3))
    with pytest.raises(ValueError, match=message):
        call(backbone, new_heads(HeadsConfig(right=1, down=1), backbone))


@pytest.mark.parametrize("config", [None, HeadsConfig(right=2, down=1), HeadsConfig(kind="chain")])
def test_the_default_decoder_takes_whatever_heads_are_given_and_is_exact(config: HeadsConfig | None) -> None:
    backbone = tiny_emu3((3, 4))
    heads = None if config is None else new_heads(config, backbone).requires_grad_(False)
    result = decode_by_default(backbone, ["blue"], heads)
    named = decode_by_default(backbone, ["blue"], heads, decoder=default_decoder(heads is not None))
    assert result.exact and torch.equal(result.tokens, named.tokens)


def test_former_names_are_answered_with_the_new_ones() -> None:
    with pytest.raises(ValueError, match="decoder 'chain' is now called 'mtp1d'"):
        decode_by_default(tiny_emu3((3, 4)), ["blue"], decoder="chain")
    with pytest.raises(ValueError, match=r"no setting 'birth'\. It is now called 'initial'"):
        decode_by_default(tiny_emu3((3, 4)), ["blue"], decoder="scd", birth="left")


def test_phases_are_timed_only_when_asked_for() -> None:
    backbone = tiny_emu3((3, 4))
    for phases in (False, True):
        stats = run(backbone, ["blue"], AR(), Sampling(), phases=phases).stats
        assert (stats.seconds_forward > 0) == (stats.seconds_verify > 0) == phases


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_likelihood_in_chunks_is_that_of_all_positions_at_once(guidance: float) -> None:
    backbone = tiny_emu3((3, 4))
    tokens = decode_by_default(backbone, CAPTIONS[:2], decoder="ar").tokens
    whole = likelihood(backbone, tokens, CAPTIONS[:2], Sampling(guidance))
    parts = likelihood(backbone, tokens, CAPTIONS[:2], Sampling(guidance), chunk=10)
    for a, b in zip(whole, parts, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
