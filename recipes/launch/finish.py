"""A run that is ready to be fitted, and what it ends with: figures, the exported folder, and pictures drawn with it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch

from draftgrid.common.timing import timed
from draftgrid.data.module import TokenDataModule
from draftgrid.heads.tokenizers import ImageTokenizer
from draftgrid.recipes.launch.schema import TrainConfig
from draftgrid.recipes.launch.trainer import StepTimer
from draftgrid.training import ranks
from draftgrid.training.checkpoint import BEST, read_checkpoint
from draftgrid.training.export import export
from draftgrid.training.module import BackboneModule, HeadsModule, adamw
from draftgrid.training.run_folder import RunFolder


@dataclass
class Job:
    config: TrainConfig
    folder: RunFolder
    tokenizer: ImageTokenizer
    data: TokenDataModule
    module: HeadsModule | BackboneModule
    trainer: L.Trainer
    timer: StepTimer

    def finish(self) -> None:
        """After fit: export, measure and tell; on rank 0. Called on all ranks."""
        if isinstance(self.module, BackboneModule):
            if self.trainer.is_global_zero:
                self.finish_backbone(self.module)
            return
        broken, skipped = (sum(ranks.gather(n)) for n in (self.module.broken, self.module.skipped))
        if self.trainer.is_global_zero:
            self.finish_heads(self.module, broken, skipped)

    def finish_backbone(self, module: BackboneModule) -> None:
        best = read_checkpoint(self.folder.checkpoints / BEST)
        missing = module.load_state_dict(best["state_dict"], strict=False).missing_keys
        assert not [name for name in missing if name in dict(module.named_parameters())], missing
        out = self.folder.path / "backbone"
        module.backbone.to(torch.bfloat16).save_pretrained(out)  # type: ignore[operator]
        self.tokenizer.save_pretrained(out / "image_tokenizer")
        nll, step = best["figures"]["backbone_nll"], best["global_step"]
        seconds = {"total": self.timer.total(), "per_step": self.timer.median()}
        self.folder.finish({"backbone_nll": nll, "best_step": step, "seconds": seconds})
        print(f"held-out NLL {nll:.3f} nats a token at step {step}; backbone saved: {out}")

    def finish_heads(self, module: HeadsModule, broken: int, skipped: int) -> None:
        metrics = self.figures(module) | {"broken_samples": broken, "skipped_samples": skipped}
        last = self.folder.last_checkpoint()
        assert last is not None
        out = export(last, self.folder.path / "heads")
        if self.config.sheet.images:
            self.sheet(out)
        metrics["seconds"]["total"] = self.timer.total()
        self.folder.finish(metrics)
        if broken:
            print(f"warning: {broken} broken samples were skipped; draftgrid verify dir=... names them")
        if skipped:
            print(f"warning: {skipped} samples gave no finite states or loss and were skipped")
        print(self.how_to(out))

    def figures(self, module: HeadsModule) -> dict[str, Any]:
        """Validation figures as {kind: {offset: value}}, and seconds: a step in the run, and its parts timed alone."""
        found: dict[str, Any] = {}
        for name, value in module.figures.items():
            kind, _, offset = name.partition("/")
            if offset:
                found.setdefault(kind, {})[offset] = value
            else:
                found[kind] = value
        sharded = self.config.trainer.strategy in ("deepspeed_3", "fsdp")  # no rank holds the weights to time alone
        forward, step = (None, None) if sharded else self.step_parts(module)
        seconds = {"total": None, "per_step": self.timer.median(), "frozen_forward": forward, "heads_step": step}
        return found | {"seconds": seconds}

    def step_parts(self, module: HeadsModule) -> tuple[float, float]:
        """Median seconds of the frozen forward, and of the heads' forward, backward and optimizer step, on one batch.

        Same batch size and precision as the run; on a copy of the heads, so that nothing trained is touched.
        """
        device = self.trainer.strategy.root_device  # fit has moved the module back to the CPU
        module.to(device)
        batch = next(iter(self.data.train_dataloader())).to(device)
        copied = HeadsModule(module.backbone, copy.deepcopy(module.heads).train(), module.optim, loss=module.terms)
        optimizer = adamw(copied, module.optim, 100)["optimizer"]
        context: Callable[[], Any] = self.trainer.precision_plugin.forward_context

        def frozen() -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad(), context():
                return module.states(batch)

        h, e = frozen()

        def heads_step() -> None:
            with context():
                loss = copied.loss(h, e, batch.tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(copied.heads.parameters(), self.config.trainer.clip or float("inf"))
            optimizer.step()
            optimizer.zero_grad()

        heads_step()  # the first call allocates
        forward, step = (median(timed(call, device) for _ in range(5)) for call in (frozen, heads_step))
        return forward, step

    def sheet(self, heads: Path) -> None:
        """Draw held-out prompts with AR and the decoder of these heads; writes sheet.png, speed.png and bench.json."""
        from draftgrid.eval.bench import bench, table
        from draftgrid.eval.measure import Plan
        from draftgrid.eval.setup import EvalConfig, load, parse_decoders

        config, s, b = self.config, self.config.sheet, self.config.backbone
        same = {name: getattr(b, name) for name in ("local_files_only", "adapter", "grid", "tokenizer")}
        drawn: dict[str, Any] = {"prompts": s.prompts, "images": s.images, **vars(config.decoding)}
        settings = EvalConfig(str(heads), b.place, seed=config.seed, **same, **drawn)
        offsets = f"ssd:rounds={s.rounds}" if config.heads.down else "mtp1d"
        decoders = parse_decoders(f"ar,{'ssd_coupled' if config.heads.kind == 'chain' else offsets}")
        plan = Plan(repeats=1, seed=config.seed, warm_up=not config.smoke)
        print(table(bench(load(settings, decoders), decoders, self.folder.path, plan, heads=str(heads))))

    def how_to(self, heads: Path) -> str:
        """Where everything is, and the Python that loads the heads."""
        b, pictures = self.config.backbone, f"pictures: {self.folder.path / 'sheet.png'}\n"
        adapter = f', adapter="{b.adapter}"' if ":" in b.adapter else ""
        return f"""
heads:    {heads}
figures:  {self.folder.path / "metrics.json"}
{pictures if self.config.sheet.images else ""}
    from draftgrid import MTPHeads, load_backbone
    backbone = load_backbone("{b.place}"{adapter})
    heads = MTPHeads.from_pretrained("{heads}", backbone)
"""
