"""Decoders: the law of each by enumeration of the production class, step counts by hand, seeds, batches, oracles."""

import math
import re

import pytest
import torch

from eval.decoders import Sampling, decode
from eval.decoders.ar import AR
from eval.decoders.kernels import transport
from eval.decoders.randomness import SeededSource, Where
from eval.decoders.ssd import SSD
from heads.grid import Offset
from heads.mtp import HeadsConfig, MTPHeads, TrainedOn, new_heads
from tests.tiny import CAPTIONS, ArbitraryHeads, Replay, TableBackbone, enumerate_law, tiny_emu3, total_variation

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
            q = getattr(self, "q", None)
            super().verify(canvas, p)
            if q is not None and self.stages:
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


class OracleHeads(MTPHeads):
    """Returns the true state of the cell asked for, found by feeding the true picture beforehand."""

    kind = "offsets"

    def __init__(self, backbone, config: HeadsConfig, truth: torch.Tensor) -> None:
        super().__init__()
        self.config, self.trained_on, self.truth = config, TrainedOn.of(backbone), truth
        self.calls: list[Offset] = []
        self.width = backbone.grid.width

    def forward(self, h, e, offset: Offset):
        """truth holds h by position; the decoder asks block after block, so the next unseen positions are meant."""
        G, B, K, D = h.shape
        start = self.next[offset]
        self.next[offset] = start + (self.width if offset[0] else self.right_step)
        return self.truth[:, start : start + K].expand(G, B, K, D)


def test_an_oracle_head_has_every_draft_accepted_and_greedy_ssd_equals_greedy_ar() -> None:
    backbone = tiny_emu3((4, 6))
    picture = decode(backbone, ["a red apple"], decoder="ar", temperature=0).tokens
    truth = backbone.states(picture, ["a red apple"])[0].flatten(1, 2)
    heads = OracleHeads(backbone, HeadsConfig(right=5, down=1), truth)
    heads.right_step = 6
    heads.next = {(0, k): k for k in range(1, 6)} | {(1, 0): 7}
    result = decode(backbone, ["a red apple"], heads, rounds=1, temperature=0)
    assert torch.equal(result.tokens, picture)
    assert result.stats.acceptance == {**{f"right{k}": 1.0 for k in range(1, 6)}, "down1": 1.0}
    assert result.stats.change_rate == 0.0
    tested = result.stats.cells[1]
    assert tested[:, 0].eq(0).all() and tested[:, 1:].eq(1).all() and result.stats.acceptance_map[:, 1:].eq(1).all()


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
                    source = Replay(pending.pop())
                    token, kept = transport(torch.tensor([[y]]), q[None, None], p[None, None], source, _where())
                    pending += source.open
                    moved[token.item()] += q[y] * source.weight
                    kept_mass += float(q[y]) * source.weight * bool(kept)
                    assert bool(kept) == (token.item() == y), "a rejected token always changes"
            torch.testing.assert_close(moved, p, rtol=0, atol=1e-12)
            assert abs(kept_mass - float(torch.minimum(p, q).sum())) < 1e-12

    def test_equal_distributions_keep_the_token_without_nan(self) -> None:
        for p in (torch.ones(4) / 4, torch.tensor([0.0, 1, 0, 0])):
            y = torch.tensor([[1]])
            nudged = torch.nextafter(p, torch.ones_like(p))
            for q in (p, nudged):
                tokens, kept = transport(y, q[None, None], p[None, None], _Fixed(1 - 2**-53), _where())
                assert tokens.item() == 1 and kept.item()

    def test_a_masked_token_is_never_drawn(self) -> None:
        weights = torch.rand(1, 1000, 50, generator=torch.Generator().manual_seed(0))
        weights[..., ::2] = 0
        weights[:, :500, -5:] = 0
        weights[:, :500, :5] = 0
        for visit in range(1000):
            where = Where([0], torch.arange(1000)[None], visit)
            drawn = SeededSource(1).draw(weights, where)
            assert (weights.gather(-1, drawn[..., None]) > 0).all()

    def test_draws_at_the_ends_of_the_unit_interval_have_weight(self) -> None:
        weights = torch.tensor([[[0.0, 0.3, 0.0, 0.7, 0.0]]])
        assert _Fixed(0.0).draw(weights, _where()).item() == 1
        assert _Fixed(1 - 2**-53).draw(weights, _where()).item() == 3

    def test_uniform_numbers_are_uniform_and_differ_by_every_part_of_their_key(self) -> None:
        where = Where(range(100), torch.arange(1000).expand(100, -1), 3, "accept")
        u = SeededSource(7).uniform(where)
        counts = torch.histc(u.float(), 50, 0, 1)
        assert ((counts - 2000) ** 2 / 2000).sum() < 110  # 49 degrees of freedom
        assert u.min() >= 0 and u.max() < 1
        changed = [
            SeededSource(8).uniform(where),
            SeededSource(7).uniform(where.to("residual")),
            SeededSource(7).uniform(Where(where.sample, where.position, 4, "accept")),
            SeededSource(7).uniform(Where(range(1, 101), where.position, 3, "accept")),
            SeededSource(7).uniform(Where(where.sample, where.position + 1, 3, "accept")),
        ]
        for other in changed:
            assert (u != other).all()
            assert abs(torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1]) < 0.02

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
        return torch.full(where.position.shape, self.u, dtype=torch.float64)


