"""The processes of one run: started by torchrun, joined in one group before anything is read or written.

What only one of them may do (claim a folder, fit a tokenizer) goes through `on_rank_zero`, so that all ranks share its
result or its error. A process alone needs no group.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
STRATEGIES = ("auto", "ddp", "deepspeed_1", "deepspeed_2", "deepspeed_3", "fsdp")
SILENCE = timedelta(minutes=30)
"""A collective that takes longer has lost a rank: all others end with an error."""


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_zero() -> bool:
    """True in the process that prepares files: rank 0, or the only one."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0


def launch(devices: int, nodes: int) -> None:
    """Become `devices` processes of this same command, by torchrun; nothing to do under torchrun or for one process.

    Raises ValueError for several nodes without torchrun: nothing here could start the others.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        if nodes > 1 and world() != nodes * local:
            raise ValueError(
                f"trainer.num_nodes is {nodes}, but torchrun started {world()} processes, {local} on this machine; "
                f"give torchrun --nnodes={nodes}, or leave trainer.num_nodes at 1: under torchrun its own count wins"
            )
        return
    if nodes > 1:
        raise ValueError(
            f"trainer.num_nodes is {nodes}; start torchrun --nnodes={nodes} on each node, as the README shows"
        )
    if devices > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={devices}"]
        command = [*torchrun, "-m", "draftgrid.train", *sys.argv[1:]]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *command])


@contextmanager
def group(gpu: bool) -> Iterator[None]:
    """The process group of this launch, if it has more than one process; destroyed at the end."""
    if world() > 1:
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(_backend(gpu), timeout=SILENCE)
    try:
        yield
        if world() > 1:
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            # References to the group keep its threads alive, and one that runs while Python ends aborts the process.
            gc.collect()


def alone(gpu: bool) -> None:
    """Form a group of one process if there is no group: strategies for several processes need one all the same."""
    if not dist.is_initialized():
        for name in ("RANK", "LOCAL_RANK"):  # DeepSpeed asks for them
            os.environ.setdefault(name, "0")
        dist.init_process_group(_backend(gpu), store=dist.HashStore(), rank=0, world_size=1)


def _backend(gpu: bool) -> str:
    return "cpu:gloo,cuda:nccl" if gpu else "gloo"


def _joined() -> bool:
    return world() > 1 and dist.is_initialized()


def on_rank_zero(call: Callable[[], T]) -> T:
    """Call on rank 0 and give all ranks what it returned. If it raises, the others end silently with exit code 2."""
    if not _joined():
        return call()
    shared: list[Any] = [None, False]
    if dist.get_rank() == 0:
        try:
            shared = [call(), True]
        finally:
            dist.broadcast_object_list(shared, 0)
        return shared[0]
    dist.broadcast_object_list(shared, 0)
    if not shared[1]:
        sys.exit(2)
    return shared[0]


def any_rank(flag: bool) -> bool:
    """True on all ranks if it is on one; for a flag that is no tensor of the model."""
    if not _joined():
        return flag
    found = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


def gather(value: T) -> list[T]:
    """The value of every rank, on every rank."""
    if not _joined():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
