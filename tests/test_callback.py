"""Pictures during training: what is logged is what decoding gives, and training does not notice."""

import copy
import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from torch import Tensor

from draftgrid.common.cli import compose
from draftgrid.data.config import StreamConfig
from draftgrid.data.module import TokenDataModule
from draftgrid.eval.callback import Preview, captions, private_copy, sharded
from draftgrid.eval.config import DecodingConfig, EvaluateConfig
from draftgrid.eval.decoders import Sampling, decode
from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.config import HeadsConfig, OptimConfig
from draftgrid.heads.mtp import MTPHeads, new_heads
from draftgrid.heads.tokenizers import load_tokenizer
from draftgrid.recipes.launch.schema import DEFAULT, RECIPES, TrainConfig
from draftgrid.training.module import HeadsModule
from tests.conftest import World
from tests.data_fixtures import read_shard
from tests.tiny import tiny_emu3

PROMPTS = ["blue", "a red apple"]
DECODING = DecodingConfig(guidance=2.0, top_k=7)


class Witness(Callback):
    """The heads behind every step, what the random state gives there, and which modules are in train mode."""

    def __init__(self) -> None:
        self.heads: dict[int, MTPHeads] = {}
        self.numbers: list[Tensor] = []
        self.modes: list[list[bool]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        assert isinstance(module, HeadsModule)
        self.heads[trainer.global_step] = copy.deepcopy(module.heads).requires_grad_(False).eval()
        self.numbers.append(torch.cat([torch.rand(2), torch.from_numpy(np.random.rand(2)).float()]))
        self.modes.append([m.training for m in module.modules()])


def train(
    world: World, out: Path, preview: Preview | None, kind: str = "offsets", steps: int = 4, **trainer: Any
) -> tuple[HeadsModule, Witness]:
    """A run of a few steps in the tiny world, the witness standing behind the preview."""
    L.seed_everything(0, verbose=False)
    backbone = load_backbone(world.backbone)
    heads = new_heads(HeadsConfig(kind=kind, **({"right": 2, "down": 1} if kind == "offsets" else {})), backbone)
    module = HeadsModule(backbone, heads, OptimConfig(lr=1e-2, warmup=1))
    tokenizer = load_tokenizer(world.backbone)
    data = TokenDataModule(StreamConfig(str(world.data), batch_size=4, workers=0), tokenizer.fingerprint, (4, 4))
    witness = Witness()
    fit = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=[CSVLogger(out, name="csv"), TensorBoardLogger(out, name="tensorboard")],
        callbacks=[*([preview] if preview else []), witness],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        **trainer,
    )
    fit.fit(module, data)
    return module, witness


def preview(world: World, **settings: Any) -> Preview:
    config = EvaluateConfig(eval_every=2, images=2, prompts=str(world.prompts), batch_size=1)
    for name, value in settings.items():
        setattr(config, name, value)
    return Preview(config, DECODING, load_tokenizer(world.backbone), seed=5)


def logged(out: Path) -> dict[int, dict[str, float]]:
    """{step: figures} of the CSV log."""
    (file,) = out.rglob("metrics.csv")
    found: dict[int, dict[str, float]] = {}
    for row in csv.DictReader(file.read_text().splitlines()):
        figures = {k: float(v) for k, v in row.items() if v and k not in ("step", "epoch")}
        found.setdefault(int(row["step"]), {}).update(figures)
    return found


@pytest.mark.parametrize(
    "kind, decoders", [("offsets", ["ar", "ssd", "ssd_coupled"]), ("chain", ["ar", "ssd_coupled"])]
)
def test_logged_figures_are_those_of_decode_with_the_heads_of_that_step(
    world: World, tmp_path: Path, kind: str, decoders: list[str]
) -> None:
    module, witness = train(world, tmp_path, preview(world), kind)
    log = logged(tmp_path)
    for step in (2, 4):
        names = {k.partition("/")[2] for k in log[step] if k.startswith("steps/")}
        assert names == set(decoders)
        for name in decoders:
            settings = {"guidance": 2.0, "top_k": 7, "seed": 5}
            stats = decode(module.backbone, PROMPTS, witness.heads[step], decoder=name, **settings).stats
            assert log[step][f"steps/{name}"] == pytest.approx(sum(stats.steps) / 2)
            assert log[step][f"seconds/{name}"] > 0
            if name != "ar":
                kept, tested = (sum(pair[i] for pair in stats.drafted.values()) for i in (0, 1))
                assert log[step][f"accepted/{name}"] == pytest.approx(kept / tested)
            if name == "ssd":
                assert log[step]["changed/ssd"] == pytest.approx(stats.change_rate)
    assert log[2]["steps/ar"] == 16 and log[2]["steps/ssd_coupled"] < 16
    assert log[2]["seconds/ar"] == log[4]["seconds/ar"]  # AR's pictures are drawn once and kept


