"""MTPHeads: what all drafting heads are, and how they are made, saved and loaded.

A head predicts the state h of a frozen backbone at another cell; the backbone's own final norm and LM head turn a
predicted state into a draft distribution. The kinds are offsets.py (the paper's) and chain.py (ours).
"""

import tempfile
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from draftgrid.common.files import read_fields, read_json
from draftgrid.common.settings import whole
from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.backbones.registry import find_named
from draftgrid.heads.config import KINDS, TARGETS, HeadsConfig
from draftgrid.heads.grid import TokenGrid
from draftgrid.heads.pretrained import CARD, CONFIG, RECIPE, find_folder, read_weights, write_folder

FORMAT = 1


@dataclass(frozen=True)
class TrainedOn:
    """The backbone heads belong to."""

    name: str
    fingerprint: str
    hidden_size: int
    grid: tuple[int, int]
    revision: str | None = None
    """Of the backbone on the hub, where it came from there."""

    @classmethod
    def of(cls, backbone: Backbone) -> "TrainedOn":
        grid = (backbone.grid.height, backbone.grid.width)
        return cls(backbone.name, backbone.fingerprint, backbone.hidden_size, grid, backbone.revision)


OWNER = get_type_hints(TrainedOn) | {"grid": [int, 2], "revision": (str, None)}
"""What read_fields holds a saved one to."""


