"""What bench and generate write, and the likelihood figures against sums written out."""

import io
import json
import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from tqdm import tqdm

from draftgrid.eval.bench import BenchConfig, resolve
from draftgrid.eval.bench import run as bench
from draftgrid.eval.chart import places, speed_chart
from draftgrid.eval.decoders import DECODERS, Sampling, decode, make_policy
from draftgrid.eval.generate import GenerateConfig
from draftgrid.eval.generate import run as generate
from draftgrid.eval.measure import DrawnBatch, Plan, Run, interpolate, lengths_on, measure, speedup
from draftgrid.eval.metrics.likelihood import bootstrap, likelihood
from draftgrid.eval.setup import DecoderSpec, demo_heads, load, parse_decoder, parse_decoders
from draftgrid.eval.suites import every
from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.grid import TokenGrid
from draftgrid.heads.mtp import new_heads
from tests.conftest import World
from tests.tiny import TableBackbone, tiny_emu3


@pytest.fixture(scope="module")
def heads(world: World) -> Path:
    backbone = load_backbone(world.backbone)
    folder = world.root / "heads"
    new_heads(HeadsConfig(right=3, down=2), backbone).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chain(world: World) -> Path:
    folder = world.root / "chain"
    new_heads(HeadsConfig(kind="chain"), load_backbone(world.backbone)).save_pretrained(folder)
    return folder


def settings(world: World, heads: Path) -> dict[str, object]:
    return {"heads": str(heads), "backbone": str(world.backbone), "prompts": str(world.prompts)}


def test_bench_writes_the_schema_with_ar_first(world: World, heads: Path, tmp_path: Path, capsys) -> None:
    decoders = "ssd:rounds=2,ssd:rounds=1:rows=2"
    bench(
        BenchConfig(**settings(world, heads), decoders=decoders, images=3, repeats=1, guidance=2.0, out=str(tmp_path))
    )
    report = json.loads((tmp_path / "bench.json").read_text())
    assert {"backbone", "heads", "grid", "machine", "rows", "step_cost", "draft_row"} <= set(report)
    assert report["grid"] == [4, 4] and "1" in report["step_cost"] and report["sampling"]["guidance"] == 2.0
    assert [(r["decoder"], r["settings"], r["exact"]) for r in report["rows"]] == [
        ("ar", {}, True),
        ("ssd", {"rounds": 2}, False),
        ("ssd", {"rounds": 1, "rows": 2}, False),
    ]
    assert [r["nfe"] for r in report["rows"]] == [16, 12, 6]
    fields = "decoder settings exact images nfe tokens_forwarded seconds_per_image seconds_draft seconds_forward"
    fields += " seconds_verify speedup speedup_allowed nll excess_nll acceptance change_rate"
    fields += " drafts timed nfe_timed nfe_interval draft_share speedup_interval"
    for row in report["rows"]:
        assert set(fields.split()) <= set(row)
        low, high = row["excess_nll"][1:]
        assert row["images"] == 3 and low <= row["excess_nll"][0] <= high
    assert set(report["rows"][2]["acceptance"]) == {"right1", "right2", "right3", "down1", "down2"}
    printed = capsys.readouterr().out
    assert "ssd rounds=1 rows=2" in printed and "lossy" in printed and "exact" in printed
    assert [r["drafts"] for r in report["rows"]] == [None, "offsets", "offsets"]
    assert report["rows"][0]["speedup"] == report["rows"][0]["speedup_allowed"] == 1
    # 3 rows of 3 pictures of 128 pixels, and text beside and above them
    with Image.open(tmp_path / "sheet.png") as sheet:
        width, height = sheet.size
    assert width > 3 * 128 and height > 3 * 128


