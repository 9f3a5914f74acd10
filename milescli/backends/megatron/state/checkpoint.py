"""Saves trainer state in Megatron's `torch_dist` format: weights, distributed optimizer, RNG;
written in the background, read under any layout. Every rank writes and reads its own pieces, from
and into the memory where they are used. The manifest beside them belongs to the checkpoint
package."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from milescli.backends.megatron.architecture.lora import Adapters
from milescli.backends.megatron.state.host_adam import HostAdamW
from milescli.backends.megatron.state.optimizer import inner_optimizers
from milescli.backends.megatron.state.saving import BackgroundSave, release_state
from milescli.checkpoint.store import save_failed
from milescli.checkpoint.torch_dist.metadata import read_metadata
from milescli.core.errors import CheckpointError
from milescli.models.adapter import write_shape

PIECE_BYTES = 2**26
"""Largest piece. While pieces are read, up to five are in memory a second time (measured: torch's
reader still holds earlier ones), and one if they come from a device."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)"""


def boxes(shape: Sequence[int], start: int, end: int, *, limit: int) -> Iterator[Box]:
    """Yield the boxes of a tensor that cover its elements `start` to `end`, in the order of
    contiguous memory; each has at most `limit` elements."""
    row = math.prod(shape[1:])
    while start < end:
        if not shape:
            yield (), ()
            return
        first, inside = divmod(start, row)
        if inside or end - start < row or row > limit:
            stop = min(end, (first + 1) * row)
            for offsets, sizes in boxes(shape[1:], inside, stop - first * row, limit=limit):
                yield (first, *offsets), (1, *sizes)
        else:
            rows = min((end - start) // row, limit // row)
            stop = start + rows * row
            yield (first, *(0 for _ in shape[1:])), (rows, *shape[1:])
        start = stop


def pieces(
    described: ShardedBase,
    values: torch.Tensor,
    *,
    start: int,
    prefixes: Sequence[str] = ("",),
    stored: Collection[str] = (),
) -> Iterator[ShardedTensor]:
    """Yield what a rank saves, or loads in place, of one parameter or of one of its optimizer
    states. `described`: the parameter in Megatron's `sharded_state_dict`; `values` [n]: its
    elements from `start` on, in flat memory; `prefixes`: of the key: the first that is in `stored`
    is used, else the last."""
    limit = PIECE_BYTES // values.element_size()
    for at, part in _parts(described):
        key = next((p + part.key for p in prefixes if p + part.key in stored), None)
        key = prefixes[-1] + part.key if key is None else key
        low = max(start, at) - at
        high = min(start + len(values), at + math.prod(part.local_shape)) - at
        ahead = part.prepend_axis_num
        for offsets, sizes in boxes(part.local_shape, low, high, limit=limit):
            begin, sizes = at + low - start, (*(1 for _ in range(ahead)), *sizes)
            low += math.prod(sizes)
            offsets = (*(0 for _ in range(ahead)), *offsets)
            yield replace(
                part,
                key=key,
                data=values[begin : begin + math.prod(sizes)].view(sizes),
                dtype=values.dtype,
                local_shape=sizes,
                global_offset=tuple(map(sum, zip(part.global_offset, offsets, strict=True))),
                axis_fragmentations=None,
                prepend_axis_num=0,
                # no two data-parallel ranks have the same range
                replica_id=(*part.replica_id[:2], 0),
            )


def _parts(described: ShardedBase) -> list[tuple[int, ShardedTensor]]:
    """Return (first element within the parameter, how it is stored) of each tensor that is stored
    for a parameter, one after the other: a fused gate and up projection has two."""
    if isinstance(described, ShardedTensor):
        return [(0, described.without_data())]
    assert isinstance(described, ShardedTensorFactory), type(described)
    whole = torch.empty(described.data.shape, dtype=described.data.dtype, device="meta")
    built = nested_values([replace(described, data=whole).build()])
    parts = sorted(((part.data.storage_offset(), part) for part in built), key=lambda part: part[0])
    end = 0
    for at, part in parts:
        assert at == end and part.data.is_contiguous(), f"{part.key} is no run of {described.key}"
        end += part.data.numel()
    assert end == whole.numel(), f"{end} of {whole.numel()} numbers of {described.key} are stored"
    return [(at, part.without_data()) for at, part in parts]


_RNG, _DEVICE_RNG = "rng", "device_rng"
_MODEL = "model"
_OPTIMIZER = "optimizer"
_NUM_UPDATES = "num_updates"
_STATE = "optimizer.state."
"""Prefix of the key of an optimizer state; the state's name and the parameter's key follow."""
_PARAM = "param"
"""Name of the state that holds float32 weights, if the optimizer keeps them beside others."""


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
        """Save and load `model` and `optimizer`, or only `adapters` if nothing else of the model
        changes. `timeout_s` bounds the wait of `finish`."""
        self._adapters = adapters
        self._model, self._optimizer, self._timeout_s = model, optimizer, timeout_s
        self._device = next(model.parameters()).device
        self._pending: BackgroundSave | None = None

    def start(self, folder: Path, *, copies: bool) -> None:
        """Start to write the state into `folder`, after any earlier save. Training may continue; it
        waits in `release_state` before it changes memory that is not written yet. `copies`: copy
        device memory to the host first; otherwise it must not change until `wait` returns."""
        self.finish()
        _make_folder(folder, adapters=self._adapters)
        writer = BackgroundSave(timeout_s=self._timeout_s, copies=copies)
        make_moments(self._optimizer)
        described = self._described()
        state = {
            _MODEL: _untrained(described),
            _OPTIMIZER: dict(enumerate(self._own_pieces(described))),
            **dict(zip((_RNG, _DEVICE_RNG), _rng_of_rank_zero(), strict=True)),
            _NUM_UPDATES: _largest(num_updates(self._optimizer), self._device),
        }
        dist_checkpointing.save(
            state, str(folder), sharded_strategy=writer, async_sharded_save=True
        )
        self._pending = writer

    @property
    def is_written(self) -> bool:
        """Return True if this rank's files of the last save are on disk."""
        return self._pending is None or self._pending.is_written

    def finish(self) -> dict[str, str]:
        """Wait until the last save is on disk. Return the SHA-256 of its files, by name. Raises
        CheckpointError if writing failed on any rank, WaitTimeout past the bound."""
        if self._pending is None:
            return {}
        writer, self._pending = self._pending, None
        writer.wait()
        return writer.complete()

    def wait(self) -> None:
        """Wait until this rank's files are on disk; `finish` must follow. Raises WaitTimeout."""
        if self._pending is not None:
            self._pending.wait()

    def give_up(self) -> None:
        """Wait for the last save without completing it. Raises WaitTimeout."""
        if self._pending is not None:
            writer, self._pending = self._pending, None
            writer.wait()

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """Load the state from `folder`, written under any layout, piece by piece into the memory
        where it is used. `weights_only`: leave optimizer and RNG unchanged.

        Raises CheckpointError for a folder that is missing, torn, of another model, or contains
        pickles that are not Megatron's; what was loaded before the error remains."""
        self.finish()
        stored = read_metadata(folder).state_dict_metadata
        if self._adapters is not None:
            self._adapters.require_matching(folder)
        release_state()
        described = self._described()
        into = list(self._whole_weights(described, stored))
        if not weights_only:
            make_moments(self._optimizer)
            into += self._own_pieces(described, stored)
        state: dict[str, object] = {_OPTIMIZER: dict(enumerate(into))}
        if rest := _untrained(described):
            state[_MODEL] = rest
        try:
            # what Megatron would check takes each key for one dtype, and a float32 run's weights
            # become both weights and copies of a bfloat16 one
            loaded = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
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
                "model that was trained",
            ) from error
        if rest:
            self._model.module.load_state_dict(loaded[_MODEL], strict=False)
        if weights_only:
            # the optimizer holds copies of bfloat16 weights, which would undo the load at the next
            # step
            self._optimizer.reload_model_params()
            return
        for inner in inner_optimizers(self._optimizer):
            for moments in inner.optimizer.state.values():
                moments["step"].fill_(loaded[_NUM_UPDATES])
        # older checkpoints have the host's alone
        set_random_states([loaded[name] for name in (_RNG, _DEVICE_RNG) if name in loaded])

    def _described(self) -> dict[str, ShardedBase]:
        """Return name -> what is saved of the model: parameters, buffers and other state of
        modules; for an adapter its parameters alone."""
        if self._adapters is not None:
            return self._adapters.sharded_state()
        # names of layers are global numbers, so that any split into stages finds them
        metadata = {
            "non_homogeneous_layers": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        return self._model.module.sharded_state_dict(prefix="", metadata=metadata)

    def _whole_weights(
        self, described: dict[str, ShardedBase], stored: Collection[str]
    ) -> Iterator[ShardedTensor]:
        """Yield all trained weights of this rank. If a bfloat16 run wrote the checkpoint with its
        float32 copies, float32 weights come from those."""
        rest = _untrained(described)
        for name in (name for name in described if name not in rest):
            weight = described[name].data
            wide = weight.dtype is torch.float32
            yield from pieces(
                described[name],
                weight.detach().view(-1),
                start=0,
                prefixes=[f"{_STATE}{_PARAM}.", ""] if wide else [""],
                stored=stored,
            )

    def _own_pieces(
        self, described: dict[str, ShardedBase], stored: Collection[str] | None = None
    ) -> Iterator[ShardedTensor]:
        """Yield the pieces of the parameter ranges that this data-parallel rank updates: optimizer
        states and, if they are saved, weights. `stored`: keys of a checkpoint that is loaded."""
        of_parameter = {base.data: base for base in described.values()}
        for inner in inner_optimizers(self._optimizer):
            for parameter in inner.model_param_gbuf_map:
                base = of_parameter[parameter]
                own = inner._get_model_param_range_map(parameter)["param"]
                if stored is None:
                    flat = parameter.detach().view(-1)[own.start : own.end]
                    yield from pieces(base, flat, start=own.start)
                states = inner._get_main_param_and_optimizer_states(parameter)
                if _share_memory(states[_PARAM], parameter):
                    del states[_PARAM]
                for name, values in states.items():
                    if name == "step":  # equal for all, and saved once
                        continue
                    prefixes = [f"{_STATE}{name}."]
                    if name == _PARAM and stored is not None:
                        prefixes.append("")  # a float32 run has them as its weights
                    yield from pieces(
                        base,
                        values.detach(),
                        start=own.start,
                        prefixes=prefixes,
                        stored=stored or (),
                    )


def _untrained(described: dict[str, ShardedBase]) -> dict[str, ShardedBase]:
    """Return frozen weights, buffers, and everything that is not a tensor."""
    return {
        name: base
        for name, base in described.items()
        if not getattr(base.data, "requires_grad", False)
    }


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def make_moments(optimizer: MegatronOptimizer) -> None:
    """Create the state that AdamW creates at its first step, since Megatron 0.16.1 can neither save
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
    """Return the number of updates since the moments were created; equal for all parameters of all
    ranks."""
    counts = {
        int(moments["step"])
        for inner in inner_optimizers(optimizer)
        for moments in inner.optimizer.state.values()
    }
    assert len(counts) <= 1, f"parameters have seen different numbers of updates: {counts}"
    return counts.pop() if counts else 0


def _make_folder(folder: Path, *, adapters: Adapters | None) -> None:
    """Create the folder on rank 0; if that fails, all ranks raise CheckpointError. `adapters`:
    adapters to save in it."""
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if adapters is not None:
                write_shape(folder, adapters.shape, base=adapters.base_mark)
        except OSError as error:
            failure = [f"trainer rank 0: {type(error).__name__}: {error}"]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise save_failed(folder, failure[0])


def random_states() -> list[torch.Tensor]:
    """Return the states of the generators of the host and of the device, which on a CPU are one."""
    return [torch.get_rng_state(), torch.cuda.get_rng_state()]


def set_random_states(states: Sequence[torch.Tensor]) -> None:
    """Restore what `random_states` returned, or the host's state alone."""
    host, *of_device = states
    torch.set_rng_state(host)
    for state in of_device:
        torch.cuda.set_rng_state(state)


def _rng_of_rank_zero() -> list[torch.Tensor]:
    """Return rank 0's random states, which are used under every layout: ranks draw equal numbers,
    except for dropout, whose number depends on the tokens of the rank."""
    holder = random_states()
    dist.broadcast_object_list(holder, src=0)
    return holder


def _largest(number: int, device: torch.device) -> int:
    """Return the largest value over all ranks; 0 counts for a rank that has no part of any
    parameter."""
    holder = torch.tensor([number], device=device)
    dist.all_reduce(holder, op=dist.ReduceOp.MAX)
    return int(holder)
