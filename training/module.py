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
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.config import LossConfig, OptimConfig
from draftgrid.heads.distributions import acceptance, entropy, probabilities, smooth_l1
from draftgrid.heads.mtp import MTPHeads
from draftgrid.heads.objective import Objective
from draftgrid.heads.prompts import unconditional_prompts

UNCERTAIN = 0.5
"""Nats: positions whose H(p) is at least this are reported apart; the rest is plain background any guess gets right."""


def adamw(module: nn.Module, config: OptimConfig, steps: int) -> dict[str, Any]:
    """Lightning's optimizer dictionary: AdamW, linear warm-up, cosine to `final` of the peak at the last step."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, config.beta2))

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        progress = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
        return config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * progress))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def guided_name(guidance: float, top_k: int = 0) -> str:
    """'acceptance_guidance3', 'acceptance_guidance3_top2048'; a module name may hold no dot."""
    return f"acceptance_guidance{guidance:g}".replace(".", "_") + (f"_top{top_k}" if top_k else "")


class _Module(L.LightningModule):
    """Means by name, logged when validation ends; a mean that nothing was added to is not reported.

    A subclass has `score`, which the best checkpoint has most of, and `parts`, which a strategy may shard one by one.
    """

    def __init__(self, optim: OptimConfig, means: Sequence[str]) -> None:
        super().__init__()
        self.optim = optim
        self.means: Any = nn.ModuleDict({name: MeanMetric() for name in means})
        self.figures: dict[str, float] = {}
        """The last validation's figures."""
        self.origin: dict[str, Any] = {}
        """Where the weights come from, as an export tells it; written into every checkpoint."""

    def add(self, name: str, values: Tensor) -> None:
        self.means[name].update(values.float().mean(), values.numel())

    def report(self) -> dict[str, float]:
        found = {}
        for name, metric in self.means.items():
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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"figures": self.figures, "origin": self.origin}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.figures = dict(checkpoint["figures"])

    def configure_optimizers(self) -> Any:
        return adamw(self, self.optim, self.trainer.max_steps)


