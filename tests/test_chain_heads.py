"""Chain heads: what they read, the cheap way of drafting with them, exporting, and training."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftgrid.eval.decoders import decode
from draftgrid.heads.chain import ChainHeads
from draftgrid.heads.chain_tables import chain_tables
from draftgrid.heads.config import HeadsConfig, LossConfig
from draftgrid.heads.mtp import MTPHeads, new_heads
from draftgrid.training.module import HeadsModule, OptimConfig
from tests.tiny import random_chain_heads, tiny_emu3

WIDE = {"rows": 2, "lefts": 2, "recent": 2}


KINDS = {
    "plain": {},
    "wide": WIDE,
    "after the norm": {"target": "h_post", **WIDE},
    "normed": {"norm_inputs": True, **WIDE},
}


@pytest.fixture(scope="module", params=KINDS)
def world(request):
    backbone = tiny_emu3((3, 4), double=True)
    heads = random_chain_heads(backbone, **KINDS[request.param])
    tokens = torch.randint(24, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    h, e = (s.flatten(1, 2) for s in backbone.states(tokens, ["blue", None]))
    assert isinstance(heads, ChainHeads)
    if heads.config.target == "h_post":
        h = backbone.text.norm(h).double()
    return backbone, heads, tokens.flatten(1), h, e


def logits(backbone, heads: ChainHeads, state: Tensor) -> Tensor:
    """LM head, after the final norm where the heads predict what comes before it."""
    state = state if heads.config.target == "h_post" else backbone.text.norm(state)
    return torch.nn.functional.linear(state, backbone.model.lm_head.weight[backbone.image_ids].to(state.dtype))


def test_the_tables_give_the_backbones_logits_of_the_predicted_state(world) -> None:
    backbone, heads, _, _, _ = world
    tables = chain_tables(heads, backbone)
    generator = torch.Generator().manual_seed(1)
    t = 5 * torch.randn(6, 32, generator=generator, dtype=torch.float64)
    u = torch.randn(6, heads.rank, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        tables.logits(tables.base(t), u), logits(backbone, heads, t + heads.late_down(u)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_backbone_with_a_layer_norm_is_refused_before_training_unless_its_head_is_said_not_to_be_linear(
    dtype: torch.dtype,
) -> None:
    backbone = tiny_emu3((3, 4)).to(dtype)
    for kind, target in (("chain", "h_pre"), ("chain", "h_post"), ("offsets", "h_pre")):
        new_heads(HeadsConfig(kind=kind, target=target, **({} if kind == "chain" else {"right": 1})), backbone)
    backbone.text.norm = torch.nn.LayerNorm(backbone.hidden_size).to(dtype)
    with pytest.raises(ValueError, match=r"need a backbone with a plain RMS norm .* or with linear_head = False; emu3"):
        new_heads(HeadsConfig(kind="chain"), backbone)
    new_heads(HeadsConfig(kind="chain", target="h_post"), backbone)  # they predict states that the norm is not part of
    backbone.linear_head = False
    heads = new_heads(HeadsConfig(kind="chain"), backbone).to(dtype)
    t, u = torch.randn(3, backbone.hidden_size).to(dtype), torch.randn(3, heads.rank).to(dtype)
    tables = chain_tables(heads, backbone)
    with torch.no_grad():
        torch.testing.assert_close(tables.logits(tables.base(t), u), logits(backbone, heads, t + heads.late_down(u)))


def by_hand(
    heads: ChainHeads, h: Tensor, e: Tensor, y: int, x: int, known: int = 12, back: int = 0, H: int = 3, W: int = 4
) -> Tensor:
    """One cell's prediction from the formula, neighbours looked up one by one, zeros where there is none known.

    `back`: how far to the left the newest drawn cell is; 0 = too far.
    """
    if heads.config.norm_inputs:
        h, e = (s / (s.square().mean(-1, keepdim=True) + 1e-6).sqrt() for s in (h, e))
    cells = []
    for dy, dx in [(-1, 0), (-1, 1), (-1, 2)] + ([(-2, 0), (-2, 1)] if heads.config.rows == 2 else []):
        at = (y + dy) * W + x + dx
        inside = 0 <= y + dy < H and 0 <= x + dx < W and at < known
        cells.append(heads.cell(torch.cat([h[at], e[at]]) if inside else torch.zeros(2 * h.shape[1], dtype=h.dtype)))
    if heads.config.recent:
        newest = y * W + x - back
        near = torch.zeros_like(cells[0])
        if 0 < back <= min(x, heads.config.recent):
            near = heads.recent(torch.cat([h[newest], e[newest]])) + heads.distance.weight[back - 1]
        cells.append(near)
    t = heads.trunk(torch.cat(cells))
    entering = heads.late_left(e[y * W + x - 1]) if x else 0
    if heads.config.lefts == 2 and x > 1:
        entering = entering + heads.late_second(e[y * W + x - 2])
    up, gate = (heads.late_trunk(heads.late_norm(t)) + entering).chunk(2)
    return t + heads.late_down(up * torch.sigmoid(gate))


def test_a_whole_picture_is_predicted_cell_by_cell_as_the_formula_says(world) -> None:
    _, heads, _, h, e = world
    predicted = heads.predict(h, e, "chain")
    assert predicted.shape == (2, 11, 32)
    for b in range(2):
        for i in range(1, 12):
            torch.testing.assert_close(predicted[b, i - 1], by_hand(heads, h[b], e[b], i // 4, i % 4))


@pytest.mark.parametrize("world", ["wide", "after the norm", "normed"], indirect=True)
def test_the_newest_drawn_cell_is_read_at_the_distance_given_and_never_across_a_row_end(world) -> None:
    _, heads, _, h, e = world
    for back in (0, 1, 2):
        predicted = heads.predict(h, e, "chain", None, torch.full((2, 11), back))
        for i in range(1, 12):
            torch.testing.assert_close(predicted[1, i - 1], by_hand(heads, h[1], e[1], i // 4, i % 4, back=back))
    drawn = heads.distances(500, torch.Generator().manual_seed(0))
    shares = [(drawn == d).float().mean().item() for d in range(3)]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.03) and drawn.shape == (500, 11)


def test_a_prediction_looks_at_cells_above_and_left_tokens_and_nothing_else(world) -> None:
    """Changing any other state or embedding leaves the prediction of a cell as it is."""
    _, heads, _, h, e = world
    further = heads.config.rows == 2
    for y, x, reads_h, left in ((1, 1, {1, 2, 3}, {4}), (2, 2, {6, 7, *({2, 3} if further else ())}, {9, 8})):
        left = left if heads.config.lefts == 2 else {y * 4 + x - 1}
        target, reads_e = y * 4 + x, reads_h | left
        before = heads.predict(h, e, "chain")[:, target - 1]
        for i in range(12):
            for tensor, reads, arguments in ((h, reads_h, lambda c: (c, e)), (e, reads_e, lambda c: (h, c))):
                changed = tensor.clone()
                changed[:, i] += 1
                same = torch.equal(heads.predict(*arguments(changed), "chain")[:, target - 1], before)
                assert same == (i not in reads), (y, x, i)


def test_other_left_tokens_may_be_read_than_those_of_the_picture(world) -> None:
    """They enter at the left and nowhere else: the cells above stay the picture's."""
    backbone, heads, tokens, h, e = world
    drafts = (tokens + 5) % 24
    predicted = heads.predict(h, e, "chain", backbone.embed(drafts))
    for target in range(1, 12):
        y = target // 4
        beside = [i for i in (target - 1, target - 2) if i >= y * 4][: heads.config.lefts]
        mixed = tokens.clone()
        mixed[:, beside] = drafts[:, beside]
        expected = heads.predict(h, backbone.embed(mixed), "chain")[:, target - 1]
        torch.testing.assert_close(predicted[:, target - 1], expected)