def test_acceptance_is_measured_along_ars_pictures_with_the_recipes_guidance_and_top_k(
    world: World, tmp_path: Path
) -> None:
    module, witness = train(world, tmp_path, preview(world))
    backbone, heads, sampling = module.backbone, witness.heads[4], Sampling(guidance=2.0, top_k=7)
    tokens = decode(backbone, PROMPTS, decoder="ar", guidance=2.0, top_k=7, seed=5).tokens
    with torch.no_grad():
        c, e = backbone.states(tokens, PROMPTS)
        u, _ = backbone.states(tokens, [None, None])
        found = []
        for b in range(2):
            for y in range(4):
                for x in range(3):  # the head right1, cell by cell
                    p = sampling.probabilities(backbone.logits(torch.stack([c[b, y, x + 1], u[b, y, x + 1]])))
                    drafts = [heads(s[b, y, x], e[b, y, x], (0, 1)) for s in (c, u)]
                    q = sampling.probabilities(backbone.logits(torch.stack(drafts)))
                    assert int((p > 0).sum()) == 7
                    found.append(float(torch.minimum(p, q).sum()))
    assert logged(tmp_path)[4]["acceptance_drawn/right1"] == pytest.approx(sum(found) / len(found), abs=1e-5)


@pytest.mark.parametrize("kind", ["offsets", "chain"])
def test_training_ends_bit_for_bit_as_it_does_without(world: World, tmp_path: Path, kind: str) -> None:
    plain, alone = train(world, tmp_path / "without", None, kind)
    module, watched = train(world, tmp_path / "with", preview(world, eval_every=1), kind)
    assert all(torch.equal(a, b) for a, b in zip(plain.heads.parameters(), module.heads.parameters(), strict=True))
    assert torch.equal(torch.stack(alone.numbers), torch.stack(watched.numbers))
    assert alone.modes == watched.modes
    assert all(p.requires_grad for p in module.heads.parameters())
    assert not any(m.training for m in module.backbone.modules())
    first, last = (torch.cat([p.flatten() for p in watched.heads[s].parameters()]) for s in (1, 4))
    assert not torch.equal(first, last)  # it did train meanwhile


