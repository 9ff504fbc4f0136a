"""Janus-Pro on a tiny checkpoint in the published layout, against transformers' own class and generate."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from draftgrid.eval.decoders import Sampling, decode, make_policy
from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.backbones.janus_pro import JanusProBackbone, load_processor
from draftgrid.heads.chain import ChainHeads
from draftgrid.heads.chain_tables import chain_tables
from draftgrid.heads.check import check
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.mtp import MTPHeads, new_heads
from draftgrid.heads.prompts import Unconditional, unconditional_prompts
from draftgrid.heads.tokenizers import JanusVQ, load_tokenizer
from tests.published_janus import (
    BOI,
    BOS,
    FULL,
    PAD,
    config,
    load_theirs,
    save,
    shapes,
    tiny,
    weights,
    write_config,
    write_janus,
)
from tests.test_every_decoder import CASES, arguments
from tests.tiny import CAPTIONS, TableBackbone, enumerate_law, random_chain_heads, total_variation

GUIDANCE = 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_janus(tmp_path_factory.mktemp("janus") / "Janus-Pro-7B")


@pytest.fixture(scope="module")
def theirs(folder: Path):
    return load_theirs(folder)


@pytest.fixture(scope="module")
def backbone(folder: Path) -> JanusProBackbone:
    return janus(folder)


def janus(folder: Path, grid: tuple[int, int] | None = None, **settings) -> JanusProBackbone:
    found = load_backbone(folder, grid=grid, **settings)  # the family is told by config.json
    assert isinstance(found, JanusProBackbone)
    return found


def words(backbone: JanusProBackbone, ids: Tensor) -> list[str]:
    return backbone.processor.tokenizer.convert_ids_to_tokens(ids)


def own_logits(model, ids: Tensor, tokens: Tensor) -> Tensor:
    """(H * W, V) by the whole model on ids and codes, read just before each token: no cache, no adapter."""
    embeds = model.get_input_embeddings()(ids)[None]
    picture = model.prepare_embeddings_for_image_generation(tokens.view(1, -1))
    hidden = model.model(inputs_embeds=torch.cat([embeds, picture], dim=1)).last_hidden_state[0]
    return model.model.generation_head(hidden)[len(ids) - 1 : -1]


class TestPublishedLayout:
    def test_names_and_shapes_are_those_of_transformers_class_at_full_size(self) -> None:
        """And their sum is what was published: 9.99 and 4.85 GB of bf16 (huggingface.co/deepseek-ai/Janus-Pro-7B, list
        of files), which the conversion left SigLIP's attention pool and a counter of used codes out of."""
        from transformers import JanusConfig, JanusForConditionalGeneration

        with torch.device("meta"):
            model = JanusForConditionalGeneration(JanusConfig(**config(FULL), tie_word_embeddings=False))
        expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert dict(shapes(FULL)) == expected
        kept = sum(math.prod(s) for s in expected.values())
        assert kept == 7_407_773_323
        E = 1024
        pool = E + (E * E + E) + (2 * E * E + 2 * E) + (E * E + E) + 2 * E + (4 * E * E + 4 * E) + (4 * E * E + E)
        assert 2 * (kept + pool + 65_536) / 1e9 == pytest.approx(9.99 + 4.85, abs=0.01)

    def test_the_whole_of_it_is_what_decoding_loads_and_the_rest(self, tmp_path: Path) -> None:
        """plan=true at full size: the language model, code embedding, aligner and image head, worked out by hand."""
        from draftgrid.common.cli import compose
        from draftgrid.recipes.launch.schema import DEFAULT, RECIPES, TrainConfig
        from draftgrid.recipes.plan.subject import count, load_subject

        keys = ["recipe=janus_ssd", f"backbone.checkpoint={write_config(tmp_path)}"]
        subject = load_subject(compose(TrainConfig, keys, RECIPES, DEFAULT))
        D, M, V = 4096, 11008, 16384
        text = 102_400 * D + 30 * (4 * D * D + 3 * D * M + 2 * D) + D
        images = V * 8 + (8 * D + D) + (D * D + D) + (D * D + D) + (D * V + V)
        assert count(subject.backbone) == text + images == 6_591_791_104
        unread = dict(shapes(FULL))
        vision = sum(math.prod(s) for n, s in unread.items() if n.startswith(("model.vision", "model.al", "model.vq")))
        assert subject.unread == vision
        assert (subject.backbone.grid.height, subject.backbone.grid.width, subject.backbone.image_vocab_size) == (
            24,
            24,
            V,
        )
        assert count(subject.heads) == 6 * 5 * D * D + 6 * D  # type: ignore[arg-type]

    def test_one_file_and_many_are_the_same_backbone(self, folder: Path, backbone, tmp_path: Path) -> None:
        many = janus(write_janus(tmp_path / "many", shards=5))
        assert len(list((tmp_path / "many").glob("*.safetensors"))) == 5
        assert many.fingerprint == backbone.fingerprint
        tokens = torch.randint(24, (1, 4, 4), generator=torch.Generator().manual_seed(0))
        assert torch.equal(many.states(tokens, ["blue"])[0], backbone.states(tokens, ["blue"])[0])
        assert load_tokenizer(tmp_path / "many").fingerprint == load_tokenizer(folder).fingerprint

    @pytest.mark.parametrize("shards", [1, 3])
    @pytest.mark.parametrize(
        "name",
        [
            "generation_aligner.fc1.bias",
            "language_model.layers.1.mlp.up_proj.weight",
            "vision_model.post_layernorm.bias",
        ],
    )
    def test_a_renamed_key_is_named(self, name: str, shards: int, tmp_path: Path) -> None:
        write_janus(tmp_path)
        state = weights(tiny(4, 24))
        state[f"model.{name}.typo"] = state.pop(f"model.{name}")
        (tmp_path / "model.safetensors").unlink()
        save(tmp_path, state, shards)
        with pytest.raises(
            ValueError,
            match=rf"weights lack \['model\.{name}'\] and have unknown or misshapen \['model\.{name}\.typo'\]",
        ):
            janus(tmp_path)

    def test_weights_of_another_size_and_files_that_are_not_there_are_one_sentence(self, tmp_path: Path) -> None:
        write_janus(tmp_path / "a")
        state = load_file(tmp_path / "a" / "model.safetensors")
        state["model.generation_head.vision_head.bias"] = torch.zeros(25)
        save(tmp_path / "a", state)
        with pytest.raises(
            ValueError, match=r"lack nothing and have unknown or misshapen \['model\.generation_head\.vision"
        ):
            janus(tmp_path / "a")
        (tmp_path / "a" / "model.safetensors").unlink()
        with pytest.raises(
            ValueError,
            match=r"holds no checkpoint like deepseek-community/Janus-Pro-7B: [^\n]*model\.safetensors[^\n]*$",
        ):
            janus(tmp_path / "a")
        write_janus(tmp_path / "b")
        (tmp_path / "b" / "chat_template.jinja").unlink()
        with pytest.raises(ValueError, match=r"chat_template\.jinja lack chat_template"):
            janus(tmp_path / "b")
        (tmp_path / "b" / "config.json").write_text(json.dumps({"model_type": "multi_modality"}))
        with pytest.raises(ValueError, match=r"model_type is 'multi_modality', not 'janus'.*deepseek-community"):
            janus(tmp_path / "b")

    def test_dtype_is_the_checkpoints_own_or_the_one_asked_for(self, folder: Path, backbone, tmp_path: Path) -> None:
        half = JanusProBackbone.from_pretrained(write_janus(tmp_path / "half", dtype=torch.bfloat16))
        assert half.dtype == torch.bfloat16 and half.fingerprint == backbone.fingerprint
        assert janus(folder, dtype=torch.float64).dtype == torch.float64

    def test_what_drawing_never_reads_is_not_kept(self, backbone, theirs) -> None:
        mine, whole = dict(backbone.model.named_parameters()), dict(theirs.named_parameters())
        left = {n.split(".")[1] for n in whole.keys() - mine.keys()}
        assert left == {"weight", "vision_model", "aligner", "vqmodel"} and "lm_head.weight" not in mine
        assert all(torch.equal(p, whole[n]) for n, p in mine.items())


