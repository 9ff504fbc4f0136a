"""What every decoder keeps on a real network in fp64: batches, odd grids, filters, and a cache of final tokens only."""

import pytest
import torch
from torch import Tensor

from draftgrid.eval.decoders import DECODERS, Sampling, decode
from draftgrid.heads.backbones.emu3 import Emu3Backbone
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.mtp import MTPHeads, new_heads
from draftgrid.heads.tokenizers import PatchVQ
from tests.tiny import CAPTIONS, random_chain_heads, tiny_emu3

VQ = PatchVQ(torch.rand(24, 12, generator=torch.Generator().manual_seed(0)), patch=2, image_size=8)
CASES: list[tuple[str, dict]] = [
    ("ar", {}),
    ("sjd", {"window": 40, "initial": "above"}),
    ("scd", {"window": 4, "initial": "left"}),
    ("scd", {"window": 6, "coupling": "gumbel"}),
    ("gumbel_fixed_point", {"window": 5}),
    ("mtp1d", {"length": 3}),
    ("ssd_coupled", {"window": 4, "coupling": "maximal", "heads": "chain"}),
    ("ssd_coupled", {"window": 40, "coupling": "maximal", "heads": "offsets", "uniform": 0.1}),
    ("ssd_coupled", {"window": 40, "coupling": "gumbel", "heads": "chain"}),
    ("ssd_coupled", {"window": 4, "coupling": "gumbel", "heads": "offsets", "sweeps": 0}),
    ("ssd", {"rounds": 2}),
    ("ssd", {"rounds": 2, "rows_in_flight": 2}),
    ("gsd", {"window": 6, "group": 4}),
    ("lantern", {"window": 6, "neighbours": 5}),
]
EXACT = [(name, settings) for name, settings in CASES if DECODERS[name].exact]


def arguments(backbone: Emu3Backbone, decoder: str, settings: dict) -> dict:
    """What `decode` takes for a case: its heads as far as the grid lets them reach, and the codebook."""
    kinds = DECODERS[decoder].drafts_with
    heads: MTPHeads | None = None
    if settings.get("heads") == "chain":
        heads = random_chain_heads(backbone, spread=1.5)
    elif kinds:
        H, W = backbone.grid.height, backbone.grid.width
        heads = new_heads(HeadsConfig(right=min(3, W - 1), down=min(1, H - 1)), backbone).double()
    rest = {k: v for k, v in settings.items() if k != "heads"}
    return {"decoder": decoder, "heads": heads, "tokenizer": VQ, **rest}


@pytest.mark.parametrize("grid", [(2, 5), (5, 2), (1, 7)])
@pytest.mark.parametrize("decoder,settings", CASES)
def test_a_sample_is_its_batch_of_one_on_every_grid(decoder: str, settings: dict, grid: tuple[int, int]) -> None:
    """Prompts of three lengths, guidance, samples that finish at different steps, windows longer than the picture."""
    backbone = tiny_emu3(grid, double=True)
    call = arguments(backbone, decoder, settings) | {"guidance": 2.0}
    together = decode(backbone, CAPTIONS, **call)
    assert together.tokens.shape == (3, *grid)
    for b, prompt in enumerate(CAPTIONS):
        alone = decode(backbone, [prompt], samples=[b], **call)
        assert torch.equal(alone.tokens[0], together.tokens[b])
        assert together.stats.steps[b] == alone.stats.nfe


@pytest.mark.parametrize("decoder,settings", EXACT)
@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.6, "temperature": 1.5}])
def test_a_token_that_is_filtered_out_is_never_committed(decoder: str, settings: dict, sampling: dict) -> None:
    """100 pictures against their own teacher-forced distributions: a draft that p forbids has no way in."""
    backbone = tiny_emu3((2, 3), double=True)
    prompts, guided = ["blue"] * 100, {"guidance": 1.5, **sampling}
    tokens = decode(backbone, prompts, **arguments(backbone, decoder, settings), **guided).tokens
    branches = [backbone.states(tokens, rows)[0] for rows in (prompts, [None] * 100)]
    p = Sampling(**guided).probabilities(backbone.logits(torch.stack(branches)))
    assert (p == 0).any(-1).all() and (p.gather(-1, tokens[..., None]) > 0).all()


@pytest.mark.parametrize("decoder,settings", CASES)
def test_the_cache_keeps_tokens_in_their_final_form_only(
    decoder: str, settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a forward takes for read, positions before its window, was last fed with the finished picture's tokens."""
    backbone = tiny_emu3((3, 4), double=True)
    fed = torch.full((3, 60), -1)
    kept: list[tuple[list[int], Tensor]] = []
    forward = backbone.forward

    def watched(state, tokens: Tensor, first: list[int]) -> Tensor:
        assert state.slots == [backbone.grid.slot(f) for f in first]
        kept.append((list(first), fed.clone()))
        for b, f in enumerate(first):
            fed[b, f : f + tokens.shape[1]] = tokens[b]
        return forward(state, tokens, first)

    monkeypatch.setattr(backbone, "forward", watched)
    picture = decode(backbone, CAPTIONS, **arguments(backbone, decoder, settings)).tokens.flatten(1)
    assert max(max(first) for first, _ in kept) >= 6
    for first, before in kept:
        for b, f in enumerate(first):
            assert torch.equal(before[b, :f], picture[b, :f])


@pytest.mark.parametrize("length", [1, 2, 4, 9])
def test_a_window_gives_the_logits_of_ar_with_guidance_and_after_rollback(length: int) -> None:
    """Lengths 1, 2, a row with its end, two rows and three: against one token at a time, at every place."""
    backbone = tiny_emu3((4, 3), double=True)
    tokens = torch.randint(24, (2, 12), generator=torch.Generator().manual_seed(5))
    prompts = CAPTIONS[:2]
    state, h = backbone.start(prompts, guidance=3.0)
    ar = [backbone.logits(h)]
    for i in range(11):
        ar.append(backbone.logits(backbone.forward(state, tokens[:, i : i + 1], [i, i])))
    alone = torch.cat(ar, dim=2)
    assert alone.shape[0] == 2 and not torch.allclose(alone[0], alone[1])
    for first in range(12 - length):
        state, _ = backbone.start(prompts, guidance=3.0)
        backbone.forward(state, (tokens[:, : first + 1] + 1) % 24, [0, 0])
        backbone.rollback(state, [0, 0])
        if first:
            backbone.forward(state, tokens[:, :first], [0, 0])
        window = backbone.logits(backbone.forward(state, tokens[:, first : first + length], [first, first]))
        torch.testing.assert_close(window, alone[:, :, first + 1 : first + length + 1], rtol=1e-10, atol=1e-10)