def test_the_whole_suite_runs_in_a_tiny_world_and_every_row_says_whether_it_is_exact(
    world: World, heads: Path, chain: Path, tmp_path: Path, capsys
) -> None:
    decoders = every().replace("lantern:", "lantern:neighbours=20:")  # the tiny codebook has 24 codes
    keys = settings(world, heads) | {"heads": f"{heads},{chain}", "decoders": decoders}
    bench(BenchConfig(**keys, suite="all", smoke=True, out=str(tmp_path)))
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["sampling"]["guidance"] == 1 and {r["images"] for r in report["rows"]} == {2}
    assert {r["decoder"] for r in report["rows"]} == set(DECODERS)
    for row in report["rows"]:
        assert row["exact"] is (row["decoder"] not in ("ssd", "gsd", "lantern"))
    # The kind of heads a row names is the kind it drafted with.
    pairs = {(r["settings"].get("drafts"), r["drafts"]) for r in report["rows"] if r["decoder"] == "ssd_coupled"}
    assert pairs == {("chain", "chain"), ("offsets", "offsets")}
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if " exact " in line or " lossy " in line]
    assert len(rows) == len(report["rows"]) and sum(" lossy " in line for line in rows) == 14
    with Image.open(tmp_path / "speed.png") as picture:
        picture.load()
        assert picture.width > picture.height > 700  # as high as its legend


def test_each_guidance_has_its_folder_and_one_needs_none(world: World, heads: Path, tmp_path: Path) -> None:
    keys = {"decoders": "scd:window=4", "images": 2, "repeats": 1} | settings(world, heads)
    bench(BenchConfig(**keys, guidances=[1.0, 2.5], out=str(tmp_path / "two")))
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["guidance1", "guidance2.5"]
    nll = []
    for folder, guidance in (("guidance1", 1), ("guidance2.5", 2.5)):
        names = sorted(p.name for p in (tmp_path / "two" / folder).iterdir())
        assert names == ["bench.json", "sheet.png", "speed.png"]
        report = json.loads((tmp_path / "two" / folder / "bench.json").read_text())
        assert report["sampling"]["guidance"] == guidance
        nll.append(report["rows"][1]["nll"])
    assert nll[0] != nll[1]
    bench(BenchConfig(**keys, guidances=[2.5], out=str(tmp_path / "one")))
    one = json.loads((tmp_path / "one" / "bench.json").read_text())
    assert one["rows"][1]["nll"] == pytest.approx(nll[1])


def test_what_is_given_wins_over_the_suite() -> None:
    config = BenchConfig(suite="all")
    decoders, samplings, plan = resolve(config)
    assert (config.images, plan.timed, plan.repeats, plan.batch_size, plan.quality_batch) == (200, 8, 3, 1, 8)
    assert [s.guidance for s in samplings] == [1, 3]
    assert demo_heads(decoders) == "runs/emoji_ssd/heads,runs/emoji_chain/heads"
    assert decoders[0] == DecoderSpec("ar") and len({d.text for d in decoders}) == len(decoders) > 35

    config = BenchConfig(suite="all", images=12, timed=3, guidance=2.0, heads="mine", decoders="ssd,ar")
    decoders, samplings, plan = resolve(config)
    assert (config.images, plan.timed, config.heads) == (12, 3, "mine")
    assert [s.guidance for s in samplings] == [2] and [d.text for d in decoders] == ["ar", "ssd"]
    assert [s.guidance for s in resolve(BenchConfig(suite="all", guidances=[1.5]))[1]] == [1.5]

    smoke, samplings, plan = resolve(BenchConfig(suite="all", smoke=True))
    assert {d.name for d in smoke} == set(DECODERS) and len(smoke) < 15 and len(samplings) == plan.repeats == 1
    assert [d.text for d in resolve(BenchConfig(decoders="scd:window=64", smoke=True))[0]] == ["ar", "scd:window=64"]

    config = BenchConfig()
    assert [d.text for d in resolve(config)[0]][:3] == ["ar", "scd:window=32", "ssd_coupled"]
    assert (config.images, config.timed, config.heads) == (8, 0, "auto")
    assert [d.text for d in resolve(BenchConfig(decoders="scd"))[0]] == ["ar", "scd"]


