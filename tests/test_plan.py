"""plan=true: counts against the real modules, bytes against a real step, arithmetic against shards laid out by hand."""

import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from draftgrid import train
from draftgrid.common.cli import compose, main
from draftgrid.data.stream import Batch
from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.config import HeadsConfig, OptimConfig
from draftgrid.heads.grid import TokenGrid
from draftgrid.heads.mtp import new_heads
from draftgrid.recipes.launch.schema import DEFAULT, RECIPES, AssumeConfig, TrainConfig
from draftgrid.recipes.plan.counting import count_step
from draftgrid.recipes.plan.memory import STRATEGIES, Counted, Tensors, held, layout
from draftgrid.recipes.plan.meter import Meter
from draftgrid.recipes.plan.plan import plan
from draftgrid.recipes.plan.speed import count_decoding, speeds, ssd_blocks, ssd_steps, tokens_per_forward
from draftgrid.recipes.plan.subject import count, load_subject, shapes
from draftgrid.training import ranks
from draftgrid.training.module import HeadsModule, adamw
from tests.measured import measured
from tests.published_emu3 import FULL
from tests.published_emu3 import write_config as write_emu3_config
from tests.published_janus import write_config
from tests.published_lumina import write_lumina_config
from tests.tiny import tiny_emu3

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "heads" / "assets" / "emoji"
NAMES = sorted(p.stem for p in RECIPES.glob("*.yaml"))
B, PROMPT = 4, 20


def composed(*arguments: str) -> TrainConfig:
    recipe = [] if any(a.startswith("recipe=") for a in arguments) else ["recipe=emoji_ssd"]
    config = compose(
        TrainConfig, [*recipe, f"data.batch_size={B}", f"assume.prompt_tokens={PROMPT}", *arguments], RECIPES, DEFAULT
    )
    config.check()
    return config


def real(config: TrainConfig, precision: str) -> tuple[HeadsModule, Batch]:
    """The module that trains, with the demo's weights in the dtypes ddp gives them, and a batch for it."""
    half = torch.bfloat16
    backbone = load_backbone("emoji", dtype=torch.float32 if precision == "32-true" else half)
    heads = new_heads(config.heads, backbone)
    if precision == "bf16-true":
        heads = heads.to(half)
    module = HeadsModule(backbone, heads, OptimConfig(), loss=config.loss)
    prompt = torch.full((PROMPT,), 20)
    backbone.prompt_ids = lambda prompts: [prompt] * len(prompts)
    tokens = torch.randint(512, (B, 16, 16), generator=torch.Generator().manual_seed(0))
    return module, Batch(tokens, ["x"] * B, ["k"] * B, ["o"] * B)


