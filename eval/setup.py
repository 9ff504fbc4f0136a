"""What `eval.generate` and `eval.bench` share: their keys, and loading backbone, heads and tokenizer from them."""

import re
from dataclasses import dataclass, field
from typing import Any

import torch

import data

if not hasattr(data, "SPLITS"):
    raise ImportError(f"the package 'data' at {data.__path__} is not Draftgrid's; run where Draftgrid's comes first")

from data.sources import read_prompts
from eval.decoders import Policy, Sampling, make_policy
from heads.backbones import Backbone, load_backbone
from heads.cli import key
from heads.mtp import MTPHeads
from heads.tokenizers import ImageTokenizer, load_tokenizer


@dataclass
class EvalConfig:
    heads: str = key("runs/emoji_ssd/heads", "folder or hub id of exported heads; '' = none (AR needs none)")
    backbone: str = key("emoji", "folder of the backbone; emoji is the demo's own")
    adapter: str = key("", "the backbone's adapter; '' = what its draftgrid.json says")
    grid: list[int] = key(list, "[rows, columns]; empty = what the checkpoint says")
    tokenizer: str = key("", "folder of the image tokenizer; '' = the backbone's own")
    prompts: str = key("emoji:test", "text file of prompts (one a line), or emoji:train|validation|test")
    images: int = key(8, "pictures: the first N of the prompts, spread evenly")
    batch_size: int = key(1, "pictures drawn together")
    guidance: float = key(1.0, "guidance scale; 1 = off")
    temperature: float = key(1.0, "0 = greedy")
    top_k: int = key(0, "keep the k most likely tokens; 0 = all")
    top_p: float = key(1.0, "keep the most likely tokens that hold this probability")
    seed: int = key(0, "same seed, same pictures")
    device: str = key("auto", "auto, cpu, cuda, cuda:1, ...")
    smoke: bool = key(False, "2 pictures, once")


@dataclass
class Loaded:
    backbone: Backbone
    tokenizer: ImageTokenizer
    heads: MTPHeads | None
    prompts: list[str]
    sampling: Sampling = field(default_factory=Sampling)


def load(config: EvalConfig, needs_heads: bool) -> Loaded:
    """Check the cheap things first, then load. Raises ValueError."""
    sampling = Sampling(config.guidance, config.temperature, config.top_k, config.top_p)
    if config.smoke:
        config.images = min(config.images, 2)
    if config.images < 1 or config.batch_size < 1:
        raise ValueError(f"images is {config.images} and batch_size is {config.batch_size}; both need at least 1")
    prompts = choose(read_prompts(config.prompts), config.images)
    if needs_heads and not config.heads:
        raise ValueError("heads is empty, but a decoder in the list drafts with heads; set heads=DIR")
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"device is {device!r}; use auto, cpu, cuda or cuda:N")
    if config.grid and len(config.grid) != 2:
        raise ValueError(f"grid is {config.grid}; use [rows, columns]")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but this machine has no GPU; use device=cpu")
    grid = (config.grid[0], config.grid[1]) if config.grid else None
    backbone = load_backbone(config.backbone, adapter=config.adapter or None, grid=grid, device=device)
    heads = MTPHeads.from_pretrained(config.heads, backbone) if needs_heads else None
    tokenizer = load_tokenizer(config.tokenizer or config.backbone)
    backbone.check_codes(tokenizer.codebook_size)
    return Loaded(backbone, tokenizer, heads, prompts, sampling)


def choose(prompts: list[str], count: int) -> list[str]:
    """`count` prompts spread evenly over the list, repeated if the list is shorter."""
    if count >= len(prompts):
        return [prompts[i % len(prompts)] for i in range(count)]
    return [prompts[i * len(prompts) // count] for i in range(count)]


def parse_decoder(text: str) -> tuple[str, dict[str, Any]]:
    """'ssd:rounds=2:rows=2' -> ('ssd', {'rounds': 2, 'rows': 2}). Raises ValueError if the decoder refuses it."""
    name, *parts = text.strip().split(":")
    settings: dict[str, Any] = {}
    for part in parts:
        setting, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"decoder {text!r}: {part!r} is not setting=value, as in ssd:rounds=2")
        settings[setting] = int(value) if re.fullmatch(r"-?\d+", value) else _number(value)
    make_policy(name, **settings)
    return name, settings


def _number(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def policies(text: str) -> list[tuple[str, dict[str, Any], Policy]]:
    """A comma-separated list of decoders."""
    found = []
    for part in text.split(","):
        name, settings = parse_decoder(part)
        found.append((name, settings, make_policy(name, **settings)))
    return found