class TestHub:
    """A hub id, from a cache laid out as the hub client lays it out; nothing is fetched."""

    @pytest.fixture
    def cache(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        repo, commit = tmp_path / "models--deepseek-community--Janus-Pro-7B", "c" * 40
        shutil.copytree(folder, repo / "snapshots" / commit)
        for branch in ("main", "v2"):
            (repo / "refs").mkdir(exist_ok=True)
            (repo / "refs" / branch).write_text(commit)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return commit

    @pytest.mark.parametrize("name,settings", [("@v2", {}), ("", {"revision": "v2"}), ("", {})])
    def test_name_and_revision_are_recorded(self, cache: str, backbone, name: str, settings: dict) -> None:
        place = "deepseek-community/Janus-Pro-7B" + name
        found = load_backbone(place, local_files_only=True, **settings)
        assert (found.name, found.revision) == ("deepseek-community/Janus-Pro-7B", cache)
        assert found.fingerprint == backbone.fingerprint
        assert isinstance(load_tokenizer(place), JanusVQ)

    def test_what_is_not_there_is_said(self, cache: str) -> None:
        for place in ("deepseek-community/Janus-Pro-8B", "deepseek-community/Janus-Pro-7B@v9"):
            with pytest.raises(ValueError, match=f"'{place.partition('@')[0]}' is no folder, and no files"):
                load_backbone(place, local_files_only=True)


class TestPrompts:
    def test_template_is_the_processors_own_and_spaces_survive(self, backbone) -> None:
        """transformers 5 may take LlamaTokenizerFast at its word, a class whose rules drop this tokenizer's spaces."""
        ids = backbone.prompt_ids(["  a red apple "])[0]
        text = backbone.processor.tokenizer.decode(ids)
        assert text == f"{BOS}<|User|>: a red apple\n\n<|Assistant|>:{BOI}"
        turn = [{"role": "user", "content": [{"type": "text", "text": "a red apple"}]}]
        prompt = backbone.processor.apply_chat_template(turn, add_generation_prompt=True)
        assert torch.equal(ids, backbone.processor(text=prompt, generation_mode="image")["input_ids"][0])

    def test_the_unconditional_prompt_is_as_long_and_keeps_bos_and_begin_of_image_alone(self, backbone) -> None:
        prompts = [*CAPTIONS, ""]
        for plain, unconditional in zip(
            backbone.ids_of(prompts), backbone.ids_of(unconditional_prompts(prompts)), strict=True
        ):
            assert words(backbone, unconditional) == [BOS] + [PAD] * (len(plain) - 2) + [BOI]
        assert torch.equal(backbone.ids_of([None])[0], backbone.ids_of([Unconditional("")])[0])
        assert len({len(i) for i in backbone.ids_of(unconditional_prompts(prompts))}) == 4

    def test_bos_comes_first_whatever_the_tokenizer_adds(self, folder: Path, backbone, tmp_path: Path) -> None:
        shutil.copytree(folder, tmp_path / "b")
        core = json.loads((tmp_path / "b" / "tokenizer.json").read_text(encoding="utf-8"))
        (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(core | {"post_processor": None}), encoding="utf-8")
        bare = load_processor(tmp_path / "b")
        assert int(bare(text=["x"], generation_mode="image")["input_ids"][0][0]) != bare.tokenizer.bos_token_id
        assert torch.equal(janus(tmp_path / "b").prompt_ids(["blue"])[0], backbone.prompt_ids(["blue"])[0])

    def test_a_wrong_begin_of_image_is_named(self, folder: Path) -> None:
        backbone = janus(folder)
        backbone.processor.image_start_token = "<end_of_image>"
        with pytest.raises(ValueError, match="the prompt ends with id 260, which is not begin-of-image"):
            backbone.prompt_ids(["blue"])


class TestContract:
    @pytest.mark.parametrize("grid", [(4, 4), (2, 5), (5, 2), (1, 7)])
    def test_logits_are_the_models_own_at_every_cell(self, folder: Path, theirs, grid: tuple[int, int]) -> None:
        backbone = janus(folder, grid)
        tokens = torch.randint(24, (1, *grid), generator=torch.Generator().manual_seed(0))
        h, e = backbone.states(tokens, ["a red apple"])
        ids = backbone.prompt_ids(["a red apple"])[0]
        with torch.no_grad():
            expected = own_logits(theirs, ids, tokens)
            embedded = theirs.prepare_embeddings_for_image_generation(tokens.flatten())
        torch.testing.assert_close(backbone.logits(h).flatten(0, 2), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(e.flatten(0, 2), embedded)

    def test_h_pre_is_normed_exactly_once(self, folder: Path) -> None:
        backbone = janus(folder)
        with torch.no_grad():
            backbone.text.norm.weight.mul_(torch.linspace(0.2, 3, 32))
        tokens = torch.randint(24, (1, 4, 4), generator=torch.Generator().manual_seed(0))
        ids, h = backbone.prompt_ids(["blue"])[0], backbone.states(tokens, ["blue"])[0]
        with torch.no_grad():
            expected = own_logits(backbone.model, ids, tokens)
        torch.testing.assert_close(backbone.logits(h).flatten(0, 2), expected, rtol=1e-4, atol=1e-4)

    def test_states_of_unequal_prompts_and_unconditional_ones_equal_each_alone_twice(self, backbone) -> None:
        prompts = ["blue", "big dog, looking left", None, Unconditional("big dog, looking left"), ""]
        tokens = torch.randint(24, (5, 4, 4), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            h, _ = backbone.states(tokens, prompts)
            for b, prompt in enumerate(prompts):
                torch.testing.assert_close(
                    h[b : b + 1], backbone.states(tokens[b : b + 1], [prompt])[0], rtol=1e-4, atol=1e-4
                )

    @pytest.mark.parametrize("grid", [None, (2, 5), (5, 2), (1, 7), (4, 1)])
    def test_every_line_of_heads_check_holds(self, folder: Path, grid: tuple[int, int] | None) -> None:
        lines = check(janus(folder, grid), None if grid else load_tokenizer(folder), tell=lambda _: None)
        assert [line.name for line in lines if line.ok is not True] == (["tokenizer"] if grid else [])

    def test_a_prompt_of_pads_for_all_lengths_is_seen_by_heads_check(self, folder: Path) -> None:
        """The mistake that families with one unconditional prompt for all invite."""

        class OneTwin(JanusProBackbone):
            def start(self, prompts, guidance=1.0):
                self.guided = guidance != 1
                return super().start(prompts, guidance)

            def ids_of(self, prompts):
                guided = self.__dict__.pop("guided", False)
                return super().ids_of([None if guided and isinstance(p, Unconditional) else p for p in prompts])

        backbone = OneTwin.from_pretrained(folder, dtype=torch.float32)
        failed = [line.name for line in check(backbone.freeze(), tell=lambda _: None) if line.ok is False]
        assert failed == ["guidance"]

    @pytest.mark.parametrize("length", [1, 4, 5, 11])
    def test_windows_from_anywhere_and_rollbacks_equal_the_full_pass(self, folder: Path, length: int) -> None:
        backbone = janus(folder, (3, 4), dtype=torch.float64)
        tokens = torch.randint(24, (2, 12), generator=torch.Generator().manual_seed(1))
        prompts = CAPTIONS[1:]
        branches = [*prompts, *unconditional_prompts(prompts)]
        full = backbone.states(tokens.view(2, 3, 4).repeat(2, 1, 1), branches)[0].flatten(1, 2).view(2, 2, 12, -1)
        for first in range(12 - length):
            state, h = backbone.start(prompts, guidance=GUIDANCE)
            torch.testing.assert_close(h[:, :, 0], full[:, :, 0], rtol=0, atol=1e-5)
            backbone.forward(state, (tokens[:, : first + 1] + 1) % 24, [0, 0])
            backbone.rollback(state, [0, 0])
            if first:
                backbone.forward(state, tokens[:, :first], [0, 0])
            h = backbone.forward(state, tokens[:, first : first + length], [first, first])
            torch.testing.assert_close(h, full[:, :, first + 1 : first + length + 1], rtol=0, atol=1e-5)

    def test_guidance_is_what_two_passes_of_the_model_mix(self, backbone, theirs) -> None:
        """Uncond + 5 (cond - uncond), as published; the two branches are far apart."""
        prompt, tokens = "a red apple", torch.randint(24, (1, 4, 4), generator=torch.Generator().manual_seed(2))
        plain = backbone.prompt_ids([prompt])[0]
        pads = plain.clone()
        pads[1:-1] = backbone.processor.tokenizer.pad_token_id  # generation_inference.py: tokens[i, 1:-1] = pad_id
        with torch.no_grad():
            cond, uncond = (own_logits(theirs, ids, tokens) for ids in (plain, pads))
        expected = torch.softmax(uncond + GUIDANCE * (cond - uncond), dim=-1)
        assert (cond - uncond).abs().mean() > 0.1
        state, h = backbone.start([prompt], guidance=GUIDANCE)
        h = torch.cat([h, backbone.forward(state, tokens.flatten(1)[:, :-1], [0])], dim=2)
        p = Sampling(guidance=GUIDANCE).probabilities(backbone.logits(h))[0]
        torch.testing.assert_close(p, expected, rtol=1e-3, atol=1e-5)

    def test_greedy_ar_is_transformers_generate_token_for_token(self, backbone, theirs) -> None:
        for prompt in CAPTIONS:
            turn = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
            text = backbone.processor.apply_chat_template(turn, add_generation_prompt=True)
            inputs = backbone.processor(text=text, generation_mode="image", return_tensors="pt")
            drawn = theirs.generate(**inputs, generation_mode="image", guidance_scale=GUIDANCE, do_sample=False)
            mine = decode(backbone, [prompt], decoder="ar", temperature=0, guidance=GUIDANCE).tokens
            assert mine.flatten().tolist() == drawn[0].tolist() and len(mine.unique()) > 3

    def test_a_model_in_memory_is_wrapped_as_it_is(self, folder: Path, backbone, theirs) -> None:
        held = JanusProBackbone.from_model(theirs, load_processor(folder))
        assert held.fingerprint == backbone.fingerprint and not any(p.requires_grad for p in theirs.parameters())
        assert theirs.model.vqmodel.decoder is not None and theirs.lm_head.weight.numel()  # nothing is taken from it
        tokens = torch.randint(24, (1, 4, 4), generator=torch.Generator().manual_seed(0))
        assert torch.equal(held.states(tokens, ["blue"])[0], backbone.states(tokens, ["blue"])[0])
        with pytest.raises(ValueError, match="Linear is no JanusForConditionalGeneration"):
            JanusProBackbone.from_model(nn.Linear(1, 1), None)

    @pytest.mark.parametrize(
        "part",
        [
            "model.model.generation_embeddings.weight",
            "model.model.generation_aligner.fc1.bias",
            "model.model.generation_aligner.hidden_layers.0.weight",
            "model.model.generation_head.proj_out.weight",
            "model.model.generation_head.vision_head.bias",
            "text.norm.weight",
        ],
    )
    def test_heads_of_another_backbone_are_refused_with_both_fingerprints(self, folder: Path, part: str) -> None:
        backbone = janus(folder)
        heads, first = new_heads(HeadsConfig(right=1, down=1), backbone), backbone.fingerprint
        heads.check(backbone)
        with torch.no_grad():
            backbone.get_parameter(part).view(-1)[0].add_(1)
        del backbone.fingerprint
        assert backbone.fingerprint != first
        with pytest.raises(ValueError, match=rf"(?s){first[:16]}.*{backbone.fingerprint[:16]}"):
            heads.check(backbone)

    def test_weights_are_read_through_module_calls_alone(self, backbone) -> None:
        """ZeRO-3 and FSDP gather a weight while its module is called: emptied outside of calls, all goes on."""
        tokens = torch.randint(24, (1, 4, 4), generator=torch.Generator().manual_seed(0))
        h, e = backbone.states(tokens, ["blue"])
        logits = backbone.logits(h)
        kept = {id(p): p.data for p in backbone.parameters()}
        hooks = []
        for module in backbone.modules():
            own = list(module.parameters(recurse=False))
            if own:

                def gather(module: nn.Module, args: object, own: list = own) -> None:
                    for p in own:
                        p.data = kept[id(p)]

                def release(module: nn.Module, args: object, out: object, own: list = own) -> None:
                    for p in own:
                        p.data = torch.empty(0)

                hooks += [module.register_forward_pre_hook(gather), module.register_forward_hook(release)]
        try:
            for p in backbone.parameters():
                p.data = torch.empty(0)
            again, embedded = backbone.states(tokens, ["blue"])
            assert torch.equal(again, h) and torch.equal(embedded, e) and torch.equal(backbone.logits(again), logits)
        finally:
            for hook in hooks:
                hook.remove()
            for p in backbone.parameters():
                p.data = kept[id(p)]


class TestDecoding:
    @pytest.mark.parametrize("decoder,settings", CASES)
    def test_every_decoder_draws_a_sample_as_its_batch_of_one(self, folder: Path, decoder: str, settings: dict) -> None:
        """Prompts of three lengths, guidance with unconditional prompts as long; offset and chain heads."""
        backbone = janus(folder, (2, 5), dtype=torch.float64)
        call = arguments(backbone, decoder, settings) | {"guidance": 2.0}  # type: ignore[arg-type]
        together = decode(backbone, CAPTIONS, **call)
        assert together.tokens.shape == (3, 2, 5) and len(together.tokens.unique()) > 2
        for b, prompt in enumerate(CAPTIONS):
            alone = decode(backbone, [prompt], samples=[b], **call)
            assert torch.equal(alone.tokens[0], together.tokens[b])

    def test_exact_decoders_agree_with_ar_when_greedy(self, backbone) -> None:
        expected = decode(backbone, CAPTIONS, decoder="ar", temperature=0, guidance=GUIDANCE).tokens
        chain = random_chain_heads(backbone, spread=1.5)
        offsets = new_heads(HeadsConfig(right=2, down=1), backbone)
        for heads in (chain, offsets):
            found = decode(backbone, CAPTIONS, heads, decoder="ssd_coupled", temperature=0, guidance=GUIDANCE, window=5)
            assert torch.equal(found.tokens, expected)

    @pytest.mark.parametrize("config", [{}, {"rows": 2, "lefts": 2, "recent": 2, "target": "h_post"}])
    def test_a_chain_head_drafts_what_it_was_trained_to_predict(self, folder: Path, config: dict) -> None:
        """Position by position through the MLP head, against the whole picture's prediction; true left tokens."""
        from draftgrid.eval.decoders.drafters import ChainDrafter
        from draftgrid.eval.decoders.engine import Canvas
        from draftgrid.eval.decoders.randomness import SeededSource

        backbone = janus(folder, (3, 4), dtype=torch.float64)
        heads = random_chain_heads(backbone, **config)
        assert isinstance(heads, ChainHeads)
        tokens = torch.randint(24, (1, 12), generator=torch.Generator().manual_seed(0))
        h, e = backbone.states(tokens.view(1, 3, 4), ["blue"])
        h, e, sampling = heads.states(backbone, h.flatten(1, 2)), e.flatten(1, 2), Sampling()
        for first in (4, 8):  # a row whose row above is known as a whole
            canvas = Canvas(backbone, heads, sampling, SeededSource(0), [0])
            canvas.tokens, canvas.hidden, canvas.committed = tokens.clone(), h[None], [first]
            drafter = ChainDrafter(canvas, heads)
            drafter.open(canvas, [first], 4)
            distance = torch.zeros(1, 11, dtype=torch.long)  # a row starts here: its newest cell is in the row before
            predicted = heads.predict(h, e, "chain", None, distance)[0]
            for s in range(4):
                left = tokens[:, first + s - 2 : first + s]
                expected = sampling.probabilities(heads.logits(backbone, predicted[None, first + s - 1]))
                torch.testing.assert_close(drafter.q(slice(s, s + 1), left)[0, 0], expected, rtol=1e-6, atol=1e-9)


class BentTable(TableBackbone):
    """A table whose head is an MLP: logits are no linear map of the state."""

    linear_head = False

    def __init__(self, grid: tuple[int, int], codes: int) -> None:
        super().__init__(grid, codes, normed=True)
        generator = torch.Generator().manual_seed(7)
        self.bend = torch.randn(codes, 2 * codes, generator=generator, dtype=torch.float64)

    def project(self, h: Tensor) -> Tensor:
        return 2 * torch.nn.functional.gelu(h @ self.bend) @ self.bend.flip(0).T


class TestNonlinearHead:
    @pytest.mark.parametrize("refresh,decay,uniform", [(1.0, 0.3, 1.0), (0.5, 0.3, 0.01)])
    def test_any_refresh_is_lossless(self, refresh: float, decay: float, uniform: float) -> None:
        settings = {"window": 3, "refresh": refresh, "decay": decay, "uniform": uniform}
        assert self.distance(BentTable((2, 2), 3), Sampling(), **settings) < 1e-10

    @pytest.mark.parametrize("grid,window", [((2, 3), 4), ((3, 2), 3)])
    def test_windows_of_every_shape_are_lossless(self, grid: tuple[int, int], window: int) -> None:
        assert self.distance(BentTable(grid, 2), Sampling(), window=window) < 1e-10

    def test_filters_that_differ_between_contexts_keep_it_lossless(self) -> None:
        assert self.distance(BentTable((2, 2), 3), Sampling(top_k=2), window=3) < 1e-10

    def test_a_head_that_is_said_to_be_linear_and_is_not_is_refused(self) -> None:
        backbone = BentTable((2, 2), 3)
        heads = random_chain_heads(backbone, rank=3)
        backbone.linear_head = True
        with pytest.raises(ValueError, match=r"chain heads need .* or with linear_head = False; table has neither"):
            chain_tables(heads, backbone)  # type: ignore[arg-type]

    @staticmethod
    def distance(backbone: BentTable, sampling: Sampling, **settings) -> float:
        heads: MTPHeads = random_chain_heads(backbone)
        paths = enumerate_law(
            backbone, lambda: make_policy("ssd_coupled", coupling="maximal", **settings), sampling, heads
        )
        return total_variation(paths, backbone.law(sampling))