def _where() -> Where:
    return Where([0], torch.zeros(1, 1, dtype=torch.long), 0)


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
            ValueError, match=re.escape(other._fingerprint[:16]) + ".*" + re.escape(backbone._fingerprint[:16])
        ):
            decode(backbone, ["x"], ArbitraryHeads(other, HeadsConfig()))

    def test_heads_that_reach_less_far_than_the_block(self) -> None:
        backbone = TableBackbone((3, 2), 2)
        with pytest.raises(ValueError, match="rows is 2, but the heads reach 1"):
            decode(backbone, ["x"], ArbitraryHeads(backbone, HeadsConfig(right=1, down=1)), rows=2)


def test_callback_sees_every_row_once_finished() -> None:
    backbone = tiny_emu3((4, 3))
    seen = []
    result = decode(backbone, ["blue"], new_heads(HeadsConfig(), backbone), callback=lambda r, t: seen.append((r, t)))
    assert [r for r, _ in seen] == [1, 2, 3, 4]
    for rows, tokens in seen:
        assert torch.equal(tokens[:, :rows], result.tokens[:, :rows])


@pytest.mark.parametrize("grid", [(2, 5), (5, 2), (1, 7), (7, 1)])
@pytest.mark.parametrize("settings", [{"decoder": "ar"}, {"rounds": 2}, {"rounds": 1, "rows": 2}])
def test_non_square_grids_are_filled_row_by_row(grid, settings: dict) -> None:
    backbone = tiny_emu3(grid)
    heads = new_heads(HeadsConfig(right=3, down=2), backbone)
    greedy = decode(backbone, ["blue"], decoder="ar", temperature=0).tokens
    assert greedy.shape == (1, *grid)
    if settings.get("decoder") != "ar":
        settings = {**settings, "rounds": 9}
    assert torch.equal(decode(backbone, ["blue"], heads, temperature=0, **settings).tokens, greedy)


def test_keys_mixed_on_the_host_and_on_the_device_are_the_same_function() -> None:
    from eval.decoders.randomness import _mix, _mix_int, _signed

    values = [0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF]
    mixed = _mix(torch.tensor([_signed(v) for v in values])).tolist()
    assert mixed == [_signed(_mix_int(v)) for v in values]
    assert _mix_int(1) == 0x5692161D100B05E5  # splitmix64's finalizer, computed by hand from its definition
