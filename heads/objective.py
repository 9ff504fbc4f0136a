"""The loss over a batch. Its gradients to the predicted states are computed in the forward pass.

Every term needs logits over the V codes. Autograd would keep those of all positions and all heads until the backward
pass: gigabytes for each head. So the forward pass walks over the target positions in chunks, and for each chunk makes
p (once, for all heads) and a head's logits, takes the loss and, while the logits exist, its gradient to the head's
predictions, and frees both. What stays is one gradient as large as the predictions. Only they lead to weights that are
trained, so the backward pass is that gradient times the gradient of whatever follows the loss.

Dimensions: G guidance branches (conditional, unconditional), B pictures, T positions of a picture, K positions of a
chunk, N predictions of a head and n of them in a chunk, D hidden size, V codes.
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
"""Which n of a head's N predictions have their target in a chunk, and where in 0 .. K - 1 those targets are."""


class Chunks:
    """Target positions 0 .. T - 1 in chunks, and which predictions of each head fall into one.

    `pairs` are {name: (source, target) positions, (N,) each}, of `MTPHeads.train_pairs`.
    """

    def __init__(self, pairs: Mapping[str, tuple[Tensor, Tensor]], positions: int) -> None:
        self.positions = positions
        self.targets = {name: target for name, (_, target) in pairs.items()}
        assert all((t.diff() > 0).all() for t in self.targets.values()), "predictions are ordered by their target"

    def of(self, rows: int, chunk: int, device: torch.device) -> Iterator[tuple[slice, dict[str, Chunk]]]:
        """(K positions, {name: part}): at most `chunk` positions of all `rows` pictures together; 0 = all at once."""
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
                known = suggest(name, self.names)
                raise ValueError(f"loss.weights names {name!r}, but no such head is trained. {known}")
        weights = {name: config.weights.get(name, 1.0) for name in self.names}
        total = sum(weights.values())
        if not total:
            raise ValueError(f"loss.weights is {config.weights}: no head has a weight above 0")
        self.weights = {name: weight / total for name, weight in weights.items()}
        self.on_tokens = heads.config.target == "token" and config.state > 0

    def __call__(self, h: Tensor, predicted: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """h (G, B, T, D) as the heads see it, {name: (G, B, N, D)} predictions, tokens (B, T) -> scalar."""
        names = list(predicted)

        def evaluate(states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
            return self._evaluate(h, dict(zip(names, states, strict=True)), tokens)

        return _GradientAhead.apply(evaluate, *predicted.values())

    def own_drafts(self, h: Tensor, e: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
        """tokens (B, T), a share of them replaced by a draw from q of the one head at the first guidance scale.

        When decoding, a chain head's left token is such a draft and not always the token of the picture.
        h (G, B, T, D), e (G B, T, D). Call it without gradients.
        """
        ((name, target),) = self.chunks.targets.items()
        B = len(tokens)
        predicted = self.heads.predict(h.flatten(0, 1), e, name).unflatten(0, (-1, B))  # (G, B, N, D)
        found = tokens.clone()
        for here, parts in self.chunks.of(B, self.config.chunk, h.device):
            for of, at in parts.values():
                logits = self.heads.logits(self.backbone, predicted[:, :, of].to(h.dtype))  # (G, B, n, V)
                q = probabilities(logits, self.config.guidance[0], top_k=self.config.top_k)  # (B, n, V)
                drawn = q.flatten(0, 1).multinomial(1, generator=generator).view(q.shape[:2])  # (B, n)
                own = torch.rand(drawn.shape, generator=generator, device=h.device) < self.config.own_drafts
                old = tokens[:, here][:, at]
                found[:, target[of].to(h.device)] = torch.where(own, drawn, old)
        return found

    def targets(self, h: Tensor) -> list[Tensor]:
        """h (G, B, K, D) -> p (B, K, V) at each guidance scale."""
        logits = self.heads.logits(self.backbone, h)
        return [probabilities(logits, g, top_k=self.config.top_k) for g in self.config.guidance]

    def _evaluate(self, h: Tensor, predicted: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Arguments as in `__call__` -> the scalar loss, and its gradient (G, B, N, D) to each head's predictions."""
        gradients = {name: torch.zeros_like(x) for name, x in predicted.items()}
        total = at_least_fp32(h.new_zeros(()))
        B = h.shape[1]
        for here, parts in self.chunks.of(B, self.config.chunk, h.device):
            true, token = h[:, :, here], tokens[:, here]  # (G, B, K, D), (B, K)
            p = self.targets(true) if self.config.on_distributions else []  # (B, K, V) at each guidance scale
            for name, (of, at) in parts.items():
                if self.weights[name]:
                    x = predicted[name][:, :, of]  # (G, B, n, D)
                    value, gradient = self._terms(x, true[:, :, at], [a[:, at] for a in p], token[:, at])
                    share = self.weights[name] / (B * predicted[name].shape[2])  # a mean over pictures and predictions
                    total += value * share
                    gradients[name][:, :, of] = gradient * share
            del p  # before the next chunk's is made
        return total, list(gradients.values())

    def _terms(self, x: Tensor, true: Tensor, p: Sequence[Tensor], token: Tensor) -> tuple[Tensor, Tensor]:
        """One head's terms on one chunk, summed over B and n, and their gradient (G, B, n, D) to its predictions x.

        x and the backbone's own states `true` are (G, B, n, D), p is (B, n, V) at each guidance scale, token (B, n).
        The terms on q give their gradient to its logits in closed form; autograd takes it from there through LM head
        and final norm to x.
        """
        c = self.config
        G, _, _, D = x.shape
        value, gradient = at_least_fp32(x.new_zeros(())), torch.zeros_like(at_least_fp32(x))  # (), (G, B, n, D)
        if c.state and not self.on_tokens:
            value += c.state / (G * D) * smooth_l1(x, true, "sum")
            gradient += c.state / (G * D) * (at_least_fp32(x) - at_least_fp32(true)).clamp_(-1, 1)
        if not p and not self.on_tokens:
            return value, gradient
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            logits = self.heads.logits(self.backbone, leaf.to(true.dtype))  # (G, B, n, V)
        to_logits = torch.zeros_like(at_least_fp32(logits.detach()))  # (G, B, n, V), the gradient to the logits
        for g, target in zip(c.guidance, p, strict=len(p) > 0):
            z = mix_guidance(logits.detach(), g)  # (B, n, V)
            each, slope = divergence(z, target, c.tv, c.ce, c.kl, c.top_k)  # (B, n), (B, n, V)
            value += each.sum() / len(p)
            to_logits[0].add_(slope, alpha=(g if G == 2 else 1) / len(p))  # z is g conditional + (1 - g) unconditional
            if G == 2:
                to_logits[1].add_(slope, alpha=(1 - g) / len(p))
        if self.on_tokens:
            each, slope = cross_entropy(at_least_fp32(logits.detach()), token.expand(G, -1, -1))  # (G, B, n), (.., V)
            value += c.state / G * each.sum()
            to_logits.add_(slope, alpha=c.state / G)
        (through,) = torch.autograd.grad(logits, leaf, to_logits.to(logits.dtype))  # (G, B, n, D)
        return value, gradient + through


class _GradientAhead(torch.autograd.Function):
    """A scalar whose gradients come from `evaluate(inputs) -> (value, gradients)`, computed in the forward pass.

    `inputs` are the heads' predictions (G, B, N, D), and each gradient has the shape of its input. All gradients are
    zero where the value is not finite, so that one bad batch does not spoil the heads.
    """

    @staticmethod
    def forward(ctx: Any, evaluate: Callable[..., tuple[Tensor, list[Tensor]]], *inputs: Tensor) -> Tensor:
        value, gradients = evaluate(inputs)
        if not value.isfinite():
            gradients = [torch.zeros_like(g) for g in gradients]
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        """upstream: one scalar, the gradient to the value. `evaluate` itself has no gradient: None."""
        return None, *[gradient * upstream[0].to(gradient.dtype) for gradient in ctx.saved_tensors]
