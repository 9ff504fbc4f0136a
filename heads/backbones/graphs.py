"""Recorded forwards: one launch in place of a thousand. On a GPU a forward over few tokens waits for the host, not for
the arithmetic; a CUDA graph holds all its kernels with their addresses and is launched as one.

A graph is of one shape, so windows of a fixed size profit as AR does; a shape is recorded when it is met again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from draftgrid.heads.backbones.cache import RaggedCache

Step = Callable[[Tensor, Tensor, Tensor | None, "RaggedCache"], Tensor]
Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""Of a call that always reads and writes the same tensors: (replays it, the tensor its result is in)."""
LIMIT = 256
"""Graphs kept; a decoder whose windows keep changing in length runs what is beyond them unrecorded."""


class CudaRecorder:
    """Records on one side stream into one memory pool: results are copied out before another graph runs."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            call()  # what is made on first use must not be made while recording
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            output = call()
        return graph.replay, output


@dataclass
class Graph:
    inputs: list[Tensor]
    replay: Callable[[], object]
    output: Tensor


class Recorded:
    """A decoding step (`Backbone.step`) that is recorded by shape. The cache must be a static one."""

    def __init__(self, step: Step, record: Record | None = None) -> None:
        self.step, self.record = step, record or CudaRecorder()
        self.cache: RaggedCache | None = None
        self.graphs: dict[tuple[object, ...], Graph] = {}
        self.met: set[tuple[object, ...]] = set()

    def __call__(self, embeds: Tensor, positions: Tensor, mask: Tensor | None, cache: "RaggedCache") -> Tensor:
        assert cache.static and mask is not None
        if cache is not self.cache:  # a graph knows the addresses of one
            self.cache = cache
            self.graphs.clear()
            self.met.clear()
        shape = embeds.shape, cache.seen
        if shape not in self.graphs:
            if shape not in self.met or len(self.graphs) >= LIMIT:
                self.met.add(shape)
                return self.step(embeds, positions, mask, cache)
            self.graphs[shape] = self._graph(embeds, positions, mask, cache)
        graph = self.graphs[shape]
        for held, given in zip(graph.inputs, (embeds, positions, mask), strict=True):
            held.copy_(given)
        graph.replay()
        return graph.output.clone()  # the next replay writes there again

    def _graph(self, embeds: Tensor, positions: Tensor, mask: Tensor, cache: "RaggedCache") -> Graph:
        held = [x.clone() for x in (embeds, positions, mask)]
        cache.window.write = held[1]
        replay, output = self.record(lambda: self.step(held[0], held[1], held[2], cache))
        return Graph(held, replay, output)
