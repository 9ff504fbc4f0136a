"""The chunked objective against the same objective written plainly and differentiated by torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from draftgrid.data.stream import Batch as DataBatch
from draftgrid.heads.config import HeadsConfig, LossConfig, OptimConfig
from draftgrid.heads.distributions import cross_entropy, divergence, probabilities
from draftgrid.heads.mtp import new_heads
from draftgrid.training.module import HeadsModule
from tests.tiny import CAPTIONS, tiny_emu3

ROOT = Path(__file__).parent.parent


def module_of(loss: LossConfig, dtype: torch.dtype = torch.float64, **heads: object) -> HeadsModule:
    loss.check()
    backbone = tiny_emu3((3, 4), double=dtype == torch.float64)
    if dtype == torch.float64:  # transformers' own works in fp32 whatever it is given
        backbone.text.norm = nn.RMSNorm(32, 1e-5, dtype=dtype)
        backbone.freeze()
    reach = {} if heads.get("kind") == "chain" else {"right": 3, "down": 2}
    config = HeadsConfig(**{**reach, **heads})
    return HeadsModule(backbone, new_heads(config, backbone).to(dtype), OptimConfig(), loss=loss)


class Batch:
    tokens = torch.randint(24, (3, 3, 4), generator=torch.Generator().manual_seed(0))
    captions = CAPTIONS


def value_and_gradients(module: HeadsModule) -> tuple[float, dict[str, Tensor]]:
    module.heads.zero_grad()
    h, e = module.states(Batch)
    loss = module.loss(h, e, Batch.tokens)
    loss.backward()
    return loss.item(), {k: p.grad.clone() for k, p in module.heads.named_parameters() if p.grad is not None}


def plainly(module: HeadsModule) -> tuple[float, dict[str, Tensor]]:
    """Every term from its definition, all positions at once, left to autograd."""
    c, heads, backbone = module.terms, module.heads, module.backbone
    heads.zero_grad()
    h, e = backbone.states(Batch.tokens, list(CAPTIONS))
    branches = [h, backbone.states(Batch.tokens, [None] * 3)[0]] if c.guided else [h]
    behind = heads.config.target == "h_post"
    image_rows = backbone.model.lm_head.weight[backbone.image_ids]

    def logits(state: Tensor, normed: bool) -> Tensor:
        return nn.functional.linear(state if normed else backbone.text.norm(state), image_rows)

    def mixed(each: list[Tensor], g: float) -> Tensor:
        return each[0] if len(each) == 1 else each[1] + g * (each[0] - each[1])

    def top(z: Tensor) -> Tensor:
        if not c.top_k:
            return z
        order = z.argsort(-1, descending=True)[..., : c.top_k]
        return torch.full_like(z, -torch.inf).scatter(-1, order, z.gather(-1, order))

    total, weights = torch.zeros((), dtype=h.dtype), 0.0
    for name, (_, target) in module.pairs.items():
        weight = c.weights.get(name, 1.0)
        p_each, q_each, terms = [], [], []
        for b in branches:
            flat = b.flatten(1, 2)
            seen = backbone.text.norm(flat) if behind else flat
            predicted = heads.predict(seen, e.flatten(1, 2), name)
            p_each.append(logits(flat[:, target], False).detach())
            q_each.append(logits(predicted, behind))
            if heads.config.target == "token":
                lines = q_each[-1].flatten(0, 1)
                terms.append(c.state * nn.functional.cross_entropy(lines, Batch.tokens.flatten(1)[:, target].flatten()))
            else:
                terms.append(c.state * nn.functional.smooth_l1_loss(predicted, seen[:, target]))
        loss = torch.stack(terms).mean()
        for g in c.guidance:
            p, z = top(mixed(p_each, g)).softmax(-1), mixed(q_each, g)
            ce = -(p * z.log_softmax(-1)).sum(-1).mean()
            kl = ce + torch.special.xlogy(p, p).sum(-1).mean()
            tv = 1 - torch.minimum(p, top(z).softmax(-1)).sum(-1).mean()
            loss = loss + (c.tv * tv + c.ce * ce + c.kl * kl) / len(c.guidance)
        total, weights = total + weight * loss, weights + weight
    (total / weights).backward()
    gradients = {k: p.grad.clone() for k, p in heads.named_parameters() if p.grad is not None}
    return (total / weights).item(), gradients


OBJECTIVES = {
    "the paper's": (LossConfig(), {}),
    "tv": (LossConfig(tv=0.7), {}),
    "ce alone": (LossConfig(state=0, ce=1.0), {}),
    "all terms, weighted heads": (
        LossConfig(state=0.5, tv=0.7, ce=0.2, kl=0.3, weights={"down1": 3, "right2": 0.5}),
        {},
    ),
    "guided, both scales": (LossConfig(tv=0.5, ce=0.2, guidance=[1.0, 3.0]), {}),
    "guided, top-k": (LossConfig(tv=0.5, kl=0.2, guidance=[3.0], top_k=5), {}),
    "behind the norm": (LossConfig(tv=0.5, guidance=[2.0]), {"target": "h_post"}),
    "on tokens": (LossConfig(state=0.8), {"target": "token", "down": 0}),
    "on tokens and p": (LossConfig(state=0.8, tv=0.5, guidance=[2.0]), {"target": "token"}),
    "chain": (LossConfig(tv=1.0, guidance=[1.0, 3.0]), {"kind": "chain", "rows": 2}),
    "chain behind the norm": (LossConfig(tv=1.0), {"kind": "chain", "target": "h_post"}),
    "shared trunk of low rank": (LossConfig(tv=1.0), {"shared": True, "project_rank": 6}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("chunk", [0, 7, 1])
def test_value_and_gradients_are_those_of_the_plain_objective(name: str, chunk: int) -> None:
    loss, heads = OBJECTIVES[name]
    plain = plainly(module_of(loss, **heads))
    chunked = value_and_gradients(module_of(LossConfig(**{**vars(loss), "chunk": chunk}), **heads))
    assert chunked[0] == pytest.approx(plain[0], abs=1e-12)
    assert chunked[1].keys() == plain[1].keys()
    for key, gradient in plain[1].items():
        torch.testing.assert_close(chunked[1][key], gradient, rtol=1e-9, atol=1e-12)


def test_chunks_do_not_show_in_fp32() -> None:
    keys = {"tv": 0.5, "ce": 0.2, "guidance": [1.0, 3.0]}
    whole, parts = (value_and_gradients(module_of(LossConfig(**keys, chunk=n), torch.float32)) for n in (0, 5))
    assert parts[0] == pytest.approx(whole[0], rel=1e-5)
    for key, gradient in whole[1].items():
        torch.testing.assert_close(parts[1][key], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))


def test_recomputed_activations_change_nothing() -> None:
    once, twice = (value_and_gradients(module_of(LossConfig(tv=0.5, recompute=r))) for r in (False, True))
    assert once[0] == twice[0]
    assert all(torch.equal(once[1][k], twice[1][k]) for k in once[1])


@pytest.mark.parametrize("heads", [{}, {"kind": "chain"}])
def test_validation_figures_do_not_depend_on_the_chunk(heads: dict) -> None:
    figures = []
    for chunk in (0, 5):
        loss = LossConfig(tv=1.0, top_k=4, chunk=chunk)
        module = module_of(loss, **heads)
        module = HeadsModule(module.backbone, module.heads, OptimConfig(), guidance=[1.0, 3.0], loss=loss, top_k=4)
        module.tables = {name: torch.eye(24, dtype=torch.float64) for name in module.pairs}
        module.validation_step(DataBatch(Batch.tokens, list(CAPTIONS), ["k"] * 3), 0)
        figures.append({name: metric.compute().item() for name, metric in module.means.items()})
    assert figures[0].keys() == figures[1].keys() and len(figures[0]) == 8 * len(module.pairs) + 2
    for name, value in figures[0].items():
        assert figures[1][name] == pytest.approx(value, abs=1e-6), name


def test_gradients_written_out_are_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, 3, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    p = probabilities(2 * torch.randn(1, 4, 3, 9, generator=generator, dtype=torch.float64), top_k=4)
    q = z.softmax(-1)
    by_hand = 0.3 * (1 - torch.minimum(p, q).sum(-1)) - 0.9 * (p * q.log()).sum(-1)
    by_hand = by_hand + 0.4 * torch.special.xlogy(p, p).sum(-1)
    value, gradient = divergence(z.detach(), p, tv=0.3, ce=0.5, kl=0.4)
    torch.testing.assert_close(value, by_hand.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(by_hand.sum(), z)[0])
    token = torch.randint(9, (4, 3), generator=generator)
    value, gradient = cross_entropy(z.detach(), token)
    theirs = nn.functional.cross_entropy(z.flatten(0, 1), token.flatten(), reduction="none").view(4, 3)
    torch.testing.assert_close(value, theirs.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs.sum(), z)[0])


HEADS = [(1, 0), (1, 1), (5, 2)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("tv", [0.0, 1.0])
def test_twenty_bf16_steps_of_1_2_and_7_heads_are_finite(heads: tuple[int, int], precision: str, tv: float) -> None:
    """bf16-true: heads and backbone are bf16 copies; bf16-mixed: fp32 under autocast."""
    true = precision == "bf16-true"
    backbone = tiny_emu3((3, 7))
    backbone = backbone.bfloat16() if true else backbone
    new = new_heads(HeadsConfig(right=heads[0], down=heads[1]), backbone)
    module = HeadsModule(
        backbone,
        new.bfloat16() if true else new,
        OptimConfig(),
        loss=LossConfig(tv=tv, guidance=[3.0] if tv else [1.0]),
    )
    optimizer = torch.optim.AdamW(module.heads.parameters(), lr=1e-3)
    batch = Batch()
    batch.tokens = torch.randint(24, (3, 3, 7), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(20):
        with torch.autocast("cpu", torch.bfloat16, enabled=not true):
            h, e = module.states(batch)
            loss = module.loss(h, e, batch.tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(module.pairs) == sum(heads)
    assert torch.tensor(losses).isfinite().all() and losses[-1] < losses[0]
    assert all(p.isfinite().all() for p in module.heads.parameters())


@pytest.mark.slow
def test_peak_memory_in_chunks_is_a_third_of_the_whole_at_32768_codes() -> None:
    """Peaks above the level before the loss, each in a process of its own, guided, so with two branches; same value."""
    found = [
        subprocess.run(
            [sys.executable, "-m", "draftgrid.recipes.plan.loss_memory", "side=12", f"chunk={chunk}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        for chunk in (0, 16)
    ]
    for done in found:
        assert done.returncode == 0, done.stderr
    (whole, value), (parts, same) = (map(float, re.findall(r"(\S+) MB .*loss (\S+)", d.stdout)[0]) for d in found)
    assert same == pytest.approx(value, rel=1e-5)
    assert parts <= 0.35 * whole, (parts, whole)


class TestSettings:
    @pytest.mark.parametrize(
        "fields,message",
        [
            ({"tv": -1.0}, "loss.tv is -1.0; use a finite number of at least 0"),
            ({"state": 0.0}, "loss.state, loss.tv, loss.ce and loss.kl are all 0"),
            ({"guidance": []}, "loss.guidance is empty"),
            ({"guidance": [3.0]}, r"loss.guidance is \[3.0\], but loss.tv, loss.ce and loss.kl are 0"),
            ({"top_k": 5}, "loss.top_k is 5, but loss.tv, loss.ce and loss.kl are 0"),
            ({"chunk": -1}, "loss.chunk is -1"),
            ({"own_drafts": 1.5}, "loss.own_drafts is 1.5; use a number from 0 to 1"),
            ({"weights": {"right1": -1.0}}, "loss.weights is .*-1.0}; use a finite number of at least 0"),
        ],
    )
    def test_wrong_ones_are_named(self, fields: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            LossConfig(**fields).check()

    @pytest.mark.parametrize(
        "loss,message",
        [
            (LossConfig(weights={"rigth1": 2.0}), "loss.weights names 'rigth1', but .* Did you mean 'right1'"),
            (LossConfig(weights=dict.fromkeys(("right1", "down1"), 0.0)), "no head has a weight above 0"),
            (LossConfig(own_drafts=0.5), "loss.own_drafts is 0.5, but these heads read no left token"),
        ],
    )
    def test_those_that_do_not_fit_the_heads_are_told_before_a_step_is_made(
        self, loss: LossConfig, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            module_of(loss, right=1, down=1)
