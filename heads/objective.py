"""The objective over a whole batch, in chunks of target positions, so that no (positions, V) tensor outlives a chunk.

p is made once a chunk and serves all heads. Gradients to the predicted states are taken chunk by chunk in the forward
pass and kept, as large as the states; the backward pass only hands them on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftgrid.common.cli import suggest
from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.config import LossConfig
from draftgrid.heads.distributions import (
    at_least_fp32,
    cross_entropy,
    divergence,
    mix_guidance,
    probabilities,
    smooth_l1,
)
from draftgrid.heads.mtp import MTPHeads

Chunk = tuple[slice, slice | Tensor]
"""Which of a head's predictions aim into a chunk, and where in the chunk."""


class Chunks:
    """Target positions 0 .. T - 1 in chunks, and what each head predicts there."""

    def __init__(self, pairs: Mapping[str, tuple[Tensor, Tensor]], positions: int) -> None:
        self.positions = positions
        self.targets = {name: target for name, (_, target) in pairs.items()}
        assert all((t.diff() > 0).all() for t in self.targets.values()), "predictions are ordered by their target"

    def of(self, rows: int, chunk: int, device: torch.device) -> Iterator[tuple[slice, dict[str, Chunk]]]:
        """(positions, {name: part}) with at most `chunk` positions of `rows` pictures together; 0 = all at once."""
        T = self.positions
        size = max(1, chunk // rows) if chunk else T
        for low in range(0, T, size):
            high = min(low + size, T)
            parts: dict[str, Chunk] = {}
            for name, target in self.targets.items():
                a, b = (int(i) for i in torch.searchsorted(target, torch.tensor([low, high])))
                if a < b:
                    first, last = int(target[a]) - low, int(target[b - 1]) - low
                    whole = last - first == b - a - 1  # a slice is a view, an index a copy
                    where = slice(first, last + 1) if whole else (target[a:b] - low).to(device)
                    parts[name] = slice(a, b), where
            yield slice(low, high), parts


class Objective:
    """Mean over the heads, by their weights, of state * Smooth-L1 + tv * (1 - sum of min(p, q)) + ce * ... + kl * ...

    The terms on distributions are means over `guidance`, p and q both mixed from the branches. With target=token the
    first term is the cross-entropy to the true token. Raises ValueError for a weight of a head there is none of.
    """

    def __init__(
        self, backbone: Backbone, heads: MTPHeads, pairs: Mapping[str, tuple[Tensor, Tensor]], config: LossConfig
    ) -> None:
        self.backbone, self.heads, self.config = backbone, heads, config
        self.chunks = Chunks(pairs, backbone.grid.positions)
        self.names = list(pairs)
        for name in config.weights:
            if name not in self.names:
                raise ValueError(
                    f"loss.weights names {name!r}, but no such head is trained. {suggest(name, self.names)}"
                )
        weights = {name: config.weights.get(name, 1.0) for name in self.names}
        total = sum(weights.values())
        if not total:
            raise ValueError(f"loss.weights is {config.weights}: no head has a weight above 0")
        self.weights = {name: weight / total for name, weight in weights.items()}
        self.on_tokens = heads.config.target == "token" and config.state > 0

    def __call__(self, h: Tensor, predicted: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """h (G, B, T, D) as the heads see it, {name: (G, B, N, D) predictions}, tokens (B, T) -> scalar."""
        names = list(predicted)

        def evaluate(states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
            return self._evaluate(h, dict(zip(names, states, strict=True)), tokens)

        return _GradientAhead.apply(evaluate, *predicted.values())

    def own_drafts(self, h: Tensor, e: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
        """tokens (B, T), a share of them replaced by a draw from q of the one head at the first guidance scale.

        What a chain head finds at its left when decoding is such a draft, and not always the token of the picture.
        h (G, B, T, D), e (G B, T, D). Call it without gradients.
        """
        ((name, target),) = self.chunks.targets.items()
        B = len(tokens)
        predicted = self.heads.predict(h.flatten(0, 1), e, name).unflatten(0, (-1, B))
        found = tokens.clone()
        for here, parts in self.chunks.of(B, self.config.chunk, h.device):
            for of, at in parts.values():
                logits = self.heads.logits(self.backbone, predicted[:, :, of].to(h.dtype))
                q = probabilities(logits, self.config.guidance[0], top_k=self.config.top_k)
                drawn = q.flatten(0, 1).multinomial(1, generator=generator).view(q.shape[:2])
                own = torch.rand(drawn.shape, generator=generator, device=h.device) < self.config.own_drafts
                old = tokens[:, here][:, at]
                found[:, target[of].to(h.device)] = torch.where(own, drawn, old)
        return found

    def targets(self, h: Tensor) -> list[Tensor]:
        """h (G, B, K, D) -> p (B, K, V) at each guidance scale."""
        logits = self.heads.logits(self.backbone, h)
        return [probabilities(logits, g, top_k=self.config.top_k) for g in self.config.guidance]

    def _evaluate(self, h: Tensor, predicted: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        gradients = {name: torch.zeros_like(x) for name, x in predicted.items()}
        total = at_least_fp32(h.new_zeros(()))
        B = h.shape[1]
        for here, parts in self.chunks.of(B, self.config.chunk, h.device):
            p = self.targets(h[:, :, here]) if self.config.on_distributions else []
            true, token = h[:, :, here], tokens[:, here]
            for name, (of, at) in parts.items():
                if self.weights[name]:
                    x = predicted[name][:, :, of]
                    value, gradient = self._terms(x, true[:, :, at], [a[:, at] for a in p], token[:, at])
                    share = self.weights[name] / (B * predicted[name].shape[2])
                    total += value * share
                    gradients[name][:, :, of] = gradient * share
            del p
        return total, list(gradients.values())

    def _terms(self, x: Tensor, true: Tensor, p: Sequence[Tensor], token: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over B and K of one head's terms, and its gradient to the predictions x (G, B, K, D)."""
        c = self.config
        G, _, _, D = x.shape
        value, gradient = at_least_fp32(x.new_zeros(())), torch.zeros_like(at_least_fp32(x))
        if c.state and not self.on_tokens:
            value += c.state / (G * D) * smooth_l1(x, true, "sum")
            gradient += c.state / (G * D) * (at_least_fp32(x) - at_least_fp32(true)).clamp_(-1, 1)
        if not p and not self.on_tokens:
            return value, gradient
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            logits = self.heads.logits(self.backbone, leaf.to(true.dtype))
        to_logits = torch.zeros_like(at_least_fp32(logits.detach()))
        for g, target in zip(c.guidance, p, strict=len(p) > 0):
            z = mix_guidance(logits.detach(), g)
            each, slope = divergence(z, target, c.tv, c.ce, c.kl, c.top_k)
            value += each.sum() / len(p)
            to_logits[0].add_(slope, alpha=(g if G == 2 else 1) / len(p))
            if G == 2:
                to_logits[1].add_(slope, alpha=(1 - g) / len(p))
        if self.on_tokens:
            each, slope = cross_entropy(at_least_fp32(logits.detach()), token.expand(G, -1, -1))
            value += c.state / G * each.sum()
            to_logits.add_(slope, alpha=c.state / G)
        (through,) = torch.autograd.grad(logits, leaf, to_logits.to(logits.dtype))
        return value, gradient + through


class _GradientAhead(torch.autograd.Function):
    """A scalar whose gradients are computed along with it; they are zero where it is not finite."""

    @staticmethod
    def forward(ctx: Any, evaluate: Callable[..., tuple[Tensor, list[Tensor]]], *inputs: Tensor) -> Tensor:
        value, gradients = evaluate(inputs)
        if not value.isfinite():
            gradients = [torch.zeros_like(g) for g in gradients]
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return None, *[gradient * upstream[0].to(gradient.dtype) for gradient in ctx.saved_tensors]