def allocator_peak(call) -> int:
    """Most bytes torch's allocator held at a time during `call`, above the level before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    del kept
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


class TestParameters:
    @pytest.mark.parametrize(
        "keys",
        [
            ["recipe=emoji_ssd"],
            ["recipe=emoji_chain"],
            ["heads.shared=true", "heads.project_rank=7", "heads.right=2"],
            ["recipe=emoji_chain", "heads.rows=2"],
        ],
    )
    def test_are_those_of_the_modules_that_are_trained(self, keys: list[str]) -> None:
        config = composed(*keys)
        subject, backbone = load_subject(config), load_backbone("emoji")
        assert all(p.is_meta for p in subject.backbone.parameters())
        assert count(subject.backbone) == count(backbone) == 5_234_432  # the README's figure
        assert subject.heads is not None
        mine = {k: tuple(v.shape) for k, v in subject.heads.named_parameters()}
        theirs = {k: tuple(v.shape) for k, v in new_heads(config.heads, backbone).named_parameters()}
        assert mine == theirs
        tensors = shapes(subject)
        assert sum(math.prod(s) for part in [*tensors.layers, tensors.rest] for s in part) == count(backbone)

    def test_picture_tokenizer_is_counted_apart(self) -> None:
        from transformers import Emu3VQVAE, Emu3VQVAEConfig

        from draftgrid.common.files import read_json

        alone = Emu3VQVAE(Emu3VQVAEConfig.from_dict(read_json(ASSETS / "config.json")["vq_config"]))
        assert load_subject(composed()).unread == count(alone) > 0


class TestMemoryOfARealStep:
    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
    def test_what_is_held_is_foretold_to_the_byte(self, precision: str) -> None:
        config = composed("heads.right=2")
        module, batch = real(config, precision)
        optimizer = adamw(module, OptimConfig(), 10)["optimizer"]
        step(module, batch, precision)[1].backward()
        optimizer.step()
        found = held(shapes(load_subject(config)), "ddp", precision, 1)
        assert measured(module, optimizer) == {name: getattr(found, name) for name in measured(module)}
        assert found.buffers == found.gathered == 0

    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
    @pytest.mark.parametrize(
        "keys", [["loss.tv=1", "loss.chunk=0"], ["recipe=emoji_chain", "loss.chunk=32"], ["loss.tv=0"]]
    )
    def test_activations_are_foretold_within_a_tenth(self, precision: str, keys: list[str]) -> None:
        config = composed(*keys)
        counted = count_step(load_subject(config), config, layout("ddp", precision))
        module, batch = real(config, precision)
        for p in module.heads.parameters():
            p.grad = torch.zeros_like(p)
        frozen = allocator_peak(lambda: frozen_forward(module, batch, precision))
        h, e = frozen_forward(module, batch, precision)
        assert counted.frozen_peak == pytest.approx(frozen, rel=0.1)
        assert counted.states == sum(x.untyped_storage().nbytes() for x in (h, e))

        def work() -> None:
            with cast(precision):
                loss = module.loss(h, e, batch.tokens)
            loss.backward()

        assert counted.saved + counted.loss == pytest.approx(allocator_peak(work), rel=0.1)
        assert counted.saved == pytest.approx(saved(module, h, e, batch, precision), rel=0.1)

    def test_a_chunked_loss_needs_less(self) -> None:
        def beyond(chunk: int) -> Counted:
            config = composed("loss.tv=1", f"loss.chunk={chunk}")
            return count_step(load_subject(config), config, layout("ddp", "32-true"))

        whole, part = beyond(0), beyond(64)
        assert part.loss < 0.5 * whole.loss and part.saved == pytest.approx(whole.saved, rel=0.01)


def cast(precision: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")


def frozen_forward(module: HeadsModule, batch: Batch, precision: str) -> tuple[Tensor, Tensor]:
    with cast(precision), torch.no_grad():
        return module.states(batch)


def step(module: HeadsModule, batch: Batch, precision: str) -> tuple[tuple[Tensor, Tensor], Tensor]:
    h, e = frozen_forward(module, batch, precision)
    with cast(precision):
        return (h, e), module.loss(h, e, batch.tokens)


class Kept:
    """A tensor autograd keeps; it goes when its graph goes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved(module: HeadsModule, h: Tensor, e: Tensor, batch: Batch, precision: str) -> int:
    """Bytes kept for the backward when the forward is over, each storage once, without weights and the states."""
    outside = {x.untyped_storage().data_ptr() for x in (h, e, batch.tokens, *module.parameters())}
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(x: Tensor) -> Kept:
        kept = Kept(x)
        alive.add(kept)
        return kept

    with cast(precision), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        loss = module.loss(h, e, batch.tokens)
    storages = {x.tensor.untyped_storage().data_ptr(): x.tensor.untyped_storage().nbytes() for x in alive}
    assert loss.requires_grad
    return sum(size for address, size in storages.items() if address not in outside)


class TestFlops:
    def test_of_the_frozen_forward_are_two_per_weight_and_token_and_attention(self) -> None:
        config = composed()
        subject = load_subject(config)
        counted = count_step(subject, config, layout("ddp", "bf16-mixed"))
        length, layers, D = PROMPT + 16 * 17 - 2, 6, 256
        weights = sum(p.numel() for block in subject.backbone.layers for p in block.parameters() if p.ndim == 2)
        attention = layers * 4 * length * length * D
        assert counted.frozen_flops == B * (2 * weights * length + attention)

    def test_of_the_heads_are_six_per_weight_and_position_less_the_gradient_no_one_needs(self) -> None:
        config = composed("loss.tv=1", "loss.chunk=100")
        counted = count_step(load_subject(config), config, layout("ddp", "bf16-mixed"))
        D, V = 256, 512
        targets = sum(len(TokenGrid(16, 16).pairs(o)[0]) for o in config.heads.offsets)
        # W0 reads states that have no gradient: forward and its own gradient only.
        assert counted.heads_flops == B * targets * (4 * 2 * D * D + 6 * 3 * D * D)
        # p at every position once, q at every prediction forward and back to the state.
        assert counted.loss_flops == B * 2 * D * V * (256 + 2 * targets)

    def test_agree_with_torch_on_real_tensors(self) -> None:
        config = composed("recipe=emoji_chain")
        counted = count_step(load_subject(config), config, layout("ddp", "32-true"))
        module, batch = real(config, "32-true")
        (h, e), _ = step(module, batch, "32-true")
        with FlopCounterMode(display=False) as counter:
            distance = torch.ones(len(e), 255, dtype=torch.long)  # as in training, the newest drawn cell is read
            module.heads.predict(h[0].flatten(1, 2), e.flatten(1, 2), "chain", None, distance).sum().backward()
        assert counted.heads_flops == counter.get_total_flops()


