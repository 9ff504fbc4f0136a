"""Every decoder that claims the backbone's law has it: all paths of the production class, enumerated, to 1e-10.

Positions n, n + 1, ... need two drafts at once before a wrong proposal shows, and the first token costs a forward of
its own, so pictures have at least four cells and windows at least three tokens (shorter ones as well).
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftgrid.eval.decoders import Policy, Sampling, drafters, make_policy
from draftgrid.eval.decoders.engine import Canvas
from draftgrid.eval.decoders.jacobi import INITIAL, SCD, SJD
from draftgrid.eval.decoders.mtp1d import MTP1D
from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.chain import ChainHeads
from draftgrid.heads.chain_tables import LinearTables
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.mtp import MTPHeads, TrainedOn, new_heads
from draftgrid.heads.tokenizers import PatchVQ
from tests.tiny import (
    ArbitraryHeads,
    TableBackbone,
    TwistedHeads,
    enumerate_law,
    markov_table,
    network_law,
    random_chain_heads,
    reversed_logits,
    tiny_emu3,
    total_variation,
    zero_at_the_mode,
)

Twist = Callable[[Tensor], Tensor]
PLAIN = Sampling()
TOP_K, NUCLEUS = Sampling(top_k=2), Sampling(temperature=0.5, top_p=0.9)
ALL = Sampling(temperature=1.5, top_k=2, top_p=0.8)
GUIDED = Sampling(guidance=2, temperature=2.5, top_k=2)


def distance(
    backbone: TableBackbone,
    decoder: str,
    sampling: Sampling = PLAIN,
    heads: MTPHeads | None = None,
    tokenizer: PatchVQ | None = None,
    **settings: object,
) -> float:
    """Total variation between what a decoder draws and the table's law; ssd_coupled by its maximal coupling."""
    if decoder == "ssd_coupled":
        settings["coupling"] = "maximal"
    paths = enumerate_law(backbone, lambda: make_policy(decoder, **settings), sampling, heads, tokenizer)
    return total_variation(paths, backbone.law(sampling))


def arbitrary(backbone: TableBackbone, seed: int = 0) -> ArbitraryHeads:
    """To the right as far as the row goes, and one row down if there is one."""
    config = HeadsConfig(right=backbone.grid.width - 1, down=min(1, backbone.grid.height - 1))
    return ArbitraryHeads(backbone, config, seed)


class TestJacobi:
    @pytest.mark.parametrize("initial", INITIAL)
    @pytest.mark.parametrize("decoder", ["sjd", "scd"])
    def test_every_initial_token_is_lossless(self, decoder: str, initial: str) -> None:
        assert distance(TableBackbone((2, 2), 3), decoder, window=3, initial=initial) < 1e-10

    @pytest.mark.parametrize("decoder", ["sjd", "scd"])
    def test_shortest_windows_and_one_longer_than_the_picture_are_lossless(self, decoder: str) -> None:
        for window in (1, 2, 9):
            assert distance(TableBackbone((2, 2), 3), decoder, window=window) < 1e-10

    @pytest.mark.parametrize("decoder", ["sjd", "scd"])
    def test_filters_that_differ_between_contexts_keep_it_lossless(self, decoder: str) -> None:
        for sampling in (TOP_K, NUCLEUS, ALL):
            assert distance(TableBackbone((2, 2), 3), decoder, sampling, window=3, initial="onehot") < 1e-10

    def test_drafts_that_wait_for_several_forwards_are_lossless(self) -> None:
        """Six cells: a draft is moved from its initial to p, and to p again, before it is tested."""
        assert distance(TableBackbone((2, 3), 2), "scd", window=4) < 1e-10
        assert distance(TableBackbone((3, 2), 2), "sjd", window=3, initial="above") < 1e-10

    def test_logits_of_half_precision_are_lossless_in_what_they_say(self) -> None:
        """Tokens drawn from a rounded distribution, tested by an unrounded one, would show here."""

        class Half(TableBackbone):
            def logits(self, h: Tensor) -> Tensor:
                return h.bfloat16()

        assert distance(Half((2, 2), 3), "scd", window=3) < 1e-6
        backbone = Half((1, 4), 2)
        assert distance(backbone, "mtp1d", heads=arbitrary(backbone), length=3) < 1e-6


