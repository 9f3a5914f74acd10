"""Trainer state on disk in Megatron's `torch_dist` format: weights, distributed optimizer, RNG;
written in the background, read under any layout. The manifest beside it belongs to the checkpoint
room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from milescli.backends.megatron.host_adam import HostAdamW
from milescli.backends.megatron.lora import Adapters
from milescli.backends.megatron.optimizer import inner_optimizers
from milescli.backends.megatron.saving import BackgroundSave
from milescli.checkpoint.store import not_written
from milescli.checkpoint.torch_dist.safe_pickle import require_known_pickles
from milescli.core.errors import CheckpointError
from milescli.models.adapter import write_shape

_RNG = "rng"
_MODEL = "model"
_OPTIMIZER = "optimizer"
_NUM_UPDATES = "num_updates"


class CheckpointIO:
    """Saves and loads one model and its optimizer. At most one save is in flight."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        *,
        timeout_s: float,
        adapters: Adapters | None = None,
    ) -> None:
        """`timeout_s` bounds the wait of `finish`. `adapters`: of the model, where nothing else of
        it changes, or is saved."""
        self._adapters = adapters
        self._model, self._optimizer, self._timeout_s = model, optimizer, timeout_s
        self._device = next(model.parameters()).device
        self._pending: BackgroundSave | None = None

    def start(self, folder: Path) -> None:
        """Copy the state to host memory and begin to write it into `folder`; training may go on.
        Waits for a save before it."""
        self.finish()
        _make_folder(folder, adapters=self._adapters)
        writer = BackgroundSave(timeout_s=self._timeout_s)
        state = self._sharded_state(loading=False)
        state |= {
            _RNG: _rng_of_rank_zero(),
            _NUM_UPDATES: _largest(num_updates(self._optimizer), self._device),
        }
        dist_checkpointing.save(
            state, str(folder), sharded_strategy=writer, async_sharded_save=True
        )
        self._pending = writer

    @property
    def is_written(self) -> bool:
        """Whether `finish` has nothing to wait for on this rank."""
        return self._pending is None or self._pending.is_written

    def finish(self) -> dict[str, str]:
        """Wait until the last save is on disk. Returns the SHA-256 of its files, by name. Raises
        CheckpointError where writing failed on any rank, WaitTimeout past the bound."""
        if self._pending is None:
            return {}
        writer, self._pending = self._pending, None
        writer.wait()
        return writer.complete()

    def wait(self) -> None:
        """Until this rank's files are on disk; `finish` is still to come. Raises WaitTimeout."""
        if self._pending is not None:
            self._pending.wait()

    def give_up(self) -> None:
        """Wait for the last save and leave it as it is. Raises WaitTimeout."""
        if self._pending is not None:
            writer, self._pending = self._pending, None
            writer.wait()

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """Take the state from `folder`, whatever layout wrote it. `weights_only`: leave optimizer
        and RNG alone.

        Raises CheckpointError for a folder that is missing, torn, of another model, or holds
        pickles that are not Megatron's.
        """
        self.finish()
        require_known_pickles(folder)
        if self._adapters is not None:
            self._adapters.require_own(folder)
        if not weights_only:
            make_moments(self._optimizer)
        state = self._sharded_state(loading=True, weights_only=weights_only)
        try:
            loaded = dist_checkpointing.load(state, str(folder))
        except (
            OSError,
            KeyError,
            ValueError,
            RuntimeError,
            dist_checkpointing.core.CheckpointingException,
        ) as error:
            raise CheckpointError(
                f"cannot load the checkpoint `{folder}`",
                why=f"{type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else 'no further word'}",
                fix="resume from another checkpoint of the run, or check that model.path is the "
                "one that was trained",
            ) from error
        if self._adapters is not None:
            self._adapters.take(loaded[_MODEL])
        else:
            self._model.module.load_state_dict(loaded[_MODEL])
        if weights_only:
            # the optimizer holds copies of bfloat16 weights, which would undo the load at the next
            # step
            self._optimizer.reload_model_params()
            return
        for number, inner in enumerate(inner_optimizers(self._optimizer)):
            with _tolerating_step(inner):
                inner.load_parameter_state_from_fully_reshardable(loaded[_OPTIMIZER][number])
            for moments in inner.optimizer.state.values():
                moments["step"].fill_(loaded[_NUM_UPDATES])
        torch.set_rng_state(loaded[_RNG])

    def _sharded_state(self, *, loading: bool, weights_only: bool = False) -> dict[str, object]:
        # names of layers are global numbers, so that any split into stages finds them
        metadata = {
            "non_homogeneous_layers": True,
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        state: dict[str, object] = {
            _MODEL: self._adapters.sharded_state()
            if self._adapters is not None
            else self._model.module.sharded_state_dict(prefix="", metadata=metadata)
        }
        if not weights_only:
            make_moments(self._optimizer)
            # by parameter name, without the list of optimizers around it: that depends on the
            # layout (experts may have their own)
            state[_OPTIMIZER] = {
                number: inner.sharded_param_state_fully_reshardable(
                    state[_MODEL], is_loading=loading, metadata=metadata
                )
                for number, inner in enumerate(inner_optimizers(self._optimizer))
            }
        return state


def make_moments(optimizer: MegatronOptimizer) -> None:
    """Give AdamW the state that it would make at its first step: Megatron 0.16.1 can neither save
    nor load without it."""
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(inner.optimizer, HostAdamW):
                    inner.optimizer.moments(parameter)
                elif not inner.optimizer.state[parameter]:
                    counter = parameter.device if group.get("fused") else torch.device("cpu")
                    inner.optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=counter),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def num_updates(optimizer: MegatronOptimizer) -> int:
    """Updates since the moments were made; equal for all parameters of all ranks."""
    counts = {
        int(moments["step"])
        for inner in inner_optimizers(optimizer)
        for moments in inner.optimizer.state.values()
    }
    assert len(counts) <= 1, f"parameters have seen different numbers of updates: {counts}"
    return counts.pop() if counts else 0


@contextmanager
def _tolerating_step(inner: MegatronOptimizer) -> Iterator[None]:
    """Megatron 0.16.1 copies every state of torch's AdamW from disk, `step` too, which its format
    does not hold: offer it its own."""
    plain = inner._set_main_param_and_optimizer_states

    def set_states(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        own = inner._get_main_param_and_optimizer_states(parameter)
        plain(parameter, {"step": own["step"], **tensors} if "step" in own else tensors)

    inner._set_main_param_and_optimizer_states = set_states
    try:
        yield
    finally:
        del inner._set_main_param_and_optimizer_states


def _make_folder(folder: Path, *, adapters: Adapters | None) -> None:
    """By rank 0; where it cannot, all ranks raise CheckpointError. `adapters`: that are saved
    there."""
    told: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if adapters is not None:
                write_shape(folder, adapters.shape, base=adapters.base_mark)
        except OSError as error:
            told = [f"trainer rank 0: {type(error).__name__}: {error}"]
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise not_written(folder, told[0])


def _rng_of_rank_zero() -> torch.Tensor:
    """Nothing in training draws on the host generator at random between ranks, so one state serves
    all layouts."""
    holder = [torch.get_rng_state()]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def _largest(number: int, device: torch.device) -> int:
    """Over all ranks: one that holds no part of any parameter counts none."""
    holder = torch.tensor([number], device=device)
    dist.all_reduce(holder, op=dist.ReduceOp.MAX)
    return int(holder)
