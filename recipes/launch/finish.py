"""What a heads run ends with: its figures, the exported folder, and pictures drawn with it."""

import copy
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from draftgrid.common.timing import timed
from draftgrid.data.module import TokenDataModule
from draftgrid.recipes.launch.schema import TrainConfig
from draftgrid.training.module import HeadsModule, adamw
from draftgrid.training.run_folder import RunFolder


def figures(module: HeadsModule, data: TokenDataModule, per_step: float | None, config: TrainConfig) -> dict[str, Any]:
    """Validation figures as {kind: {offset: value}}, and seconds: a step in the run, and its parts timed alone."""
    found: dict[str, Any] = {}
    for name, value in module.figures.items():
        kind, _, offset = name.partition("/")
        if offset:
            found.setdefault(kind, {})[offset] = value
        else:
            found[kind] = value
    sharded = config.trainer.strategy in ("deepspeed_3", "fsdp")  # no rank holds the weights to time alone
    forward, step = (None, None) if sharded else step_parts(module, data, config)
    found["seconds"] = {"total": None, "per_step": per_step, "frozen_forward": forward, "heads_step": step}
    return found


def step_parts(
    module: HeadsModule, data: TokenDataModule, config: TrainConfig, repeats: int = 5
) -> tuple[float, float]:
    """Median seconds of the frozen forward, and of the heads' forward, backward and optimizer step, on one batch.

    Same batch size and precision as the run; on a copy of the heads, so that nothing trained is touched.
    """
    device = module.trainer.strategy.root_device  # fit has moved the module back to the CPU
    module.to(device)
    batch = next(iter(data.train_dataloader())).to(device)
    heads = copy.deepcopy(module.heads).train()
    twin = HeadsModule(module.backbone, heads, module.optim, loss=module.terms)
    optimizer = adamw(heads, module.optim, 100)["optimizer"]
    context: Callable[[], Any] = module.trainer.precision_plugin.forward_context

    def frozen() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad(), context():
            return module.states(batch)

    h, e = frozen()

    def heads_step() -> None:
        with context():
            loss = twin.loss(h, e, batch.tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), config.trainer.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()

    return seconds(frozen, repeats, device), seconds(heads_step, repeats, device)


def seconds(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median wall-clock of `repeats` calls after one that warms up."""
    return median([timed(call, device) for _ in range(repeats + 1)][1:])


def sheet(heads: Path, config: TrainConfig, folder: RunFolder) -> None:
    """Draw held-out prompts with AR and the decoder of these heads; writes DIR/sheet.png, speed.png and bench.json."""
    from draftgrid.eval.bench import bench, table
    from draftgrid.eval.measure import Plan
    from draftgrid.eval.setup import EvalConfig, load, parse_decoders

    s = config.sheet
    settings = EvalConfig(
        heads=str(heads),
        backbone=config.backbone.place,
        local_files_only=config.backbone.local_files_only,
        adapter=config.backbone.adapter,
        grid=config.backbone.grid,
        tokenizer=config.backbone.tokenizer,
        prompts=s.prompts,
        images=s.images,
        guidance=config.decoding.guidance,
        top_k=config.decoding.top_k,
        seed=config.seed,
    )
    rows = f"ssd:rounds={s.rounds}" if config.heads.down else "mtp1d"
    decoders = parse_decoders(f"ar,{'ssd_coupled' if config.heads.kind == 'chain' else rows}")
    plan = Plan(repeats=1, seed=config.seed, warm_up=not config.smoke)
    print(table(bench(load(settings, decoders), decoders, folder.path, plan, heads=str(heads))))
