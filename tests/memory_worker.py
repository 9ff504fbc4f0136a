"""Started by torchrun in tests/test_plan.py: what two ranks really hold, by strategy, against plan/memory.py."""

import sys
from collections.abc import Iterable

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from draftgrid.recipes.plan import memory
from draftgrid.recipes.plan.memory import Tensors, held
from tests.measured import measured


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(*[nn.Linear(29, 29) for _ in range(3)]).requires_grad_(False)
        self.embedding = nn.Linear(29, 29, bias=False).requires_grad_(False)
        self.parts = nn.Sequential(nn.Linear(29, 15), nn.Linear(15, 13, bias=False), nn.LayerNorm(13))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.frozen(self.embedding(x))
        return self.parts(x).float().pow(2).mean()

    @property
    def tensors(self) -> Tensors:
        def sizes(module: nn.Module) -> list[tuple[int, ...]]:
            return [tuple(p.shape) for p in module.parameters()]

        return Tensors([sizes(x) for x in self.frozen], sizes(self.embedding), [sizes(x) for x in self.parts])

    def adam(self) -> torch.optim.AdamW:
        trained = list(self.parts.parameters())
        return torch.optim.AdamW(
            [{"params": [p for p in trained if p.ndim >= 2]}, {"params": [p for p in trained if p.ndim < 2]}]
        )


def compare(name: str, found: dict[str, int], foretold: memory.Held, items: Iterable[str]) -> None:
    """On rank 0, which the arithmetic is of: where a tensor does not divide, it has the longer part."""
    if dist.get_rank() == 0:
        for item in items:
            assert found[item] == getattr(foretold, item), (name, item, found, foretold)
        print(f"{name} as foretold", flush=True)


def zero(stage: int, precision: str) -> None:
    model = Model()
    tensors = model.tensors
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision != "32-true"},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": 10_000,
            "stage3_param_persistence_threshold": 0,
        },
    }
    engine, outer, _, _ = deepspeed.initialize(model=model, optimizer=model.adam(), config=settings)
    engine.backward(engine(torch.randn(4, 29, dtype=next(model.parameters()).dtype)))
    kept = [g for group in outer.averaged_gradients.values() if group is not None for g in group]
    gradients = sum(g.numel() * g.element_size() for g in kept)
    engine.step()
    shards = outer.fp32_partitioned_groups_flat if stage == 3 else outer.single_partition_of_fp32_groups
    found = measured(model, outer.optimizer, shards) | {"gradients": gradients}
    items = ["backbone", "heads", "master", "moments"] + ["gradients"] * (stage > 1)
    compare(f"deepspeed_{stage} {precision}", found, held(tensors, f"deepspeed_{stage}", precision, 2), items)


def fsdp() -> None:
    model = Model()
    tensors, mesh = model.tensors, init_device_mesh("cpu", (2,))
    for part in [*model.frozen, *model.parts]:
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    optimizer = model.adam()
    model(torch.randn(4, 29)).backward()
    optimizer.step()
    found = measured(model, optimizer)
    compare("fsdp", found, held(tensors, "fsdp", "32-true", 2), found)


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    memory.PERSISTENT = 0  # as in the settings
    deepspeed.init_distributed("gloo")
    for stage, precision in ((1, "bf16-mixed"), (2, "32-true"), (2, "bf16-mixed"), (3, "bf16-true")):
        zero(stage, precision)
    fsdp()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