def test_the_sheet_is_in_the_event_file_with_the_pictures_that_decode_gives(world: World, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    module, witness = train(world, tmp_path, preview(world))
    (file,) = tmp_path.rglob("events.out*")
    events = EventAccumulator(str(file), {"images": 0})
    events.Reload()
    images = events.Images("pictures")
    assert [image.step for image in images] == [2, 4]
    sheet = np.asarray(Image.open(io.BytesIO(images[1].encoded_image_string)).convert("RGB"))
    tokenizer = load_tokenizer(world.backbone)
    for row, name in enumerate(["ar", "ssd", "ssd_coupled"]):
        settings = {"guidance": 2.0, "top_k": 7, "seed": 5}
        tokens = decode(module.backbone, PROMPTS, witness.heads[4], decoder=name, **settings).tokens
        for column, picture in enumerate(tokenizer.pil(tokens, scale=8)):
            low, left = 18 + 6 + row * 134, sheet.shape[1] - (2 - column) * 134
            assert np.array_equal(sheet[low : low + 128, left : left + 128], np.asarray(picture)), (name, column)
    assert {"steps/ssd", "acceptance_drawn/right1"} <= set(events.Tags()["scalars"])


def test_steps_are_optimizer_steps_and_each_is_done_once(world: World, tmp_path: Path) -> None:
    train(world, tmp_path, preview(world, decoders="ssd"), accumulate_grad_batches=3)
    assert [step for step, figures in logged(tmp_path).items() if "steps/ssd" in figures] == [2, 4]


def test_prompts_are_captions_of_the_validation_set_where_none_are_named(world: World, tmp_path: Path) -> None:
    drawn = preview(world, prompts="", decoders="ssd", images=3)
    train(world, tmp_path, drawn, steps=2)
    files = sorted((world.data / "validation").glob("*.tar"))
    texts = [s.caption for file in files for s in read_shard(file)]
    assert drawn.prompts == [texts[i] for i in (0, 20, 40)]
    data = TokenDataModule(StreamConfig(str(world.data)), load_tokenizer(world.backbone).fingerprint, (4, 4))
    assert captions(data.validation_set, 60) == texts


def test_two_settings_of_one_decoder_are_told_apart(world: World, tmp_path: Path) -> None:
    train(world, tmp_path, preview(world, decoders="ssd:rounds=0,ssd:rounds=2"), steps=2)
    found = logged(tmp_path)[2]
    assert found["steps/ssd:rounds=2"] > found["steps/ssd:rounds=0"] and "changed/ssd:rounds=0" not in found


def test_a_copy_is_in_the_backbones_dtype_and_shares_no_memory() -> None:
    backbone = tiny_emu3().to(torch.bfloat16)
    heads = new_heads(HeadsConfig(right=2, down=1), backbone)
    weights = {f"heads.{k}": v for k, v in heads.state_dict().items()} | {"backbone.x": torch.zeros(1)}
    mine = private_copy(heads, weights, backbone)
    for (name, a), (_, b) in zip(heads.named_parameters(), mine.named_parameters(), strict=True):
        assert b.dtype == torch.bfloat16 and torch.equal(a.to(torch.bfloat16), b), name
        assert a.data_ptr() != b.data_ptr() and not b.requires_grad
    with pytest.raises(RuntimeError, match=r"down1\.project\.weight"):
        private_copy(heads, {k: v for k, v in weights.items() if k != "heads.down1.project.weight"}, backbone)


def test_a_copy_in_the_same_dtype_shares_no_memory_either() -> None:
    backbone = tiny_emu3()
    heads = new_heads(HeadsConfig(right=1, down=1), backbone)
    mine = private_copy(heads, {f"heads.{k}": v for k, v in heads.state_dict().items()}, backbone)
    assert not {p.data_ptr() for p in heads.parameters()} & {p.data_ptr() for p in mine.parameters()}


def _partitioned(module: torch.nn.Module) -> None:
    """As ZeRO-3 leaves a parameter: empty, with an id."""
    parameter = next(module.parameters())
    parameter.data, parameter.ds_id = torch.zeros(0), 0  # type: ignore[attr-defined]


def test_with_a_sharded_backbone_nothing_is_drawn_and_that_is_said_at_the_start(world: World, tmp_path: Path) -> None:
    class Sharded(Preview):
        """Parts only while it is looked at: the run itself needs the weights."""

        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            parameter = module.backbone.model.lm_head.weight
            parameter.ds_id = 0
            super().on_train_start(trainer, module)
            del parameter.ds_id

    config = EvaluateConfig(eval_every=1, images=1, prompts=str(world.prompts))
    drawn = Sharded(config, DECODING, load_tokenizer(world.backbone))
    with pytest.warns(UserWarning, match="shards the backbone.*no pictures are drawn during training"):
        train(world, tmp_path, drawn, steps=2)
    assert not any("steps" in name for figures in logged(tmp_path).values() for name in figures)
    backbone = tiny_emu3()
    assert not sharded(backbone)
    _partitioned(backbone)
    assert sharded(backbone)


class TestRecipe:
    def settings(self, *arguments: str) -> Callable[[], None]:
        return compose(TrainConfig, list(arguments), RECIPES, DEFAULT).check

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["evaluate.eval_every=-1"], "evaluate.eval_every is -1"),
            (["evaluate.images=0"], "evaluate.images is 0"),
            (["evaluate.batch_size=0"], "evaluate.batch_size is 0"),
            (["evaluate.eval_every=5", "evaluate.decoders=ar,sds"], r"evaluate\.decoders: unknown decoder 'sds'"),
            (["evaluate.eval_every=5", "evaluate.decoders=ssd,ssd"], "each once is enough"),
            (
                ["recipe=emoji_ssd", "evaluate.eval_every=5", "evaluate.decoders=ar"],
                "none of them drafts with offsets heads",
            ),
            (["recipe=emoji_chain", "evaluate.eval_every=5", "evaluate.decoders=ar,ssd"], "drafts with chain heads"),
            (["recipe=emoji_backbone", "evaluate.eval_every=5"], "task=backbone trains no heads"),
            (["decoding.top_k=-2"], "decoding.top_k is -2"),
        ],
    )
    def test_what_is_wrong_is_named(self, arguments: list[str], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            self.settings(*arguments)()

    def test_one_place_says_how_the_heads_are_used(self) -> None:
        config = compose(TrainConfig, ["decoding.guidance=2.5"], RECIPES, DEFAULT)
        config.check()
        assert config.guidance == [1.0, 2.5]
        assert compose(TrainConfig, ["decoding.guidance=1"], RECIPES, DEFAULT).guidance == [1.0]
