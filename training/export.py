"""A checkpoint -> exported heads: the folder that `MTPHeads.from_pretrained` loads.

    draftgrid export checkpoint=runs/emoji_chain out=runs/emoji_chain/best which=best

One process, no GPU and no backbone, whatever strategy and number of ranks wrote the checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftgrid.common.cli import key, main
from draftgrid.common.files import read_fields
from draftgrid.common.settings import one_of
from draftgrid.common.table import markdown
from draftgrid.heads.mtp import MTPHeads
from draftgrid.heads.pretrained import EXPORTED
from draftgrid.heads.weights import check_tensors
from draftgrid.training.checkpoint import pick_checkpoint, read_checkpoint


@dataclass
class ExportConfig:
    checkpoint: str = key("runs/emoji_chain", "a run folder, its checkpoints/, or one .ckpt file")
    which: str = key("last", "of a folder's checkpoints: last, or best (by mean acceptance in validation)")
    out: str = key("", "folder for the heads; '' = heads beside the checkpoints")
    overwrite: bool = key(False, "replace what lies in out")
    smoke: bool = key(False, "changes nothing: an export takes seconds")


def load_heads(checkpoint: dict[str, Any], where: str) -> MTPHeads:
    """The heads of a checkpoint, with weights, card and recipe. Raises ValueError if it is not a whole one of heads."""
    if not checkpoint.get("heads"):
        raise ValueError(f"{where} is a checkpoint of a backbone (task=backbone), not of heads")
    heads = MTPHeads.from_description(checkpoint["heads"], where)
    own, weights = heads.state_dict(), checkpoint["state_dict"]
    check_tensors(f"{where}: state_dict", weights, {f"heads.{name}": tensor.shape for name, tensor in own.items()})
    heads.load_state_dict({name: weights[f"heads.{name}"] for name in own})
    heads.recipe = read_fields(checkpoint["origin"], f"{where}: origin", {"recipe": str, "data": str})["recipe"]
    try:
        recipe = yaml.safe_load(heads.recipe)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: origin.recipe is not valid YAML: {' '.join(str(error).split())}") from None
    read_fields(recipe, f"{where}: origin.recipe", dict.fromkeys(("data", "backbone"), (dict, None)))
    heads.card = model_card(heads, checkpoint, recipe)
    return heads.requires_grad_(False).eval()


def export(checkpoint: str | Path, out: str | Path) -> Path:
    """Write the exported folder, whole or not at all. Returns it. Raises ValueError."""
    load_heads(read_checkpoint(checkpoint), str(checkpoint)).save_pretrained(out)
    return Path(out)


def model_card(heads: MTPHeads, checkpoint: dict[str, Any], recipe: dict[str, Any]) -> str:
    """README.md of the exported folder: what the heads belong to, how they were trained, what they reach."""
    owner, figures, origin = heads.trained_on, checkpoint["figures"], checkpoint["origin"]
    kinds = ("acceptance", "acceptance_uncertain", "smooth_l1", "cosine")
    rows = [
        [name, *(f"{figures[key]:.3f}" if (key := f"{kind}/{name}") in figures else "" for kind in kinds)]
        for name in heads.names
        if f"acceptance/{name}" in figures
    ]
    data, trained = recipe.get("data") or {}, recipe.get("backbone") or {}
    place, adapter = trained.get("checkpoint") or owner.name, trained.get("adapter") or ""
    at = f', revision="{owner.revision}"' if owner.revision else ""
    at += f', adapter="{adapter}"' if ":" in adapter else ""
    at += f", grid={owner.grid}" if trained.get("grid") else ""
    return "\n".join(
        [
            "---",
            "library_name: draftgrid",
            "tags: [speculative-decoding, image-generation]",
            "---",
            f"# Drafting heads for {owner.name}",
            "",
            f"{len(heads.names)} heads, {sum(p.numel() for p in heads.parameters()):,} parameters, step "
            f"{checkpoint['global_step']} of recipe `{recipe.get('recipe', '?')}` (see recipe.yaml).",
            f"They belong to one backbone: fingerprint `{owner.fingerprint}`, grid {owner.grid[0]}x{owner.grid[1]}.",
            "",
            "```python",
            "from draftgrid import MTPHeads, load_backbone",
            f'backbone = load_backbone("{place}"{at})',
            'heads = MTPHeads.from_pretrained("this folder", backbone)',
            "```",
            "",
            "Held-out figures (acceptance = sum of min(p, q); uncertain: positions with H(p) >= 0.5 nats):",
            "",
            *markdown([["offset", "acceptance", "uncertain", "Smooth-L1", "cosine"], *rows]),
            "",
            f"Training data: `{data.get('source') or data.get('dir') or '?'}`, sha256 of its shards "
            f"`{origin.get('data', '?')}`.",
            "Licences: the backbone's and the training data's apply; the demo's pictures are Twemoji, CC-BY-4.0.",
            "",
        ]
    )


def run(config: ExportConfig) -> None:
    source = pick_checkpoint(config.checkpoint, one_of("which", config.which, ("last", "best")))
    out = Path(config.out) if config.out else source.parent.parent / "heads"
    if out.is_file():
        raise ValueError(f"out={out} is a file; name a folder")
    held = {p.name for p in out.iterdir()} if out.is_dir() else set()
    if foreign := held - EXPORTED:
        raise ValueError(f"out={out} holds {min(foreign)}, which is no part of exported heads; choose another out")
    if held and not config.overwrite:
        raise ValueError(f"out={out} holds exported heads already; choose another out, or overwrite=true")
    export(source, out)
    print(f"{source} -> {out}")


if __name__ == "__main__":
    main(run, ExportConfig, __doc__)