class TestChain:
    @pytest.mark.parametrize("codes,sampling", [(2, PLAIN), (3, TOP_K), (3, ALL)])
    def test_three_drafts_to_the_right_are_lossless(self, codes: int, sampling: Sampling) -> None:
        backbone = TableBackbone((1, 4), codes)
        assert distance(backbone, "mtp1d", sampling, arbitrary(backbone), length=3) < 1e-10

    def test_chains_that_stop_at_row_ends_are_lossless(self) -> None:
        backbone = TableBackbone((2, 3), 2)
        assert distance(backbone, "mtp1d", heads=arbitrary(backbone), length=2) < 1e-10

    @pytest.mark.parametrize("twist,sampling", [(reversed_logits, TOP_K), (zero_at_the_mode, PLAIN)])
    def test_the_worst_heads_cost_steps_and_not_the_law(self, twist: Twist, sampling: Sampling) -> None:
        backbone = TableBackbone((1, 4), 3)
        heads = TwistedHeads(backbone, HeadsConfig(right=3, down=0), twist)
        assert distance(backbone, "mtp1d", sampling, heads, length=2) < 1e-10


MAXIMAL = {"window": 3, "coupling": "maximal"}
REFRESHES = [(0.0, 1.0, 0.0), (1.0, 0.3, 1.0), (0.5, 0.3, 0.01), (1.0, 1.0, 0.01)]
"""(refresh, decay, uniform)"""


class TestCoupledSSD:
    @pytest.mark.parametrize("refresh,decay,uniform", REFRESHES)
    def test_any_refresh_is_lossless(self, refresh: float, decay: float, uniform: float) -> None:
        backbone = TableBackbone((2, 2), 3)
        settings = {"window": 3, "refresh": refresh, "decay": decay, "uniform": uniform}
        assert distance(backbone, "ssd_coupled", heads=arbitrary(backbone), **settings) < 1e-10

    @pytest.mark.parametrize("grid,window", [((2, 3), 4), ((3, 2), 3), ((3, 2), 9)])
    def test_windows_of_every_shape_are_lossless(self, grid: tuple[int, int], window: int) -> None:
        backbone = TableBackbone(grid, 2)
        assert distance(backbone, "ssd_coupled", heads=arbitrary(backbone), window=window) < 1e-10

    def test_three_codes_and_five_cells_are_lossless(self) -> None:
        backbone = TableBackbone((1, 5), 3)
        for window in (3, 4):
            assert distance(backbone, "ssd_coupled", heads=arbitrary(backbone), window=window) < 1e-10

    def test_filters_that_differ_between_contexts_keep_it_lossless(self) -> None:
        backbone = TableBackbone((2, 2), 3)
        for sampling in (TOP_K, NUCLEUS, ALL):
            assert distance(backbone, "ssd_coupled", sampling, arbitrary(backbone), window=3) < 1e-10

    @pytest.mark.parametrize("twist", [reversed_logits, zero_at_the_mode])
    def test_the_worst_heads_cost_steps_and_not_the_law(self, twist: Twist) -> None:
        for backbone, uniform in ((TableBackbone((2, 2), 3), 0.01), (TableBackbone((2, 3), 2), 0.0)):
            heads = TwistedHeads(backbone, HeadsConfig(right=1, down=1), twist)
            assert distance(backbone, "ssd_coupled", heads=heads, window=3, uniform=uniform) < 1e-10