class HeadsModule(_Module):
    """Trains heads on the states of a frozen backbone with Smooth-L1; measures what decoding will see."""

    def __init__(
        self,
        backbone: Backbone,
        heads: MTPHeads,
        optim: OptimConfig,
        *,
        tables: Mapping[str, Tensor] | None = None,
        guidance: Sequence[float] = (1.0,),
        loss: LossConfig | None = None,
        seed: int = 0,
        max_skipped: float = 0.01,
        top_k: int = 0,
    ) -> None:
        """`tables` holds a (V, V) count table per head's name: the floor of its acceptance.

        Validation measures acceptance at each scale of `guidance` with `top_k` (0 = all), as decoding meets it.
        `max_skipped` is the share of samples without finite states or loss that training puts up with. Raises
        ValueError for a loss these heads cannot have.
        """
        pairs, scales = heads.train_pairs(backbone.grid), [g for g in guidance if g != 1 or top_k]
        kinds = ["smooth_l1", "cosine", "acceptance", "acceptance_uncertain", "acceptance_table", "top1"]
        kinds += [guided_name(g, top_k) for g in scales]
        names = [f"{kind}/{offset}" for kind in kinds for offset in pairs]
        super().__init__(optim, [*names, "backbone_nll", "backbone_entropy"])
        self.pairs, self.scales, self.top_k = pairs, scales, top_k
        """`scales`: guidance scales measured apart from the plain acceptance, with `top_k`."""
        self.backbone, self.heads, self.terms = backbone.freeze(), heads, loss or LossConfig()
        self.tables = dict(tables or {})
        self.seed = seed
        """Of the drafts that the loss draws from the heads."""
        self.objective = Objective(self.backbone, heads, self.pairs, self.terms)
        if self.terms.own_drafts and not heads.reads_left:
            raise ValueError(f"loss.own_drafts is {self.terms.own_drafts}, but these heads read no left token; use 0")
        self.broken = 0
        """Samples of this rank that could not be read and were skipped."""
        self.skipped, self.max_skipped = 0, max_skipped
        """Samples of this rank that gave no finite states or loss and were left out."""
        self.samples: Counter[str] = Counter()
        """Samples this rank was trained on, by the shard set they come from."""

    def score(self) -> float | None:
        """Mean acceptance of the heads; None before the first validation."""
        found = [v for k, v in self.figures.items() if k.startswith("acceptance/")]
        return sum(found) / len(found) if found else None

    def parts(self) -> list[nn.Module]:
        return [*self.backbone.layers, *self.heads.children()]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["counts"] = {"broken": self.broken, "skipped": self.skipped, "samples": dict(self.samples)}
        checkpoint["heads"] = self.heads.describe()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        counts = checkpoint["counts"]
        self.broken, self.skipped, self.samples = counts["broken"], counts["skipped"], Counter(counts["samples"])

    def states(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss's inputs: states (G, B, H, W, D), G = 2 where it asks for guidance, and embeddings (B, H, W, D).

        States are as the heads read them; the conditional branch comes first, then the unconditional one.
        """
        tokens, captions = batch.tokens, list(batch.captions)
        if not self.terms.guided:
            h, e = self.backbone.states(tokens, captions)
            return self.heads.states(self.backbone, h)[None], e
        h, e = self.backbone.states(tokens.repeat(2, 1, 1), captions + unconditional_prompts(captions))
        return self.heads.states(self.backbone, h).unflatten(0, (2, -1)), e[: len(captions)]

    def loss(self, h: Tensor, e: Tensor, tokens: Tensor, step: Sequence[int] = ()) -> Tensor:
        """(G, B, H, W, D), (B, H, W, D), (B, H, W) -> the objective (heads.objective) as a scalar.

        `step` are whole numbers that tell this batch from all others, for what is drawn.
        """
        G = len(h)
        h, e, tokens = h.flatten(2, 3), e.flatten(1, 2), tokens.flatten(1)
        states, embeds = h.flatten(0, 1), e.repeat(G, 1, 1)
        generator, left = self.generator(step, h.device), None
        if self.terms.own_drafts:
            with torch.no_grad():
                drafted = self.objective.own_drafts(h, embeds, tokens, generator)
                left = self.backbone.embed(drafted).repeat(G, 1, 1)
        more = self.heads.training_inputs(G, len(tokens), generator, left)
        predicted = {}
        for name in self.pairs:
            if self.terms.recompute:
                x = checkpoint(self.heads.predict, states, embeds, name, *more, use_reentrant=False)
            else:
                x = self.heads.predict(states, embeds, name, *more)
            predicted[name] = x.unflatten(0, (G, -1))
        return self.objective(h, predicted, tokens)

    def generator(self, step: Sequence[int], device: torch.device) -> torch.Generator:
        """Random numbers that depend on the seed and on `step` alone, so that a resumed run repeats them."""
        mixed = 0
        for number in (self.seed, *step):
            mixed = (mixed * 1_000_003 + number + 1) % 2**63
        return torch.Generator(device).manual_seed(mixed)

    def training_step(self, batch: Any, index: int) -> Tensor:
        with torch.no_grad():
            h, e = self.states(batch)
            good = h.isfinite().flatten(2).all(-1).all(0) & e.isfinite().flatten(1).all(-1)
        tokens, weight = batch.tokens, 1.0
        if not good.all():
            self.skip(len(good) - int(good.sum()), batch)
            if good.any():
                h, e, tokens = h[:, good], e[good], tokens[good]
            else:  # the heads are run all the same: other ranks may be waiting for their weights
                h, e, weight = torch.zeros_like(h), torch.zeros_like(e), 0.0
        trainer = self.trainer
        step = (trainer.global_step, index % trainer.accumulate_grad_batches, trainer.global_rank)
        loss = self.loss(h, e, tokens, step) * weight
        if not loss.isfinite():  # the objective has left its gradient at zero
            self.skip(len(tokens), batch)
            loss = loss.nan_to_num(0.0, 0.0, 0.0)
        self.log("loss", loss, prog_bar=True, sync_dist=trainer.world_size > 1)
        self.log("skipped", float(self.skipped))
        self.broken += batch.broken
        self.samples.update(batch.origins)
        for origin, seen in self.samples.items():
            self.log(f"samples/{origin}", float(seen * self.trainer.world_size))
        return loss

    def skip(self, samples: int, batch: Any) -> None:
        """Count samples that are left out. Raises ValueError, naming the step, if they are too many."""
        self.skipped += samples
        seen = sum(self.samples.values()) + len(batch.tokens)
        if self.skipped > max(len(batch.tokens), self.max_skipped * seen):
            raise ValueError(
                f"step {self.trainer.global_step}: {self.skipped} of {seen} samples gave no finite states or loss, "
                f"more than trainer.max_skipped={self.max_skipped:g} allows; last among {', '.join(batch.keys[:4])}. "
                "Lower optim.lr, set trainer.clip, or use a precision of more range"
            )

    def validation_step(self, batch: Any, _: int) -> None:
        self.broken += batch.broken
        tokens = batch.tokens.flatten(1)
        states, e = (s.flatten(1, 2) for s in self.backbone.states(batch.tokens, batch.captions))
        branches = [states]
        if self.scales:
            branches.append(self.backbone.states(batch.tokens, unconditional_prompts(batch.captions))[0].flatten(1, 2))
        h = self.heads.states(self.backbone, torch.stack(branches))
        predicted = {n: torch.stack([self.heads.predict(x, e, n) for x in h]).to(h.dtype) for n in self.pairs}
        for name, x in predicted.items():
            true = h[0][:, self.pairs[name][1].to(h.device)]
            self.add(f"smooth_l1/{name}", smooth_l1(x[0], true, "none").mean(-1))
            self.add(f"cosine/{name}", nn.functional.cosine_similarity(x[0].float(), true.float(), dim=-1))
        for here, parts in self.objective.chunks.of(len(tokens), self.terms.chunk, h.device):
            logits = self.heads.logits(self.backbone, h[:, :, here])
            p = probabilities(logits[:1])
            self.add("backbone_nll", -p.gather(-1, tokens[:, here, None]).clamp_min(1e-30).log())
            uncertainty = entropy(p)
            self.add("backbone_entropy", uncertainty)
            for name, (of, at) in parts.items():
                drafted = self.heads.logits(self.backbone, predicted[name][:, :, of])
                q = probabilities(drafted[:1])
                accepted = acceptance(p[:, at], q)
                self.add(f"acceptance/{name}", accepted)
                if (unsure := uncertainty[:, at] >= UNCERTAIN).any():
                    self.add(f"acceptance_uncertain/{name}", accepted[unsure])
                self.add(f"top1/{name}", (q.argmax(-1) == p[:, at].argmax(-1)).float())
                if name in self.tables:
                    source = self.pairs[name][0][of].to(h.device)
                    floor = self.tables[name].to(p.device)[tokens[:, source]]
                    self.add(f"acceptance_table/{name}", acceptance(p[:, at], floor))
                for g in self.scales:
                    both = (probabilities(x, g, top_k=self.top_k) for x in (logits[:, :, at], drafted))
                    self.add(f"{guided_name(g, self.top_k)}/{name}", acceptance(*both))


class BackboneModule(_Module):
    """Trains a backbone on image tokens: cross-entropy over the image vocabulary, structure tokens being forced."""

    def __init__(self, backbone: Backbone, optim: OptimConfig) -> None:
        super().__init__(optim, ["backbone_nll"])
        self.backbone = backbone

    def score(self) -> float | None:
        return -self.figures["backbone_nll"] if self.figures else None

    def parts(self) -> list[nn.Module]:
        return list(self.backbone.layers)

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