class TestMeter:
    def test_live_and_peak_by_hand(self) -> None:
        x = torch.ones(1000)  # 4,000 bytes, there before
        with Meter() as meter:
            y = x + 1
            view = y[:10]
            y.mul_(2)
            assert (meter.live, meter.peak) == (4000, 4000)
            z = torch.cat([y, y])
            assert meter.live == 12_000
            del z
            assert (meter.live, meter.peak) == (4000, 12_000)
            del y
            assert meter.live == 4000, "a view holds its storage"
            del view
        assert (meter.live, meter.peak) == (0, 12_000)

    def test_reads_count_a_weight_once_and_rows_as_rows(self) -> None:
        linear, table, unread = nn.Linear(8, 6, bias=False), nn.Embedding(100, 8), nn.Linear(5, 5)
        with Meter() as meter, torch.no_grad():
            for _ in range(3):
                nn.functional.linear(table(torch.tensor([4, 7])), linear.weight[2:5])
        assert meter.read(linear.parameters()) == 3 * 8
        assert meter.read(table.parameters()) == 2 * 8
        assert meter.read(unread.parameters()) == 0
        assert meter.flops == 3 * 2 * 2 * 8 * 3


LAYERS = [[(6, 4), (4,)], [(6, 4), (4,)]]
REST = [(11, 4)]
TRAINED = [[(5, 4), (4,)], [(3, 5)]]
"""Backbone: 2 x 28 + 44 = 100 weights. Heads: 24 + 15 = 39, of which 35 are matrices."""


class TestShards:
    """Three ranks. By hand, in elements."""

    tensors = Tensors(LAYERS, REST, TRAINED)

    def test_zero_1_and_2_lay_each_group_end_to_end(self) -> None:
        # 35 -> padded to 36, 12 a rank; 4 -> padded to 6, 2 a rank.
        one, two = (held(self.tensors, f"deepspeed_{stage}", "bf16-mixed", 3) for stage in (1, 2))
        assert one.moments == two.moments == 2 * 4 * 14 and one.master == two.master == 4 * 14
        assert one.gradients == 2 * 39 and two.gradients == 2 * 14
        assert one.backbone == two.backbone == 2 * 100 and one.heads == two.heads == 2 * 42

    def test_zero_3_splits_each_tensor_and_keeps_small_ones_whole_too(self) -> None:
        # ceil(n / 3): layers 8 + 2 each, rest 15; heads 7 + 2 + 5.
        found = held(self.tensors, "deepspeed_3", "32-true", 3)
        assert found.backbone == 4 * (35 + 100) and found.heads == 4 * (14 + 39)
        assert found.gradients == 4 * 14 and found.moments == 2 * 4 * 14 and found.master == 4 * 14
        assert found.gathered == 4 * 139

    def test_zero_3_of_large_tensors(self) -> None:
        found = held(Tensors([[(1000, 1000)]], [], [[(500, 1000)]]), "deepspeed_3", "bf16-true", 8)
        assert found.backbone == 2 * 125_000 and found.heads == 2 * 62_500 and found.moments == 2 * 4 * 62_500

    def test_fsdp_splits_rows_of_layers_and_heads_and_nothing_else(self) -> None:
        # Rank 0 has ceil(rows / 3): layers 2 x 4 + 2 each; heads 2 x 4 + 2 and 1 x 5.
        found = held(self.tensors, "fsdp", "32-true", 3)
        assert found.backbone == 4 * (2 * 10 + 44) and found.heads == found.gradients == 4 * 15
        assert found.moments == 2 * 4 * 15 and found.master == 0
        assert found.gathered == 4 * 28 and found.buffers == 4 * 24

    def test_ddp_splits_nothing(self) -> None:
        found = held(self.tensors, "ddp", "bf16-mixed", 3)
        assert (found.backbone, found.heads, found.gradients, found.moments) == (200, 156, 156, 312)
        assert found.master == found.gathered == 0 and found.buffers == 156

    def test_strategies_are_those_of_the_trainer(self) -> None:
        assert ("auto", *STRATEGIES) == ranks.STRATEGIES


