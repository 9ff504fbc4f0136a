"""Emu3 on a tiny checkpoint in the published layout, against transformers' own class, processor and generate.

What holds for any checkpoint of this architecture is in tests/test_backbone.py and tests/test_emu3_vq.py.
"""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Emu3Config, Emu3ForConditionalGeneration

from draftgrid import MTPHeads, load_backbone, load_tokenizer
from draftgrid.eval.decoders import decode
from draftgrid.heads.backbones import Backbone
from draftgrid.heads.backbones.emu3 import NEGATIVE_PROMPT, Emu3Backbone, load_processor
from draftgrid.heads.backbones.registry import families
from draftgrid.heads.check import check
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.distributions import mix_guidance
from draftgrid.heads.mtp import new_heads
from draftgrid.training.export import model_card
from tests.published_emu3 import BOS, FULL, config, save, shapes, tiny, visual, vocabulary, weights, write_emu3

WORDS = vocabulary(24)
GRIDS = [(3, 4), (2, 5), (5, 2), (1, 7)]
PROMPTS = ["a red apple", "blue", "a big dog, looking left"]
HUB = "BAAI/Emu3-Gen-hf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_emu3(tmp_path_factory.mktemp("emu3"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return Emu3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()


def emu3(folder: Path, grid: tuple[int, int] = (3, 4), **settings: Any) -> Backbone:
    return load_backbone(folder, grid=grid, **{"dtype": torch.float64, **settings})


def renamed(name: str) -> str:
    """A published name as the class of transformers 5 has it."""
    name = re.sub(r"^text_model\.model\.", "model.text_model.", name)
    return re.sub(r"^vqmodel\.", "model.vqmodel.", re.sub(r"^text_model\.lm_head", "lm_head", name))


def header(folder: Path, prompt: str, grid: tuple[int, int]) -> list[int]:
    """Ids before the first code, by the public template and tokenizer.json alone."""
    text = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = [*str(grid[0]), "*", *str(grid[1])]
    image = ["<|image start|>", *size, "<|image token|>"]
    return [WORDS[BOS], *text.encode(prompt).ids, *(WORDS[w] for w in image)]


def own_logits(model: Any, head: list[int], tokens: Tensor) -> Tensor:
    """(H, W, V): the model's logits over codes, read at the sequence place before each token of (H, W)."""
    H, W = tokens.shape
    rows = [[WORDS[visual(c)] for c in row] + [WORDS["<|extra_200|>"]] for row in tokens.tolist()]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([head + [i for row in rows for i in row]])).logits[0]
    codes = [WORDS[visual(c)] for c in range(24)]
    return torch.stack([logits[len(head) - 1 + y * (W + 1) :][:W, codes] for y in range(H)])


