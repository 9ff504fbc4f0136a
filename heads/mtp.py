"""The drafting heads: plain modules that predict a frozen backbone's states to the right and below.

OffsetHeads is the paper's form (SSD, arXiv 2606.20543): one head per offset, f(z) = W0 z + SwiGLU(RMSNorm(W0 z)) with
z = [h; e], where e is the embedding of the token drawn at the cell. The backbone's own final norm and LM head turn a
predicted state into a draft distribution. Exported heads are a folder: config.json, model.safetensors, README.md.
"""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from heads.backbones.base import Backbone
from heads.config import KINDS, TARGETS, HeadsConfig
from heads.files import atomic_folder, read_json, write_json, write_text
from heads.grid import Offset, TokenGrid, offset_name
from heads.weights import HUB_ID, fetch

FORMAT = 1
WEIGHTS = "model.safetensors"


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


class RMSNorm(nn.Module):
    """torch's, with the weight cast to the input: under autocast the two differ, and torch warns and slows down."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), eps=1e-6)


class OffsetHead(nn.Module):
    """(..., k D) -> (..., D): W0 z + SwiGLU(RMSNorm(W0 z)); W0 of rank `rank`, if that is not 0."""

    def __init__(self, inputs: int, hidden: int, width: int, rank: int = 0) -> None:
        super().__init__()
        self.project: nn.Module = nn.Linear(inputs, hidden, bias=False)
        if rank:
            self.project = nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, hidden, bias=False))
        self.norm = RMSNorm(hidden)
        self.gate_up = nn.Linear(hidden, 2 * width, bias=False)  # one product for both: a draft is a few small calls
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        base = self.project(z)
        gate, up = self.gate_up(self.norm(base)).chunk(2, dim=-1)
        return base + self.down(nn.functional.silu(gate) * up)


class OffsetPart(nn.Module):
    """(..., D) -> (..., D): M GLU(C RMSNorm(t)), what one offset adds to a trunk that all share."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden)
        self.up = nn.Linear(hidden, 2 * rank, bias=False)
        self.down = nn.Linear(rank, hidden, bias=False)

    def forward(self, t: Tensor) -> Tensor:
        return self.down(nn.functional.glu(self.up(self.norm(t)), dim=-1))


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
        """What config.json says: all that is needed to build these heads, without their weights."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "offsets": self.names,
            "target": self.config.target,
            **self._fields(),
            "backbone": {**asdict(self.trained_on), "grid": list(self.trained_on.grid)},
        }

    @staticmethod
    def from_description(config: dict[str, Any], where: str) -> "MTPHeads":
        """Untrained heads as `describe` told; `where` is named in errors. Raises ValueError for what is not known."""
        for field, known in (("format", (FORMAT,)), ("kind", KINDS), ("target", TARGETS)):
            if config.get(field) not in known:
                raise ValueError(f"{where}: {field} is {config.get(field)!r}; this version reads {known}")
        kind = kind_of(config["kind"])
        try:
            fields = {k: config[k] for k in [*kind.fields, *(o for o in kind.options if o in config)]}
            owner = TrainedOn(**{**config["backbone"], "grid": tuple(config["backbone"]["grid"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{where} lacks or misnames a field: {error}") from None
        heads = kind(HeadsConfig(kind=config["kind"], target=config["target"], **fields), owner)  # type: ignore[call-arg]
        if config.get("offsets") != heads.names:
            raise ValueError(f"{where}: offsets {config.get('offsets')} do not agree with {fields}")
        return heads

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the exported folder, whole or not at all, `card` and `recipe` included."""
        tensors = {k: v.detach().to("cpu").contiguous() for k, v in self.state_dict().items()}
        empty = [k for k, v in tensors.items() if not v.numel()]
        if empty:
            raise ValueError(f"tensors {empty[:3]} are empty; gather the shards of all ranks before exporting")
        with atomic_folder(folder) as temporary:
            # Through Python's own write: safetensors reports a full disk as an error of no particular kind.
            (temporary / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
            write_json(temporary / "config.json", self.describe())
            write_text(temporary / "README.md", self.card)
            if self.recipe:
                write_text(temporary / "recipe.yaml", self.recipe)

    def _fields(self) -> dict[str, object]:
        plain = HeadsConfig()
        chosen = [o for o in self.options if getattr(self.config, o) != getattr(plain, o)]
        return {field: getattr(self.config, field) for field in [*self.fields, *chosen]}

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

        With `backbone`, checks that they belong to it and takes over its device and dtype. Raises ValueError for a
        missing folder, an unknown format, weights cut short or with a missing, unknown or misshapen tensor.
        """
        folder = _folder(folder_or_id, revision, local_files_only)
        heads = cls.from_description(read_json(folder / "config.json"), f"{folder}/config.json")
        if backbone is not None:
            heads.check(backbone)
        try:
            tensors = load_file(folder / WEIGHTS)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder}/model.safetensors cannot be read ({error}); it may be cut short") from None
        wanted = {k: tuple(v.shape) for k, v in heads.state_dict().items()}
        found = {k: tuple(v.shape) for k, v in tensors.items()}
        if wanted != found:
            missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
            shapes = sorted(k for k in wanted.keys() & found.keys() if wanted[k] != found[k])
            raise ValueError(f"{folder}/model.safetensors: missing {missing}, unknown {extra}, misshapen {shapes}")
        heads.load_state_dict(tensors, assign=True)
        for name, file in (("card", "README.md"), ("recipe", "recipe.yaml")):
            if (folder / file).is_file():
                setattr(heads, name, (folder / file).read_text(encoding="utf-8"))
        if backbone is not None:
            heads = heads.to(backbone.device, backbone.dtype)
        return heads.requires_grad_(False).eval()

    def push_to_hub(self, repo_id: str, private: bool = False, token: str | None = None) -> str:
        """Upload the exported folder, card and recipe included, to the Hugging Face hub; returns the address."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(Path(folder) / "heads")
            return str(api.upload_folder(repo_id=repo_id, folder_path=Path(folder) / "heads"))


class OffsetHeads(MTPHeads):
    """One head per offset: independent (the paper's form), or with a trunk that all share.

    Shared: t = W0 z + SwiGLU(RMSNorm(W0 z)), and each offset adds M GLU(C RMSNorm(t)) of `rank` units of its own.
    """

    kind = "offsets"
    fields = ("right", "down", "width", "input")
    options = ("shared", "project_rank", "rank")

    def __init__(self, config: HeadsConfig, trained_on: TrainedOn) -> None:
        super().__init__()
        config.check()
        self.config, self.trained_on = config, trained_on
        D = trained_on.hidden_size
        inputs = D * len(config.input.split("+"))
        head = partial(OffsetHead, inputs, D, config.width or D, config.project_rank)
        self.trunk = head() if config.shared else None
        for offset in config.offsets:
            own = OffsetPart(D, config.rank or max(1, D // 4)) if config.shared else head()
            self.add_module(offset_name(offset), own)

    @property
    def offsets(self) -> list[Offset]:
        return self.config.offsets

    @property
    def names(self) -> list[str]:
        return [offset_name(o) for o in self.offsets]

    def train_pairs(self, grid: TokenGrid) -> dict[str, tuple[Tensor, Tensor]]:
        """{offset name: (source, target) positions} of one picture; an offset too long for the grid is left out."""
        pairs = {offset_name(o): grid.pairs(o) for o in self.offsets}
        return {name: pair for name, pair in pairs.items() if len(pair[0])}

    def predict(self, h: Tensor, e: Tensor, name: str) -> Tensor:
        offset = self.offsets[self.names.index(name)]
        source, _ = TokenGrid(*self.trained_on.grid).pairs(offset)
        return self(h[:, source], e[:, source], offset)

    def forward(self, h: Tensor, e: Tensor, offset: Offset) -> Tensor:
        """States and embeddings (..., D) of source cells -> predicted states (..., D) of the cells at `offset`."""
        reads = {"h": h, "e": e.expand_as(h)}
        z = torch.cat([reads[name] for name in self.config.input.split("+")], dim=-1)
        own = getattr(self, offset_name(offset))
        if self.trunk is None:
            return own(z)
        t = self.trunk(z)
        return t + own(t)


def kind_of(name: str) -> type[MTPHeads]:
    """The class of a kind: chain heads are built from this file's parts, so they are imported when asked for."""
    if name == "offsets":
        return OffsetHeads
    from heads.chain import ChainHeads

    return ChainHeads


def new_heads(config: HeadsConfig, backbone: Backbone, seed: int = 0) -> MTPHeads:
    """Untrained heads for a backbone; the same seed gives the same weights.

    Raises ValueError for an offset that leaves the grid everywhere: it could never be trained.
    """
    config.check()
    grid = backbone.grid
    reaches = (("right", config.right, grid.width), ("down", config.down, grid.height))
    for name, reach, cells in reaches if config.kind == "offsets" else ():
        if reach >= cells:
            raise ValueError(f"heads.{name} is {reach}, but the grid has {cells} that way; use at most {cells - 1}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind_of(config.kind)(config, TrainedOn.of(backbone))  # type: ignore[call-arg]


def _folder(place: str | Path, revision: str | None, local_files_only: bool) -> Path:
    if Path(place).is_dir():
        if not (Path(place) / "config.json").is_file():
            raise ValueError(f"{place} holds no exported heads (no config.json)")
        return Path(place)
    hub = HUB_ID.fullmatch(str(place))
    if hub is None:
        raise ValueError(f"heads {str(place)!r} is neither a folder nor a hub id like org/name or org/name@revision")
    try:
        return fetch(hub["id"], revision or hub["revision"], local_files_only, also=["README.md", "recipe.yaml"])
    except ValueError as error:
        raise ValueError(f"heads {error}") from None
