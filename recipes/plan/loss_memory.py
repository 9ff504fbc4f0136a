"""How much memory the objective takes at a full vocabulary, above what is held before it; run it once per `chunk`.

    draftgrid loss-memory chunk=0
    draftgrid loss-memory chunk=128

Two heads of random states, both guidance branches, on a random LM head. Prints megabytes and the loss. Peaks of one
process hide one another, so a process measures once. On a CPU it needs Linux's /proc.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from draftgrid.common.cli import key, main
from draftgrid.heads.backbones.base import ImageHead
from draftgrid.heads.config import HeadsConfig, LossConfig
from draftgrid.heads.grid import TokenGrid
from draftgrid.heads.mtp import TrainedOn
from draftgrid.heads.objective import Objective
from draftgrid.heads.offsets import OffsetHeads


@dataclass
class MemoryConfig:
    chunk: int = key(1024, "positions whose logits are held at once; 0 = all", least=0)
    codes: int = key(32768, "image vocabulary", least=1)
    side: int = key(24, "rows and columns of the one picture", least=2)
    hidden: int = key(64, "hidden size", least=1)
    device: str = key("cpu", "cpu or cuda")


class RandomHead(nn.Module):
    """What the objective asks of a backbone: a grid, and logits."""

    def __init__(self, grid: TokenGrid, codes: int, hidden: int) -> None:
        super().__init__()
        self.grid = grid
        self.image_head = ImageHead(nn.Parameter(torch.randn(codes, hidden) / hidden**0.5), slice(0, codes))
        self.requires_grad_(False)

    def logits(self, h: Tensor) -> Tensor:
        return self.image_head(nn.functional.rms_norm(h, h.shape[-1:]))


class Peak:
    """Bytes above the level at `reset`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.level = torch.cuda.memory_allocated(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self.level = self._status("VmRSS")

    def read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.level
        return self._status("VmHWM") - self.level

    def _status(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def run(config: MemoryConfig) -> None:
    torch.manual_seed(0)
    device, D = torch.device(config.device), config.hidden
    grid = TokenGrid(config.side, config.side)
    backbone = RandomHead(grid, config.codes, D).to(device)
    heads = OffsetHeads(HeadsConfig(right=1, down=1), TrainedOn("random", "", D, (config.side, config.side)))
    pairs = heads.train_pairs(grid)
    terms = LossConfig(tv=1.0, ce=0.1, guidance=[1.0, 3.0], chunk=config.chunk)
    objective = Objective(backbone, heads, pairs, terms)  # type: ignore[arg-type]
    h = torch.randn(2, 1, grid.positions, D, device=device)
    predicted = {
        name: h[:, :, target] + 0.3 * torch.randn(2, 1, len(target), D, device=device)
        for name, (_, target) in pairs.items()
    }
    tokens = torch.zeros(1, grid.positions, dtype=torch.long, device=device)
    for x in predicted.values():
        x.requires_grad_()
    objective.chunks.positions, small = 2, objective.chunks.positions  # first calls allocate buffers of their own
    objective(h, predicted, tokens).backward()
    objective.chunks.positions = small
    peak = Peak(device)
    peak.reset()
    loss = objective(h, predicted, tokens)
    loss.backward()
    print(f"chunk {config.chunk}: {peak.read() / 1e6:.1f} MB above the level before the loss; loss {loss.item():.7f}")


command = partial(main, run, MemoryConfig, __doc__)

if __name__ == "__main__":
    command()
