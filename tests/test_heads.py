"""The heads: alignment of what they read and predict, exporting, loading, refusing what does not belong."""

import json
import resource
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from huggingface_hub import errors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftgrid.eval.decoders import decode
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.grid import Offset, offset_name
from draftgrid.heads.mtp import MTPHeads, TrainedOn, new_heads
from draftgrid.heads.offsets import OffsetHeads
from draftgrid.training.module import HeadsModule, OptimConfig
from tests.tiny import CAPTIONS, tiny_emu3


def module_of(backbone, heads: MTPHeads) -> HeadsModule:
    return HeadsModule(backbone, heads, OptimConfig())


class Echo(OffsetHeads):
    """Returns what it reads: shows which source cell stands beside which target."""

    def __init__(self, backbone, config: HeadsConfig) -> None:
        MTPHeads.__init__(self, config, TrainedOn.of(backbone))

    def forward(self, h: Tensor, e: Tensor, offset: Offset) -> Tensor:
        return torch.cat([h, e], dim=-1)


@pytest.mark.parametrize("grid", [(3, 4), (2, 5), (5, 2), (1, 7)])
def test_source_state_embedding_and_target_belong_together_at_every_row_end(grid: tuple[int, int]) -> None:
    backbone = tiny_emu3(grid)
    H, W = grid
    module = module_of(backbone, Echo(backbone, HeadsConfig()))
    cells = torch.arange(H * W, dtype=torch.float32)
    h, e = cells.view(1, -1, 1), 1000 + cells.view(1, -1, 1)
    for offset in HeadsConfig().offsets:
        dy, dx = offset
        wanted = [(y * W + x, (y + dy) * W + x + dx) for y in range(H) for x in range(W) if y + dy < H and x + dx < W]
        if not wanted:
            assert offset_name(offset) not in module.pairs
            continue
        name = offset_name(offset)
        read, true = module.heads.predict(h, e, name), h[:, module.pairs[name][1]]
        assert read[0].tolist() == [[s, 1000 + s] for s, _ in wanted]
        assert true[0, :, 0].tolist() == [t for _, t in wanted]


class Oracle(OffsetHeads):
    """Finds the source cell by its state in the true picture and returns the true state at the offset."""

    def __init__(self, backbone, config: HeadsConfig, truth: Tensor) -> None:
        MTPHeads.__init__(self, config, TrainedOn.of(backbone))
        self.truth, self.grid = truth, backbone.grid

    def forward(self, h: Tensor, e: Tensor, offset: Offset) -> Tensor:
        source = torch.cdist(h.reshape(-1, h.shape[-1]), self.truth).argmin(-1)
        return self.truth[source + offset[0] * self.grid.width + offset[1]].view(h.shape)


def test_an_oracle_head_has_simulated_acceptance_one_and_the_decoder_accepts_everything() -> None:
    backbone = tiny_emu3((4, 6))
    picture = decode(backbone, ["a red apple"], decoder="ar", temperature=0).tokens
    truth = backbone.states(picture, ["a red apple"])[0].flatten(0, 2)
    heads = Oracle(backbone, HeadsConfig(right=5, down=1), truth)
    module = module_of(backbone, heads)
    module.validation_step(_batch(picture, ["a red apple"]), 0)
    for name in module.pairs:
        assert module.means[f"acceptance/{name}"].compute().item() == pytest.approx(1, abs=1e-5)
        assert module.means[f"smooth_l1/{name}"].compute().item() == pytest.approx(0, abs=1e-8)
    result = decode(backbone, ["a red apple"], heads, decoder="ssd", rounds=1, temperature=0)
    assert torch.equal(result.tokens, picture)
    assert result.stats.acceptance == {**{f"right{k}": 1.0 for k in range(1, 6)}, "down1": 1.0}
    assert result.stats.change_rate == 0.0


def test_simulated_acceptance_of_untrained_heads_is_the_decoders_measured_acceptance() -> None:
    """Row 0 and its right heads read exact states: there simulation and decoder must agree (3 sigma)."""
    backbone = tiny_emu3((1, 4), codes=6, spread=3.0)
    heads = new_heads(HeadsConfig(right=3, down=0), backbone)
    count = 3000
    result = decode(backbone, ["blue"] * count, heads, decoder="ssd", rounds=1)
    first = decode(backbone, ["blue"] * count, decoder="ar").tokens
    module = module_of(backbone, heads)
    module.validation_step(_batch(first, ["blue"] * count), 0)
    source, target = module.pairs["right1"]
    at_zero = source == 0
    h, e = (s.flatten(1, 2) for s in backbone.states(first, ["blue"] * count))
    predicted, true = heads.predict(h, e, "right1"), h[:, target]
    p, q = (backbone.logits(s[:, at_zero]).softmax(-1) for s in (true, predicted))
    simulated = torch.minimum(p, q).sum(-1).mean().item()
    measured = result.stats.acceptance["right1"]
    assert abs(simulated - measured) < 3 * (0.25 / count) ** 0.5 + 0.01
    assert target.tolist() == [1, 2, 3]