class TestPublishedLayout:
    def test_names_and_shapes_are_those_of_transformers_class_at_full_size(self) -> None:
        """And their sizes those of the published files: 35.05 GB of fp32, 33.97 GB of them the language model's."""
        with torch.device("meta"):
            model = Emu3ForConditionalGeneration(Emu3Config.from_dict(config(FULL)))
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        assert {renamed(name): shape for name, shape in shapes(FULL)} == expected
        sizes = {name: math.prod(shape) for name, shape in shapes(FULL)}
        assert 4 * sum(sizes.values()) / 1e9 == pytest.approx(35.05, abs=0.01)
        text = sum(n for name, n in sizes.items() if name.startswith("text_model."))
        assert 4 * text / 1e9 == pytest.approx(33.97, abs=0.01)
        rope = model.config.text_config.rope_parameters
        assert (rope["rope_theta"], rope["rope_type"]) == (1e6, "default")

    @pytest.mark.parametrize("recipe", ["emu3_ssd", "emu3_chain", "emu3_mtp1d"])
    def test_a_plan_needs_no_checkpoint_and_counts_what_is_published(
        self, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from draftgrid.common.cli import compose
        from draftgrid.recipes.launch.schema import RECIPES, TrainConfig
        from draftgrid.recipes.plan.subject import count, load_subject

        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        subject = load_subject(compose(TrainConfig, [f"recipe={recipe}"], RECIPES))
        sizes = {name: math.prod(s) for name, s in shapes(FULL) if "running" not in name and "batches" not in name}
        text = sum(n for name, n in sizes.items() if name.startswith("text_model."))
        assert count(subject.backbone) == text and round(text / 1e9, 2) == 8.49
        assert subject.unread == sum(sizes.values()) - text
        assert (subject.backbone.grid.height, subject.backbone.grid.width) == (90, 90)
        assert subject.backbone.image_vocab_size == 32_768 and subject.backbone.structure_ids() == [151_846]

    def test_what_is_known_of_it_offline_builds_the_same_model(self) -> None:
        with torch.device("meta"):
            known, whole = (
                Emu3ForConditionalGeneration(Emu3Config.from_dict(c))
                for c in (families()["emu3"].model_config(), config(FULL))
            )
        assert [(n, p.shape) for n, p in known.named_parameters()] == [
            (n, p.shape) for n, p in whole.named_parameters()
        ]
        for field in ("rope_parameters", "rms_norm_eps", "num_attention_heads", "num_key_value_heads", "hidden_act"):
            assert getattr(known.config.text_config, field) == getattr(whole.config.text_config, field)


class TestLoading:
    def test_without_a_card_family_and_grid_are_known(self, folder: Path) -> None:
        backbone = load_backbone(folder)
        assert isinstance(backbone, Emu3Backbone) and backbone.dtype == torch.float32
        assert (backbone.grid.height, backbone.grid.width, backbone.image_vocab_size) == (90, 90, 24)
        assert (emu3(folder, (2, 5)).grid.height, emu3(folder, (2, 5)).grid.width) == (2, 5)
        with pytest.raises(ValueError, match="model_type is 'emu3', not 'janus'"):
            load_backbone(folder, adapter="janus_pro")

    @pytest.mark.parametrize(("shards", "dtype"), [(1, torch.float32), (3, torch.float32), (2, torch.bfloat16)])
    def test_weights_are_the_files_own_in_one_or_many(self, folder: Path, shards: int, dtype, tmp_path: Path) -> None:
        write_emu3(tmp_path, shards=shards, dtype=dtype)
        assert len(list(tmp_path.glob("*.safetensors"))) == shards
        loaded = load_backbone(tmp_path)
        held = dict(loaded.model.named_parameters())
        stored = {renamed(n): t.to(dtype).float() for n, t in weights(tiny(24)).items() if n.startswith("text_model.")}
        assert held.keys() == stored.keys(), "and nothing of the picture tokenizer"
        assert all(torch.equal(held[n], t) for n, t in stored.items())
        assert loaded.fingerprint == load_backbone(folder).fingerprint

    @pytest.mark.parametrize("shards", [1, 3])
    @pytest.mark.parametrize("name", ["text_model.model.layers.1.mlp.up_proj.weight", "text_model.lm_head.weight"])
    def test_one_renamed_key_is_named_and_nothing_loads(self, name: str, shards: int, tmp_path: Path) -> None:
        state = weights(tiny(24))
        state[name.replace(".weight", ".typo")] = state.pop(name)
        save(write_emu3(tmp_path), state, shards)
        lost, typo = re.escape(renamed(name)), re.escape(renamed(name.replace(".weight", ".typo")))
        with pytest.raises(ValueError, match=rf"weights lack \['{lost}'\] and have unknown or misshapen \['{typo}'\]"):
            load_backbone(tmp_path)

    def test_a_renamed_key_of_the_picture_tokenizer_is_named_where_it_is_read(self, tmp_path: Path) -> None:
        state = weights(tiny(24))
        state["vqmodel.encoder.conv_typo.bias"] = state.pop("vqmodel.encoder.conv_in.bias")
        save(write_emu3(tmp_path), state)
        with pytest.raises(ValueError, match=r"missing \['encoder\.conv_in\.bias'\].*\['encoder\.conv_typo\.bias'\]"):
            load_tokenizer(tmp_path)

    def test_weights_of_another_size_absent_or_damaged_are_one_sentence(self, tmp_path: Path) -> None:
        state = weights(tiny(24))
        state["text_model.model.norm.weight"] = torch.ones(33)
        save(write_emu3(tmp_path), state, 2)
        with pytest.raises(ValueError, match=r"lack nothing and have unknown or misshapen \['model\.text_model\.norm"):
            load_backbone(tmp_path)
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(
            ValueError,
            match=rf"^{tmp_path} lacks model-00002-of-00002\.safetensors, one of the 2 files of its weights$",
        ):
            load_backbone(tmp_path)
        save(tmp_path, {"a": torch.ones(1)})
        (tmp_path / "model.safetensors").write_bytes(b"cut short")
        with pytest.raises(ValueError, match=rf"^{tmp_path} holds no checkpoint like {HUB}: [^\n]*$"):
            load_backbone(tmp_path)

    def test_a_finetuned_model_in_memory_has_the_same_fingerprint(self, folder: Path) -> None:
        """As long as embedding, head and final norm are the old ones; the model itself is left whole."""
        model = Emu3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float64)
        with torch.no_grad():
            model.model.text_model.layers[0].mlp.up_proj.weight.add_(0.5)
        held = Backbone.from_model(model, load_processor(folder), grid=(3, 4), name="mine")
        loaded = emu3(folder)
        assert isinstance(held, Emu3Backbone) and held.name == "mine"
        assert held.fingerprint == loaded.fingerprint
        assert not held.training and not any(p.requires_grad for p in held.parameters())
        tokens = torch.randint(24, (1, 3, 4), generator=torch.Generator().manual_seed(0))
        h, _ = held.states(tokens, ["blue"])
        torch.testing.assert_close(held.logits(h)[0], own_logits(model, header(folder, "blue", (3, 4)), tokens[0]))
        assert not torch.allclose(h, loaded.states(tokens, ["blue"])[0], rtol=0.1)
        assert sum(p.numel() for p in model.model.vqmodel.parameters()) > 0
        with torch.no_grad():
            model.lm_head.weight[WORDS[visual(3)], 0] += 1
        changed = Emu3Backbone.from_model(model, held.processor, grid=(3, 4))
        assert changed.fingerprint != loaded.fingerprint
        with pytest.raises(ValueError, match=r"Linear: config\.model_type is None; known: emu3, janus"):
            Backbone.from_model(nn.Linear(1, 1), None)

    @pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
    def test_a_model_of_the_callers_own_attends_as_before(self, folder: Path, attention: str, monkeypatch) -> None:
        """Ours, whose masks flex_attention does not read, holds in our own calls alone, also in one that fails."""
        model = Emu3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float64)
        tokens = torch.randint(24, (1, 3, 4), generator=torch.Generator().manual_seed(0))
        before = own_logits(model, header(folder, "blue", (3, 4)), tokens[0])
        config = model.model.text_model.config
        config._attn_implementation = attention
        held = Backbone.from_model(model, load_processor(folder), grid=(3, 4))
        h, _ = held.states(tokens, ["blue"])
        torch.testing.assert_close(held.logits(h)[0], before, rtol=1e-4, atol=1e-4)  # eager's softmax is fp32
        state, first = held.start(["blue"], 2.0)
        rest = held.forward(state, tokens.flatten(1)[:, :11], [0])
        torch.testing.assert_close(torch.cat([first, rest], dim=2)[0], h.flatten(1, 2), rtol=1e-4, atol=1e-4)
        monkeypatch.setattr(type(held.text.layers[0]), "forward", lambda *_, **__: 1 / 0)
        for call in (lambda: held.states(tokens, ["blue"]), lambda: held.start(["blue"])):
            with pytest.raises(ZeroDivisionError):
                call()
        assert config._attn_implementation == attention
        monkeypatch.undo()
        config._attn_implementation = "sdpa"
        assert torch.equal(own_logits(model, header(folder, "blue", (3, 4)), tokens[0]), before)

    def test_progress_bars_and_verbosity_of_the_process_stay_as_they_are(self, folder: Path, tmp_path: Path) -> None:
        from huggingface_hub.utils import are_progress_bars_disabled
        from transformers.utils import logging

        def found() -> tuple[bool, bool, int]:
            return logging.is_progress_bar_enabled(), are_progress_bars_disabled(), logging.get_verbosity()

        shown = logging.is_progress_bar_enabled()
        try:
            for turn in (logging.enable_progress_bar, logging.disable_progress_bar):
                turn()
                before = found()
                load_backbone(folder)
                with pytest.raises(ValueError):
                    load_backbone(tmp_path, adapter="emu3")
                assert found() == before
        finally:
            (logging.enable_progress_bar if shown else logging.disable_progress_bar)()

    def test_a_device_map_without_accelerate_is_one_sentence(self, folder: Path, monkeypatch) -> None:
        monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda *_: False)
        with pytest.raises(ValueError, match=r"^device_map is 'cpu': [^\n]*pip install accelerate[^\n]*$"):
            load_backbone(folder, device_map="cpu")


