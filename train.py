"""Train drafting heads on a frozen backbone, export them, and draw with them.

    python train.py                                        # the demo: recipe=emoji_ssd, a laptop, minutes
    python train.py recipe=emoji_backbone                  # the demo's backbone itself
    torchrun --nproc_per_node=2 train.py trainer.accelerator=cpu

Compose a recipe, build, fit, export. Keys: python train.py --help
"""

from pathlib import Path

from heads.cli import main
from recipes.schema import DEFAULT, RECIPES, TrainConfig


def run(config: TrainConfig) -> None:
    from heads.run_folder import RunFolder
    from recipes.build import build, claim

    config.check()
    folder = RunFolder(config.out or Path("runs") / config.recipe)
    if claim(folder, config):
        print(f"finished before: {folder.path} (overwrite=true starts anew)")
        return
    try:
        job = build(config, folder)
    except ValueError:
        folder.release()
        raise
    try:
        job.trainer.fit(job.module, job.data, ckpt_path=folder.last_checkpoint(), weights_only=True)
    except SystemExit:  # how Lightning ends a run at Ctrl-C
        print(f"stopped at step {job.trainer.global_step}; the same command goes on from {folder.checkpoints}")
        raise
    job.finish()


if __name__ == "__main__":
    main(run, TrainConfig, __doc__, RECIPES, DEFAULT)
