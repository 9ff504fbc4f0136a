"""Lumina-mGPT through the backbone contract, on tiny checkpoints in the published layout, against transformers' class,
sequences written out by hand and plain loops."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftgrid.eval.decoders import decode
from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.backbones.lumina_mgpt import LuminaBackbone, image_codes
from draftgrid.heads.check import check
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.mtp import MTPHeads, new_heads
from draftgrid.heads.tokenizers import load_tokenizer
from tests.published import save
from tests.published_lumina import code_name, vocabulary, write_lumina, write_lumina_config, write_vqgan
from tests.test_every_decoder import CASES, EXACT, arguments
from tests.tiny import CAPTIONS

GRIDS = [(4, 6), (2, 10), (10, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lumina(tmp_path_factory.mktemp("lumina"))


def fresh(folder: Path, grid: tuple[int, int] = (4, 6), dtype: torch.dtype = torch.float64) -> LuminaBackbone:
    backbone = load_backbone(folder, grid=grid, dtype=dtype)  # its config.json says that it is a Chameleon
    assert isinstance(backbone, LuminaBackbone)
    return backbone


load = cache(fresh)
"""For tests that change neither the backbone nor its folder."""


def header(prompt: str | None, grid: tuple[int, int]) -> list[int]:
    """Ids before the first code, from the public template and the published names alone."""
    words = vocabulary(24)
    image = ["<racm3:break>", f"<reserved{8800 + grid[0] // 2:05d}>", f"<reserved{8800 + grid[1] // 2:05d}>"]
    if prompt is None:
        return [words[n] for n in image]
    text = f"Generate an image of {16 * grid[1]}x{16 * grid[0]} according to the following prompt:\n{prompt}"
    return [words[n] for n in ["<s>", *(c if c in words else "<unk>" for c in text), "<reserved08706>", *image]]


def sequence(prompt: str | None, tokens: Tensor) -> Tensor:
    """(1, N) ids of a whole picture (H, W)."""
    words, ids = vocabulary(24), header(prompt, tuple(tokens.shape))
    for row in tokens.tolist():
        ids += [words[code_name(c)] for c in row] + [words["<reserved08799>"]]
    return torch.tensor([ids])


def own_logits(backbone: LuminaBackbone, prompt: str | None, tokens: Tensor) -> Tensor:
    """(H, W, V): the model's LM head on its own text model's output, read at the place before each token."""
    with torch.no_grad():
        ids = sequence(prompt, tokens)
        logits = backbone.model.lm_head(backbone.model.model(input_ids=ids).last_hidden_state)[0]
    words, start, (H, W) = vocabulary(24), len(header(prompt, tuple(tokens.shape))), tokens.shape
    codes = [words[code_name(c)] for c in range(24)]
    return torch.stack([logits[start + y * (W + 1) - 1 :][:W, codes] for y in range(H)])


class TestContract:
    @pytest.mark.parametrize("grid", GRIDS)
    def test_states_give_the_models_own_logits_and_embeddings(self, folder: Path, grid: tuple[int, int]) -> None:
        backbone = load(folder, grid)
        tokens = torch.randint(24, (1, *grid), generator=torch.Generator().manual_seed(0))
        for prompt in ("a red apple", None):
            h, e = backbone.states(tokens, [prompt])
            torch.testing.assert_close(backbone.logits(h)[0], own_logits(backbone, prompt, tokens[0]))
        words = vocabulary(24)
        table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].double()
        assert torch.equal(e[0], table[torch.tensor([words[code_name(c)] for c in range(24)])[tokens[0]]])

    def test_the_class_masks_image_logits_and_nothing_else(self, folder: Path) -> None:
        """Where it does not, on text, its logits are the LM head's on the states that `logits` reads."""
        backbone = load(folder)
        tokens = torch.randint(24, (1, 4, 6), generator=torch.Generator().manual_seed(1))
        ids, words = sequence("blue", tokens[0]), vocabulary(24)
        with torch.no_grad():
            theirs = backbone.model(input_ids=ids).logits[0]
        image = torch.tensor([words[code_name(c)] for c in range(24)])
        assert (theirs[:, image] == torch.finfo(theirs.dtype).min).all()
        text = torch.tensor(sorted(set(words.values()) - set(image.tolist())))
        h, _ = backbone.states(tokens, ["blue"])
        start = len(header("blue", (4, 6)))
        for y in range(4):
            ours = backbone.model.lm_head(backbone.norm(h[0, y]))[:, text]
            torch.testing.assert_close(ours, theirs[start + 7 * y - 1 :][:6, text])

    @pytest.mark.parametrize("grid", GRIDS)
    def test_every_line_of_heads_check_holds(self, folder: Path, grid: tuple[int, int]) -> None:
        lines = check(load(folder, grid), tell=lambda _: None)
        assert [line.name for line in lines if line.ok is not True] == ["tokenizer"]

    def test_heads_check_takes_a_tokenizer_with_and_without_pixels(self, folder: Path, tmp_path: Path) -> None:
        backbone, whole = load(folder), load_tokenizer(write_vqgan(tmp_path))
        (line,) = (x for x in check(backbone, whole, tell=lambda _: None, rows=1) if x.name == "tokenizer")
        assert line.ok and "ChameleonVQ: 24 codes, pictures of 8x12" in line.figure
        whole.model.decoder = None
        (line,) = (x for x in check(backbone, whole, tell=lambda _: None, rows=1) if x.name == "tokenizer")
        assert line.ok is None and "24 codes, no pixel decoder" in line.figure

    def test_a_batch_of_unequal_prompts_is_each_alone_twice(self, folder: Path) -> None:
        """Training and decoding, in fp64: nothing of the padding, the batch or the call before shows."""
        backbone = load(folder)
        prompts = ["blue", "a big dog, looking left", None, "x"]
        tokens = torch.randint(24, (4, 4, 6), generator=torch.Generator().manual_seed(2))
        for _ in range(2):
            h, _ = backbone.states(tokens, prompts)
            for b, prompt in enumerate(prompts):
                torch.testing.assert_close(h[b : b + 1], backbone.states(tokens[b : b + 1], [prompt])[0])
        state, first = backbone.start(prompts[:2], guidance=2.0)
        both = torch.cat([first, backbone.forward(state, tokens[:2].flatten(1)[:, :8], [0, 0])], dim=2)
        for b, prompt in enumerate(prompts[:2]):
            for branch, alone in enumerate((prompt, None)):
                true = backbone.states(tokens[b : b + 1], [alone])[0].flatten(1, 2)
                torch.testing.assert_close(both[branch, b], true[0, :9])
        assert not torch.allclose(both[0], both[1], rtol=0.1)

    @pytest.mark.parametrize("keep", [0, 5, 6, 7, 12, 13])
    def test_a_rollback_around_a_row_end_leaves_nothing_behind(self, folder: Path, keep: int) -> None:
        backbone = load(folder)
        tokens = torch.randint(24, (2, 24), generator=torch.Generator().manual_seed(3))
        true = backbone.states(tokens[:1].view(1, 4, 6), ["blue"])[0].flatten(1, 2)
        state, _ = backbone.start(["blue"])
        backbone.forward(state, torch.cat([tokens[:1, :keep], tokens[1:, keep:20]], dim=1), [0])
        backbone.rollback(state, [keep])
        h = backbone.forward(state, tokens[:1, keep : keep + 3], [keep])
        torch.testing.assert_close(h[0], true[:, keep + 1 : keep + 4])