class TestHub:
    @pytest.fixture
    def commit(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """A cache laid out as the hub's client lays it out, in which `main` and `v2` are there."""
        repo, commit = tmp_path / f"models--{HUB.replace('/', '--')}", "d" * 40
        shutil.copytree(folder, repo / "snapshots" / commit)
        (repo / "refs").mkdir()
        for branch in ("main", "v2"):
            (repo / "refs" / branch).write_text(commit)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        return commit

    def test_the_revision_goes_into_exported_heads_and_their_card(self, commit: str, tmp_path: Path) -> None:
        backbone = load_backbone(HUB, revision="v2", local_files_only=True, grid=(3, 4))
        assert (backbone.name, backbone.revision) == (HUB, commit)
        heads = new_heads(HeadsConfig(right=2, down=1), backbone)
        heads.card = model_card(heads, {"figures": {}, "origin": {}, "global_step": 0}, {})
        heads.save_pretrained(tmp_path / "heads")
        told = json.loads((tmp_path / "heads" / "config.json").read_text())["backbone"]
        assert (told["name"], told["revision"]) == (HUB, commit)
        assert f'load_backbone("{HUB}", revision="{commit}")' in (tmp_path / "heads" / "README.md").read_text()

    def test_heads_of_another_revision_are_refused_with_both_fingerprints(self, folder: Path, tmp_path: Path) -> None:
        save(write_emu3(tmp_path / "other"), weights(tiny(24), seed=2))
        mine, other = emu3(folder), emu3(tmp_path / "other")
        new_heads(HeadsConfig(right=2, down=1), mine).save_pretrained(tmp_path / "heads")
        assert MTPHeads.from_pretrained(tmp_path / "heads", mine).names == ["right1", "right2", "down1"]
        with pytest.raises(ValueError, match=f"{mine.fingerprint[:16]}.*{other.fingerprint[:16]}"):
            MTPHeads.from_pretrained(tmp_path / "heads", other)

    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            (errors.RepositoryNotFoundError, "the hub has no repository of that name"),
            (errors.GatedRepoError, f"accept its terms at huggingface.co/{HUB}"),
            (errors.RevisionNotFoundError, "has no revision 'v9'"),
            (errors.LocalEntryNotFoundError, "at revision 'v9' are in the cache, while the hub cannot be reached"),
            (ConnectionError, "are to be had: ConnectionError"),
        ],
    )
    @pytest.mark.parametrize("load", [load_backbone, load_tokenizer])
    def test_what_the_hub_refuses_is_one_sentence(self, load, kind, message: str, monkeypatch) -> None:
        def refuse(*_: object, **__: object) -> str:
            raise kind.__new__(kind)

        monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
        with pytest.raises(ValueError, match=f"^{HUB.join(chr(39) * 2)} is no folder, and [^\n]*{message}[^\n]*$"):
            load(HUB, revision="v9")

    def test_with_local_files_only_nothing_is_asked(self, commit: str, monkeypatch) -> None:
        monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: pytest.fail("the hub was asked"))
        assert load_tokenizer(HUB, revision="v2", local_files_only=True).codebook_size == 24
        with pytest.raises(
            ValueError, match="at revision 'v3' are in the cache, while nothing but the cache may be asked"
        ):
            load_backbone(HUB, revision="v3", local_files_only=True)

    def test_a_picture_tokenizer_fetches_the_files_it_lies_in_alone(self, tmp_path: Path, monkeypatch) -> None:
        write_emu3(tmp_path, shards=20)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        asked: list[list[str]] = []

        def serve(name: str, *, allow_patterns: list[str], **_: object) -> str:
            asked.append(allow_patterns)
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", serve)
        load_tokenizer(HUB)
        needed = {file for name, file in index.items() if name.startswith("vqmodel.")}
        assert asked[0] == ["*.json", "*.jinja"] and set(asked[1]) == needed < set(index.values())
        load_backbone(HUB)
        assert asked[3] == ["*.safetensors"]


