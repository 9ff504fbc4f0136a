"""How much memory the objective takes at a full vocabulary, above what is held before it; run it once per `chunk`.

    draftgrid loss-memory chunk=0
    draftgrid loss-memory chunk=128

Two heads of random states, both guidance branches, on a random LM head. Prints megabytes and the loss. Peaks of one
process hide one another, so a process measures once. On a CPU it needs Linux's /proc.
"""

from collections.abc import Callable
from dataclasses import dataclass
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


def peak_above(call: Callable[[], object], device: torch.device) -> int:
    """Most bytes held at a time during `call`, above the level before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        level = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - level

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")
    level = status("VmRSS")
    call()
    return status("VmHWM") - level


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
        name: (h[:, :, target] + 0.3 * torch.randn(2, 1, len(target), D, device=device)).requires_grad_()
        for name, (_, target) in pairs.items()
    }
    tokens = torch.zeros(1, grid.positions, dtype=torch.long, device=device)

    def loss() -> Tensor:
        value = objective(h, predicted, tokens)
        value.backward()
        return value.detach()

    objective.chunks.positions = 2  # first calls allocate buffers of their own
    loss()
    objective.chunks.positions = grid.positions
    losses: list[Tensor] = []
    peak = peak_above(lambda: losses.append(loss()), device)
    print(f"chunk {config.chunk}: {peak / 1e6:.1f} MB above the level before the loss; loss {losses[0]:.7f}")


if __name__ == "__main__":
    main(run, MemoryConfig, __doc__)
