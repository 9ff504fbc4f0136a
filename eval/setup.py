"""What `eval.generate` and `eval.bench` share: their keys, and loading backbone, heads and tokenizer from them."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftgrid.common.cli import check_ranges, key
from draftgrid.common.device import pick_device
from draftgrid.common.files import read_json
from draftgrid.eval.decoders import DECODERS, DecodeResult, Policy, Sampling, make_policy
from draftgrid.eval.decoders.engine import RowCallback
from draftgrid.eval.decoders.engine import run as decode
from draftgrid.heads.backbones import Backbone, load_backbone
from draftgrid.heads.config import KINDS
from draftgrid.heads.mtp import MTPHeads
from draftgrid.heads.tokenizers import ImageTokenizer, load_tokenizer

DEMO_HEADS = {"offsets": "runs/emoji_ssd/heads", "chain": "runs/emoji_chain/heads"}


@dataclass
class EvalConfig:
    heads: str = key(
        "auto", "folders or hub ids of exported heads, one per kind, a,b; auto = the demo's; '' = none (AR needs none)"
    )
    backbone: str = key("emoji", "folder or hub id (org/name@revision) of the backbone; emoji is the demo's own")
    local_files_only: bool = key(False, "ask the hub's cache on this machine alone, never the hub")
    adapter: str = key("", "the backbone's adapter, or your own package.module:Class; '' = what the checkpoint says")
    grid: list[int] = key(list, "[rows, columns]; empty = what the checkpoint says", least=1, items="rows, columns")
    tokenizer: str = key("", "folder of the image tokenizer; '' = the backbone's own")
    prompts: str = key("emoji:test", "text file of prompts (one a line), or emoji:train|validation|test")
    images: int = key(8, "pictures: the first N of the prompts, spread evenly", least=1)
    batch_size: int = key(1, "pictures drawn together", least=1)
    guidance: float = key(1.0, "guidance scale; 1 = off")
    temperature: float = key(1.0, "0 = greedy", least=0)
    top_k: int = key(0, "keep the k most likely tokens; 0 = all", least=0)
    top_p: float = key(1.0, "keep the most likely tokens that hold this probability", above=0, most=1)
    seed: int = key(0, "same seed, same pictures", least=0)
    device: str = key("auto", "auto, cpu, cuda, cuda:1, ...")
    compile: bool = key(False, "compile the backbone's decoding forward with torch.compile")
    smoke: bool = key(False, "2 pictures, once")


@dataclass(frozen=True)
class DecoderSpec:
    """One entry of a list of decoders: what it is called, and its settings as they were written."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    """The policy's own settings, and perhaps `drafts`: the kind of heads to draft with, not its first choice."""

    def make(self) -> Policy:
        """A fresh one: a policy draws one batch."""
        return make_policy(self.name, **{k: v for k, v in self.settings.items() if k != "drafts"})

    @property
    def exact(self) -> bool:
        return self.make().exact

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of heads it may get, best first; empty = it uses none."""
        return (self.settings["drafts"],) if "drafts" in self.settings else DECODERS[self.name].drafts_with

    @property
    def text(self) -> str:
        """As one writes it on the command line."""
        return ":".join([self.name, *(f"{k}={v}" for k, v in self.settings.items())])

    def pick(self, loaded: Collection[str]) -> str | None:
        """The kind of heads it drafts with, of those loaded."""
        return next((kind for kind in self.kinds if kind in loaded), None)


@dataclass
class Loaded:
    backbone: Backbone
    tokenizer: ImageTokenizer
    heads: dict[str, MTPHeads]
    """By kind; only those that a decoder of the list drafts with."""
    prompts: list[str]
    sampling: Sampling = field(default_factory=Sampling)
    place: str = ""
    """Where the heads are, as given in `heads=`."""

    def draw(
        self,
        decoder: DecoderSpec,
        numbers: Sequence[int],
        seed: int,
        callback: RowCallback | None = None,
        phases: bool = False,
    ) -> DecodeResult:
        """The pictures of these numbers of the prompts, drawn together; `phases` as in `engine.run`."""
        prompts = [self.prompts[i] for i in numbers]
        heads = self.heads.get(decoder.pick(self.heads) or "")
        more: dict[str, Any] = {"tokenizer": self.tokenizer, "callback": callback, "phases": phases}
        return decode(self.backbone, prompts, decoder.make(), self.sampling, heads, seed, numbers, **more)


def load(config: EvalConfig, decoders: Sequence[DecoderSpec]) -> Loaded:
    """Check the cheap things first, then load. Raises ValueError."""
    # It reads pictures too, with a library that latency alone need not have.
    from draftgrid.data.sources import read_prompts

    check_ranges(config)
    sampling = Sampling(config.guidance, config.temperature, config.top_k, config.top_p)
    prompts = choose(read_prompts(config.prompts), min(config.images, 2) if config.smoke else config.images)
    device = pick_device(config.device)
    place = demo_heads(decoders) if config.heads == "auto" else config.heads
    folders = find_heads(place, decoders, config.local_files_only)
    hub: dict[str, Any] = {"local_files_only": config.local_files_only}
    how: dict[str, Any] = {"adapter": config.adapter or None, "grid": config.grid or None, "device": device}
    backbone = load_backbone(config.backbone, **how, **hub)
    heads = {kind: MTPHeads.from_pretrained(folder, backbone, **hub) for kind, folder in folders.items()}
    tokenizer = load_tokenizer(config.tokenizer or config.backbone, device, **hub)
    backbone.check_codes(tokenizer.codebook_size)
    if config.compile:
        backbone.compile_decoding()
    return Loaded(backbone, tokenizer, heads, prompts, sampling, place)


def demo_heads(decoders: Sequence[DecoderSpec]) -> str:
    """'folder,folder' of the demo's heads for these decoders: of those a decoder may get, the first that is there."""
    kinds = {next((k for k in d.kinds if Path(DEMO_HEADS[k]).is_dir()), d.kinds[0]) for d in decoders if d.kinds}
    return ",".join(folder for kind, folder in DEMO_HEADS.items() if kind in kinds)


