"""heads.check: every line holds on sound backbones, and each way of breaking one is FAILED at its own line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftgrid.common.cli import compose, main
from draftgrid.heads.backbones.cache import RaggedCache
from draftgrid.heads.backbones.emu3 import Emu3Backbone
from draftgrid.heads.check import CheckConfig, check, run
from draftgrid.heads.contract import Line
from draftgrid.heads.grid import TokenGrid
from draftgrid.heads.tokenizers import PatchVQ
from tests.conftest import World
from tests.tiny import tiny_emu3


def sound(grid: tuple[int, int] = (3, 4), **settings: Any) -> Emu3Backbone:
    """A tiny Emu3 whose final norm is not its own inverse: twice and never show."""
    backbone = tiny_emu3(grid, **settings)
    with torch.no_grad():
        backbone.text.norm.weight.mul_(torch.linspace(0.2, 3, 32))
    return backbone


def failed(backbone: Emu3Backbone, **settings: Any) -> dict[str, Line]:
    return {line.name: line for line in check(backbone, tell=lambda _: None, **settings) if line.ok is False}


@pytest.mark.parametrize("grid", [(3, 4), (2, 5), (5, 2), (1, 7), (4, 1)])
def test_a_sound_backbone_holds_every_line_on_any_grid(grid: tuple[int, int]) -> None:
    lines = check(sound(grid), tell=lambda _: None)
    assert [line.name for line in lines if line.ok is not True] == ["tokenizer"]  # it has none, and that is said
    assert "no tokenizer given" in lines[-1].figure


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_tolerance_goes_by_the_dtype_and_is_printed(dtype: torch.dtype) -> None:
    backbone = tiny_emu3(spread=2.0).to(dtype)
    (line,) = (line for line in check(backbone, tell=lambda _: None) if line.name == "rounding")
    assert line.ok and {torch.bfloat16: "0.1 in bfloat16", torch.float64: "1e-05 in float64"}[dtype] in line.figure
    assert not failed(backbone)


class Moved(Emu3Backbone):
    """States read from the wrong sequence places."""

    def states(self, tokens: Tensor, prompts: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        grid, places = self.grid, self.grid.image_slots() + self.places()
        self.grid = MovedGrid(grid.height, grid.width, grid.row_end)
        object.__setattr__(self.grid, "places", places.clamp(0, grid.slots - 1))
        try:
            return super().states(tokens, prompts)
        finally:
            self.grid = grid

    def places(self) -> Tensor:
        raise NotImplementedError


class MovedGrid(TokenGrid):
    def image_slots(self) -> Tensor:
        return self.places


class Late(Moved):
    def places(self) -> Tensor:
        return torch.tensor(1)


class EarlyAtRowStarts(Moved):
    """Column 0 gets the state at the row's last code instead of the one at the structure token after it."""

    def places(self) -> Tensor:
        return -(torch.arange(self.grid.positions) % self.grid.width == 0).long()


class NormedTwice(Emu3Backbone):
    def logits(self, h: Tensor) -> Tensor:
        return super().logits(self.text.norm(h))


class NeverNormed(Emu3Backbone):
    def logits(self, h: Tensor) -> Tensor:
        return torch.nn.functional.linear(h, self.model.lm_head.weight[self.image_ids])


class RowsPermuted(Emu3Backbone):
    def logits(self, h: Tensor) -> Tensor:
        return super().logits(h).roll(1, -1)


class SamePrompt(Emu3Backbone):
    """Guidance's unconditional branch gets the caption."""

    captions: Sequence[str | None] = ()

    def start(self, prompts: Sequence[str], guidance: float = 1.0) -> Any:
        self.captions = prompts
        try:
            return super().start(prompts, guidance)
        finally:
            self.captions = ()

    def prompt_ids(self, prompts: Sequence[str | None]) -> list[Tensor]:
        return super().prompt_ids([*self.captions] * 2 if len(prompts) == 2 * len(self.captions) else prompts)


class BranchesSwapped(Emu3Backbone):
    def start(self, prompts: Sequence[str], guidance: float = 1.0) -> Any:
        state, h = super().start(prompts, guidance)
        return state, h.flip(0)