class TestContract:
    @pytest.mark.parametrize("grid", GRIDS)
    def test_logits_are_the_models_own_at_every_cell(self, folder: Path, theirs: Any, grid: tuple[int, int]) -> None:
        backbone = emu3(folder, grid)
        tokens = torch.randint(24, (1, *grid), generator=torch.Generator().manual_seed(0))
        for prompt in ("a red apple", None):
            head = header(folder, prompt or NEGATIVE_PROMPT, grid)
            assert backbone.prompt_ids([prompt])[0].tolist() == head
            h, _ = backbone.states(tokens, [prompt])
            torch.testing.assert_close(backbone.logits(h)[0], own_logits(theirs, head, tokens[0]))

    @pytest.mark.parametrize("grid", GRIDS)
    def test_every_line_of_heads_check_holds(self, folder: Path, grid: tuple[int, int]) -> None:
        lines = check(emu3(folder, grid), load_tokenizer(folder), tell=lambda _: None)
        assert [line.name for line in lines if line.ok is not True] == []

    def test_a_batch_of_unequal_prompts_with_guidance_is_each_alone_twice(self, folder: Path) -> None:
        backbone = emu3(folder)
        tokens = torch.randint(24, (3, 3, 4), generator=torch.Generator().manual_seed(2))
        for _ in range(2):
            state, first = backbone.start(PROMPTS, guidance=3.0)
            both = torch.cat([first, backbone.forward(state, tokens.flatten(1)[:, :9], [0] * 3)], dim=2)
            for b, prompt in enumerate(PROMPTS):
                for branch, alone in enumerate((prompt, None)):
                    true = backbone.states(tokens[b : b + 1], [alone])[0].flatten(1, 2)
                    torch.testing.assert_close(both[branch, b], true[0, :10])
            assert not torch.allclose(both[0], both[1], rtol=0.1)

    @pytest.mark.parametrize("grid", [(3, 4), (5, 2)])
    def test_guidance_is_what_two_passes_of_the_model_mix(self, folder: Path, theirs: Any, grid) -> None:
        backbone = emu3(folder, grid)
        tokens = torch.randint(24, (1, *grid), generator=torch.Generator().manual_seed(3))
        told, untold = (own_logits(theirs, header(folder, p, grid), tokens[0]) for p in (PROMPTS[0], NEGATIVE_PROMPT))
        state, first = backbone.start(PROMPTS[:1], guidance=3.0)
        both = torch.cat([first, backbone.forward(state, tokens.flatten(1)[:, :-1], [0])], dim=2)
        mixed = mix_guidance(backbone.logits(both), 3.0)[0]
        torch.testing.assert_close(mixed, (untold + 3 * (told - untold)).flatten(0, 1), check_dtype=False)
        assert (told - untold).abs().max() > 0.5

    @pytest.mark.parametrize("ratio,grid", [("16:9", (68, 120)), ("3:4", (104, 78)), ("1:1", (90, 90))])
    def test_shapes_of_720_pixels_have_the_processors_own_prompt(self, folder: Path, ratio: str, grid) -> None:
        backbone = emu3(folder, grid)
        theirs = load_processor(folder)(text="blue", return_for_image_generation=True, ratio=ratio, image_area=720**2)
        assert theirs["image_sizes"] == [list(grid)]
        assert backbone.prompt_ids(["blue"])[0].tolist() == theirs["input_ids"][0] == header(folder, "blue", grid)
        slots = len(theirs["input_ids"][0]) + backbone.grid.slots
        assert slots < backbone.model.config.text_config.max_position_embeddings == 9216


