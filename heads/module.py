"""The LightningModules, thin: heads on a frozen backbone, and the demo backbone itself.

They own loss, optimizer and logging and are handed their network. A statistic is a sum and a count, divided last and
over all ranks (torchmetrics.MeanMetric).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from heads.backbones.base import Backbone
from heads.config import LossConfig, OptimConfig
from heads.mtp import MTPHeads
from heads.objective import acceptance, entropy, mix_guidance, smooth_l1

UNCERTAIN = 0.5
"""Nats: positions whose H(p) is at least this are reported apart; the rest is plain background any guess gets right."""


def adamw(parameters: Sequence[nn.Parameter], config: OptimConfig, steps: int) -> dict[str, Any]:
    """Lightning's optimizer dictionary: AdamW, linear warm-up, cosine to `final` of the peak at the last step."""
    decay = [p for p in parameters if p.ndim >= 2]
    rest = [p for p in parameters if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, config.beta2))

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        progress = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
        return config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * progress))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def guided_name(guidance: float) -> str:
    """'acceptance_guidance3'; a module name may hold no dot."""
    return f"acceptance_guidance{guidance:g}".replace(".", "_")


class _Module(L.LightningModule):
    """Means by name, logged when validation ends. A mean nobody updated is not reported."""

    optim: OptimConfig

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.ModuleDict()
        self.figures: dict[str, float] = {}
        """The last validation's figures."""

    def add(self, name: str, values: Tensor) -> None:
        metric = self.means[name]
        assert isinstance(metric, MeanMetric)
        metric.update(values.float().mean(), values.numel())

    def report(self) -> dict[str, float]:
        found = {}
        for name, metric in self.means.items():
            assert isinstance(metric, MeanMetric)
            # Every rank computes, even one that saw nothing: compute() is a collective.
            if metric.update_called or self.trainer.world_size > 1:
                value = float(metric.compute())
                if not math.isnan(value):
                    found[name] = value
            metric.reset()
        return found

    def on_validation_epoch_end(self) -> None:
        self.figures = self.report()
        for name, value in self.figures.items():
            self.log(name, value)

    def parameters_to_train(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters_to_train(), self.optim, self.trainer.max_steps)