def find_heads(text: str, decoders: Sequence[DecoderSpec], local_files_only: bool = False) -> dict[str, str]:
    """'folder,folder' -> {kind: folder} of the heads these decoders draft with. Loads none.

    Raises ValueError for a folder that is not there, two of one kind, or a decoder that has none to draft with.
    """
    drafting = [d for d in decoders if d.kinds]
    if not drafting:
        return {}
    if not text:
        raise ValueError("heads is empty, but a decoder in the list drafts with heads; set heads=DIR")
    found: dict[str, str] = {}
    # A folder's own name may hold a comma.
    for folder in [text] if Path(text).is_dir() else [part.strip() for part in text.split(",")]:
        kind = kind_at(folder, local_files_only)
        if kind in found:
            raise ValueError(f"heads names two folders of {kind} heads, {found[kind]} and {folder}; one is enough")
        found[kind] = folder
    for decoder in drafting:
        if decoder.pick(found) is None:
            raise ValueError(
                f"decoder {decoder.text} drafts with {' or '.join(decoder.kinds)} heads, but heads={text} are "
                f"{' and '.join(found)}; add a folder of them after a comma ({_maker(decoder.kinds[0])})"
            )
    used = {decoder.pick(found) for decoder in drafting}
    return {kind: folder for kind, folder in found.items() if kind in used}


def kind_at(folder: str, local_files_only: bool = False) -> str:
    """The kind of the heads in a folder or hub id. Raises ValueError, with the command that makes the demo's."""
    config = Path(folder) / "config.json"
    if config.is_file() and read_json(config).get("kind") in KINDS:
        return str(read_json(config)["kind"])
    try:
        return MTPHeads.from_pretrained(folder, local_files_only=local_files_only).kind
    except ValueError as error:
        missing = [kind for kind, demo in DEMO_HEADS.items() if folder == demo]
        raise ValueError(f"{error}; {_maker(missing[0])}" if missing else str(error)) from None


def _maker(kind: str) -> str:
    demo = DEMO_HEADS[kind]
    return f"`python train.py recipe={Path(demo).parent.name}` makes {demo}"


def choose(prompts: list[str], count: int) -> list[str]:
    """`count` prompts spread evenly over the list, repeated if the list is shorter."""
    numbers = spread(count, len(prompts)) if count < len(prompts) else range(count)
    return [prompts[i % len(prompts)] for i in numbers]


def spread(count: int, of: int) -> list[int]:
    """`count` of the numbers 0 .. of - 1, as far apart as they go."""
    count = min(count, of)
    return [i * of // count for i in range(count)]


def parse_decoder(text: str) -> DecoderSpec:
    """'ssd:rounds=2:rows=2' -> the decoder of that name and settings; `drafts=KIND` names the heads it gets.

    Raises ValueError if the decoder refuses a setting.
    """
    name, *parts = text.strip().split(":")
    settings: dict[str, Any] = {}
    for part in parts:
        setting, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"decoder {text!r}: {part!r} is not setting=value, as in ssd:rounds=2")
        settings[setting] = _value(value)
    decoder = DecoderSpec(name, settings)
    kinds = decoder.make().drafts_with
    if "drafts" in settings and settings["drafts"] not in kinds:
        uses = f"{name} drafts with {' or '.join(kinds)} heads" if kinds else f"{name} drafts without heads"
        raise ValueError(f"decoder {text!r}: drafts is {settings['drafts']!r}, but {uses}")
    return decoder


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def parse_decoders(text: str) -> list[DecoderSpec]:
    """A comma-separated list of decoders."""
    return [parse_decoder(part) for part in text.split(",")]
