"""The console command: `draftgrid COMMAND key=value ...`, or `python -m draftgrid COMMAND ...`."""

import importlib
import sys
from collections.abc import Sequence
from typing import get_type_hints

COMMANDS = {
    "train": ("train", "train heads on a frozen backbone, or the demo's backbone"),
    "encode": ("data.encode", "pictures + captions -> token shards"),
    "show": ("data.show", "look at a shard set"),
    "verify": ("data.verify", "check every hash and sample of a shard set"),
    "generate": ("eval.generate", "prompts -> PNGs with any decoder, or token shards with any exact one"),
    "bench": ("eval.bench", "decoders side by side: steps, seconds, likelihood"),
    "latency": ("eval.latency", "what decoding costs at full size, without weights"),
    "check": ("heads.check", "a backbone against the contract"),
    "export": ("training.export", "a checkpoint -> exported heads"),
    "data-bench": ("data.bench", "how fast shards stream"),
    "loss-memory": ("recipes.plan.loss_memory", "memory the loss takes at a full vocabulary"),
}
"""Command: (its module below draftgrid, what it does)."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        ["draftgrid COMMAND key=value ...", "", *lines, "", "draftgrid COMMAND --help lists the keys of a command."]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command with the rest of the arguments; exit code 2 for a command there is none of."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return
    name, *rest = arguments
    if name not in COMMANDS:
        from draftgrid.common.cli import suggest

        print(f"error: unknown command {name!r}. {suggest(name, list(COMMANDS))}", file=sys.stderr)
        sys.exit(2)
    sys.argv[:] = [f"draftgrid {name}", *rest]  # as if the command had been started alone
    from draftgrid.common.cli import main as run

    module = importlib.import_module(f"draftgrid.{COMMANDS[name][0]}")
    run(module.run, get_type_hints(module.run)["config"], module.__doc__)


if __name__ == "__main__":
    main()