class Padded(Emu3Backbone):
    """Prompts padded on the left, and the pads seen."""

    def prompt_ids(self, prompts: Sequence[str | None]) -> list[Tensor]:
        ids = super().prompt_ids(prompts)
        longest = max(len(i) for i in ids)
        return [torch.nn.functional.pad(i, (longest - len(i), 0), value=2) for i in ids]


class Sighted(Emu3Backbone):
    """No causal mask in training: a state sees the tokens after it."""

    def trunk(self, embeds: Tensor, positions: Tensor, mask: Tensor | None, cache: RaggedCache | None) -> Tensor:
        if cache is None:
            L = embeds.shape[1]
            mask = torch.zeros(1, 1, L, L, dtype=embeds.dtype)
        return super().trunk(embeds, positions, mask, cache)


class Miscounted(Emu3Backbone):
    """Decoding counts positions from 1."""

    def step(self, embeds: Tensor, positions: Tensor, mask: Tensor | None, cache: RaggedCache) -> Tensor:
        return super().step(embeds, positions + 1, mask, cache)


class StaleKeys(Emu3Backbone):
    """Rollback leaves the forgotten keys where they are, and later queries see them."""

    def start(self, prompts: Sequence[str], guidance: float = 1.0) -> Any:
        state, h = super().start(prompts, guidance)
        self.stale: list[int] = []
        return state, h

    def rollback(self, state: Any, keep: list[int]) -> None:
        self.stale = list(state.slots)
        super().rollback(state, keep)

    def step(self, embeds: Tensor, positions: Tensor, mask: Tensor | None, cache: RaggedCache) -> Tensor:
        if self.stale:
            end = int(positions.max()) + 1
            cache.window.seen = end + max(self.stale)
            hidden = torch.arange(cache.seen) > positions[:, None, :, None]
            hidden[..., end:] = False
            mask = torch.zeros(hidden.shape, dtype=embeds.dtype).masked_fill_(hidden, torch.finfo(embeds.dtype).min)
        return super().step(embeds, positions, mask, cache)


def broken(kind: type[Emu3Backbone], **settings: Any) -> Emu3Backbone:
    backbone = sound(**settings)
    backbone.__class__ = kind
    return backbone


@pytest.mark.parametrize(
    "kind, lines, advice",
    [
        (Late, {"place", "alignment", "causality"}, "h[0,0] is the state 1 place(s) after its own"),
        (EarlyAtRowStarts, {"place", "alignment"}, "h[1,0] is the state 1 place(s) before its own"),
        (NormedTwice, {"logits"}, "applied twice"),
        (NeverNormed, {"logits"}, "left out"),
        (RowsPermuted, {"logits"}, "order of the codes"),
        (SamePrompt, {"guidance"}, "guidance does nothing: look at prompt_ids(None)"),
        (BranchesSwapped, {"guidance"}, "order of rows"),
        (Padded, {"batch", "guidance"}, "padding"),
        (Sighted, {"logits", "alignment", "causality", "batch"}, "the mask is not causal"),
        (Miscounted, {"alignment"}, "Compare positions"),
        (StaleKeys, {"rollback"}, "forgotten tokens are still seen"),
    ],
)
def test_what_is_broken_is_failed_at_its_line(kind: type[Emu3Backbone], lines: set[str], advice: str) -> None:
    found = failed(broken(kind))
    assert found.keys() == lines
    assert any(advice in str(line) for line in found.values())


def test_dropout_left_on_is_failed_at_one_line_and_the_others_are_measured_without() -> None:
    backbone = sound(dropout=0.5)
    torch.nn.Module.train(backbone, True)
    found = failed(backbone)
    assert found.keys() == {"frozen"} and "modules in train mode" in found["frozen"].figure
    assert not any(m.training for m in backbone.modules())


def test_a_trainable_weight_is_failed() -> None:
    backbone = sound()
    backbone.model.lm_head.weight.requires_grad_(True)
    assert "1 trainable tensors" in failed(backbone)["frozen"].figure


def test_a_line_that_raises_is_failed_and_the_others_go_on() -> None:
    class Raises(Emu3Backbone):
        def rollback(self, state: Any, keep: list[int]) -> None:
            raise RuntimeError("positive crop")

    found = failed(broken(Raises))
    assert found.keys() == {"rollback"} and "RuntimeError: positive crop" in found["rollback"].figure