class TestCoupledSSDWithChainHeads:
    """Heads that read the left draft, on a table behind an RMS norm."""

    @pytest.mark.parametrize("refresh,decay,uniform", REFRESHES[2:])
    def test_any_refresh_is_lossless(self, refresh: float, decay: float, uniform: float) -> None:
        backbone = TableBackbone((2, 2), 3, normed=True)
        settings = {"window": 3, "refresh": refresh, "decay": decay, "uniform": uniform}
        assert distance(backbone, "ssd_coupled", heads=random_chain_heads(backbone), **settings) < 1e-10

    @pytest.mark.parametrize("grid,window", [((2, 3), 4), ((3, 2), 3), ((3, 2), 9)])
    def test_windows_of_every_shape_are_lossless(self, grid: tuple[int, int], window: int) -> None:
        backbone = TableBackbone(grid, 2, normed=True)
        assert distance(backbone, "ssd_coupled", heads=random_chain_heads(backbone), window=window) < 1e-10

    def test_filters_that_differ_between_contexts_keep_it_lossless(self) -> None:
        backbone = TableBackbone((2, 2), 3, normed=True)
        for sampling in (TOP_K, NUCLEUS):
            assert distance(backbone, "ssd_coupled", sampling, random_chain_heads(backbone), window=3) < 1e-10

    @pytest.mark.parametrize("worst", ["reversed", "zero at the mode"])
    def test_the_worst_heads_cost_steps_and_not_the_law(self, worst: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a Markov world heads of hand-set weights say exactly -logits of p, or p without its mode."""
        backbone = markov_table((1, 5), 3)
        heads = markov_heads(backbone, -1.0 if worst == "reversed" else 1.0)
        if worst == "zero at the mode":
            monkeypatch.setattr(drafters, "chain_tables", Modeless)
        assert distance(backbone, "ssd_coupled", heads=heads, window=3, uniform=0.01) < 1e-10


class Modeless(LinearTables):
    """Its logits are not the backbone's, on purpose."""

    def logits(self, base: Tensor, u: Tensor) -> Tensor:
        return zero_at_the_mode(super().logits(base, u))


def markov_heads(backbone: TableBackbone, sign: float) -> ChainHeads:
    """Row 0 has nothing above, so t = 0 and u = GLU(A e) = e / 2: the predicted state is sign * logits of p."""
    V = backbone.image_vocab_size
    heads = ChainHeads(HeadsConfig(kind="chain", rank=V), TrainedOn.of(backbone)).double().requires_grad_(False)
    heads.late_left.weight.copy_(torch.cat([torch.eye(V), torch.zeros(V, V)]))
    heads.late_down.weight.copy_(2 * sign * backbone.left_logits.T)
    return heads


@pytest.fixture(scope="module")
def network() -> Backbone:
    return tiny_emu3((2, 2), codes=3, double=True)


class TestNetwork:
    """A real transformer in fp64, its row-end token forced in mid-sequence; the law comes without a cache."""

    @pytest.mark.parametrize(
        "decoder,settings,kind,sampling",
        [
            ("ar", {}, None, PLAIN),
            ("ar", {}, None, GUIDED),
            ("sjd", {"window": 3, "initial": "above"}, None, GUIDED),
            ("scd", {"window": 3}, None, GUIDED),
            ("mtp1d", {"length": 1}, "offsets", GUIDED),
            ("ssd_coupled", MAXIMAL, "offsets", PLAIN),
            ("ssd_coupled", MAXIMAL, "offsets", GUIDED),
            ("ssd_coupled", MAXIMAL, "chain", PLAIN),
            ("ssd_coupled", MAXIMAL, "chain", GUIDED),
        ],
    )
    def test_lossless_across_the_row_end_with_and_without_guidance(
        self, network: Backbone, decoder: str, settings: dict, kind: str | None, sampling: Sampling
    ) -> None:
        heads = None
        if kind == "offsets":
            heads = new_heads(HeadsConfig(right=1, down=1), network).double()
        if kind == "chain":
            heads = random_chain_heads(network)
        law = network_law(network, sampling, "a red apple")
        assert len(law) > 10 and max(law.values()) < 0.5
        paths = enumerate_law(
            network, lambda: make_policy(decoder, **settings), sampling, heads, prompt="a red apple", batch=1000
        )
        assert total_variation(paths, law) < 1e-10

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["offsets", "chain"])
    def test_six_cells_of_two_codes_are_lossless(self, kind: str) -> None:
        backbone = tiny_emu3((2, 3), codes=2, double=True)
        sampling = Sampling(guidance=2, temperature=2.0)
        heads = random_chain_heads(backbone)
        if kind == "offsets":
            heads = new_heads(HeadsConfig(right=2, down=1), backbone).double()
        make = lambda: make_policy("ssd_coupled", window=4, coupling="maximal")  # noqa: E731
        paths = enumerate_law(backbone, make, sampling, heads, prompt="blue")
        assert total_variation(paths, network_law(backbone, sampling, "blue")) < 1e-10


@pytest.mark.parametrize("decoder,settings", [("scd", {}), ("ssd_coupled", {"coupling": "maximal"})])
def test_two_samples_of_a_batch_are_independent(decoder: str, settings: dict) -> None:
    """Their joint law, over all paths of both, is the product: no sample waits for, or shows, what the other did."""
    backbone = TableBackbone((1, 4), 2)
    heads = arbitrary(backbone) if decoder == "ssd_coupled" else None
    settings = {"coupling": "maximal"} if decoder == "ssd_coupled" else {}
    paths = enumerate_law(backbone, lambda: make_policy(decoder, window=3, **settings), PLAIN, heads, share=2)
    law = backbone.law(PLAIN)
    product = {(*a, *b): p * q for a, p in law.items() for b, q in law.items()}
    assert total_variation(paths, product) < 1e-10


