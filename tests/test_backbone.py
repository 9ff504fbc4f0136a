"""The backbone contract on transformers' own Emu3 classes, against the model's own forward and generate."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftgrid.eval.decoders import decode
from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.backbones.emu3 import Emu3Backbone
from tests.tiny import CAPTIONS, tiny_emu3


def sequence(backbone: Emu3Backbone, tokens: Tensor, prompt: str | None) -> Tensor:
    """Prompt and picture as vocabulary ids, written out by hand: rows of codes, each ended by the row-end token."""
    vocabulary = backbone.model.config.vocabulary_map
    row_end = vocabulary["<|extra_200|>"]
    ids = backbone.prompt_ids([prompt])[0].tolist()
    for row in tokens.tolist():
        ids += [vocabulary[f"<|visual token {c:06d}|>"] for c in row] + [row_end]
    return torch.tensor([ids])


def own_logits(backbone: Emu3Backbone, tokens: Tensor, prompt: str | None) -> Tensor:
    """(H, W, V) logits of the model itself over image codes, read at the sequence place before each token."""
    vocabulary = backbone.model.config.vocabulary_map
    codes = [vocabulary[f"<|visual token {c:06d}|>"] for c in range(backbone.image_vocab_size)]
    ids = sequence(backbone, tokens, prompt)
    logits = backbone.model(input_ids=ids).logits[0][:, codes]
    start = len(backbone.prompt_ids([prompt])[0])
    H, W = tokens.shape
    return torch.stack([torch.stack([logits[start + y * (W + 1) + x - 1] for x in range(W)]) for y in range(H)])


@pytest.mark.parametrize("grid", [(3, 4), (2, 5), (5, 2), (1, 7)])
def test_states_give_the_models_own_logits_at_every_cell(grid: tuple[int, int]) -> None:
    backbone = tiny_emu3(grid)
    tokens = torch.randint(24, (1, *grid), generator=torch.Generator().manual_seed(0))
    h, e = backbone.states(tokens, ["a red apple"])
    torch.testing.assert_close(
        backbone.logits(h)[0], own_logits(backbone, tokens[0], "a red apple"), rtol=1e-4, atol=1e-4
    )
    ids = sequence(backbone, tokens[0], "a red apple")[0]
    table = backbone.model.model.text_model.embed_tokens.weight
    start = len(backbone.prompt_ids(["a red apple"])[0])
    H, W = grid
    for y in range(H):
        for x in range(W):
            assert torch.equal(e[0, y, x], table[ids[start + y * (W + 1) + x]])


def test_h_pre_is_normed_exactly_once() -> None:
    backbone = tiny_emu3()
    text = backbone.model.model.text_model
    tokens = torch.randint(24, (1, 3, 4))
    h, _ = backbone.states(tokens, ["blue"])
    with torch.no_grad():
        text.norm.weight.mul_(torch.linspace(0.2, 3, 32))  # a final norm applied never, or twice, now shows
    torch.testing.assert_close(backbone.logits(h)[0], own_logits(backbone, tokens[0], "blue"), rtol=1e-4, atol=1e-4)


def test_states_of_a_batch_of_unequal_prompts_equal_each_alone_twice() -> None:
    backbone = tiny_emu3()
    prompts: list[str | None] = ["blue", "big dog, looking left", None, "zzz unknown words"]
    tokens = torch.randint(24, (4, 3, 4))
    for _ in range(2):
        h, e = backbone.states(tokens, prompts)
        for b, prompt in enumerate(prompts):
            alone_h, alone_e = backbone.states(tokens[b : b + 1], [prompt])
            torch.testing.assert_close(h[b : b + 1], alone_h, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(e[b : b + 1], alone_e)


def test_greedy_ar_equals_transformers_generate_token_for_token() -> None:
    grid = (3, 4)
    backbone = tiny_emu3(grid)
    vocabulary = backbone.model.config.vocabulary_map
    codes = [vocabulary[f"<|visual token {c:06d}|>"] for c in range(24)]
    row_end = vocabulary["<|extra_200|>"]
    for prompt in CAPTIONS:
        ids = backbone.prompt_ids([prompt])[0]

        def allowed(_: int, sofar: Tensor, start: int = len(ids)) -> list[int]:
            return [row_end] if (len(sofar) - start) % (grid[1] + 1) == grid[1] else codes

        out = backbone.model.generate(
            input_ids=ids[None],
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=grid[0] * (grid[1] + 1) - 1,
            do_sample=False,
            prefix_allowed_tokens_fn=allowed,
        )[0, len(ids) :].tolist()
        theirs = [codes.index(t) for t in out if t != row_end]
        mine = decode(backbone, [prompt], decoder="ar", temperature=0).tokens
        assert mine.flatten().tolist() == theirs
        assert len(set(theirs)) > 1


@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_window_forward_equals_full_forward_at_row_ends_and_after_rollback(length: int) -> None:
    """fp64, sdpa: one window of any length, begun anywhere, against the teacher-forced pass."""
    backbone = tiny_emu3((3, 4), double=True)
    tokens = torch.randint(24, (2, 3, 4), generator=torch.Generator().manual_seed(1))
    prompts = ["blue", "big dog, looking left"]
    full = backbone.states(tokens, prompts)[0].flatten(1, 2)
    flat = tokens.flatten(1)
    for first in range(0, 12 - length):
        state, h0 = backbone.start(prompts)
        torch.testing.assert_close(h0[0, :, 0], full[:, 0], rtol=0, atol=1e-10)
        if first:
            wrong = (flat[:, :first] + 1) % 24
            backbone.forward(state, wrong, [0, 0])  # stale entries that rollback must hide
            backbone.rollback(state, [0, 0])
            backbone.forward(state, flat[:, :first], [0, 0])
        h = backbone.forward(state, flat[:, first : first + length], [first, first])
        torch.testing.assert_close(h[0], full[:, first + 1 : first + length + 1], rtol=0, atol=1e-10)


def test_samples_of_a_batch_may_stand_at_different_places() -> None:
    backbone = tiny_emu3((3, 4), double=True)
    tokens = torch.randint(24, (2, 12), generator=torch.Generator().manual_seed(2))
    prompts = ["blue", "big dog, looking left"]
    full = backbone.states(tokens.view(2, 3, 4), prompts)[0].flatten(1, 2)
    state, _ = backbone.start(prompts)
    backbone.forward(state, tokens[:, :9], [0, 0])
    backbone.rollback(state, [2, 7])
    h = backbone.forward(state, torch.stack([tokens[0, 2:6], tokens[1, 7:11]]), [2, 7])
    torch.testing.assert_close(h[0, 0], full[0, 3:7], rtol=0, atol=1e-10)
    torch.testing.assert_close(h[0, 1], full[1, 8:12], rtol=0, atol=1e-10)


def test_rollback_of_none_some_and_all_entries_and_not_more() -> None:
    backbone = tiny_emu3((3, 4), double=True)
    flat = torch.randint(24, (1, 12), generator=torch.Generator().manual_seed(3))
    fresh_state, _ = backbone.start(["blue"])
    fresh = backbone.forward(fresh_state, flat[:, :8], [0])
    state, _ = backbone.start(["blue"])
    backbone.forward(state, flat[:, :8], [0])
    for keep in (8, 5, 4, 0):
        backbone.rollback(state, [keep])
        if keep < 8:
            h = backbone.forward(state, flat[:, keep:8], [keep])
            torch.testing.assert_close(h[0], fresh[0, :, keep:], rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="rollback"):
        backbone.rollback(state, [9])


def test_guidance_branches_differ_and_match_two_separate_passes() -> None:
    backbone = tiny_emu3((3, 4), double=True)
    flat = torch.randint(24, (1, 12), generator=torch.Generator().manual_seed(4))
    state, h0 = backbone.start(["a red apple"], guidance=3.0)
    assert h0.shape[0] == 2 and not torch.allclose(h0[0], h0[1])
    h = backbone.forward(state, flat[:, :6], [0])
    for branch, prompt in enumerate(["a red apple", None]):
        alone = backbone.states(flat.view(1, 3, 4), [prompt])[0].flatten(1, 2)
        torch.testing.assert_close(h[branch], alone[:, 1:7], rtol=0, atol=1e-10)
    assert backbone.start(["a red apple"], guidance=1.0)[1].shape[0] == 1


def test_prompt_is_the_processors_own_template() -> None:
    backbone = tiny_emu3((2, 5))
    words = backbone.processor.tokenizer.convert_ids_to_tokens(backbone.prompt_ids(["a RED zebra"])[0])
    assert words == ["<bos>", "a", "red", "<unk>", "<|image start|>", "2", "*", "5", "<|image token|>"]
    assert len(backbone.prompt_ids([None])[0]) == len(words) - 3


def test_frozen_backbone_stays_in_eval_mode_and_repeats_itself() -> None:
    backbone = tiny_emu3(dropout=0.5)
    torch.nn.ModuleList([backbone]).train()
    assert not any(m.training for m in backbone.modules())
    tokens = torch.randint(24, (1, 3, 4))
    assert torch.equal(backbone.states(tokens, ["blue"])[0], backbone.states(tokens, ["blue"])[0])


def test_tokens_outside_the_vocabulary_or_the_grid_are_named() -> None:
    backbone = tiny_emu3((3, 4))
    with pytest.raises(ValueError, match=r"reach 0\.\.24; the backbone knows 0\.\.23"):
        backbone.states(torch.tensor([[[0, 24, 1, 1]] * 3]), ["x"])
    with pytest.raises(ValueError, match="tokens are 4x3, but the backbone's grid is 3x4"):
        backbone.states(torch.zeros(1, 4, 3, dtype=torch.long), ["x"])


class TestLoading:
    def test_saved_and_loaded_is_the_same_backbone(self, tmp_path) -> None:
        backbone = tiny_emu3()
        backbone.save_pretrained(tmp_path / "b")
        loaded = load_backbone(tmp_path / "b")
        assert loaded.fingerprint == backbone.fingerprint
        tokens = torch.randint(24, (1, 3, 4))
        torch.testing.assert_close(loaded.states(tokens, ["blue"])[0], backbone.states(tokens, ["blue"])[0])

    def test_fingerprint_does_not_depend_on_load_dtype_but_on_weights(self, tmp_path) -> None:
        backbone = tiny_emu3()
        backbone.save_pretrained(tmp_path / "b")
        half = load_backbone(tmp_path / "b", dtype=torch.bfloat16)
        assert half.dtype == torch.bfloat16 and half.fingerprint == backbone.fingerprint
        with torch.no_grad():
            half.model.lm_head.weight[half.image_ids[3], 0] += 1
        del half.fingerprint
        assert half.fingerprint != backbone.fingerprint

    def test_one_renamed_key_fails_and_is_named(self, tmp_path) -> None:
        tiny_emu3().save_pretrained(tmp_path / "b")
        file = tmp_path / "b" / "model.safetensors"
        tensors = load_file(file)
        (name,) = (k for k in tensors if k.endswith("layers.0.mlp.up_proj.weight"))
        tensors[name.replace("up_proj", "typo")] = tensors.pop(name)
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight.*typo"):
            load_backbone(tmp_path / "b")

    def test_unknown_names_say_what_is_known(self, tmp_path) -> None:
        with pytest.raises(ValueError, match="neither a folder nor a shipped checkpoint"):
            load_backbone("no-such-model")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match=r"config\.json names no adapter; set adapter to one of emu3, janus_pro"):
            load_backbone(tmp_path / "empty")
        with pytest.raises(ValueError, match=r"config\.json does not exist"):
            load_backbone(tmp_path / "empty", adapter="emu3")
