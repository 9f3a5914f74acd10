"""The planner's peak of a trainer rank against what the allocator holds over a whole step, with all
activations kept and with layers recomputed; and what the process takes beside the allocator. On a
CPU, where there is no such allocator, memory that torch's operators hand out is counted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from lines import Bound, Line
from planning import size_of_weight, time_model
from shapes import write_model
from torch.utils._python_dispatch import TorchDispatchMode
from trainer import end, make_shard, make_trainer

from checks import Visit
from milescli.models.base import WeightTable
from milescli.plan.activations import Packing
from milescli.plan.devices import Efficiency
from milescli.plan.memory import TrainerBytes, TrainerLoad
from milescli.plan.types import TrainerLayout
from milescli.train.base import TrainShard

WITHIN = 0.10


def measure(visit: Visit, shape: str) -> Iterator[Line]:
    """See the module."""
    folder, weights = write_model(shape, visit)
    row_tokens = 128
    if visit.on_device:
        row_tokens = 8192 if shape == "qwen3-1.7b" else 16_384
    shard = make_shard(
        _lengths(row_tokens, rows=2, visit=visit),
        vocab_size=weights.facts.vocab_size,
        microbatch_tokens=row_tokens,
    )
    context: dict[str, float] = {}
    for name, recompute in (("peak", "none"), ("peak_recomputed", "full")):
        layout = TrainerLayout(recompute=recompute)  # type: ignore[arg-type]
        held = _step_bytes(folder, shard, layout, row_tokens, visit)
        plan = _planned(weights, layout, row_tokens, visit, Packing(imbalance=1.0))
        exact = _planned(
            weights, layout, row_tokens, visit, Packing(fill=held["fill"], imbalance=1.0)
        )
        context = {key: value for key, value in held.items() if key.startswith("context")}
        yield Line(
            name=name,
            measured=held["peak"] / 2**30,
            predicted=plan.total / 2**30,
            unit="GiB",
            bound=Bound(kind="within", value=WITHIN, anywhere=False),
            note=f"{len(shard.updates[0])} rows of {row_tokens} tokens; a step after the first; "
            "without the process's own",
            figures={f"{key}_bytes": value for key, value in held.items() if key != "fill"}
            | {
                "fill": held["fill"],
                "planned_weights_bytes": plan.weights,
                "planned_gradients_bytes": plan.gradients,
                "planned_optimizer_bytes": plan.optimizer,
                "planned_activations_bytes": plan.activations,
                "planned_logits_bytes": plan.logits,
                "planned_scratch_bytes": plan.workspace,
                "planned_with_this_fill_bytes": exact.total,
            },
        )
    yield _context_line(context, time_model(weights).efficiency.trainer_context)


def _lengths(row_tokens: int, *, rows: int, visit: Visit) -> list[int]:
    """Uneven sequences that fill rows to the brim, as the planner takes them to be."""
    shortest, longest = (512, 2048) if visit.on_device else (16, 48)
    rng, lengths = np.random.default_rng(0), []
    for _ in range(rows):
        left = row_tokens
        while left >= longest + shortest:
            lengths.append(int(rng.integers(shortest, longest + 1)))
            left -= lengths[-1]
        lengths += [left // 2, left - left // 2] if left > longest else [left]
    return lengths


def _planned(
    weights: WeightTable, layout: TrainerLayout, row_tokens: int, visit: Visit, packing: Packing
) -> TrainerBytes:
    load = TrainerLoad(
        size=size_of_weight(visit),
        row_tokens=row_tokens,
        num_microbatches=2,
        keeps_reference=False,
        critic="none",
        sleeps=False,
        bucket_bytes=0,
        packing=packing,
        # what the process takes by itself is a line of its own
        efficiency=Efficiency(trainer_context=0),
    )
    return time_model(weights).memory.worst_stage(layout, load)


def _step_bytes(
    folder: Path, shard: TrainShard, layout: TrainerLayout, row_tokens: int, visit: Visit
) -> dict[str, float]:
    """Bytes `before` a step and at its `peak`; cells that attention computes for each position
    (`fill`); on a device what the allocator had `reserved` at the peak, and what of that was no
    tensor's (`fragments`), and the process's own (`context`)."""
    used_before = _used_on_device() if visit.on_device else 0
    trainer = make_trainer(folder, microbatch_tokens=row_tokens, recompute=layout.recompute)
    held: dict[str, float] = {"fill": _fill(trainer, shard)}
    trainer.step(shard, 1e-6)  # makes the optimizer's moments
    if visit.on_device:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held["before"] = torch.cuda.memory_allocated()
        trainer.step(shard, 1e-6)
        torch.cuda.synchronize()
        held["peak"] = torch.cuda.max_memory_allocated()
        held["reserved"] = torch.cuda.max_memory_reserved()
        held["fragments"] = held["reserved"] - held["peak"]
        held["context"] = _used_on_device() - torch.cuda.memory_reserved()
        held["context_before"] = used_before
    else:
        held["before"] = _bytes_of_tensors()
        with CountedBytes() as counted:
            trainer.step(shard, 1e-6)
        held["peak"] = held["before"] + counted.peak
    end(trainer)
    return held


def _fill(trainer, shard: TrainShard) -> float:
    from milescli.backends.megatron.step.shard import RankShard

    rows = RankShard(shard, mesh=trainer.mesh, facts=trainer.facts).microbatches
    cells = sum(grid.shape[0] * grid.shape[2] for row in rows for grid in row.row.grids)
    return cells / sum(row.num_tokens for row in rows)


def _used_on_device() -> int:
    """By all processes; there is no other of ours."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def _context_line(context: dict[str, float], planned: int) -> Line:
    own = context.get("context")
    return Line(
        name="context",
        measured=None if own is None else own / 2**30,
        predicted=planned / 2**30,
        unit="GiB",
        bound=Bound(kind="at most", value=planned / 2**30),
        note="a CPU has no driver"
        if own is None
        else "driver, kernels and collectives' buffers; others on the device counted",
        figures={} if own is None else {"trainer_context_bytes": own},
    )


def _bytes_of_tensors() -> int:
    """Of all memory behind tensors that Python knows, on a CPU."""
    gc.collect()
    storages = {}
    for tensor in gc.get_objects():
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class CountedBytes(TorchDispatchMode):
    """Memory that operators hand out within, less what is given back, and its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Called by torch for every operator."""
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), given=args)
        return out

    def _count(self, storage: torch.UntypedStorage, *, given: object) -> None:
        place = storage._cdata
        if place in self._known or _is_given(place, given):
            return
        self._known.add(place)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._give_back, place, storage.nbytes())

    def _give_back(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


def _is_given(place: int, given: object) -> bool:
    """Whether the memory is an argument's: a view, or written in place."""
    return any(
        isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata == place
        for tensor in torch.utils._pytree.tree_leaves(given)
    )