def test_pictures_and_counts_do_not_depend_on_which_of_them_are_timed(
    world: World, heads: Path, chain: Path, tmp_path: Path
) -> None:
    decoders = parse_decoders("ar,scd:window=6,ssd_coupled:coupling=gumbel:window=6,ssd:rounds=1")
    decoders += parse_decoders("gsd,lantern:neighbours=5")
    keys = settings(world, heads) | {"heads": f"{heads},{chain}", "images": 7}
    loaded = load(BenchConfig(**keys), decoders)
    bar = tqdm(disable=True)
    whole = measure(loaded, decoders, Plan(repeats=1, seed=5), bar)
    split = measure(loaded, decoders, Plan(timed=2, repeats=2, quality_batch=3, seed=5), bar)
    for a, b in zip(whole, split, strict=True):
        assert [len(once) for once in a.passes] == [7] and [len(once) for once in b.passes] == [2, 2]
        assert [list(p.numbers) for p in b.parts] == [[0], [3], [1, 2, 4], [5, 6]]  # timed ones: spread
        assert torch.equal(a.tokens, b.tokens) and a.steps == b.steps
    # In the order of the prompts: picture 6 is the one drawn alone under that number.
    alone = decode(loaded.backbone, [loaded.prompts[6]], decoder="scd", window=6, seed=5, samples=[6])
    assert torch.equal(split[1].tokens[6:], alone.tokens) and split[1].steps[6] == alone.stats.nfe


def test_the_bar_counts_every_picture_that_is_drawn(world: World, heads: Path) -> None:
    decoders = parse_decoders("ar,ssd:rounds=1")
    loaded = load(BenchConfig(**settings(world, heads), images=7), decoders)
    for plan in (Plan(timed=2, repeats=2, quality_batch=3), Plan(repeats=1, batch_size=4), Plan(warm_up=False)):
        with tqdm(file=io.StringIO()) as bar:
            measure(loaded, decoders, plan, bar)
            assert bar.n == 2 * plan.pictures(7)


def test_a_decoder_gets_the_heads_it_names_or_else_prefers(world: World, heads: Path, chain: Path) -> None:
    """Against `decode` called with those heads by hand."""
    both = settings(world, heads) | {"heads": f"{heads}, {chain}", "images": 2}
    for text, kind in (("ssd_coupled", "chain"), ("ssd_coupled:drafts=offsets", "offsets"), ("ssd", "offsets")):
        decoder = parse_decoder(text)
        loaded = load(BenchConfig(**both), [decoder])
        assert list(loaded.heads) == [kind] and decoder.pick(loaded.heads) == kind
        by_hand = decode(loaded.backbone, loaded.prompts, loaded.heads[kind], decoder=decoder.name, seed=1)
        assert torch.equal(loaded.draw(decoder, [0, 1], 1).tokens, by_hand.tokens)
    only = load(BenchConfig(**both | {"heads": str(heads)}), [parse_decoder("ssd_coupled")])
    assert list(only.heads) == ["offsets"]
    none = load(BenchConfig(**both | {"heads": "no/such/folder"}), [parse_decoder("scd")])
    assert none.heads == {}


