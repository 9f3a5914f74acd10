"""Weights that come in pieces. Runs inside engine ranks, installed by the plug-in: an order of
`TensorChannel` names tensors and the boxes of them that lie in the memory of trainer ranks, and
the model's own loader copies from there what this engine rank holds, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from milescli.backends.sglang.inside.links import read_links
from milescli.backends.sglang.inside.remote import is_remote, remote_memories
from milescli.weights.delta import Delta, apply
from milescli.weights.remote import RemoteMemory
from milescli.weights.shards import Box, Numbers, Recorder, Sharded, Source

SHARDS_FORMAT = "miles_shards"
"""`load_format` of such an order; its payload is [(JSON of the order, handles of memory)]. An order
has `tensors` ([name, shape, dtype, boxes] each), which lie in the memory of the handles (shared, in
a file, or elsewhere), or come `from` ranks of a `group` and are passed on `to` others, or `from`
URLs; or `record`, tensors of which it asks what the rank takes."""
FETCHED = "bytes fetched: "
"""How the reply starts; then JSON: the number of each engine rank."""
CUTS = "cuts: "
"""How the reply to `record` starts; then JSON: for each engine rank [number of the tensor, start,
shape] of each box that it takes."""


def install() -> None:
    """Let /update_weights_from_tensor understand SHARDS_FORMAT. Comes before other pieces that
    change the update: they shall see this one as any other."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    ordinary = WeightUpdater.update_weights_from_tensor

    def update(self, named_tensors, load_format=None):
        if load_format != SHARDS_FORMAT:
            return ordinary(self, named_tensors, load_format)
        ((text, handles),) = named_tensors
        order, device = json.loads(text), torch.device(self.device)
        failure = said = None
        try:
            if "record" in order:
                recorders = recorders_of(order["record"], device)
                ordinary(self, [(each.name, Sharded.of(each)) for each in recorders])
                _record_taken({each.name: bool(each.taken) for each in recorders})
                said = _cut_of(recorders)
            else:
                flats, passing_on = _memory(self, order, handles, device)
                sources = sources_of(order["tensors"], flats, device)
                ordinary(self, [(each.name, Sharded.of(each)) for each in sources])
                for work in passing_on:
                    work.wait()
                _record_taken({each.name: each.fetched > 0 for each in sources if each.boxes})
                said = sum(each.fetched * each.dtype.itemsize for each in sources)
        except Exception as error:  # would end the engine, without a word to the sender
            failure = f"{type(error).__name__}: {error}"
        return _joined_reply(CUTS if "record" in order else FETCHED, said, failure)

    WeightUpdater.update_weights_from_tensor = update


_is_taken: dict[str, bool] = {}
"""Name of a tensor that was sent or announced -> whether a model of this rank took some of it."""


def _record_taken(taken: Mapping[str, bool]) -> None:
    for name, is_taken in taken.items():
        _is_taken[name] = is_taken or _is_taken.get(name, False)


def ignored_tensors() -> set[str]:
    """Return the names of what was sent or announced in pieces since the last call, and of which no
    model of this rank took anything."""
    names = {name for name, is_taken in _is_taken.items() if not is_taken}
    _is_taken.clear()
    return names


def _memory(
    updater: Any, order: Mapping[str, Any], handles: Sequence[str], device: torch.device
) -> tuple[Sequence[torch.Tensor | RemoteMemory], list[Any]]:
    """Provide the memory of the order's boxes, and what is still being passed on from it."""
    if handles and is_remote(handles[0]):
        return remote_memories(order["tensors"], handles), []
    if "from" not in order:
        from sglang.srt.utils import MultiprocessingSerializer

        return [MultiprocessingSerializer.deserialize(handle) for handle in handles], []
    if "to" not in order:
        wire, passing_on = read_links(order["from"], size_bytes=order["wire"]), []
    else:
        group = updater._model_update_group[order["group"]]
        wire = torch.empty(order["wire"], dtype=torch.uint8, device=device)
        arriving = [group.recv([wire[first:end]], rank, 0) for rank, first, end in order["from"]]
        for work in arriving:
            work.wait()
        passing_on = [group.send([wire], rank, 0) for rank in order["to"]]
    return [(updated_bucket(order, wire) if order["keep"] else wire).to(device)], passing_on


_kept: dict[str, dict[int, torch.Tensor]] = {}
"""Name of the group -> bucket -> [bytes] uint8 in host memory, as it was received last."""


def updated_bucket(order: Mapping[str, Any], wire: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a bucket of which changes may have arrived, and keep them. Raises
    ValueError if they are changes of other numbers."""
    if order["group"] not in _kept:
        _kept.clear()
        _kept[order["group"]] = {}
    buckets = _kept[order["group"]]
    if order["bucket"] not in buckets:
        buckets[order["bucket"]] = torch.zeros(order["bytes"], dtype=torch.uint8)
    numbers, arrived = buckets[order["bucket"]], wire.cpu()
    for first, end, start, stop, delta in order["parts"]:
        if delta is None:
            numbers[start:stop] = arrived[first:end]
        else:
            words = numbers[start:stop].view(torch.int16).numpy()
            apply(Delta(**delta), arrived[first:end].numpy(), words)
    return numbers


def recorders_of(order: Sequence[Any], device: torch.device) -> list[Recorder]:
    """Return tensors that note what is taken of them."""
    return [
        Recorder(name, shape, getattr(torch, dtype), device=device) for name, shape, dtype in order
    ]


def sources_of(
    order: Sequence[Any], memories: Sequence[torch.Tensor | RemoteMemory], device: torch.device
) -> list[Source]:
    """Return the tensors of an order; `memories` ([bytes] uint8, or what is read when it is wanted)
    are those of the senders."""
    return [
        Source(
            name,
            shape,
            (kind := getattr(torch, dtype)),
            [
                (
                    Box(start=tuple(start), shape=tuple(size)),
                    _numbers(memories[sender], first, end, kind, size),
                )
                for sender, first, end, start, size in boxes
            ],
            device=device,
        )
        for name, shape, dtype, boxes in order
    ]


def _numbers(
    memory: torch.Tensor | RemoteMemory,
    first: int,
    end: int,
    dtype: torch.dtype,
    shape: Sequence[int],
) -> Numbers:
    if isinstance(memory, RemoteMemory):
        return memory.box(first, dtype=dtype, shape=shape)
    return memory[first:end].view(dtype).view(shape)


def _cut_of(recorders: Sequence[Recorder]) -> list[list[object]]:
    return [
        [number, box.start, box.shape]
        for number, recorder in enumerate(recorders)
        for box in dict.fromkeys(recorder.taken)
    ]


def _joined_reply(kind: str, said: object, failure: str | None) -> tuple[bool, str]:
    """Join what all ranks of the engine report: only rank 0 replies."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    answers: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(answers, (failure, said), group=group.cpu_group)
    for rank, (failed, _) in enumerate(answers):
        if failed is not None:
            return False, f"engine rank {rank}: {failed}"
    return True, kind + json.dumps([each for _, each in answers])
