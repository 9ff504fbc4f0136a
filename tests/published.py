"""What the writers of tiny checkpoints in published layouts share: JSON files, and weights in one file or several."""

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def save(folder: Path, state: dict[str, Tensor], shards: int = 1) -> None:
    """model.safetensors, or model-0000K-of-0000N.safetensors with their index; whatever was there is replaced."""
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = {n: f"model-{i * shards // len(state) + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(state)}
    for file in sorted(set(files.values())):
        save_file({n: t for n, t in state.items() if files[n] == file}, folder / file, metadata={"format": "pt"})
    total = sum(v.numel() * v.element_size() for v in state.values())
    write(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})