def test_calibrate_prints_every_window_and_leaves_the_decoder_alone(
    world: World, heads: Path, tmp_path: Path, capsys
) -> None:
    defaults = {name: make_policy(name).window for name in ("scd", "ssd_coupled")}
    keys = settings(world, heads) | {"decoders": "ar,scd:window=5:coupling=gumbel,ssd_coupled,scd:coupling=gumbel"}
    bench(BenchConfig(**keys, calibrate=True, images=3, repeats=1, out=str(tmp_path)))
    assert {name: make_policy(name).window for name in defaults} == defaults
    assert [p.name for p in tmp_path.iterdir()] == ["calibrate.json"]
    report = json.loads((tmp_path / "calibrate.json").read_text())
    assert [d["decoder"] for d in report["decoders"]] == ["scd:coupling=gumbel", "ssd_coupled"]
    blocks = capsys.readouterr().out.split("write: ")
    for found, block, after in zip(report["decoders"], blocks, blocks[1:], strict=False):
        # 16 positions; 24 and more do not fit.
        assert [r["window"] for r in found["rows"]] == [4, 8, 12, 16]
        lines = [line for line in block.splitlines() if re.match(r" +\d+ ", line)]
        assert [int(line.split()[0]) for line in lines] == [4, 8, 12, 16]
        quickest = min(found["rows"], key=lambda r: r["seconds_per_image"])
        assert [line.split()[0] for line in lines if line.endswith("best")] == [str(quickest["window"])]
        assert after.splitlines()[0] == found["best"] == f"{found['decoder']}:window={quickest['window']}"
        assert quickest["seconds_per_image"] == pytest.approx(quickest["steps"] * quickest["seconds_per_step"])
    # Steps are those of the decoder at that window.
    backbone = load_backbone(world.backbone)
    prompts = ["blue", "a red apple", "blue"]
    steps = decode(backbone, prompts, decoder="scd", coupling="gumbel", window=8).stats.steps
    assert report["decoders"][0]["rows"][1]["steps"] == pytest.approx(sum(steps) / 3)


def test_generate_writes_a_picture_per_prompt_that_decodes_from_its_tokens(
    world: World, heads: Path, tmp_path: Path
) -> None:
    from draftgrid.heads.tokenizers import load_tokenizer

    generate(GenerateConfig(**settings(world, heads), images=2, decoder="ar", seed=3, scale=2, out=str(tmp_path)))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "0000-blue.png",
        "0001-a-red-apple.png",
        "pictures.json",
        "sheet.png",
    ]
    tokens = decode(load_backbone(world.backbone), ["a red apple"], decoder="ar", seed=3, samples=[1]).tokens
    (expected,) = load_tokenizer(world.backbone).pil(tokens, scale=2)
    with Image.open(tmp_path / "0001-a-red-apple.png") as picture:
        assert picture.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"decoder": "ar,ssd"}, "name one"),
        ({"decoder": "ssd:rounds=-1"}, "rounds is -1"),
        ({"decoder": "ssd:rounds=two"}, "rounds is 'two'; use a whole number"),
        ({"decoder": "ssd:rounds"}, "'rounds' is not setting=value"),
        ({"decoder": "sdd"}, "unknown decoder 'sdd'. Did you mean 'ssd'"),
        ({"heads": "", "decoder": "ssd"}, "heads is empty"),
        ({"heads": "no/such/folder"}, "neither a folder nor a hub id"),
        ({"prompts": "nothing.txt"}, "prompts is 'nothing.txt'"),
        ({"images": -1}, "images is -1"),
        ({"device": "gpu"}, "device is 'gpu'; use auto, cpu, cuda"),
        ({"backbone": "nowhere"}, "'nowhere' is neither a folder"),
        ({"scale": 0}, "scale is 0"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"decoder": "ssd_coupled:drafts=tea"}, "drafts is 'tea', but ssd_coupled drafts with chain or offsets heads"),
        ({"decoder": "ssd:drafts=chain"}, "drafts is 'chain', but ssd drafts with offsets heads"),
        ({"decoder": "ar:drafts=chain"}, "drafts is 'chain', but ar drafts without heads"),
        (
            {"decoder": "ssd_coupled:drafts=chain"},
            "drafts with chain heads, but heads=.* are offsets; .*`python train.py recipe=emoji_chain`",
        ),
        (
            {"heads": "runs/emoji_chain/heads", "backbone": "nowhere"},
            "'runs/emoji_chain/heads' is neither .*`python train.py recipe=emoji_chain`",
        ),
    ],
)
def test_wrong_input_is_told_and_nothing_is_written(
    world: World, heads: Path, tmp_path: Path, change, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(GenerateConfig(**(settings(world, heads) | {"out": str(tmp_path / "out")} | change)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"suite": "some"}, "suite is 'some'; use all"),
        ({"suite": "all", "calibrate": True}, "calibrate=true has its own list"),
        ({"calibrate": True, "decoders": "ar,ssd"}, "ar, ssd has none; use e.g. decoders=scd,ssd_coupled"),
        ({"guidance": 2.0, "guidances": [1.0]}, "guidance is 2 and guidances is"),
        ({"guidances": [1.0, 1.0]}, "each once is enough"),
        ({"guidances": [1.0, 3.0], "temperature": -1.0}, "temperature is -1"),
        ({"repeats": 0}, "repeats is 0; use a finite number of at least 1"),
        ({"quality_batch": 0}, "quality_batch is 0"),
        ({"timed": -1}, "timed is -1"),
        ({"images": -1}, "images is -1"),
        ({"decoders": "ssd_coupled:window=0"}, "window is 0"),
        ({"decoders": "ar,,ssd"}, "unknown decoder ''"),
    ],
)
def test_bench_tells_wrong_input_before_it_loads(tmp_path: Path, heads: Path, change, message: str) -> None:
    keys = {"heads": str(heads), "backbone": "nowhere", "out": str(tmp_path / "out")} | change
    with pytest.raises(ValueError, match=message):
        bench(BenchConfig(**keys))
    assert not (tmp_path / "out").exists()


