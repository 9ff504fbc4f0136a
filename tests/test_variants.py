"""Forms of heads: every target with every input, shared trunks, low ranks, wider chains. Each is trained, exported,
loaded and drawn with, and says in its config what it is."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftgrid.data.stream import Batch
from draftgrid.eval.decoders import Sampling, decode, make_policy
from draftgrid.heads.config import HeadsConfig, LossConfig, OptimConfig
from draftgrid.heads.grid import Offset
from draftgrid.heads.mtp import MTPHeads, TrainedOn, new_heads
from draftgrid.heads.offsets import OffsetHeads
from draftgrid.training.module import HeadsModule
from tests.tiny import CAPTIONS, TableBackbone, enumerate_law, random_chain_heads, tiny_emu3, total_variation

OFFSETS = {"right": 2, "down": 1}
TARGETS, INPUTS = ("h_pre", "h_post", "token"), ("h", "h+e", "e")
FORMS = {
    **{f"{t} from {i}": OFFSETS | {"target": t, "input": i} for t in TARGETS for i in INPUTS},
    "shared": OFFSETS | {"shared": True, "rank": 5},
    "shared, low rank, behind the norm": OFFSETS | {"shared": True, "project_rank": 7, "target": "h_post"},
    "low rank": OFFSETS | {"project_rank": 7},
    "normed": OFFSETS | {"norm_inputs": True},
    "1D": {"right": 3, "down": 0, "target": "token"},
    "chain": {"kind": "chain"},
    "chain, wide": {"kind": "chain", "rows": 2, "lefts": 2, "recent": 2, "project_rank": 7},
    "chain, normed": {"kind": "chain", "lefts": 2, "recent": 2, "norm_inputs": True},
    "chain behind the norm": {"kind": "chain", "target": "h_post", "lefts": 2, "recent": 1},
    "chain on tokens": {"kind": "chain", "target": "token"},
}


def batch(seed: int = 0) -> Batch:
    tokens = torch.randint(24, (3, 3, 4), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens, list(CAPTIONS), ["k"] * 3)


@pytest.mark.parametrize("form", FORMS)
def test_exported_offsets_are_the_heads_that_got_a_gradient_and_every_weight_did(form: str) -> None:
    backbone = tiny_emu3()
    heads = new_heads(HeadsConfig(**FORMS[form]), backbone)
    module = HeadsModule(backbone, heads, OptimConfig(), loss=LossConfig(tv=0.5))
    h, e = module.states(batch())
    module.loss(h, e, batch().tokens, (0,)).backward()
    moved = {name for name, p in heads.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moved == set(heads.state_dict())
    offsets = heads.describe()["offsets"]
    if heads.kind == "offsets":
        assert {name.split(".")[0] for name in moved} - {"trunk"} == set(offsets) == set(module.pairs)
    assert all(p.grad is None for p in backbone.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_exported_and_loaded_again_they_draw_the_same(form: str, tmp_path: Path) -> None:
    backbone = tiny_emu3()
    heads = new_heads(HeadsConfig(**FORMS[form]), backbone, seed=3)
    heads.save_pretrained(tmp_path / "heads")
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert config["target"] == FORMS[form].get("target", "h_pre")
    loaded = MTPHeads.from_pretrained(tmp_path / "heads", backbone)
    assert loaded.describe() == heads.describe() and loaded.config == heads.config
    decoders = [("ssd_coupled", {"window": 5}), ("ssd_coupled", {"coupling": "maximal"})]
    if heads.kind == "offsets":
        decoders += [("ssd", {"rounds": 1}), ("mtp1d", {"length": 2})]
    for decoder, settings in decoders:
        one, two = (decode(backbone, CAPTIONS, h, decoder=decoder, guidance=2.0, **settings) for h in (heads, loaded))
        assert torch.equal(one.tokens, two.tokens)


def test_folders_written_before_there_were_options_load(tmp_path: Path) -> None:
    backbone = tiny_emu3()
    for kind, fields in (("offsets", {"right": 2, "down": 1, "width": 0, "input": "h+e"}), ("chain", {})):
        heads = new_heads(HeadsConfig(kind=kind, **fields), backbone)
        heads.save_pretrained(tmp_path / kind)
        config = json.loads((tmp_path / kind / "config.json").read_text())
        assert not {"shared", "project_rank", "rows", "lefts", "recent", "norm_inputs"} & set(config)
        assert MTPHeads.from_pretrained(tmp_path / kind, backbone).config == heads.config


class Oracle(OffsetHeads):
    """Finds the cell it reads in the true picture and returns the true state of its target, of the kind it predicts."""

    def __init__(self, backbone, config: HeadsConfig, truth: Tensor) -> None:
        MTPHeads.__init__(self, config, TrainedOn.of(backbone))
        self.truth, self.grid = truth, backbone.grid

    def forward(self, h: Tensor, e: Tensor, offset: Offset) -> Tensor:
        distance = torch.cdist(h.reshape(-1, h.shape[-1]), self.truth)
        assert distance.min(-1).values.max() < 1e-2, "what it is given are not the states it reads"
        return self.truth[distance.argmin(-1) + offset[0] * self.grid.width + offset[1]].view(h.shape)


@pytest.mark.parametrize("target", ["h_pre", "h_post"])
def test_an_oracle_of_either_state_is_accepted_everywhere(target: str) -> None:
    """The norm is applied once on the way to logits, in training's figures and in both decoders; never twice or not."""
    backbone = tiny_emu3((4, 6))
    picture = decode(backbone, ["blue"], decoder="ar", temperature=0).tokens
    truth = backbone.states(picture, ["blue"])[0].flatten(0, 2)
    truth = backbone.text.norm(truth) if target == "h_post" else truth
    heads = Oracle(backbone, HeadsConfig(right=5, down=1, target=target), truth)
    module = HeadsModule(backbone, heads, OptimConfig())
    module.validation_step(Batch(picture, ["blue"], ["k"]), 0)
    for name in module.pairs:
        assert module.means[f"acceptance/{name}"].compute().item() == pytest.approx(1, abs=1e-5)
        assert module.means[f"smooth_l1/{name}"].compute().item() == pytest.approx(0, abs=1e-8)
    for decoder in ("ssd", "mtp1d"):
        result = decode(backbone, ["blue"], heads, decoder=decoder, temperature=0)
        assert torch.equal(result.tokens, picture)
        assert set(result.stats.acceptance.values()) == {1.0}