class TestDrawing:
    @pytest.mark.parametrize("guidance", [1.0, 3.0])
    @pytest.mark.parametrize("grid", [(3, 4), (2, 5), (5, 2)])
    def test_greedy_ar_is_transformers_generate_to_the_pixel(
        self, folder: Path, theirs: Any, grid: tuple[int, int], guidance: float
    ) -> None:
        """With the authors' own rule of what may follow what, and the negative prompt with its image header."""
        (H, W), codes = grid, [WORDS[visual(c)] for c in range(24)]
        end = [WORDS[w] for w in ("<|extra_201|>", "<|image end|>", "<|extra_204|>")]

        def allowed(_: int, sofar: Tensor) -> list[int]:
            offset = len(sofar) - int((sofar == WORDS["<|image token|>"]).nonzero()[0, 0])
            if offset % (W + 1) == 0:
                return [WORDS["<|extra_200|>"]]
            past = offset - (W + 1) * H - 1
            return codes if past < 0 else [end[past]]

        backbone, tokenizer = emu3(folder, grid), load_tokenizer(folder)
        drawn = decode(backbone, PROMPTS, decoder="ar", temperature=0, guidance=guidance).tokens
        for prompt, tokens in zip(PROMPTS, drawn, strict=True):
            head = torch.tensor([header(folder, prompt, grid)])
            out = theirs.generate(
                input_ids=head,
                attention_mask=torch.ones_like(head),
                negative_prompt_ids=torch.tensor([header(folder, NEGATIVE_PROMPT, grid)]),
                guidance_scale=guidance,
                prefix_allowed_tokens_fn=allowed,
                do_sample=False,
                max_new_tokens=H * (W + 1) + 3,
            )[:, head.shape[1] :]
            rows = out[0, :-3].view(H, W + 1)[:, :-1]
            assert [[codes.index(t) for t in row] for row in rows.tolist()] == tokens.tolist()
            picture = theirs.model.decode_image_tokens(out, height=H, width=W)
            expected = (picture * 0.5 + 0.5).clamp(0, 1).float()
            found = tokenizer.decode(tokens[None])
            assert found.shape == (1, 3, 8 * H, 8 * W)
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
        assert len({tuple(t.flatten().tolist()) for t in drawn}) == 3 and len(drawn.unique()) > 3

    @pytest.mark.parametrize("shards", [1, 3])
    def test_pictures_become_transformers_own_codes_and_codes_pictures(
        self, theirs: Any, shards: int, tmp_path: Path
    ) -> None:
        tokenizer = load_tokenizer(write_emu3(tmp_path, shards=shards))
        assert (tokenizer.patch, tokenizer.image_size, tokenizer.codebook_size) == (8, 720, 24)
        images = torch.rand(2, 3, 16, 40, generator=torch.Generator().manual_seed(1))
        images[0, :, :, 20:] = 1
        codes = tokenizer.encode(images)
        vq = theirs.model.vqmodel.float()
        with torch.no_grad():
            expected = vq.encode((images - 0.5) / 0.5, torch.tensor([[16, 40]] * 2)).image_tokens
            pixels = (vq.decode(torch.stack(expected)) * 0.5 + 0.5).clamp(0, 1)
        assert codes.shape == (2, 2, 5) and torch.equal(codes, torch.stack(expected)) and len(codes.unique()) > 1
        torch.testing.assert_close(tokenizer.decode(codes), pixels)
        vq.double()