def _batch(tokens: Tensor, captions: list):
    from draftgrid.data.stream import Batch

    return Batch(tokens, captions, ["k"] * len(captions))


@pytest.mark.parametrize("norm_inputs", [False, True])
def test_a_head_is_the_papers_formula(norm_inputs: bool) -> None:
    """W0 z + SwiGLU(RMSNorm(W0 z)), written out with plain matrices; z of h and e, or of both over their rms."""
    backbone = tiny_emu3()
    heads = new_heads(HeadsConfig(right=1, down=0, width=5, norm_inputs=norm_inputs), backbone)
    head = heads.right1
    h, e = 7 * torch.randn(2, 32), 0.1 * torch.randn(2, 32)
    predicted = heads(h, e, (0, 1))
    if norm_inputs:
        h, e = (s / (s.square().mean(-1, keepdim=True) + 1e-6).sqrt() for s in (h, e))
    base = torch.cat([h, e], -1) @ head.project.weight.T
    normed = base / (base.square().mean(-1, keepdim=True) + 1e-6).sqrt() * head.norm.weight
    gate, up = normed @ head.gate_up.weight[:5].T, normed @ head.gate_up.weight[5:].T
    expected = base + (gate * torch.sigmoid(gate) * up) @ head.down.weight.T
    torch.testing.assert_close(predicted, expected)
    D, w = 32, 5
    assert sum(p.numel() for p in heads.parameters()) == 2 * D * D + 3 * D * w + D