@pytest.mark.parametrize("grid,window", [((2, 3), 4), ((3, 2), 3), ((3, 2), 9), ((1, 5), 4)])
def test_chains_that_read_all_they_can_are_lossless(grid: tuple[int, int], window: int) -> None:
    backbone = TableBackbone(grid, 2, normed=True)
    heads = random_chain_heads(backbone, rows=2, lefts=2, recent=2)
    make = lambda: make_policy("ssd_coupled", window=window, coupling="maximal", uniform=0.01)  # noqa: E731
    assert total_variation(enumerate_law(backbone, make, Sampling(), heads), backbone.law(Sampling())) < 1e-10


@pytest.mark.parametrize("kind", ["offsets", "chain"])
def test_heads_that_predict_behind_the_norm_are_lossless(kind: str) -> None:
    backbone = TableBackbone((2, 2), 3, normed=True)
    heads = random_chain_heads(backbone, target="h_post", lefts=2, recent=1)
    if kind == "offsets":
        heads = new_heads(HeadsConfig(right=1, down=1, target="h_post", shared=True), backbone).double()
    make = lambda: make_policy("ssd_coupled", window=3, coupling="maximal")  # noqa: E731
    # One path at a time: products of another batch size round differently, and here some p / q is 1 but for rounding.
    paths = enumerate_law(backbone, make, Sampling(), heads, batch=1)
    assert total_variation(paths, backbone.law(Sampling())) < 1e-10


class TestOwnDrafts:
    @pytest.fixture
    def module(self) -> HeadsModule:
        backbone = tiny_emu3(spread=3.0)
        heads = new_heads(HeadsConfig(kind="chain"), backbone)
        return HeadsModule(backbone, heads, OptimConfig(), loss=LossConfig(tv=1.0, own_drafts=1.0), seed=5)

    def test_what_is_drawn_depends_on_seed_and_step_and_on_nothing_before(self, module: HeadsModule) -> None:
        h, e = module.states(batch())
        losses = [module.loss(h, e, batch().tokens, step).item() for step in ((1, 0), (2, 0), (1, 0), (1, 1))]
        assert losses[0] == losses[2] and len(set(losses)) == 3
        torch.rand(7)
        module.seed = 6
        assert module.loss(h, e, batch().tokens, (1, 0)).item() not in losses

    def test_left_tokens_are_drawn_from_the_heads_own_q(self, module: HeadsModule) -> None:
        """Counts of 2,000 draws at every cell against q, and the share that is replaced."""
        h, e = module.states(batch())
        flat, embeds, tokens = h.flatten(2, 3), e.flatten(1, 2), batch().tokens.flatten(1)
        with torch.no_grad():
            q = module.backbone.logits(module.heads.predict(flat[0], embeds, "chain")).softmax(-1)
            drawn = [
                module.objective.own_drafts(flat, embeds, tokens, module.generator((n,), h.device)) for n in range(2000)
            ]
        counts = torch.nn.functional.one_hot(torch.stack(drawn), 24).float().mean(0)
        assert (counts[:, 1:] - q).abs().max() < 5 * (0.25 / 2000) ** 0.5
        assert torch.equal(counts[:, 0].argmax(-1), tokens[:, 0])
        module.objective.config.own_drafts = 0.25
        some = torch.stack(
            [module.objective.own_drafts(flat, embeds, tokens, module.generator((n,), h.device)) for n in range(300)]
        )
        kept = q.gather(-1, tokens[:, 1:, None]).mean().item()  # a draw may be the picture's own token
        assert (some[..., 1:] != tokens[:, 1:]).float().mean().item() == pytest.approx(0.25 * (1 - kept), abs=0.02)

    def test_the_target_stays_the_pictures(self, module: HeadsModule) -> None:
        """With heads that ignore the left token nothing changes."""
        h, e = module.states(batch())
        module.heads.late_left.weight.data.zero_()
        own = module.loss(h, e, batch().tokens, (1,)).item()
        module.terms.own_drafts = 0.0
        assert module.loss(h, e, batch().tokens, (1,)).item() == pytest.approx(own, rel=1e-6)