def test_targets_are_all_cells_but_the_first_and_sources_the_left_ones(world) -> None:
    backbone, heads, *_ = world
    source, target = heads.train_pairs(backbone.grid)["chain"]
    assert target.tolist() == list(range(1, 12))
    assert source.tolist() == [0, 1, 2, 0, 4, 5, 6, 4, 8, 9, 10]


def test_drafts_at_temperature_zero_are_the_argmax_of_the_predictions(world) -> None:
    """A decoder that commits its drafts untested would draw these; here the first window's are read off."""
    from draftgrid.eval.decoders import make_policy
    from draftgrid.eval.decoders.engine import run
    from draftgrid.eval.decoders.kernels import Sampling

    backbone, heads, *_ = world
    policy = make_policy("ssd_coupled", window=12)
    seen: list[Tensor] = []
    draft = policy.draft

    def watched(canvas) -> None:
        draft(canvas)
        if not seen:
            seen.append(canvas.tokens.clone())

    policy.draft = watched  # type: ignore[method-assign]
    run(backbone, ["blue"], policy, Sampling(temperature=0), heads)
    (tokens,) = seen
    # Only row 0 can be checked without the states of drafts: nothing is above it, and cell 0 is the one that is drawn.
    h, e = backbone.states(tokens.view(1, 3, 4), ["blue"])[0].flatten(1, 2)[0], backbone.embed(tokens)[0]
    h = heads.states(backbone, h)
    for x in range(1, 4):
        assert int(logits(backbone, heads, by_hand(heads, h, e, 0, x, back=x)).argmax()) == int(tokens[0, x])


