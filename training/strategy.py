"""How a job is spread over processes: one device, DDP, DeepSpeed's ZeRO 1 to 3, or torch's fully_shard (FSDP).

Whatever the strategy and the number of ranks, a checkpoint holds the same: every trained weight whole and in fp32,
AdamW's moments whole and by name, and what Lightning keeps beside them. So each strategy says how it gathers and
scatters them, and nothing else knows of shards. ZeRO runs on CPU ranks too (gloo), which Lightning's own strategy
refuses: that is the form the tests run.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from draftgrid.training import ranks
from draftgrid.training.checkpoint import MOMENTS, read_resumable, write_checkpoint


def choose_devices(accelerator: str, devices: int) -> tuple[str, int]:
    """(accelerator, processes on this machine); under torchrun its LOCAL_WORLD_SIZE wins.

    Raises ValueError if GPUs are asked for that are not there.
    """
    found = torch.cuda.device_count()
    if accelerator == "auto":
        accelerator = "gpu" if found else "cpu"
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    if accelerator == "gpu" and devices > found:
        raise ValueError(
            f"this run needs {devices} GPU(s), but the machine has {found}; "
            "set trainer.devices, or trainer.accelerator=cpu"
        )
    return accelerator, devices


def choose_precision(precision: str, accelerator: str) -> str:
    """auto: bf16-mixed on a GPU and on CPUs with bf16 matrix units; 32-true on others, where bf16 is emulated."""
    if precision != "auto":
        return precision
    return "bf16-mixed" if accelerator == "gpu" or torch.cpu._is_amx_tile_supported() else "32-true"


def choose_strategy(name: str, accelerator: str) -> "Strategy":
    """The strategy of that name; auto is DDP for several processes and nothing for one."""
    assert name in ranks.STRATEGIES
    if name == "auto":
        name = "ddp" if ranks.world() > 1 else "single"
    gpu = accelerator == "gpu"
    if name == "single":
        return OneDevice(torch.device("cuda", 0) if gpu else torch.device("cpu"))
    ranks.alone(gpu)
    if name == "ddp":
        # Buffers are constants here; broadcasting them would tie ranks whose counts differ.
        return DDP(broadcast_buffers=False, timeout=ranks.SILENCE)
    if name == "fsdp":
        return FSDP(timeout=ranks.SILENCE)
    return Zero(int(name.removeprefix("deepspeed_")), gpu)


class Whole(Strategy):
    """Gathers weights and moments whole, and writes and reads them as one file: of plain parameters and of DTensors,
    which fully_shard makes."""

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = True

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of what is trained, named as in the module."""
        assert self.lightning_module is not None
        for name, parameter in self.lightning_module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    @property
    def adam(self) -> torch.optim.Optimizer:
        """torch's own optimizer, whatever wraps it."""
        (optimizer,) = self.optimizers
        return optimizer

    # What a sharding strategy overrides ------------------------------------------------------------------------------

    def gather_weight(self, parameter: nn.Parameter) -> Tensor:
        """The whole weight, fp32; called on all ranks."""
        return _full(parameter.detach()).float()

    def gather_moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        return _full(self.adam.state[parameter][key]).float()

    def scatter_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Each rank takes its part of the whole weight."""
        parameter.data.copy_(_like(value, parameter))

    def scatter_moments(self, parameter: nn.Parameter, values: Mapping[str, Tensor], step: float) -> None:
        state = self.adam.state[parameter]
        state["step"] = torch.tensor(step)
        for key in MOMENTS:
            state[key] = _like(values[key], parameter).to(parameter.device, parameter.dtype, copy=True)

    def stepped(self) -> float:
        """Optimizer steps taken."""
        states = list(self.adam.state.values())
        return float(states[0]["step"]) if states else 0.0

    # What Lightning asks for when it saves and loads -----------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """{name: whole fp32 weight on the CPU} of what is trained; empty on other ranks than 0. Called on all ranks."""
        return self._collect(self.gather_weight)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        step = self.stepped()
        moments = {key: self._collect(partial(self.gather_moment, key=key)) if step else {} for key in MOMENTS}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.adam.param_groups]
        return {"step": step, "moments": moments, "groups": groups}

    def _collect(self, gather: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.trained():
            tensor = gather(parameter)  # every rank gathers, rank 0 keeps
            if self.is_global_zero:
                found[name] = tensor.to("cpu", copy=True)
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Rank 0 writes; if it cannot, all ranks end. Raises OSError, or ValueError for weights that are not finite."""
        ranks.on_rank_zero(lambda: write_checkpoint(checkpoint, filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Raises ValueError, naming file and field, unless the checkpoint is whole and of this module."""
        shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self.trained()}
        return read_resumable(checkpoint_path, shapes)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Strict, whatever Lightning asks: `load_checkpoint` has compared names and shapes."""
        with torch.no_grad():
            for name, parameter in self.trained():
                self.scatter_weight(parameter, checkpoint["state_dict"][name])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        (saved,) = checkpoint["optimizer_states"]
        for group, settings in zip(self.adam.param_groups, saved["groups"], strict=True):
            group.update(settings)
        if not saved["step"]:
            return
        with torch.no_grad():
            for name, parameter in self.trained():
                self.scatter_moments(parameter, {key: saved["moments"][key][name] for key in MOMENTS}, saved["step"])


class OneDevice(Whole, SingleDeviceStrategy):  # type: ignore[misc]
    strategy_name = "one_device"


class DDP(Whole, DDPStrategy):  # type: ignore[misc]
    strategy_name = "ddp_whole"


class FSDP(Whole, DDPStrategy):  # type: ignore[misc]
    """torch's fully_shard over each part of the heads and each layer of the backbone.

    The backbone's embedding, final norm and LM head stay whole on every rank.
    """

    strategy_name = "fsdp_whole"

    def configure_ddp(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        assert self.lightning_module is not None
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        for part in cast(Any, self.lightning_module).parts():
            fully_shard(part, mesh=mesh, reshard_after_forward=True)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, sharded as the parameter is. Every rank holds the whole one, so nothing is sent."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return value
    value = value.to(parameter.device_mesh.device_type)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


class Zero(Whole, DeepSpeedStrategy):  # type: ignore[misc]
    """DeepSpeed's ZeRO: 1 shards the moments, 2 the gradients too, 3 the weights too, also the frozen backbone's."""

    strategy_name = "zero_whole"

    def __init__(self, stage: int, gpu: bool) -> None:
        if not gpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it had to guess
        super().__init__(
            stage=stage,
            overlap_comm=gpu,
            contiguous_gradients=True,
            logging_batch_size_per_gpu=1,
            logging_level=logging.ERROR,
            timeout=ranks.SILENCE,
        )
        self.gpu, self.stage = gpu, stage
        assert isinstance(self.config, dict)
        if not gpu:
            # Small tensors are not worth sharding on a GPU; on a CPU the point is to run what large ones do.
            self.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        if self.gpu:
            super().setup_distributed()
            return
        import deepspeed

        # DeepSpeed would compile a C++ extension for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return super().root_device if self.gpu else torch.device("cpu", 0)

    @property
    def zero(self) -> Any:
        """DeepSpeed's optimizer, which holds fp32 weights and torch's AdamW in shards."""
        (optimizer,) = self.optimizers
        return optimizer

    @property
    def adam(self) -> torch.optim.Optimizer:
        return self.zero.optimizer

    @property
    def shards(self) -> list[Tensor]:
        """This rank's flat fp32 shards, one per parameter group; AdamW's state is keyed by them."""
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(self.zero, name):
                return getattr(self.zero, name)
        raise AssertionError(f"{type(self.zero).__name__} of this DeepSpeed is not known")

    def gather_weight(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)

    def gather_moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, key)

    def scatter_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        from deepspeed import zero
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        value = value.to(self.root_device)
        if self.stage < 3:
            parameter.data.copy_(value)
            safe_set_full_fp32_param(parameter, value)
            return
        with zero.GatheredParameters(parameter, modifier_rank=0):
            if self.is_global_zero:
                parameter.data.copy_(value)
        safe_set_local_fp32_param(parameter, self._local(parameter, value))

    def scatter_moments(self, parameter: nn.Parameter, values: Mapping[str, Tensor], step: float) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        for key in MOMENTS:
            value = values[key].to(self.root_device)
            if self.stage < 3:
                safe_set_full_optimizer_state(parameter, value, key)
            else:
                safe_set_local_optimizer_state(parameter, self._local(parameter, value), key)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """DeepSpeed can set moments only where AdamW has some, so every shard is first given moments of zero."""
        (saved,) = checkpoint["optimizer_states"]
        if saved["step"]:
            for shard in self.shards:
                state = self.adam.state[shard]
                state["step"] = torch.tensor(saved["step"])
                state |= {key: torch.zeros_like(shard) for key in MOMENTS}
            self._link()
        super().load_optimizer_state_dict(checkpoint)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self.stepped():
            self._link()
        return super().optimizer_state(optimizer)

    def _link(self) -> None:
        """Tell each parameter where its moments lie. DeepSpeed does so only after the first group's first step, when
        the other groups have none yet."""
        if self.stage < 3:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def _local(self, parameter: Any, value: Tensor) -> Tensor:
        """This rank's part of a whole tensor; the last part is padded."""
        size = parameter.ds_tensor.numel()
        flat = nn.functional.pad(value.flatten(), (0, self.world_size * size - value.numel()))
        return flat[self.global_rank * size :][:size]
