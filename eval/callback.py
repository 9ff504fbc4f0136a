"""Pictures and real step counts while heads are trained: the same few validation prompts, drawn with the heads as they
are. Acceptance on states tells how good a draft is; only decoding tells how many forwards a picture takes.

Training continues as if nothing had happened: the heads that draw are a private copy, and no random state changes.
"""

import warnings
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from torch import Tensor, nn

from draftgrid.common.sheet import contact_sheet
from draftgrid.data.sources import read_prompts
from draftgrid.data.stream import Sample, ShardSet
from draftgrid.eval.config import DecodingConfig, EvaluateConfig
from draftgrid.eval.decoders import Sampling, Stats
from draftgrid.eval.measure import Run, batches, draw
from draftgrid.eval.setup import DecoderSpec, Loaded, choose, parse_decoders
from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.distributions import acceptance
from draftgrid.heads.mtp import MTPHeads
from draftgrid.heads.prompts import unconditional_prompts
from draftgrid.heads.tokenizers import ImageTokenizer
from draftgrid.training.module import HeadsModule

CHUNK = 512
"""Cells of a batch whose distributions are held at a time."""
LOOKED_AT = 1000
"""Samples of the validation set that prompts are chosen from."""


@dataclass
class Drawn(Run):
    """What one decoder drew of all prompts."""

    pictures: list[Image.Image] = field(default_factory=list)

    @property
    def per_picture(self) -> tuple[float, float]:
        """Steps and seconds."""
        return mean(self.steps), float(self.seconds().sum()) / len(self.pictures)

    def figures(self, name: str) -> dict[str, float]:
        total = Stats.total([part.result.stats for part in self.parts])
        kept, tested = (sum(pair[i] for pair in total.drafted.values()) for i in (0, 1))
        found = dict(zip((f"steps/{name}", f"seconds/{name}"), self.per_picture, strict=True))
        if tested:
            found[f"accepted/{name}"] = kept / tested
        if total.change_rate is not None:
            found[f"changed/{name}"] = total.change_rate
        return found