class HeadsModule(_Module):
    """Trains heads on the states of a frozen backbone with Smooth-L1; measures what decoding will see."""

    def __init__(
        self,
        backbone: Backbone,
        heads: MTPHeads,
        optim: OptimConfig,
        tables: Mapping[str, Tensor] | None = None,
        guidance: Sequence[float] = (1.0,),
        loss: LossConfig | None = None,
    ) -> None:
        """`tables` holds a (V, V) count table per head's name: the floor of its acceptance."""
        super().__init__()
        self.backbone = backbone.freeze()
        self.heads, self.optim, self.terms = heads, optim, loss or LossConfig()
        self.tables = dict(tables or {})
        self.guidance = list(guidance)
        self.pairs = heads.train_pairs(backbone.grid)
        kinds = ["smooth_l1", "cosine", "acceptance", "acceptance_uncertain", "acceptance_table", "top1"]
        names = [f"{kind}/{offset}" for kind in kinds for offset in self.pairs]
        names += [f"{guided_name(g)}/{offset}" for g in self.guidance if g != 1 for offset in self.pairs]
        self.means = nn.ModuleDict({n: MeanMetric() for n in [*names, "backbone_nll", "backbone_entropy"]})
        self.broken = 0
        """Samples of this rank that could not be read and were skipped."""
        self.samples: Counter[str] = Counter()
        """Samples this rank was trained on, by the shard set they come from."""
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Heads only: the backbone never enters a checkpoint."""
        return {k: v for k, v in super().state_dict(*args, **kwargs).items() if k.startswith("heads.")}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counts"] = {"broken": self.broken, "samples": dict(self.samples)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        counts = checkpoint["counts"]
        self.broken, self.samples = counts["broken"], Counter(counts["samples"])

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Strict about the heads, whatever Lightning asks: a missing or unknown key is an error that names it."""
        mine = {k.removeprefix("heads."): v for k, v in state_dict.items()}
        return self.heads.load_state_dict(mine, strict=True, assign=assign)

    def predict(self, h: Tensor, e: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """States (B, T, D) of a picture -> (predicted, true) states (B, N, D) of one head's targets."""
        target = self.pairs[name][1].to(h.device)
        return self.heads.predict(h, e, name), h[:, target]

    def states(self, batch: Any) -> tuple[Tensor, Tensor]:
        """What the loss is taken of: states (G, B, H, W, D), G = 2 where it asks for guidance, embeddings (B, H, W, D).

        The conditional branch comes first, then the unconditional one.
        """
        tokens, captions = batch.tokens, list(batch.captions)
        if not self.terms.guided:
            h, e = self.backbone.states(tokens, captions)
            return h[None], e
        h, e = self.backbone.states(tokens.repeat(2, 1, 1), captions + [None] * len(captions))
        return h.unflatten(0, (2, -1)), e[: len(captions)]

    def loss(self, h: Tensor, e: Tensor) -> Tensor:
        """(G, B, H, W, D) and (B, H, W, D) -> mean over heads of Smooth-L1 + tv * (1 - sum of min(p, q)).

        The second term is the mean over `loss.guidance`, p and q both mixed from the branches.
        """
        h, e = h.flatten(2, 3), e.flatten(1, 2)
        terms = []
        if self.terms.tv:
            with torch.no_grad():
                logits = self.backbone.logits(h)
                p = [mix_guidance(logits, g).softmax(-1) for g in self.terms.guidance]
        for name, (_, target) in self.pairs.items():
            target = target.to(h.device)
            predicted = torch.stack([self.heads.predict(branch, e, name) for branch in h])
            terms.append(smooth_l1(predicted, h[:, :, target]))
            if self.terms.tv:
                logits = self.backbone.logits(predicted.to(h.dtype))
                q = [mix_guidance(logits, g).softmax(-1) for g in self.terms.guidance]
                rejected = [1 - acceptance(a[:, target], b).mean() for a, b in zip(p, q, strict=True)]
                terms[-1] = terms[-1] + self.terms.tv * torch.stack(rejected).mean()
        return torch.stack(terms).mean()

    def training_step(self, batch: Any, _: int) -> Tensor:
        with torch.no_grad():
            h, e = self.states(batch)
        loss = self.loss(h, e)
        self.log("loss", loss, prog_bar=True)
        self.broken += batch.broken
        self.samples.update(batch.origins)
        for origin, seen in self.samples.items():
            self.log(f"samples/{origin}", float(seen * self.trainer.world_size))
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.broken += batch.broken
        tokens = batch.tokens.flatten(1)
        h, e = (s.flatten(1, 2) for s in self.backbone.states(batch.tokens, batch.captions))
        p = self.backbone.logits(h).float().softmax(-1)
        self.add("backbone_nll", -p.gather(-1, tokens[..., None]).clamp_min(1e-30).log())
        self.add("backbone_entropy", entropy(p))
        uncertain = entropy(p) >= UNCERTAIN
        for name, (source, target) in self.pairs.items():
            predicted, true = self.predict(h, e, name)
            q = self.backbone.logits(predicted.to(h.dtype)).float().softmax(-1)
            accepted = acceptance(p[:, target], q)
            self.add(f"smooth_l1/{name}", smooth_l1(predicted, true, "none").mean(-1))
            self.add(f"cosine/{name}", nn.functional.cosine_similarity(predicted.float(), true.float(), dim=-1))
            self.add(f"acceptance/{name}", accepted)
            if (unsure := uncertain[:, target]).any():
                self.add(f"acceptance_uncertain/{name}", accepted[unsure])
            self.add(f"top1/{name}", (q.argmax(-1) == p[:, target].argmax(-1)).float())
            if name in self.tables:
                floor = self.tables[name].to(p.device)[tokens[:, source]]
                self.add(f"acceptance_table/{name}", acceptance(p[:, target], floor))
        for g in self.guidance:
            if g != 1:
                self._guided(batch, h, e, g)

    def _guided(self, batch: Any, h: Tensor, e: Tensor, guidance: float) -> None:
        """Acceptance where p and q are both mixed from the conditional and the unconditional branch."""
        free, _ = self.backbone.states(batch.tokens, [None] * len(batch.captions))
        branches = torch.stack([h, free.flatten(1, 2)])
        p = mix_guidance(self.backbone.logits(branches), guidance).softmax(-1)
        for name, (_, target) in self.pairs.items():
            predicted = torch.stack([self.predict(b, e, name)[0] for b in branches]).to(h.dtype)
            q = mix_guidance(self.backbone.logits(predicted), guidance).softmax(-1)
            self.add(f"{guided_name(guidance)}/{name}", acceptance(p[:, target], q))


class BackboneModule(_Module):
    """Trains a backbone on image tokens: cross-entropy over the image vocabulary, structure tokens being forced."""

    def __init__(self, backbone: Backbone, optim: OptimConfig) -> None:
        super().__init__()
        self.backbone, self.optim = backbone, optim
        self.means = nn.ModuleDict({"backbone_nll": MeanMetric()})

    def nll(self, batch: Any) -> Tensor:
        """(B, T) nats of every image token."""
        h, _ = self.backbone.states(batch.tokens, batch.captions)
        logits = self.backbone.logits(h).flatten(1, 2).float()
        return nn.functional.cross_entropy(logits.transpose(1, 2), batch.tokens.flatten(1), reduction="none")

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.nll(batch).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.add("backbone_nll", self.nll(batch))
