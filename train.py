"""Train drafting heads on a frozen backbone, export them, and draw with them.

    python train.py                                        # the demo: recipe=emoji_chain, a laptop, minutes
    python train.py recipe=emoji_backbone                  # the demo's backbone itself
    torchrun --nproc_per_node=8 train.py trainer.strategy=deepspeed_2

Compose a recipe, build, fit, export. Keys: python train.py --help
"""

import sys
from pathlib import Path

from draftgrid.common.cli import main
from draftgrid.recipes.launch.schema import TrainConfig


def run(config: TrainConfig) -> None:
    config.check()
    if config.plan:
        from draftgrid.recipes.plan.plan import show

        return show(config)
    from draftgrid.recipes.launch.ready import check_machine

    check_machine(config)
    from draftgrid.recipes.launch.build import build, claim, shrink
    from draftgrid.training import ranks
    from draftgrid.training.run_folder import RunFolder
    from draftgrid.training.saving import Stopped
    from draftgrid.training.strategy import choose_devices

    shrink(config)
    accelerator, devices = choose_devices(config.trainer.accelerator, config.trainer.devices)
    ranks.launch(devices, config.trainer.num_nodes)
    folder = RunFolder(config.out or Path("runs") / config.recipe)
    with ranks.group(gpu=accelerator == "gpu"):
        if ranks.on_rank_zero(lambda: claim(folder, config)):
            if ranks.rank_zero():
                print(f"finished before: {folder.path} (overwrite=true starts over)")
            return
        try:
            job = build(config, folder)
        except ValueError:
            if ranks.rank_zero():
                folder.release()
            raise
        if ranks.rank_zero():
            folder.keep()
        try:
            job.trainer.fit(job.module, job.data, ckpt_path=folder.last_checkpoint(), weights_only=True)
        except Stopped as stop:
            if ranks.rank_zero():
                print(stop)
            sys.exit(stop.code)
        job.finish()


if __name__ == "__main__":
    main(run, TrainConfig, __doc__)
