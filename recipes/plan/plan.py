"""What a recipe will need, before anything is loaded: `python train.py recipe=NAME plan=true`.

The checkpoint's config.json is all that is read, and of a published one on the hub not even that. The training code
runs once on tensors without data (`counting`), so parameters, activations and FLOPs are counted and not estimated; what
a rank holds by strategy is arithmetic (`memory`); seconds and speed-ups are estimates from the stated machine.
"""

from draftgrid.recipes.launch.schema import TrainConfig
from draftgrid.recipes.plan import text
from draftgrid.recipes.plan.counting import count_step
from draftgrid.recipes.plan.memory import STRATEGIES, Counted, Memory, held, layout
from draftgrid.recipes.plan.speed import count_decoding
from draftgrid.recipes.plan.subject import load_subject, shapes
from draftgrid.training.ranks import rank_zero


def plan(config: TrainConfig) -> str:
    """The whole plan as text. Raises ValueError for what a user can set right."""
    subject, t = load_subject(config), config.trainer
    tensors = shapes(subject)
    precision = "bf16-mixed" if t.precision == "auto" else t.precision
    asked = t.devices * t.num_nodes
    gpus = config.assume.gpus or (asked if asked > 1 else 8)
    steps: dict[tuple[int, int, bool], Counted] = {}
    by_strategy = {}
    for strategy in STRATEGIES:
        size = layout(strategy, precision)
        key = (size.backbone, size.heads, size.autocast)
        if key not in steps:
            steps[key] = count_step(subject, config, size)
        by_strategy[strategy] = Memory(held(tensors, strategy, precision, gpus), steps[key])
    parts = [
        f"plan of recipe {config.recipe}; nothing was loaded and nothing is written",
        text.parameters(config, subject),
        text.memory(config, subject, precision, gpus, by_strategy),
        text.step(config, subject, gpus, by_strategy["ddp"].step),
    ]
    if subject.heads is not None:
        decoding = count_decoding(subject.backbone, subject.heads, 1 if config.decoding.guidance == 1 else 2)
        parts += [text.drafting(decoding), text.speed(config, decoding)]
    return "\n\n".join(parts)


def show(config: TrainConfig) -> None:
    if rank_zero():
        print(plan(config))
