"""Every key a recipe or `train.py key=value` may set, with its default and meaning. An unknown key is an error."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from draftgrid.common.cli import check_ranges, key
from draftgrid.common.settings import one_of
from draftgrid.data.config import StreamConfig
from draftgrid.eval.config import DecodingConfig, EvaluateConfig
from draftgrid.heads.config import Emu3Size, HeadsConfig, LossConfig, OptimConfig
from draftgrid.training.ranks import STRATEGIES

RECIPES = Path(__file__).parent.parent
DEFAULT = "emoji_chain"


@dataclass
class BackboneConfig:
    checkpoint: str = key("emoji", "folder or hub id (org/name) of the frozen backbone; emoji is the demo's own")
    revision: str = key("", "of a hub id: branch, tag or commit; '' = the main branch")
    local_files_only: bool = key(False, "ask the hub's cache on this machine alone, never the hub")
    adapter: str = key("", "emu3, janus_pro, lumina_mgpt or your package.module:Class; '' = what the checkpoint says")
    grid: list[int] = key(list, "[rows, columns]; empty = what the checkpoint says", least=1, items="rows, columns")
    tokenizer: str = key("", "folder of the image tokenizer; '' = the checkpoint's own")
    codes: int = key(512, "task=backbone: size of the codebook to fit", least=1)
    size: Emu3Size = field(default_factory=Emu3Size)

    @property
    def place(self) -> str:
        """The checkpoint as everything that loads takes it: a folder, `emoji`, org/name or org/name@revision."""
        return f"{self.checkpoint}@{self.revision}" if self.revision else self.checkpoint

    def check(self) -> None:
        """Raises ValueError naming the field."""
        if self.revision and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.checkpoint):
            raise ValueError(
                f"backbone.revision is {self.revision!r}, but backbone.checkpoint {self.checkpoint!r} is no hub id "
                "like org/name, which alone has revisions"
            )


@dataclass
class TrainerConfig:
    steps: int = key(1000, "optimizer steps", least=1)
    devices: int = key(1, "processes on this machine; under torchrun its own count wins", least=1)
    num_nodes: int = key(1, "machines; more than one are started by torchrun, whose own count wins", least=1)
    strategy: str = key("auto", "auto (ddp for several processes), ddp, deepspeed_1, deepspeed_2, deepspeed_3 or fsdp")
    accelerator: str = key("auto", "auto, cpu or gpu")
    precision: str = key("auto", "32-true, bf16-mixed, bf16-true; auto = bf16-mixed where it is fast, else 32-true")
    accumulate: int = key(1, "batches per optimizer step", least=1)
    clip: float = key(1.0, "gradient norm is clipped to this; 0 = never", least=0)
    validate_every: int = key(200, "steps between validations", least=1)
    save_every: int = key(100, "steps between checkpoints", least=1)
    keep: int = key(2, "newest checkpoints that are kept, beside the best", least=1)
    max_hours: float = key(0.0, "save and stop after so many hours; the same command resumes. 0 = never", least=0)
    max_skipped: float = key(0.01, "share of samples that may give no finite states or loss", least=0, most=1)
    compile: bool = key(False, "compile the heads with torch.compile")
    threads: int = key(0, "CPU threads; 0 = torch's own choice", least=0)


@dataclass
class SheetConfig:
    images: int = key(6, "held-out prompts drawn with AR and SSD at the end; 0 = none", least=0)
    prompts: str = key("emoji:test", "text file of prompts, emoji:validation|test, or photos")
    rounds: int = key(2, "verification rounds of SSD", least=0)


@dataclass
class AssumeConfig:
    gpus: int = key(0, "plan=true: GPUs; 0 = trainer.devices x trainer.num_nodes, or 8 where that is 1", least=0)
    memory_gb: float = key(141.0, "plan=true: memory of a GPU, 10^9 bytes (H200)", above=0)
    flops: float = key(989e12, "plan=true: a GPU's dense bf16 FLOP/s (H100, H200)", above=0)
    utilisation: float = key(0.45, "plan=true: share of them that is reached", above=0, most=1)
    bandwidth: float = key(4.8e12, "plan=true: bytes/s a GPU reads from its memory (H200)", above=0)
    prompt_tokens: int = key(64, "plan=true: tokens of a prompt, header included", least=1)
    acceptance: list[float] = key(
        [0.5, 0.7, 0.9], "plan=true: chances that an exact decoder accepts a draft", least=0, most=1
    )
    window: int = key(16, "plan=true: positions ssd_coupled has in flight", least=1)


@dataclass
class TrainConfig:
    recipes: ClassVar = RECIPES, DEFAULT
    recipe: str = key(DEFAULT, "a shipped recipe's name, or a .yaml file of your own, which may have a `base:`")
    task: str = key("heads", "heads on a frozen backbone, or backbone (the demo's own)")
    out: str = key("", "run folder; '' = runs/RECIPE")
    resume: str = key("auto", "auto: resume the run in out; never: refuse if there is one")
    overwrite: bool = key(False, "delete the run in out and start over")
    smoke: bool = key(False, "2 steps, 2 pictures: does everything run?")
    plan: bool = key(False, "print parameters, memory, FLOPs, hours and expected speed-up; load and write nothing")
    seed: int = key(0, "of weights, data order and sampling", least=0)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    data: StreamConfig = field(default_factory=StreamConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    sheet: SheetConfig = field(default_factory=SheetConfig)
    assume: AssumeConfig = field(default_factory=AssumeConfig)

    @property
    def guidance(self) -> list[float]:
        """Guidance scales at which validation measures acceptance: none, and the one the heads are for."""
        return sorted({1.0, self.decoding.guidance})

    def check(self) -> None:
        """Cross-field checks. Raises ValueError naming the field, the value and what would be right."""
        check_ranges(self)
        t = self.trainer
        one_of("task", self.task, ("heads", "backbone"))
        one_of("resume", self.resume, ("auto", "never"))
        one_of("trainer.accelerator", t.accelerator, ("auto", "cpu", "gpu"))
        one_of("trainer.precision", t.precision, ("auto", "32-true", "bf16-mixed", "bf16-true"))
        one_of("trainer.strategy", t.strategy, STRATEGIES)
        if self.task == "backbone" and (len(self.backbone.grid) != 2 or len(set(self.backbone.grid)) != 1):
            raise ValueError(
                f"backbone.grid is {self.backbone.grid}; task=backbone needs [n, n], its pictures are square"
            )
        if self.task == "backbone" and t.validate_every > t.steps:
            raise ValueError(
                f"trainer.validate_every is {t.validate_every}, more than the {t.steps} steps; "
                "task=backbone keeps its best validated checkpoint"
            )
        for part in (self.backbone, self.data, self.heads, self.loss):
            part.check()
        self.evaluate.check(self.heads.kind)
        if self.evaluate.eval_every and self.task == "backbone":
            raise ValueError(
                f"evaluate.eval_every is {self.evaluate.eval_every}, but task=backbone trains no heads; use 0"
            )
