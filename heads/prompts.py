"""What training, decoding and the data stream hand to a backbone: captions, and their unconditional twins."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(unsafe_hash=True)  # nobody changes one, but Lightning moves no batch that holds a frozen dataclass
class Unconditional:
    """The unconditional twin of a caption: what guidance compares the caption with, and what a dropped one becomes.

    Most families have one unconditional prompt for all captions; Janus-Pro's is as long as the caption's.
    """

    caption: str = ""


Prompt = str | Unconditional | None
"""None is the unconditional prompt that belongs to no caption, `Unconditional("")`."""


def twins(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Each caption's unconditional twin; a twin is its own."""
    return [Unconditional(p) if isinstance(p, str) else p for p in prompts]