@pytest.mark.slow
def test_two_ranks_hold_what_is_foretold() -> None:
    """DeepSpeed's and torch's own shards, sizes that do not divide, to the byte."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "tests/memory_worker.py"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("as foretold") == 5


class TestDecoding:
    @pytest.mark.parametrize(("right", "down"), [(2, 2), (2, 0), (1, 0), (3, 1), (0, 1)])
    @pytest.mark.parametrize("grid", [(5, 4), (4, 5), (3, 6)])
    def test_ssd_steps_are_the_decoders(self, right: int, down: int, grid: tuple[int, int]) -> None:
        from draftgrid import decode

        backbone = tiny_emu3(grid)
        heads = new_heads(HeadsConfig(right=right, down=down), backbone).requires_grad_(False)
        for rounds, rows, flight in itertools.product((0, 1, 2, 3), (1, 2), (1, 2, 3, 4)):
            if (flight > 1 and (rows > 1 or flight > rounds + 1)) or rows > max(down, 1):
                continue
            settings = {"rounds": rounds, "rows": rows, "rows_in_flight": flight}
            stats = decode(backbone, ["blue"], heads, decoder="ssd", **settings).stats
            blocks = ssd_blocks(backbone.grid, right, down, rows)
            assert sum(blocks) == backbone.grid.positions
            assert stats.nfe == ssd_steps(blocks, rounds, flight), settings

    def test_ssd_is_planned_for_heads_to_the_right_alone(self) -> None:
        subject = load_subject(composed("heads.right=3", "heads.down=0"))
        assert subject.heads is not None
        found = speeds(count_decoding(subject.backbone, subject.heads, 1), AssumeConfig())
        # 16 rows of 4 blocks of 4 cells; two blocks at a time where two rows are in flight.
        assert {s.decoder: s.steps for s in found if s.decoder.startswith("ssd,")} == {
            "ssd, 1 row, 1 round": 128,
            "ssd, 1 row, 2 rounds": 192,
            "ssd, 1 row, 2 rounds, 2 in flight": 97,
        }

    def test_tokens_per_forward_by_enumeration(self) -> None:
        for a, k in itertools.product((0.0, 0.3, 0.9, 1.0), (1, 3, 5)):
            expected = 0.0
            for accepted in itertools.product((True, False), repeat=k):
                chance = math.prod(a if x else 1 - a for x in accepted)
                expected += chance * (1 + len(list(itertools.takewhile(bool, accepted))))
            assert tokens_per_forward(a, k) == pytest.approx(expected)
        assert tokens_per_forward(0.7, 4) == pytest.approx((1 - 0.7**5) / (1 - 0.7))

    def test_costs_by_hand(self) -> None:
        config = composed("heads.right=1", "heads.down=1")
        subject = load_subject(config)
        assert subject.heads is not None
        cost = count_decoding(subject.backbone, subject.heads, 1)
        D, V, layer = 256, 512, 256 * (256 + 2 * 128 + 256) + 3 * 256 * 640
        assert cost.trunk.flops == 2 * 6 * layer + 6 * 4 * D  # one token attends to itself
        assert cost.trunk.bytes == 2 * (6 * (layer + 2 * D) + D)  # transformers' own forward ends with the final norm
        assert cost.lm_head.flops == 2 * D * V and cost.lm_head.bytes == 2 * (D * V + D)
        assert cost.heads["down1"].flops == 2 * 5 * D * D and cost.heads["down1"].bytes == 2 * (5 * D * D + D)
        assert cost.cache == 2 * 6 * 2 * 128 and cost.attention == 6 * 4 * D and cost.common == cost.serial == 0

    def test_a_shared_trunk_is_read_once(self) -> None:
        subject = load_subject(composed("heads.shared=true"))
        assert subject.heads is not None
        cost = count_decoding(subject.backbone, subject.heads, 1)
        every = sum(x.bytes for x in cost.heads.values()) - 6 * cost.common
        assert every == 2 * count(subject.heads) and cost.common > 0


def published(folder: Path) -> Path:
    """config.json of an 8B model and nothing else."""
    from transformers import Emu3Config, Emu3TextConfig

    text = Emu3TextConfig(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, vocab_size=184_622)
    codes = {f"<|visual token {i:06d}|>": 151_854 + i for i in range(32_768)}
    config = Emu3Config(text_config=text, vocabulary_map=codes | {"<|extra_200|>": 151_840})
    config.architectures = ["Emu3ForConditionalGeneration"]
    config.save_pretrained(folder)
    return folder


class TestCommand:
    @pytest.mark.parametrize("name", NAMES)
    def test_every_recipe_in_seconds(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        keys = [f"recipe={name}", "plan=true"]
        config = compose(TrainConfig, keys, RECIPES, DEFAULT)
        if config.task == "heads" and config.backbone.checkpoint != "emoji":
            lumina = partial(write_lumina_config, layers=4)  # seconds
            emu3 = partial(write_emu3_config, size=FULL | {"layers": 4})
            write = {"emu3": emu3, "janus_pro": write_config, "lumina_mgpt": lumina}[config.backbone.adapter]
            keys += [f"backbone.checkpoint={write(tmp_path / 'model')}"]
        before = sorted(tmp_path.rglob("*"))
        begun = time.process_time()
        config = compose(TrainConfig, keys, RECIPES, DEFAULT)
        config.check()
        text = plan(config)
        assert time.process_time() - begun < 10
        assert f"plan of recipe {name}" in text and f"time for {config.trainer.steps:,} steps" in text
        assert sorted(tmp_path.rglob("*")) == before, "a plan writes nothing"

    def test_eight_billion_weights_from_config_json_alone(self, tmp_path: Path) -> None:
        folder = published(tmp_path)
        config = composed(f"backbone.checkpoint={folder}", "backbone.adapter=emu3", "data.batch_size=1")
        text = plan(config)
        by_hand = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) + 2 * 184_622 * 4096 + 4096
        assert count(load_subject(config).backbone) == by_hand
        assert re.search(r"backbone +8\.49 G", text) and re.search(r"heads \(offsets\) +587 M", text)
        assert re.search(r"fits in 141 GB( +yes){5}", text)

    @pytest.mark.slow
    def test_from_the_command_line_needs_no_weights_and_leaves_no_trace(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        for name in ("config.json", "draftgrid.json"):
            shutil.copy(ASSETS / name, folder)
        done = subprocess.run(
            [
                sys.executable,
                ROOT / "train.py",
                "recipe=emoji_ssd",
                "plan=true",
                f"backbone.checkpoint={folder}",
                "trainer.devices=2",
            ],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert "2 GPUs" in done.stdout and "ssd, 1 row, 2 rounds" in done.stdout
        assert [p.name for p in tmp_path.iterdir()] == ["model"]

    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            (["backbone.checkpoint=/none/such"], ["backbone.checkpoint is '/none/such'", "config.json", "emoji"]),
            (["backbone.adapter=emu4"], ["adapter is 'emu4'", "emu3", "package.module:Class"]),
            (["assume.utilisation=45"], ["assume.utilisation is 45", "at most 1"]),
            (["assume.acceptance=[1.5]"], ["assume.acceptance is [1.5]", "from 0 to 1"]),
        ],
    )
    def test_what_is_wrong_is_said_in_a_sentence(self, keys: list[str], words: list[str], capsys) -> None:
        with pytest.raises(SystemExit) as end:
            main(train.run, TrainConfig, train.__doc__, ["plan=true", *keys])
        said = capsys.readouterr().err
        assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1
        assert all(word in said for word in words), said

    def test_a_config_json_of_no_known_model_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "emu3", "architectures": ["NoSuchClass"]}')
        with pytest.raises(ValueError, match=r"config\.json names no model transformers knows: .*NoSuchClass"):
            load_subject(composed(f"backbone.checkpoint={tmp_path}", "backbone.adapter=emu3"))