class TestExport:
    @pytest.fixture
    def exported(self, tmp_path: Path):
        backbone = tiny_emu3()
        heads = new_heads(HeadsConfig(right=3, down=2), backbone)
        heads.card, heads.recipe = "# card\n", "a: 1\n"
        heads.save_pretrained(tmp_path / "heads")
        return backbone, heads, tmp_path / "heads"

    def test_round_trip_is_bit_for_bit_and_decodes_the_same(self, exported) -> None:
        backbone, heads, folder = exported
        loaded = MTPHeads.from_pretrained(folder, backbone)
        assert loaded.config == heads.config and loaded.trained_on == heads.trained_on
        for name, tensor in heads.state_dict().items():
            assert torch.equal(tensor, loaded.state_dict()[name])
        one, two = (decode(backbone, ["blue"], h, decoder="ssd", rounds=1).tokens for h in (heads, loaded))
        assert torch.equal(one, two)
        assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())

    def test_folder_holds_config_weights_card_and_recipe_and_nothing_of_the_backbone(self, exported) -> None:
        backbone, heads, folder = exported
        assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors", "README.md", "recipe.yaml"}
        config = json.loads((folder / "config.json").read_text())
        assert config["offsets"] == ["right1", "right2", "right3", "down1", "down2"]
        assert config["backbone"]["fingerprint"] == backbone.fingerprint and config["backbone"]["grid"] == [3, 4]
        with safe_open(folder / "model.safetensors", "pt") as file:
            names = list(file.keys())
        assert {n.split(".")[0] for n in names} == set(config["offsets"])
        bytes_ = sum(p.numel() * 4 for p in heads.parameters())
        assert bytes_ <= (folder / "model.safetensors").stat().st_size < bytes_ + 8192

    def test_heads_of_another_backbone_are_refused_with_both_fingerprints(self, exported) -> None:
        backbone, _, folder = exported
        other = tiny_emu3(spread=5.0)
        with pytest.raises(ValueError) as error:
            MTPHeads.from_pretrained(folder, other)
        assert backbone.fingerprint[:16] in str(error.value) and other.fingerprint[:16] in str(error.value)

    def test_heads_of_another_grid_are_refused(self, exported) -> None:
        _, _, folder = exported
        wide = tiny_emu3((4, 3))
        wide.fingerprint = tiny_emu3().fingerprint
        with pytest.raises(ValueError, match=r"trained on a \(3, 4\) grid, but the backbone draws \(4, 3\)"):
            MTPHeads.from_pretrained(folder, wide)

    def test_one_renamed_key_fails_and_is_named(self, exported) -> None:
        _, _, folder = exported
        tensors = load_file(folder / "model.safetensors")
        tensors["right2.typo.weight"] = tensors.pop("right2.gate_up.weight")
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"missing \['right2.gate_up.weight'\], unknown \['right2.typo.weight'\]"):
            MTPHeads.from_pretrained(folder)

    def test_weights_cut_short_are_told(self, exported) -> None:
        _, _, folder = exported
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ValueError, match=r"cannot be read .* cut short"):
            MTPHeads.from_pretrained(folder)

    def test_missing_folder_and_future_format_are_told(self, exported, tmp_path: Path) -> None:
        _, _, folder = exported
        with pytest.raises(ValueError, match="neither a folder nor a hub id"):
            MTPHeads.from_pretrained(tmp_path / "nothing")
        config = json.loads((folder / "config.json").read_text()) | {"format": 9}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="format is 9"):
            MTPHeads.from_pretrained(folder)

    def test_of_the_hub_they_come_at_their_revision_with_card_and_recipe(
        self, exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, heads, folder = exported
        (tmp_path / "cache" / "c0ffee").mkdir(parents=True)
        asked: list[tuple[str, str | None, bool]] = []

        def serve(name: str, *, revision: str | None, local_files_only: bool, allow_patterns: list[str]) -> str:
            asked.append((name, revision, local_files_only))
            for file in folder.iterdir():
                if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                    shutil.copy(file, tmp_path / "cache" / "c0ffee")
            return str(tmp_path / "cache" / "c0ffee")

        monkeypatch.setattr("huggingface_hub.snapshot_download", serve)
        for place, revision in (("me/heads@v2", None), ("me/heads", "v2")):
            loaded = MTPHeads.from_pretrained(place, revision=revision, local_files_only=True)
            assert asked[-2:] == [("me/heads", "v2", True), ("me/heads", "c0ffee", True)]
            assert (loaded.card, loaded.recipe) == (heads.card, heads.recipe)
            assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in heads.state_dict().items())

    def test_what_the_hub_refuses_is_one_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> str:
            raise errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)

        monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
        with pytest.raises(ValueError, match=r"^heads 'me/heads' is no folder, and the hub has no repository [^\n]*$"):
            MTPHeads.from_pretrained("me/heads")

    @pytest.mark.parametrize(
        "change,message",
        [
            ({"target": "h_mid"}, "target is 'h_mid'"),
            ({"offsets": ["right1"]}, r"offsets \['right1'\] do not agree"),
            ({"kind": "trees"}, "kind is 'trees'"),
            ({"backbone": {"name": "x"}}, r"config\.json: backbone: fingerprint is missing; it must be text"),
            ({"backbone": []}, r"config\.json: backbone is \[\]; it must be a group of keys"),
            ({"right": "3"}, r'config\.json: right is "3"; it must be a whole number'),
            ({"width": -1}, r"config\.json: heads\.width is -1; use a finite number of at least 0"),
            ({"offsets": "right1"}, r'config\.json: offsets is "right1"; it must be a list of text'),
        ],
    )
    def test_heads_of_another_kind_of_state_or_shape_are_refused(self, exported, change: dict, message: str) -> None:
        _, _, folder = exported
        config = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            MTPHeads.from_pretrained(folder)

    def test_an_empty_tensor_is_never_exported(self, tmp_path: Path) -> None:
        heads = new_heads(HeadsConfig(right=1, down=0), tiny_emu3())
        heads.right1.gate_up.weight.data = torch.empty(0)
        with pytest.raises(ValueError, match=r"right1\.gate_up\.weight.*empty"):
            heads.save_pretrained(tmp_path / "heads")
        assert not list(tmp_path.iterdir())

    def test_a_failed_export_leaves_the_old_one(self, exported) -> None:
        """A real failing write: files may grow to 8 KiB only."""
        _, heads, folder = exported
        before = (folder / "model.safetensors").read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
            with pytest.raises(OSError):
                heads.save_pretrained(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (folder / "model.safetensors").read_bytes() == before
        assert [p.name for p in folder.parent.iterdir()] == [folder.name]

    def test_push_to_hub_uploads_the_exported_folder(self, exported, monkeypatch) -> None:
        backbone, _, folder = exported
        heads = MTPHeads.from_pretrained(folder, backbone)
        seen: dict[str, object] = {}

        class Hub:
            def __init__(self, token: str | None = None) -> None: ...

            def create_repo(self, repo_id: str, **_: object) -> None:
                seen["repo"] = repo_id

            def upload_folder(self, repo_id: str, folder_path: Path) -> str:
                seen["files"] = {p.name: p.read_bytes() for p in folder_path.iterdir()}
                return "address"

        monkeypatch.setattr("huggingface_hub.HfApi", Hub)
        assert heads.push_to_hub("org/name") == "address"
        assert seen["repo"] == "org/name"
        assert seen["files"] == {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"right": -1}, "heads.right is -1"),
        ({"right": 0, "down": 0}, "at least one head"),
        ({"width": -3}, "heads.width is -3"),
        ({"input": "x"}, "heads.input is 'x'; use one of h\\+e, h, e"),
        ({"right": 4}, "heads.right is 4, but the grid has 4 that way; use at most 3"),
        ({"right": 1, "down": 3}, "heads.down is 3, but the grid has 3 that way; use at most 2"),
    ],
)
def test_wrong_settings_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_heads(HeadsConfig(**fields), tiny_emu3())


@pytest.mark.parametrize("heads", [(1, 0), (1, 1), (5, 2)])
def test_twenty_bf16_steps_are_finite(heads: tuple[int, int]) -> None:
    backbone = tiny_emu3((3, 7)).bfloat16()
    module = module_of(backbone, new_heads(HeadsConfig(right=heads[0], down=heads[1]), backbone).bfloat16())
    optimizer = torch.optim.AdamW(module.heads.parameters(), lr=1e-3)
    tokens = torch.randint(24, (3, 3, 7))
    losses = []
    for _ in range(20):
        h, e = backbone.states(tokens, list(CAPTIONS))
        loss = module.loss(h[None], e, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert torch.tensor(losses).isfinite().all() and losses[-1] < losses[0]
    assert len(module.pairs) == sum(heads)