class StaleRecord(SCD):
    """Keeps the old proposal of what is right of the rejection, as the released Lumina and Janus code does."""

    def verify(self, canvas: Canvas, p: Tensor) -> None:
        self.stale = self.proposal.clone()
        super().verify(canvas, p)

    def draft(self, canvas: Canvas) -> None:
        super().draft(canvas)
        for b, (old, n, carried) in enumerate(zip(self.n, canvas.committed, self.fresh, strict=True)):
            if self.stale.numel():
                kept = self.stale[b, n - old : n - old + carried]
                had = kept.sum(-1, keepdim=True) > 0
                self.proposal[b, :carried] = torch.where(had, kept, self.proposal[b, :carried])


class FromP(SJD):
    """Draws the first rejected token from p instead of the residual, as the released Cosmos baseline does."""

    def move(self, canvas: Canvas, y: Tensor, kept: Tensor, beyond: Tensor, inside: Tensor) -> Tensor:
        self.proposal.zero_()
        return super().move(canvas, y, kept, beyond, inside)


class CutByToken(SJD):
    """Drops a draft, and all right of it, for being token 0."""

    def draft(self, canvas: Canvas) -> None:
        super().draft(canvas)
        for b, (n, a) in enumerate(zip(canvas.committed, canvas.ahead, strict=True)):
            cut = [d for d in range(a) if canvas.tokens[b, n + d] == 0]
            canvas.ahead[b] = cut[0] if cut else a
            self.proposal[b, canvas.ahead[b] :] = 0
        self.proposal = self.proposal[:, : max(canvas.ahead) + 1]


class MixedCommit(SCD):
    """Goes by the mixture of p and the proposal where p alone may decide."""

    def verify(self, canvas: Canvas, p: Tensor) -> None:
        if self.proposal.numel():
            p = torch.where(self.proposal.sum(-1, keepdim=True) > 0, torch.lerp(p, self.proposal, 0.5), p)
        super().verify(canvas, p)


class ArgmaxBySampledRecord(MTP1D):
    """Drafts the heads' most likely token but proposals their distribution."""

    def propose(self, canvas: Canvas, rows: slice, start: int, count: int) -> tuple[Tensor, Tensor]:
        _, q = super().propose(canvas, rows, start, count)
        return q.argmax(-1), q


@pytest.mark.parametrize(
    "mutant",
    [
        lambda: StaleRecord(4),
        lambda: FromP(3),
        lambda: CutByToken(4),
        lambda: MixedCommit(3),
        lambda: ArgmaxBySampledRecord(1),
    ],
    ids=["stale proposal", "resampled from p", "cut by its token", "mixture commits", "argmax"],
)
def test_what_breaks_the_law_is_seen(mutant: Callable[[], Policy]) -> None:
    backbone = TableBackbone((1, 4), 3)
    paths = enumerate_law(backbone, mutant, PLAIN, arbitrary(backbone))
    assert total_variation(paths, backbone.law(PLAIN)) > 1e-3


class TestLossy:
    """The relaxed decoders are exact where their knob is off, visibly not where it is on, and worse the further."""

    def test_gsd_over_the_size_of_its_group(self) -> None:
        backbone = TableBackbone((1, 4), 3)
        tv = [distance(backbone, "gsd", window=3, group=group, delta=1.0) for group in (0, 1, 4)]
        assert tv[0] < 1e-10 and 0.02 < tv[1] < tv[2], tv

    def test_lantern_over_its_budget(self) -> None:
        backbone = TableBackbone((1, 4), 3)
        codebook = torch.rand(3, 12, generator=torch.Generator().manual_seed(0))
        vq = PatchVQ(codebook, patch=2, image_size=8)
        off = distance(backbone, "lantern", window=3, neighbours=0, tokenizer=vq)
        tv = [distance(backbone, "lantern", window=3, neighbours=2, delta=d, tokenizer=vq) for d in (0.0, 0.5, 1)]
        assert off < 1e-10 and tv[0] < 1e-10 and 0.02 < tv[1] < tv[2], tv

    def test_ssd_over_its_rounds(self) -> None:
        backbone = TableBackbone((2, 3), 2)
        tv = [distance(backbone, "ssd", heads=arbitrary(backbone), rounds=r) for r in range(4)]
        assert tv[0] > tv[1] > 0.02 and tv[1] > tv[2] and tv[3] < 1e-10, tv

    def test_pipelined_ssd_is_lossy_where_one_row_at_a_time_is_exact_and_less_so_with_more_rounds(self) -> None:
        backbone = TableBackbone((4, 2), 2)
        heads = arbitrary(backbone)
        assert distance(backbone, "ssd", heads=heads, rounds=2) < 1e-10
        tv = [distance(backbone, "ssd", heads=heads, rounds=r, rows_in_flight=2) for r in (1, 2, 3)]
        assert tv[0] > tv[1] > 0.02 and tv[1] > tv[2], tv