def test_two_folders_of_one_kind_are_refused(world: World, heads: Path) -> None:
    keys = settings(world, heads) | {"heads": f"{heads},{heads}", "backbone": "nowhere"}
    with pytest.raises(ValueError, match="two folders of offsets heads"):
        bench(BenchConfig(**keys))


def test_speed_is_the_median_of_paired_passes_and_its_interval_holds_it() -> None:
    def timed(decoder: str, seconds: list[list[float]]) -> Run:
        return Run(DecoderSpec(decoder), [[DrawnBatch([i], None, s) for i, s in enumerate(once)] for once in seconds])  # type: ignore[arg-type]

    ar = timed("ar", [[4.0, 4.0], [4.0, 4.0], [40.0, 40.0]])
    run = timed("scd", [[1.0, 3.0], [1.0, 1.0], [10.0, 30.0]])
    ratio, (low, high) = speedup(ar, run)
    assert ratio == 2  # of 2, 4, 2: the slow pass is slow for both
    # Per picture, medians over the passes: 4 / 1 and 4 / 3; resampled pictures are (1, 1), (1, 3) or (3, 3).
    assert (low, high) == (pytest.approx(4 / 3), 4)
    assert run.seconds().sum(1).tolist() == [4, 2, 40]


def test_forwards_are_timed_up_to_the_longest_window_the_grid_has_room_for() -> None:
    assert lengths_on(TokenGrid(16, 16)) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert lengths_on(TokenGrid(16, 16), [12, 96, 200]) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96]
    assert lengths_on(TokenGrid(4, 4)) == [1, 2, 4]