def test_drafting_position_by_position_says_what_the_whole_picture_is_predicted_to_be(world) -> None:
    """The drafter's tables with true left tokens, both guidance branches, in and out of step, row ends included.

    Cells up and to the right that come after the first opened position count as missing.
    """
    from draftgrid.eval.decoders.drafters import ChainDrafter
    from draftgrid.eval.decoders.engine import Canvas
    from draftgrid.eval.decoders.kernels import Sampling
    from draftgrid.eval.decoders.randomness import SeededSource

    backbone, heads, tokens, h, e = world
    tokens = tokens[:1].expand(2, -1)
    branches, sampling = h[:, None].expand(-1, 2, -1, -1), Sampling(guidance=2.0)  # h is of prompt and no prompt
    for first in ([1, 1], [1, 5], [3, 4], [8, 6]):
        canvas = Canvas(backbone, heads, sampling, SeededSource(0), [0, 1])
        canvas.tokens, canvas.hidden, canvas.committed = tokens.clone(), branches, list(first)
        drafter = ChainDrafter(canvas, heads)
        drafter.open(canvas, first, drafter.reach)
        for s in range(drafter.reach):
            left = torch.stack([canvas.tokens[b, [max(f + s - 2, 0), f + s - 1]] for b, f in enumerate(first)])
            q = drafter.q(slice(s, s + 1), left)
            for b, f in enumerate(first):  # the tables leave out the norm's epsilon, which row 0's small states show
                y, x = divmod(f + s, 4)
                predicted = torch.stack([by_hand(heads, branch[b], e[0], y, x, f, s + 1) for branch in branches])
                expected = sampling.probabilities(logits(backbone, heads, predicted))
                torch.testing.assert_close(q[b, 0], expected, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["offsets", "chain"])
def test_drafts_of_a_network_are_accepted_as_often_as_their_distributions_overlap(kind: str) -> None:
    """One draft, at position 1: the share that passes its first test is 1 - TV(q, p) within 3 sigma."""
    backbone, count = tiny_emu3((1, 3), codes=6, double=True, spread=3.0), 4000
    heads = new_heads(
        HeadsConfig(kind=kind, **({"right": 1, "down": 0} if kind == "offsets" else {})), backbone
    ).double()
    stats = decode(backbone, ["blue"] * count, heads, decoder="ssd_coupled", window=2, uniform=0.1).stats
    pictures = torch.zeros(6, 1, 3, dtype=torch.long)
    pictures[:, 0, 0] = torch.arange(6)
    h, e = (s[:, 0] for s in backbone.states(pictures, ["blue"] * 6))
    p = backbone.logits(h).softmax(-1)
    drafted = heads.predict(h, e, heads.names[0])[:, 0]
    q = 0.9 * backbone.logits(drafted).softmax(-1) + 0.1 / 6
    overlap = float((p[0, 0] * torch.minimum(p[:, 1], q).sum(-1)).sum().detach())
    hits, tests = stats.cells[:, 0, 1].tolist()
    assert tests == count and 0.05 < overlap < 0.95
    assert abs(hits / tests - overlap) < 3 * (overlap * (1 - overlap) / count) ** 0.5


