"""Compiled and recorded decoding draws what eager decoding draws, picture after picture, on one graph."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from draftgrid import load_backbone
from draftgrid.eval.decoders import Sampling, make_policy
from draftgrid.eval.decoders.engine import run
from draftgrid.heads.backbones.attention import NAME, grouped_sdpa, own_attention
from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.backbones.graphs import Recorded
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.mtp import MTPHeads, new_heads
from tests.published_janus import write_janus
from tests.published_lumina import write_lumina
from tests.tiny import CAPTIONS, tiny_emu3

GUIDED = Sampling(guidance=2.0)
DECODERS = {"ar": {}, "scd": {"window": 5}, "ssd": {"rounds": 1}}


def lookalike(backbone: Backbone) -> MTPHeads:
    """Untrained offset heads: what they draft does not matter here."""
    return new_heads(HeadsConfig(right=2, down=1), backbone).to(backbone.dtype).eval()


def draw(backbone: Backbone, name: str, prompts: list[str], seed: int = 0) -> Tensor:
    policy = make_policy(name, **DECODERS[name])
    return run(backbone, prompts, policy, GUIDED, lookalike(backbone) if policy.drafts_with else None, seed).tokens


def on_the_cpu(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """A recording without a GPU: the same call once more, into the tensor it wrote first."""
    output = call()
    return lambda: output.copy_(call()), output


BACKBONES: dict[str, Callable[[Path], Backbone]] = {
    "emu3": lambda folder: tiny_emu3(),
    "janus_pro": lambda folder: load_backbone(write_janus(folder, side=4)),
    "lumina_mgpt": lambda folder: load_backbone(write_lumina(folder), grid=(4, 4)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")  # torch's own compiler
@pytest.mark.parametrize("family", BACKBONES)
def test_compiled_decoding_draws_the_same_pictures_with_few_graphs(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family != "emu3":  # the graph is what differs between families; to make C++ of it takes long
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    backbone = BACKBONES[family](tmp_path).double()
    jobs = [(name, seed) for name in DECODERS for seed in (0, 1)]
    eager = [draw(backbone, name, CAPTIONS[:2], seed) for name, seed in jobs]
    torch._dynamo.reset()
    counters.clear()
    backbone.compile_decoding()
    for (name, seed), expected in zip(jobs, eager, strict=True):
        assert torch.equal(draw(backbone, name, CAPTIONS[:2], seed), expected), name
    # One graph serves all layers and lengths but 1, and a length that is by chance the number of heads.
    assert 2 <= counters["stats"]["unique_graphs"] <= 3


def test_a_recorded_step_draws_the_same_pictures() -> None:
    backbone = tiny_emu3(double=True)
    eager = {name: [draw(backbone, name, CAPTIONS[:2], seed) for seed in (0, 1)] for name in DECODERS}
    backbone.compiled = True
    calls = []

    def step(*inputs: object) -> Tensor:
        calls.append(1)
        return Backbone.step(backbone, *inputs)  # type: ignore[arg-type]

    recorded = Recorded(step, on_the_cpu)
    backbone.step = recorded  # type: ignore[method-assign]
    for name, pictures in eager.items():
        for seed, expected in enumerate(pictures):
            assert torch.equal(draw(backbone, name, CAPTIONS[:2], seed), expected), name
    # Windows of every length that came twice are recorded, and a picture of known windows records nothing new.
    assert {shape[0][1] for shape in recorded.graphs} >= {1, 2}
    before = dict(recorded.graphs)
    draw(backbone, "ar", CAPTIONS[:2], 2)
    assert recorded.graphs == before


def test_a_recorded_result_outlives_the_next_replay() -> None:
    backbone = tiny_emu3(double=True)
    backbone.compiled = True
    backbone.step = Recorded(backbone.step, on_the_cpu)  # type: ignore[method-assign]
    state, _ = backbone.start(["blue"], guidance=2.0)
    found = []
    for n in range(3):
        h = backbone.forward(state, torch.tensor([[n]]), [n])
        found.append((h, h.clone()))
    assert all(torch.equal(kept, copied) for kept, copied in found)
    assert not torch.equal(found[1][0], found[2][0])


def test_another_batch_size_or_a_longer_prompt_is_recorded_anew() -> None:
    backbone = tiny_emu3(double=True)
    eager = [draw(backbone, "ar", prompts) for prompts in (["blue"], CAPTIONS[:2], ["red " * 200], ["blue"])]
    backbone.compiled = True
    backbone.step = Recorded(backbone.step, on_the_cpu)  # type: ignore[method-assign]
    for prompts, expected in zip((["blue"], CAPTIONS[:2], ["red " * 200], ["blue"]), eager, strict=True):
        assert torch.equal(draw(backbone, "ar", prompts), expected)


def test_the_first_of_two_pictures_at_a_time_is_refused() -> None:
    backbone = tiny_emu3()
    backbone.compiled = True
    first, _ = backbone.start(["blue"])
    backbone.start(["blue"])
    with pytest.raises(ValueError, match=r"taken by a later start\(\); compiled, finish one"):
        backbone.forward(first, torch.tensor([[0]]), [0])


@pytest.mark.parametrize("length", [1, 5])
def test_grouped_queries_attend_as_with_repeated_keys(length: int) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    backbone = tiny_emu3()
    attention = backbone.text.layers[0].self_attn
    with own_attention(backbone.text.config):
        assert attention.config._attn_implementation == NAME
    groups = attention.num_key_value_groups
    assert groups > 1
    g = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2 * groups, length, 8, generator=g, dtype=torch.double)
    key, value = (torch.randn(3, 2, 11, 8, generator=g, dtype=torch.double) for _ in range(2))
    mask = torch.zeros(3, 1, length, 11, dtype=torch.double)
    mask.masked_fill_(torch.rand(mask.shape, generator=g) < 0.5, -1e9)
    found, _ = grouped_sdpa(attention, query, key, value, mask, scaling=0.3)
    wide = [x.repeat_interleave(groups, dim=1) for x in (key, value)]
    weights = (0.3 * query @ wide[0].mT + mask).softmax(-1)
    assert torch.allclose(found, (weights @ wide[1]).transpose(1, 2), atol=1e-12)
    without, _ = sdpa_attention_forward(attention, query, key, value, mask, scaling=0.3)
    assert torch.allclose(found, without, atol=1e-12)


def test_the_cache_of_a_finished_picture_is_freed_at_once() -> None:
    backbone = tiny_emu3()
    gc.collect()
    gc.disable()  # gigabytes must not wait for it
    try:
        state, _ = backbone.start(["blue"])
        keys = weakref.ref(state.cache.layers[0].keys)
        assert keys() is not None
        del state
        assert keys() is None
    finally:
        gc.enable()