def test_a_model_too_noisy_for_its_dtype_is_failed_as_that() -> None:
    assert "rounding" in failed(tiny_emu3(spread=40.0).to(torch.bfloat16))


def test_few_rows_read_all_cells_all_the_same() -> None:
    (line,) = (line for line in check(sound(), rows=1, tell=lambda _: None) if line.name == "alignment")
    assert line.ok and "12 cells, the first 4 token by token" in line.figure
    assert "alignment" in failed(broken(Miscounted), rows=1)


class TestTokenizer:
    def vq(self, codes: int = 24) -> PatchVQ:
        return PatchVQ(torch.rand(codes, 48, generator=torch.Generator().manual_seed(0)), patch=4, image_size=16)

    def test_one_that_fits_is_measured(self) -> None:
        line = check(sound(), self.vq(), tell=lambda _: None)[-1]
        assert line.ok and "24 codes, pictures of 12x16, 100% of random codes" in line.figure

    def test_a_share_below_one_is_told_and_passes(self) -> None:
        vq = self.vq()
        vq.codebook[7] = vq.codebook[3]  # alike: what was 7 comes back as 3
        line = check(sound((10, 10)), vq, tell=lambda _: None)[-1]
        share = int(line.figure.split("%")[0].split()[-1])
        assert line.ok and 80 <= share < 100

    @pytest.mark.parametrize("codes", [23, 25])
    def test_another_size_is_failed(self, codes: int) -> None:
        assert f"it has {codes} codes, the backbone 24" in failed(sound(), tokenizer=self.vq(codes))["tokenizer"].advice

    def test_wrong_shapes_and_ranges_are_failed(self) -> None:
        class Turned(PatchVQ):
            def decode(self, tokens: Tensor) -> Tensor:
                return 3 * super().decode(tokens).transpose(2, 3)

        vq = Turned(self.vq().codebook, 4, 16)
        advice = failed(sound(), tokenizer=vq)["tokenizer"].advice
        assert "(1, 3, 16, 12), not (1, 3, 12, 16)" in advice and "encode gives (1, 4, 3)" in advice
        assert "not 0..1" in advice


class TestCommand:
    def test_the_demo_passes(self, capsys: pytest.CaptureFixture[str]) -> None:
        run(CheckConfig(smoke=True))
        out = capsys.readouterr().out
        assert "FAILED" not in out and "all 11 lines hold" in out and "fingerprint 64ed080d" in out

    def test_a_checkpoint_on_disk_and_its_exit_codes(self, world: World, tmp_path: Path, capsys: Any) -> None:
        def command(*arguments: str) -> tuple[int, str]:
            code: Any = 0
            try:
                main(run, CheckConfig, None, arguments=[f"backbone={world.backbone}", *arguments])
            except SystemExit as ended:
                code = ended.code
            printed = capsys.readouterr()
            return code, printed.out + printed.err

        code, text = command()
        assert code == 0 and text.count("ok   ") == 11, text
        other = tmp_path / "vq"
        PatchVQ(torch.rand(9, 48), patch=4, image_size=16).save_pretrained(other)
        code, text = command(f"tokenizer={other}")
        assert code == 1 and "FAILED  tokenizer" in text and "1 of 11 FAILED (tokenizer)" in text
        code, text = command("backbone=nowhere")
        assert code == 2 and "error: 'nowhere' is neither a folder nor a shipped checkpoint" in text

    @pytest.mark.parametrize(
        "argument, message",
        [
            ("rows=-1", "rows is -1"),
            ("dtype=bfloat", "Did you mean 'bfloat16'"),
            ("device=tpu", "device is 'tpu'"),
            ("grid=[3]", "grid is"),
            ("tokenizer=nowhere", "neither a folder"),
        ],
    )
    def test_bad_input_is_told_before_weights_are_loaded(self, argument: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            run(compose(CheckConfig, [argument]))

    def test_a_checkpoint_without_image_tokenizer_is_told_as_that(self, tmp_path: Path, capsys: Any) -> None:
        tiny_emu3().save_pretrained(tmp_path / "b")
        run(CheckConfig(backbone=str(tmp_path / "b"), device="cpu"))
        assert "none here, so pictures can be neither encoded nor shown" in capsys.readouterr().out