class TestExport:
    def test_round_trip_draws_the_same_and_the_config_says_what_they_are(self, tmp_path: Path) -> None:
        backbone = tiny_emu3((3, 4))
        heads = new_heads(HeadsConfig(kind="chain", rank=6, width=9), backbone, seed=3)
        heads.save_pretrained(tmp_path / "heads")
        config = json.loads((tmp_path / "heads" / "config.json").read_text())
        assert (config["kind"], config["rank"], config["width"], config["offsets"]) == ("chain", 6, 9, ["chain"])
        loaded = MTPHeads.from_pretrained(tmp_path / "heads", backbone)
        assert isinstance(loaded, ChainHeads) and loaded.rank == 6
        one, two = (decode(backbone, ["blue"], h, decoder="ssd_coupled").tokens for h in (heads, loaded))
        assert torch.equal(one, two)

    def test_another_backbone_is_refused(self, tmp_path: Path) -> None:
        heads = new_heads(HeadsConfig(kind="chain"), tiny_emu3((3, 4)))
        heads.save_pretrained(tmp_path / "heads")
        with pytest.raises(ValueError, match="these heads belong to backbone"):
            MTPHeads.from_pretrained(tmp_path / "heads", tiny_emu3((3, 4), codes=25))

    @pytest.mark.parametrize("decoder", ["ssd", "mtp1d"])
    def test_decoders_of_offset_heads_refuse_them_in_one_sentence(self, decoder: str) -> None:
        backbone = tiny_emu3((3, 4))
        heads = new_heads(HeadsConfig(kind="chain"), backbone)
        with pytest.raises(ValueError, match=f"decoder {decoder} drafts with offsets heads; these are chain"):
            decode(backbone, ["blue"], heads, decoder=decoder)

    @pytest.mark.parametrize(
        "config,message",
        [
            (HeadsConfig(kind="chains"), "heads.kind is 'chains'; use one of offsets, chain"),
            (HeadsConfig(kind="chain", rank=-1), "heads.rank is -1"),
        ],
    )
    def test_wrong_settings_are_named(self, config: HeadsConfig, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            new_heads(config, tiny_emu3((3, 4)))


@dataclass
class Batch:
    tokens: Tensor
    captions: list[str]


@pytest.mark.parametrize("guidance", [[1.0], [3.0], [1.0, 3.0]])
def test_training_with_the_total_variation_term_raises_acceptance(guidance: list[float]) -> None:
    backbone = tiny_emu3((3, 4), spread=3.0)
    heads = new_heads(HeadsConfig(kind="chain"), backbone)
    module = HeadsModule(backbone, heads, OptimConfig(), loss=LossConfig(tv=1.0, guidance=guidance))
    plain = HeadsModule(backbone, heads, OptimConfig())
    tokens = decode(backbone, ["blue"] * 16, decoder="ar").tokens
    h, e = module.states(Batch(tokens, ["blue"] * 16))
    assert len(h) == (1 if guidance == [1.0] else 2)
    optimizer = torch.optim.Adam(heads.parameters(), 3e-3)

    def rejected() -> float:
        return float((module.loss(h, e, tokens) - plain.loss(h, e, tokens)).detach())

    before = rejected()
    assert 0 < before < 1
    for _ in range(60):
        optimizer.zero_grad()
        module.loss(h, e, tokens).backward()
        optimizer.step()
    assert rejected() < 0.8 * before