class MTPHeads(nn.Module, ABC):
    """What all drafting heads share: what they belong to, saving, loading and refusing a foreign backbone."""

    kind: str
    fields: tuple[str, ...]
    """The fields of the config that matter to this kind; the others are neither written nor read."""
    options: tuple[str, ...]
    """More such fields, written where they differ from their default: folders of an earlier version lack them."""
    config: HeadsConfig
    trained_on: TrainedOn
    card: str = "# Draftgrid heads\n"
    """README.md of the exported folder."""
    recipe: str = ""
    """The resolved recipe they were trained with, YAML."""

    def __init__(self, config: HeadsConfig, trained_on: TrainedOn) -> None:
        super().__init__()
        config.check()
        self.config, self.trained_on = config, trained_on

    @classmethod
    @abstractmethod
    def check_fit(cls, config: HeadsConfig, backbone: Backbone) -> None:
        """Raises ValueError if new heads of these settings could not be trained or drafted with on this backbone."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """One name per head: 'right1', 'down2', 'chain'."""

    @abstractmethod
    def train_pairs(self, grid: TokenGrid) -> dict[str, tuple[Tensor, Tensor]]:
        """{name: (source, target) positions}: what each head of one picture predicts, and the cell it starts from."""

    @abstractmethod
    def predict(self, h: Tensor, e: Tensor, name: str) -> Tensor:
        """States and embeddings (B, T, D) of whole pictures -> predicted states (B, N, D) of the targets of `name`."""

    reads_left: bool = False
    """Whether `predict` reads the token to the left, in whose place training may put the heads' own draft."""

    def training_inputs(
        self, branches: int, rows: int, generator: torch.Generator, left: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """What `predict` reads in training beside h and e of (branches * rows) pictures; nothing by default.

        `left` (branches * rows, T, D) are embeddings to read as left tokens, None = the picture's own.
        """
        return ()

    def scaled(self, x: Tensor) -> Tensor:
        """States or embeddings (..., D) as the layers get them: with norm_inputs divided by their root mean square.

        The two differ in size by a factor of 100 and more (DeepSeek-V3's MTP norms both, arXiv 2412.19437, eq. 21).
        """
        return rms_norm(x, x.shape[-1:], eps=1e-6) if self.config.norm_inputs else x

    def states(self, backbone: Backbone, h: Tensor) -> Tensor:
        """(..., D) states before the final norm -> the states these heads read and predict."""
        return backbone.norm(h) if self.config.target == "h_post" else h

    def logits(self, backbone: Backbone, states: Tensor) -> Tensor:
        """(..., D) states as these heads read and predict them -> (..., V). The one way from a prediction to logits."""
        return backbone.project(states) if self.config.target == "h_post" else backbone.logits(states)

    def check(self, backbone: Backbone) -> None:
        """Raises ValueError, with both fingerprints, unless these heads were trained on this backbone."""
        mine, theirs = self.trained_on, TrainedOn.of(backbone)
        if mine.fingerprint != theirs.fingerprint:
            raise ValueError(
                f"these heads belong to backbone {mine.name} ({mine.fingerprint[:16]}), "
                f"but the backbone given is {theirs.name} ({theirs.fingerprint[:16]})"
            )
        if mine.grid != theirs.grid:
            raise ValueError(f"these heads were trained on a {mine.grid} grid, but the backbone draws {theirs.grid}")

    def describe(self) -> dict[str, Any]:
        """config.json: all that is needed to build these heads, without their weights."""
        chosen = [o for o in self.options if getattr(self.config, o) != getattr(HeadsConfig, o)]
        return {
            "format": FORMAT,
            "kind": self.kind,
            "offsets": self.names,
            "target": self.config.target,
            **{field: getattr(self.config, field) for field in [*self.fields, *chosen]},
            "backbone": {**asdict(self.trained_on), "grid": list(self.trained_on.grid)},
        }

    @staticmethod
    def from_description(config: Any, where: str) -> "MTPHeads":
        """Untrained heads from `describe`. Raises ValueError, beginning with `where`, for an unknown or wrong field."""
        kinds = {"format": int, "kind": str, "target": str, "offsets": [str, None], "backbone": dict}
        read_fields(config, where, kinds)
        for field, known in (("format", (FORMAT,)), ("kind", tuple(KINDS)), ("target", TARGETS)):
            if config[field] not in known:
                raise ValueError(f"{where}: {field} is {config[field]!r}; this version reads {known}")
        kind = kind_of(config["kind"])
        hints = get_type_hints(HeadsConfig)
        names = [*kind.fields, *(o for o in kind.options if o in config)]
        fields = read_fields(config, where, {name: hints[name] for name in names})
        owner = read_fields(config["backbone"], f"{where}: backbone", OWNER)
        for size in (owner["hidden_size"], *owner["grid"]):
            whole(f"{where}: a size of the backbone", size, 1)
        settings = HeadsConfig(kind=config["kind"], target=config["target"], **fields)
        try:
            heads = kind(settings, TrainedOn(**{**owner, "grid": tuple(owner["grid"])}))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if config["offsets"] != heads.names:
            raise ValueError(f"{where}: offsets {config['offsets']} do not agree with {fields}")
        return heads

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the exported folder, whole or not at all, `card` and `recipe` included."""
        tensors = {k: v.detach().to("cpu").contiguous() for k, v in self.state_dict().items()}
        write_folder(folder, tensors, self.describe(), self.card, self.recipe)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        backbone: Backbone | None = None,
        *,
        revision: str | None = None,
        local_files_only: bool = False,
    ) -> "MTPHeads":
        """Load exported heads from a folder or a hub id (`org/name`, `org/name@revision`); frozen, in eval mode.

        With `backbone`, they must belong to it and get its device and dtype. Raises ValueError for a missing folder, an
        unknown format, weights cut short, and tensors that are missing, unknown or misshapen.
        """
        folder = find_folder(folder_or_id, revision, local_files_only)
        heads = cls.from_description(read_json(folder / CONFIG), f"{folder / CONFIG}")
        if backbone is not None:
            heads.check(backbone)
        heads.load_state_dict(read_weights(folder, heads.state_dict()), assign=True)
        for name, file in (("card", folder / CARD), ("recipe", folder / RECIPE)):
            if file.is_file():
                setattr(heads, name, file.read_text(encoding="utf-8"))
        if backbone is not None:
            heads = heads.to(backbone.device, backbone.dtype)
        return heads.requires_grad_(False).eval()

    def push_to_hub(self, repo_id: str, private: bool = False, token: str | None = None) -> str:
        """Upload the exported folder, card and recipe included, to the Hugging Face hub; returns the address."""
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            self.save_pretrained(folder := Path(temporary) / "heads")
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder))


def kind_of(name: str) -> type[MTPHeads]:
    """The class of a kind of heads, imported here because its module imports this one."""
    return find_named(KINDS[name], "heads.kind")


def new_heads(config: HeadsConfig, backbone: Backbone, seed: int = 0) -> MTPHeads:
    """Untrained heads for a backbone; the same seed gives the same weights.

    Raises ValueError for wrong settings, and for a backbone they do not fit (`check_fit`).
    """
    config.check()
    kind = kind_of(config.kind)
    kind.check_fit(config, backbone)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(config, TrainedOn.of(backbone))