class TestPrompt:
    @pytest.mark.parametrize("grid", GRIDS)
    def test_it_is_the_public_template_with_sizes_in_the_right_order(self, folder: Path, grid: tuple[int, int]) -> None:
        backbone = load(folder, grid)
        words = {i: n for n, i in vocabulary(24).items()}
        told, untold = ([words[i] for i in ids.tolist()] for ids in backbone.prompt_ids(["a cat", None]))
        assert "".join(told[1:-4]) == (
            f"Generate an image of {16 * grid[1]}x{16 * grid[0]} according to the following prompt:\na cat"
        )
        rows, columns = f"<reserved{8800 + grid[0] // 2:05d}>", f"<reserved{8800 + grid[1] // 2:05d}>"
        assert told[0] == "<s>" and told[-4:] == ["<reserved08706>", "<racm3:break>", rows, columns]
        assert untold == ["<racm3:break>", rows, columns]

    def test_begin_of_sequence_is_the_vocabularys_and_not_the_configs(self, folder: Path) -> None:
        """config.json says 1, which is <pad>."""
        backbone = load(folder)
        assert backbone.model.config.bos_token_id == 1
        assert backbone.prompt_ids(["x"])[0][0] == vocabulary(24)["<s>"] == 0

    def test_text_is_cut_as_tokenizer_json_says_whatever_class_the_config_names(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        text = "to  the\nright"
        ours = load(folder).processor.encode(text, add_special_tokens=False)
        assert ours == [vocabulary(24)[c] for c in text]
        named = AutoTokenizer.from_pretrained(folder)  # rebuilt with the rules of LlamaTokenizer
        assert named.encode(text, add_special_tokens=False) != ours

    def test_a_processor_that_holds_the_tokenizer_serves_too(self, folder: Path) -> None:
        from transformers import ChameleonImageProcessorPil, ChameleonProcessor

        first = load(folder)
        processor = ChameleonProcessor(ChameleonImageProcessorPil(), first.processor)
        held = LuminaBackbone.from_model(first.model, processor, grid=(4, 6))
        assert torch.equal(held.prompt_ids(["a cat"])[0], first.prompt_ids(["a cat"])[0])
        assert held.fingerprint == first.fingerprint and not any(p.requires_grad for p in held.parameters())

    def test_a_tokenizer_of_another_model_is_refused(self, folder: Path) -> None:
        first = load(folder)
        wrong = fresh(folder).processor
        wrong.encode = lambda text, **_: [5, 6]
        held = LuminaBackbone.from_model(first.model, wrong, grid=(4, 6), name="mine")
        with pytest.raises(ValueError, match="mine: its tokenizer reads <reserved08706> as 6, not 30"):
            held.prompt_ids(["x"])

    def test_image_codes_are_read_digit_by_digit(self) -> None:
        words = {"IMGIMGAZ": 4, "IMGIMGBADZ": 9, "IMGIMGIBJBZ": 7, "<image>": 2, "IMGIMGZ": 1, "A": 3}
        assert image_codes(words) == {0: 4, 103: 9, 8191: 7}

    def test_a_vocabulary_in_another_order_draws_the_same_codes(self, folder: Path, tmp_path: Path) -> None:
        """Image rows are then no slice: two codes change their places in table and LM head, and nothing else."""
        write_lumina(tmp_path)
        words, state = vocabulary(24), load_file(tmp_path / "model.safetensors")
        a, b = words[code_name(3)], words[code_name(17)]
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            state[name][[a, b]] = state[name][[b, a]]
        save(tmp_path, state, 1)
        config = json.loads((tmp_path / "config.json").read_text())
        config["vocabulary_map"] |= {code_name(3): b, code_name(17): a}
        (tmp_path / "config.json").write_text(json.dumps(config))
        swapped, straight = load(tmp_path), load(folder)
        assert swapped._rows is None and straight._rows is not None
        tokens = torch.arange(24).view(1, 4, 6)
        for ours, theirs in zip(swapped.states(tokens, ["x"]), straight.states(tokens, ["x"]), strict=True):
            torch.testing.assert_close(ours, theirs)
        h = straight.states(tokens, ["x"])[0]
        torch.testing.assert_close(swapped.logits(h), straight.logits(h))
        assert swapped.fingerprint == straight.fingerprint


class TestDrawing:
    @pytest.mark.parametrize("guidance", [1.0, 4.0])
    @pytest.mark.parametrize("grid", [(4, 6), (6, 2)])
    def test_greedy_ar_is_a_loop_that_reads_all_anew_for_every_token(
        self, folder: Path, grid: tuple[int, int], guidance: float
    ) -> None:
        """Two passes of the model a token, mixed as inference_solver.py does: scale * (c - u) + u."""
        backbone, words = load(folder, grid), vocabulary(24)
        codes = [words[code_name(c)] for c in range(24)]
        for prompt in CAPTIONS[:2]:
            drawn: list[int] = []
            fed: list[int] = []
            while len(drawn) < grid[0] * grid[1]:
                branches = []
                for ids in (header(prompt, grid) + fed, header(None, grid) + fed):
                    with torch.no_grad():
                        last = backbone.model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
                        branches.append(backbone.model.lm_head(last)[codes])
                drawn.append(int((guidance * (branches[0] - branches[1]) + branches[1]).argmax()))
                fed.append(codes[drawn[-1]])
                if len(drawn) % grid[1] == 0:
                    fed.append(words["<reserved08799>"])
            found = decode(backbone, [prompt], decoder="ar", guidance=guidance, temperature=0)
            assert found.tokens.shape == (1, *grid) and found.tokens.flatten().tolist() == drawn
            assert found.stats.nfe == grid[0] * grid[1] and len(set(drawn)) > 3

    @pytest.mark.parametrize("decoder,settings", CASES)
    def test_with_every_decoder_a_sample_is_its_batch_of_one(self, folder: Path, decoder: str, settings: dict) -> None:
        """Offset and chain heads, guidance, prompts of three lengths, on a grid that is wider than high."""
        backbone = load(folder, (2, 6))
        call = arguments(backbone, decoder, settings) | {"guidance": 2.0, "top_k": 12}
        together = decode(backbone, CAPTIONS, **call)
        assert together.tokens.shape == (3, 2, 6)
        for b, prompt in enumerate(CAPTIONS):
            alone = decode(backbone, [prompt], samples=[b], **call)
            assert torch.equal(alone.tokens[0], together.tokens[b])

    @pytest.mark.parametrize("decoder,settings", EXACT)
    def test_every_exact_decoder_draws_greedy_ars_picture(self, folder: Path, decoder: str, settings: dict) -> None:
        backbone = load(folder)
        greedy = {"guidance": 4.0, "temperature": 0.0}
        expected = decode(backbone, CAPTIONS, decoder="ar", **greedy).tokens
        found = decode(backbone, CAPTIONS, **arguments(backbone, decoder, settings), **greedy)
        assert torch.equal(found.tokens, expected)


class TestLoading:
    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_norms_are_given_to_every_head_of_their_rank(self, tmp_path: Path, ranks: int) -> None:
        """(1, 8) for all four heads; (2, 8) for two heads each; (4, 8) as transformers has them."""
        backbone = load(write_lumina(tmp_path, ranks=ranks), dtype=torch.float32)
        stored = load_file(tmp_path / "model.safetensors")
        for layer in range(2):
            for part in ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"):
                name = f"model.layers.{layer}.self_attn.{part}"
                held, own = backbone.model.get_parameter(name), stored[name]
                assert own.shape == (ranks, 8) and held.shape == (4, 8)
                for head in range(4):
                    assert torch.equal(held[head], own[head * ranks // 4])

    def test_every_other_weight_is_the_files_own(self, folder: Path) -> None:
        held = dict(load(folder, dtype=torch.float32).model.named_parameters())
        stored = load_file(folder / "model.safetensors")
        assert set(held) == set(stored)
        for name in (n for n in stored if "_norm." not in n or "layernorm" in n):
            assert torch.equal(held[name], stored[name])

    def test_files_dtype_and_layout_do_not_matter(self, folder: Path, tmp_path: Path) -> None:
        one = load(folder, dtype=torch.float32)
        many = load(write_lumina(tmp_path / "many", shards=3), dtype=torch.float32)
        half = load(write_lumina(tmp_path / "half", dtype=torch.bfloat16), dtype=torch.bfloat16)
        assert len(list((tmp_path / "many").glob("*.safetensors"))) == 3
        tokens = torch.randint(24, (1, 4, 6), generator=torch.Generator().manual_seed(4))
        assert torch.equal(many.states(tokens, ["x"])[0], one.states(tokens, ["x"])[0])
        assert one.fingerprint == many.fingerprint == half.fingerprint and half.dtype == torch.bfloat16

    def test_saved_and_loaded_again_it_needs_no_settings(self, folder: Path, tmp_path: Path) -> None:
        first = load(folder, (2, 10), torch.float32)
        first.save_pretrained(tmp_path)
        second = load_backbone(tmp_path)
        assert isinstance(second, LuminaBackbone) and second.grid == first.grid
        tokens = torch.randint(24, (1, 2, 10), generator=torch.Generator().manual_seed(4))
        assert torch.equal(second.states(tokens, ["a b"])[0], first.states(tokens, ["a b"])[0])

    def test_a_picture_encoder_in_the_checkpoint_is_left_where_it_is(self, tmp_path: Path) -> None:
        write_lumina(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        count = sum(p.numel() for p in fresh(tmp_path).parameters())
        save(tmp_path, {**state, "model.vqmodel.encoder.conv_in.bias": torch.zeros(128)}, 2)
        assert sum(p.numel() for p in fresh(tmp_path).parameters()) == count

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model.layers.1.mlp.up_proj.weight": None}, r"lack \['model\.layers\.1\.mlp\.up_proj\.weight'\]"),
            ({"model.layers.0.self_attn.q_norm.bias": None}, r"lack \['model\.layers\.0\.self_attn\.q_norm\.bias'\]"),
            (
                {"model.layers.0.typo.weight": torch.zeros(2)},
                r"unknown or misshapen \['model\.layers\.0\.typo\.weight'",
            ),
            ({"lm_head.weight": torch.zeros(3, 32)}, r"unknown or misshapen \['lm_head\.weight'\]"),
            (
                {"model.layers.1.self_attn.k_norm.weight": torch.ones(3, 8)},
                r"misshapen \['model\.layers\.1\.self_attn\.k_norm\.weight'\]",
            ),
            (
                {"model.layers.1.self_attn.k_norm.weight": torch.ones(1, 9)},
                r"misshapen \['model\.layers\.1\.self_attn\.k_norm\.weight'\]",
            ),
        ],
    )
    def test_a_key_that_does_not_fit_is_named(self, tmp_path: Path, change: dict, message: str) -> None:
        write_lumina(tmp_path)
        state = load_file(tmp_path / "model.safetensors") | change
        save(tmp_path, {k: v for k, v in state.items() if v is not None}, 1)
        with pytest.raises(ValueError, match=message):
            fresh(tmp_path)

    def test_what_else_is_wrong_is_one_sentence(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="grid is 3x4; size tokens count pairs, so both numbers must be even"):
            fresh(folder, (3, 4))
        with pytest.raises(ValueError, match=r"vocabulary_map lacks \['<reserved08807>'\]"):
            fresh(folder, (2, 14))
        write_lumina(tmp_path)
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(ValueError, match=r"has no tokenizer\.json; those of Alpha-VLLM/Lumina-mGPT-7B-768"):
            fresh(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"damaged")
        with pytest.raises(ValueError, match=r"holds no checkpoint like Alpha-VLLM/Lumina-mGPT-7B-768: "):
            fresh(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "emu3"}')
        with pytest.raises(ValueError, match="model_type is 'emu3', not 'chameleon'"):
            load_backbone(tmp_path, adapter="lumina_mgpt")

    def test_heads_of_another_backbone_are_refused_with_both_fingerprints(self, folder: Path, tmp_path: Path) -> None:
        mine, other = load(folder), load(write_lumina(tmp_path / "other", seed=1))
        new_heads(HeadsConfig(right=2, down=1), mine).save_pretrained(tmp_path / "heads")
        assert MTPHeads.from_pretrained(tmp_path / "heads", mine).names == ["right1", "right2", "down1"]
        with pytest.raises(ValueError, match=f"{mine.fingerprint[:16]}.*{other.fingerprint[:16]}"):
            MTPHeads.from_pretrained(tmp_path / "heads", other)


RECIPES = ["lumina_ssd", "lumina_chain", "lumina_mtp1d"]


class TestPlan:
    def test_at_full_size_the_weights_are_as_many_as_published(self, tmp_path: Path) -> None:
        """7.01 B (huggingface.co, Lumina-mGPT-7B-768-Omni); 9.98 + 4.05 GB of bf16 (its list of files)."""
        from draftgrid.recipes.plan.subject import load_subject

        subject = load_subject(composed("recipe=lumina_ssd", f"backbone.checkpoint={write_lumina_config(tmp_path)}"))
        held = {n: p.numel() for n, p in subject.backbone.model.named_parameters()}
        norms = [n for n in held if re.search(r"\.[qk]_norm\.", n)]
        assert len(norms) == 32 * 4 and all(held[n] == 32 * 128 for n in norms)
        stored = sum(held.values()) - sum(held[n] for n in norms) * 31 // 32  # files keep one row for all 32 heads
        by_hand = 2 * 65_536 * 4096 + 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096 + 4 * 128)
        assert stored == by_hand and round(stored / 1e9, 2) == 7.01
        assert round(2 * stored / 1e9, 2) == pytest.approx(9.98 + 4.05, abs=0.011)
        assert subject.backbone.grid.height == subject.backbone.grid.width == 48

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_the_recipe_plans_the_tiny_checkpoint(self, folder: Path, recipe: str) -> None:
        from draftgrid.recipes.plan.plan import plan

        config = composed(f"recipe={recipe}", "plan=true", f"backbone.checkpoint={folder}", "backbone.grid=[4, 6]")
        text = plan(config)
        assert f"plan of recipe {recipe}" in text and "4 x 6" in text.replace("4x6", "4 x 6")

    def test_without_pixels_a_run_that_would_draw_ends_before_it_begins(self, folder: Path, tmp_path: Path) -> None:
        from draftgrid.recipes.launch.build import build
        from draftgrid.training.run_folder import RunFolder

        keys = [f"backbone.checkpoint={folder}", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.strategy=ddp"]
        with pytest.raises(
            ValueError, match=r"no weights of a picture tokenizer .* \(in a recipe backbone\.tokenizer\)"
        ):
            build(composed("recipe=lumina_ssd", *keys), RunFolder(tmp_path / "run"))
        tokenizer = load_tokenizer(write_vqgan(tmp_path / "release"))
        tokenizer.model.decoder = None
        tokenizer.save_pretrained(tmp_path / "encoder")
        with pytest.raises(ValueError, match=r"sheet\.images is 6 and evaluate\.eval_every 0, but .* no pixel"):
            build(
                composed("recipe=lumina_ssd", *keys, f"backbone.tokenizer={tmp_path / 'encoder'}"),
                RunFolder(tmp_path / "run"),
            )


def composed(*keys: str):
    from draftgrid.common.cli import compose
    from draftgrid.recipes.launch.schema import RECIPES as FOLDER
    from draftgrid.recipes.launch.schema import TrainConfig

    config = compose(TrainConfig, list(keys), FOLDER)
    config.check()
    return config