def test_the_speed_picture_is_the_same_bytes_and_fills_markers_of_exact_rows_only(tmp_path: Path) -> None:
    def row(decoder: str, speedup: float, exact: bool) -> dict:
        return {"decoder": decoder, "speedup": speedup, "exact": exact, "excess_nll": [0.0, -0.01, 0.02]}

    def dark(exact: bool, name: str) -> int:
        speed_chart([row("ar", 1, True), row("ssd", 3, exact)], ["ar", "ssd"], "title", tmp_path / name)
        with Image.open(tmp_path / name) as picture:
            return sum(1 for p in picture.convert("L").get_flattened_data() if p < 200)

    assert dark(True, "a.png") > dark(False, "b.png") + 50  # two markers more, its own and the legend's
    dark(True, "c.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "c.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_numbers_beside_crowded_points_do_not_cover_each_other() -> None:
    points = [(100 + 3.0 * i, 50 + 2.0 * (i % 3)) for i in range(12)]
    spots = [(x + dx, y + dy) for (x, y), (dx, dy) in zip(points, places(points), strict=True)]
    for i, (x, y) in enumerate(spots):
        assert all(abs(x - u) >= 10 or abs(y - v) >= 8 for u, v in spots[:i])


def test_likelihood_equals_sums_over_the_pictures_own_logits() -> None:
    backbone = tiny_emu3((2, 3))
    tokens = torch.randint(24, (2, 2, 3), generator=torch.Generator().manual_seed(0))
    sampling = Sampling(guidance=2.0, temperature=0.7)
    nll, excess = likelihood(backbone, tokens, ["blue", "a red apple"], sampling)
    for b, prompt in enumerate(["blue", "a red apple"]):
        c, u = (backbone.logits(backbone.states(tokens[b : b + 1], [p])[0])[0] for p in (prompt, None))
        p = ((u + 2 * (c - u)) / 0.7).softmax(-1).flatten(0, 1).tolist()
        picked = [-math.log(row[t]) for row, t in zip(p, tokens[b].flatten().tolist(), strict=True)]
        entropies = [-sum(v * math.log(v) for v in row if v > 0) for row in p]
        assert nll[b].item() == pytest.approx(sum(picked) / 6, rel=1e-4)
        assert excess[b].item() == pytest.approx((sum(picked) - sum(entropies)) / 6, abs=1e-4)


def test_excess_nll_of_the_exact_distribution_is_zero_and_of_a_colder_one_negative() -> None:
    """Expectation over every picture of a table backbone: no sampling."""

    class Table(TableBackbone):
        def states(self, tokens, prompts):
            rows = [[self.state_of(t[:i]) for i in range(len(t))] for t in tokens.flatten(1).tolist()]
            return torch.stack([torch.stack(r) for r in rows]).view(*tokens.shape, -1), None

    backbone = Table((2, 2), 2)
    pictures = torch.tensor(list(backbone.law(Sampling()))).view(-1, 2, 2)
    _, excess = likelihood(backbone, pictures, ["x"] * len(pictures), Sampling())
    for temperature, check in ((1.0, lambda v: abs(v) < 1e-9), (0.8, lambda v: v < -0.02)):
        weights = torch.tensor(list(backbone.law(Sampling(temperature=temperature)).values()), dtype=torch.float64)
        assert check(float((weights * excess).sum()))


def test_bootstrap_interval_holds_the_mean_and_shrinks_with_more_pictures() -> None:
    generator = torch.Generator().manual_seed(0)
    few, many = (torch.randn(n, generator=generator).tolist() for n in (20, 2000))
    for values in (few, many):
        mean, low, high = bootstrap(values)
        assert low < mean < high and mean == pytest.approx(sum(values) / len(values))
    assert bootstrap(many)[2] - bootstrap(many)[1] == pytest.approx(2 * 1.96 / math.sqrt(2000), rel=0.15)
    assert bootstrap([2.0, 2.0]) == [2.0, 2.0, 2.0]


def test_cost_between_measured_lengths_is_linear_and_flat_outside() -> None:
    cost = {1: 1.0, 4: 4.0, 8: 6.0}
    assert [interpolate(cost, n) for n in (0.5, 1, 2, 4, 6, 8, 99)] == [1, 1, 2, 4, 5, 6, 6]


def test_auto_is_the_demos_heads_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    decoders = parse_decoders("ar,ssd_coupled")
    assert demo_heads(decoders) == "runs/emoji_chain/heads"  # the best it may get, to be made
    Path("runs/emoji_ssd/heads").mkdir(parents=True)
    assert demo_heads(decoders) == "runs/emoji_ssd/heads"
    Path("runs/emoji_chain/heads").mkdir(parents=True)
    assert demo_heads(decoders) == "runs/emoji_chain/heads"
    assert demo_heads(parse_decoders("ssd")) == "runs/emoji_ssd/heads" and demo_heads(parse_decoders("ar,scd")) == ""
