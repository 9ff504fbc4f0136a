"""What training, decoding and the data stream hand to a backbone: captions and unconditional prompts."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(unsafe_hash=True)  # nobody changes one, but Lightning moves no batch that holds a frozen dataclass
class Unconditional:
    """The unconditional prompt of a caption: guidance compares the two, and a dropped caption is replaced by it.

    Most families have one unconditional prompt for all captions; Janus-Pro's is as long as the caption's.
    """

    caption: str = ""


Prompt = str | Unconditional | None
"""None is `Unconditional("")`, the unconditional prompt of no caption."""


def unconditional_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Each caption's unconditional prompt; prompts that are unconditional already stay."""
    return [Unconditional(p) if isinstance(p, str) else p for p in prompts]