class Preview(Callback):
    """Every `evaluate.eval_every` steps, on rank 0: steps, seconds and accepted drafts of each decoder, and a sheet.

    Logged as `steps/DECODER` (mean forwards a picture), `seconds/DECODER` (a picture), `accepted/DECODER` (share of
    drafts that passed their first test), `changed/DECODER` (tokens that still changed in their last round), and
    `acceptance_drawn/HEAD`: sum of min(p, q) along AR's own pictures, at the recipe's guidance and top-k. AR does not
    depend on the heads, so it draws once.
    """

    def __init__(
        self, evaluate: EvaluateConfig, decoding: DecodingConfig, tokenizer: ImageTokenizer, seed: int = 0
    ) -> None:
        """Raises ValueError for a decoder or prompts that do not exist."""
        self.config, self.tokenizer, self.seed = evaluate, tokenizer, seed
        self.sampling = Sampling(guidance=decoding.guidance, top_k=decoding.top_k)
        self.decoders = parse_decoders(evaluate.decoders)
        self.prompts = choose(read_prompts(evaluate.prompts), evaluate.images) if evaluate.prompts else []
        self.kept: dict[str, Drawn] = {}
        """What decoders without heads drew."""
        self.last = 0  # step
        self.able = True

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, HeadsModule)
        self.last = trainer.global_step
        self.able = not sharded(module.backbone)
        if not self.able and trainer.is_global_zero:
            warnings.warn(
                f"evaluate.eval_every is {self.config.eval_every}, but trainer.strategy shards the backbone, and one "
                "rank alone cannot decode with a part of it: no pictures are drawn during training. Draw them from the "
                "exported heads (draftgrid bench), or use ddp, deepspeed_1 or deepspeed_2",
                stacklevel=2,
            )
        self.decoders = [d for d in self.decoders if not d.kinds or module.heads.kind in d.kinds]
        if not self.prompts:
            self.prompts = captions(trainer.datamodule.validation_set, self.config.images)  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if not self.able or step == self.last or step % self.config.eval_every:
            return
        self.last = step
        assert isinstance(module, HeadsModule)
        weights = trainer.strategy.lightning_module_state_dict()  # gathered by all ranks, kept by rank 0
        heads = private_copy(module.heads, weights, module.backbone) if trainer.is_global_zero else None
        self.draw(trainer, module.backbone, heads, step)

    def draw(self, trainer: L.Trainer, backbone: Backbone, heads: MTPHeads | None, step: int) -> None:
        """Rank 0 (`heads`) draws; the others meet it after every batch, so that no wait gets longer than one."""
        found: dict[str, Drawn] = {}
        for decoder in self.decoders:
            name = self.name(decoder)
            drawn = found[name] = self.kept.get(name) or Drawn(decoder, [[]])
            for numbers in () if name in self.kept else batches(range(len(self.prompts)), self.config.batch_size):
                if heads is not None:
                    loaded = Loaded(backbone, self.tokenizer, {heads.kind: heads}, self.prompts, self.sampling)
                    drawn.passes[0].append(draw(loaded, decoder, numbers, self.seed))
                trainer.strategy.barrier()
            if heads is not None and not drawn.pictures:
                drawn.pictures = self.show(drawn, backbone.device)
            if not decoder.kinds:
                self.kept[name] = drawn
        if heads is not None:
            figures = {key: value for name, drawn in found.items() for key, value in drawn.figures(name).items()}
            if "ar" in found:
                figures |= self.along(backbone, heads, found["ar"].tokens)
            self.write(trainer, figures, found, step)
        trainer.strategy.barrier()

    def name(self, decoder: DecoderSpec) -> str:
        """`ssd`; with its settings where the list has two of that name."""
        alike = sum(decoder.name == other.name for other in self.decoders)
        return decoder.name if alike == 1 else decoder.text

    def show(self, drawn: Drawn, device: torch.device) -> list[Image.Image]:
        """On the backbone's device: a learned decoder takes minutes on a CPU."""
        self.tokenizer.to(device)
        pictures = [picture for part in drawn.parts for picture in self.tokenizer.pil(part.result.tokens)]
        self.tokenizer.to("cpu")
        return pictures

    @torch.inference_mode()
    def along(self, backbone: Backbone, heads: MTPHeads, tokens: Tensor) -> dict[str, float]:
        """{acceptance_drawn/HEAD: mean of sum of min(p, q)} on pictures (N, H, W), as the decoder meets p and q."""
        found: dict[str, list[Tensor]] = {}
        for numbers in batches(range(len(tokens)), self.config.batch_size):
            part, prompts = tokens[list(numbers)], [self.prompts[i] for i in numbers]
            branches: list[list[Any]] = [prompts]
            if self.sampling.guidance != 1:
                branches.append(unconditional_prompts(prompts))
            read = [backbone.states(part, branch) for branch in branches]
            h = torch.stack([heads.states(backbone, states.flatten(1, 2)) for states, _ in read])
            e = read[0][1].flatten(1, 2)
            for name, (_, target) in heads.train_pairs(backbone.grid).items():
                predicted = torch.stack([heads.predict(branch, e, name) for branch in h])
                true = h[:, :, target.to(h.device)]
                size = max(1, CHUNK // len(part))
                for a, b in zip(true.split(size, dim=2), predicted.split(size, dim=2), strict=True):
                    p, q = (self.sampling.probabilities(heads.logits(backbone, x)) for x in (a, b))
                    found.setdefault(name, []).append(acceptance(p, q).flatten())
        every = {name: torch.cat(parts) for name, parts in found.items()}
        return {f"acceptance_drawn/{name}": float(x.mean()) for name, x in every.items() if x.numel()}

    def write(self, trainer: L.Trainer, figures: dict[str, float], found: dict[str, Drawn], step: int) -> None:
        labels = ["{}\n{:.1f} steps\n{:.2f} s".format(name, *d.per_picture) for name, d in found.items()]
        sheet = contact_sheet([d.pictures for d in found.values()], labels, self.prompts)
        for logger in trainer.loggers:
            logger.log_metrics(figures, step)
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("pictures", np.asarray(sheet), step, dataformats="HWC")
            if isinstance(logger, CSVLogger):
                logger.save()


def private_copy(heads: MTPHeads, weights: dict[str, Tensor], backbone: Backbone) -> MTPHeads:
    """Heads of their own memory with these weights, `heads.NAME` as in the module, in the backbone's dtype."""
    prefix = "heads."
    mine = {k.removeprefix(prefix).replace("_orig_mod.", ""): v for k, v in weights.items() if k.startswith(prefix)}
    with torch.random.fork_rng(devices=[]):  # new heads draw random weights
        copy = type(heads)(heads.config, heads.trained_on)  # type: ignore[call-arg]
    copy.load_state_dict(mine)
    return copy.to(backbone.device, backbone.dtype).requires_grad_(False).eval()


def sharded(module: nn.Module) -> bool:
    """Whether this rank holds only parts of the weights (ZeRO-3, FSDP), so that a forward needs all ranks."""
    return any(hasattr(p, "ds_id") or hasattr(p, "full_tensor") or not p.numel() for p in module.parameters())


def captions(shards: ShardSet, count: int) -> list[str]:
    """`count` captions of a shard set, spread over its first samples. Raises ValueError if none can be read."""
    samples = shards.in_file_order(0, min(shards.size, LOOKED_AT))
    found = [s.caption for s in samples if isinstance(s, Sample) and s.caption]
    if not found:
        raise ValueError(f"{shards.place} holds no caption to draw; set evaluate.prompts to a text file of prompts")
    return choose(found, count)
