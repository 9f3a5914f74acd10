"""Two channels by which trainer ranks send weights to SGLang engines: shared memory on one machine,
or a process group. They run inside the trainer ranks, collectively; torch.distributed's default
group belongs to the ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from milescli.backends.sglang.client.http import EngineRefused, Orders, Reply
from milescli.backends.sglang.inside.corrections import DRAFT_FORMAT
from milescli.backends.sglang.inside.quantised import LOADED_FORMAT
from milescli.backends.sglang.inside.shards import FETCHED, SHARDS_FORMAT
from milescli.backends.sglang.inside.verify import BEGIN, DIFFERS, END, VERIFY_FORMAT
from milescli.backends.sglang.weights.group import WeightGroup
from milescli.backends.sglang.weights.pushing import GroupRoute, Outgoing, Pusher, Route
from milescli.backends.sglang.weights.shared_tensor import (
    FOLDER,
    SharedBuffer,
    plain_payload,
)
from milescli.core.errors import MachineError, MilesError, MismatchError
from milescli.core.types import EngineAddress
from milescli.weights.base import Bucket, Slice, has_quantised, layout, write_flat
from milescli.weights.shards import Shard, Shards

DEFAULT_TIMEOUT_S = 600.0
"""Time for an engine to load one bucket; a run uses `request_timeout_s` of the recipe."""
READ_WITHIN_S = 30.0
"""After a failure, the time for the other engines to read what they were sent."""


class _Channel:
    """Implements what both channels share: every rank consumes all buckets, raises any rank's
    failure, and verifies what arrived."""

    def __init__(
        self,
        *,
        backend: str = "gloo",
        host: str = "127.0.0.1",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Take the `backend` of collectives, gloo or nccl, and `host`, the address of trainer rank
        0's node for the engines; `timeout_s` bounds each order to an engine."""
        self._backend = backend
        self._host = host
        self._timeout_s = timeout_s
        self._orders: Orders | None = None
        self._loading: list[Reply] = []
        self._failed = False
        """Rank 0 has met a failure: nothing more is sent."""
        self.groups: list[list[int]] = []
        """Trainer ranks that reach the same engines: each group sends shards once. Every engine
        rank is reached by one."""
        self.num_receivers: int | None = None
        """Ranks of an engine, where they receive shards into memory of their own."""
        self.sent_bytes = 0
        """Bytes that this rank sent, or put where engines read them."""
        self.full_every = 1
        """Every how many publishes a channel that can send what changed sends all numbers."""
        self.fetched: dict[str, list[int]] = {}
        """Engine -> [tp] bytes that each of its ranks took from shards since `open`."""

    @property
    def orders(self) -> Orders:
        """Return the client for orders to the engines. Call `open` before."""
        assert self._orders is not None, "send before open"
        return self._orders

    def open(self, engines: list[EngineAddress]) -> None:
        self.close()
        self._orders = Orders(engines, timeout_s=self._timeout_s)
        self.fetched = {}

    def close(self) -> None:
        if self._orders is not None:
            self._orders.close()
            self._orders = None

    def send(self, buckets: Iterator[Bucket] | Iterator[Shards]) -> None:
        try:
            agree(self._send_all(buckets))
        finally:
            self._free()

    def verify(self, buckets: Iterator[Bucket] | Iterator[Shards]) -> None:
        """Overwrite the engines' weights, send everything again in the same way, and compare."""
        failure = error_of(self._order_verifier, BEGIN) if rank_here() == 0 else None
        try:
            failure = self._send_all(buckets) or failure
            if rank_here() == 0:
                failure = failure or error_of(self._order_verifier, END)
            agree(failure)
        finally:
            self._free()

    def _order_all(self, load_format: str, order: str) -> None:
        """Send an order of miles to every engine, without tensors."""
        payload = plain_payload([(order, None)])
        bodies = [
            {
                "serialized_named_tensors": [payload] * engine.tp,
                "load_format": load_format,
                "flush_cache": False,
                "disable_draft_model": engine.has_own_draft,
            }
            for engine in self.orders.engines
        ]
        self.orders.finish(self.orders.begin_all("/update_weights_from_tensor", bodies))

    def _order_verifier(self, order: str) -> None:
        try:
            self._order_all(VERIFY_FORMAT, order)
        except EngineRefused as error:
            _, is_difference, finding = error.why.partition(DIFFERS)
            if not is_difference:
                raise
            engine = error.what.partition(" rejected ")[0]
            raise MismatchError(
                "an engine does not hold the weights that the trainer sent: "
                f"{finding.strip(chr(34) + '}')}",
                why=f"{engine} was compared bit for bit after the publish",
                fix="stop the run: the engine samples from another policy than the trained one; "
                "please report this with the recipe",
            ) from None

    def _send_all(self, buckets: Iterator[Bucket] | Iterator[Shards]) -> MilesError | None:
        """Send all buckets; engines load one while the ranks make and flatten the next. Every rank
        consumes all buckets, even after a failure: making them is collective, and a rank that
        stopped would hang the others. After the last bucket of quantised weights the engines
        prepare them."""
        failure: MilesError | None = None
        quantised = False
        for index, bucket in enumerate(buckets):
            quantised = quantised or has_quantised(_dtypes(bucket))
            own = self._flatten(bucket, index)
            # on rank 0; before `_collect` lets the other ranks go on
            failure = error_of(self._finish_loading) or failure
            self._failed = failure is not None
            whole = self._collect(own)
            if rank_here() == 0 and failure is None:
                failure = error_of(self._begin_loading, whole)
        failure = error_of(self._finish_loading) or failure
        if quantised and rank_here() == 0 and failure is None:
            failure = error_of(self._order_all, LOADED_FORMAT, "all")
        return failure

    def _flatten(self, bucket: Any, index: int) -> Any:
        """Prepare this rank's part of a bucket. The engines may still be reading the bucket
        before."""
        raise NotImplementedError

    def _collect(self, own: Any) -> Any:
        """Collect on rank 0 what it needs from all ranks. No rank continues before rank 0 arrives:
        by then the engines have read the bucket before, and its memory is free."""
        return own

    def _begin_loading(self, whole: Any) -> None:
        """Rank 0: make all engines load one bucket."""
        raise NotImplementedError

    def _finish_loading(self) -> None:
        """Rank 0: wait until all engines have replied to the last bucket, each within its time
        limit. They reply once they have read it."""
        loading, self._loading = self._loading, []
        replies = self.orders.finish(loading) if loading else []
        for engine, reply in zip(self.orders.engines, replies, strict=False):
            _, is_shards, counts = str(reply.get("message", "")).partition(FETCHED)
            if is_shards:
                fetched = self.fetched.setdefault(engine.name, [0] * engine.tp)
                for rank, size in enumerate(json.loads(counts)):
                    fetched[rank] += size

    def _free(self) -> None:
        """Free the memory of the buckets: no rank sends any more."""


class TensorChannel(_Channel):
    """Sends through shared memory: host memory on a CPU, CUDA or HIP IPC on a GPU, which is
    untested. Each engine rank reads from the trainer rank that shares its memory.

    Buffers alternate on every rank: engines read one while the other is filled. A buffer is reused
    only after all engines have replied.
    """

    def __init__(self, **settings: Any) -> None:
        """Accept the settings of every channel; shared memory needs neither backend nor host."""
        super().__init__(**settings)
        self._buffers: list[SharedBuffer | None] = [None, None]
        self._readers: list[list[tuple[int, int]]] = []
        self._for_draft = False
        self._shards = Shards()

    def open(self, engines: list[EngineAddress]) -> None:
        super().open(engines)
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._readers = self._readers_of(engines, num_ranks)
        memories = [self._memory_key()] * num_ranks
        if num_ranks > 1:
            dist.all_gather_object(memories, self._memory_key())
        self.groups = groups_of(memories, self._readers)

    def _readers_of(
        self, engines: list[EngineAddress], num_ranks: int
    ) -> list[list[tuple[int, int]]]:
        """Return per trainer rank the (engine, engine rank) pairs that read its whole tensors, and
        pieces from all ranks with an equal `_memory_key`."""
        return readers(engines, num_ranks=num_ranks)

    def _memory_key(self) -> object:
        """Return a key that is equal on trainer ranks whose memory the same engines read."""
        return _memory()

    def _new_buffer(self, size_bytes: int, device: torch.device) -> SharedBuffer:
        return SharedBuffer(size_bytes, device)

    def send_draft(self, buckets: Iterator[Bucket]) -> None:
        self._for_draft = True
        try:
            self.send(buckets)
        finally:
            self._for_draft = False

    def _flatten(self, bucket: Any, index: int) -> Any:
        """Return a handle for each reader of this rank; for shards, where this rank put them; or
        the error, which rank 0 raises."""
        if bucket and isinstance(bucket[0], Shard):
            self._shards = bucket
            return self._place(bucket, index)
        self._shards = []
        mine = self._readers[rank_here()]
        if not mine:
            return []
        slices = layout(bucket)
        try:
            buffer = self._filled(bucket, slices, index)
        except MachineError as error:
            return error
        return [buffer.payload(slices) for _ in mine]

    def _place(self, shards: Shards, index: int) -> _Placed | MilesError:
        """Put this rank's shards into memory that the engines can read."""
        rank = rank_here()
        mine = [
            (str(number), shard.tensor)
            for number, shard in enumerate(shards)
            if shard.tensor is not None and rank in shard.senders
        ]
        if not mine:
            return _Placed(places={}, handles=[])
        slices = layout(mine)
        try:
            buffer = self._filled(mine, slices, index)
        except MachineError as error:
            return error
        # one handle of a file serves all; those of a device are counted
        num_readers = 1
        if buffer.device.type != "cpu":
            (group,) = [members for members in self.groups if rank in members]
            num_readers = sum(len(self._readers[member]) for member in group)
        return _Placed(
            places={int(place.name): (place.start, place.end) for place in slices},
            handles=[buffer.handle(slices[-1].end) for _ in range(num_readers)],
        )

    def _filled(self, bucket: Bucket, slices: list[Slice], index: int) -> SharedBuffer:
        buffer = self._buffer(bucket[0][1].device, slices[-1].end, index)
        buffer.write(bucket)
        self.sent_bytes += slices[-1].end
        return buffer

    def _buffer(self, device: torch.device, size_bytes: int, index: int) -> SharedBuffer:
        buffer = self._buffers[index % 2]
        if buffer is None or buffer.size_bytes < size_bytes or buffer.made_for != device:
            self._free_one(index % 2)
            buffer = self._buffers[index % 2] = self._new_buffer(size_bytes, device)
        return buffer

    def _collect(self, own: Any) -> list[Any]:
        reads_others = any(self._readers[1:]) or (bool(self._shards) and len(self._readers) > 1)
        if not reads_others:  # all engines read the memory of rank 0
            return [own]
        gathered = [own for _ in self._readers] if rank_here() == 0 else None
        dist.gather_object(own, gathered, dst=0)
        return gathered or []

    def _begin_loading(self, whole: list[Any]) -> None:
        for own in whole:
            if isinstance(own, MilesError):
                raise own
        plain = DRAFT_FORMAT if self._for_draft else "flattened_bucket"
        payloads = self._pieces(whole) if self._shards else self._whole_buckets(whole)
        bodies = [
            {
                "serialized_named_tensors": own,
                "load_format": SHARDS_FORMAT if self._shards else plain,
                "flush_cache": False,
                "disable_draft_model": engine.has_own_draft and not self._for_draft,
            }
            for own, engine in zip(payloads, self.orders.engines, strict=True)
        ]
        self._loading = self.orders.begin_all("/update_weights_from_tensor", bodies)

    def _whole_buckets(self, whole: list[list[str]]) -> list[list[str]]:
        """Return for each engine rank the handle that its trainer rank made."""
        payloads = [[""] * engine.tp for engine in self.orders.engines]
        for handles, mine in zip(whole, self._readers, strict=False):
            for handle, (engine, engine_rank) in zip(handles, mine, strict=True):
                payloads[engine][engine_rank] = handle
        return payloads

    def _pieces(self, placed: list[_Placed]) -> list[list[str]]:
        """Return for each engine rank which tensors exist, and which rank has which box."""
        payloads = [[""] * engine.tp for engine in self.orders.engines]
        for group, members in enumerate(self.groups):
            numbers = count()
            senders = sorted({shard.senders[group] for shard in self._shards})
            order = json.dumps({"tensors": _described(self._shards, group, senders, placed)})
            for rank in members:
                for engine, engine_rank in self._readers[rank]:
                    number = next(numbers)
                    handles = [placed[sender].handles for sender in senders]
                    own = [each[number % len(each)] for each in handles]
                    payloads[engine][engine_rank] = plain_payload([(order, own)])
        return payloads

    def _finish_loading(self) -> None:
        """Wait for all engines even if one fails: the others may still open what is freed next."""
        loading = self._loading
        try:
            super()._finish_loading()
        except MilesError:
            wait(loading, timeout=READ_WITHIN_S)
            raise

    def _free(self) -> None:
        """Free the buffers: training needs the memory, and on a device the engines' caches."""
        on_device = any(
            buffer is not None and buffer.device.type == "cuda" for buffer in self._buffers
        )
        for place in range(len(self._buffers)):
            self._free_one(place)
        if on_device:
            torch.cuda.ipc_collect()

    def _free_one(self, place: int) -> None:
        buffer, self._buffers[place] = self._buffers[place], None
        if buffer is not None:
            buffer.free()

    def close(self) -> None:
        super().close()
        self._free()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """Where a rank has put its shards of a bucket."""

    places: dict[int, tuple[int, int]]
    """Number of the shard -> (first byte, one past the last)."""
    handles: list[str]
    """Handles of this rank's memory: one for all readers, or one for each."""


def _described(
    shards: Shards, group: int, senders: list[int], placed: list[_Placed]
) -> list[list[object]]:
    """Return [name, shape, dtype, [[sender, first byte, end, start, shape] of each box]] of each
    tensor; a sender is its index in `senders`."""
    number_of = {rank: number for number, rank in enumerate(senders)}
    tensors: dict[str, list[object]] = {}
    for number, shard in enumerate(shards):
        part, sender = shard.part, shard.senders[group]
        boxes = tensors.setdefault(part.name, [])
        box = [*placed[sender].places[number], part.box.start, part.box.shape]
        boxes.append([number_of[sender], *box])
    kinds = {shard.part.name: shard.part for shard in shards}
    return [
        [name, kinds[name].shape, str(kinds[name].dtype).removeprefix("torch."), boxes]
        for name, boxes in tensors.items()
    ]


def _memory() -> tuple[str, int]:
    """Return a key that is equal for processes that share memory: the kernel's boot id and the
    device of the shared folder."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else "", FOLDER.stat().st_dev


def groups_of(
    memories: Sequence[object], of_rank: Sequence[Sequence[tuple[int, int]]]
) -> list[list[int]]:
    """Return the trainer ranks of each memory that engines read. Pure."""
    by_memory: dict[object, list[int]] = {}
    for rank, memory in enumerate(memories):
        by_memory.setdefault(memory, []).append(rank)
    return [ranks for ranks in by_memory.values() if any(of_rank[rank] for rank in ranks)]


def _dtypes(bucket: Any) -> list[torch.dtype]:
    """Return the dtypes of the tensors of a bucket, or of the shards of all ranks."""
    return [each.part.dtype if isinstance(each, Shard) else each[1].dtype for each in bucket]


def readers(engines: list[EngineAddress], *, num_ranks: int) -> list[list[tuple[int, int]]]:
    """Return per trainer rank the (engine, engine rank) pairs that read its memory. Pure."""
    of_rank: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for index, engine in enumerate(engines):
        assert len(engine.sharing_ranks) == engine.tp, (
            f"{engine.url}: {engine.tp} ranks, shared by {engine.sharing_ranks}"
        )
        for engine_rank, rank in enumerate(engine.sharing_ranks):
            of_rank[rank].append((index, engine_rank))
    return of_rank


class PushChannel(_Channel):
    """Implements what channels share by which engine ranks get messages: engines say once what they
    take of each bucket, and are sent that, or what changed of it."""

    def __init__(self, **settings: Any) -> None:
        """Accept the settings of every channel."""
        super().__init__(**settings)
        self._pusher: Pusher | None = None
        self._shards = Shards()

    def open(self, engines: list[EngineAddress]) -> None:
        super().open(engines)
        equal = all(engine.tp == engines[0].tp for engine in engines)
        joined = equal and dist.is_initialized()
        self.groups = [list(range(dist.get_world_size()))] if joined else []
        self.num_receivers = engines[0].tp

    def _new_route(self) -> Route:
        """Return the way of messages. Collective: raises MilesError on all ranks, or on none."""
        raise NotImplementedError

    def _messages(self, shards: Shards) -> list[Outgoing] | MilesError:
        """Return this rank's messages for a bucket. The first time, ask the engines which parts
        they need; if that fails, every rank returns the error."""
        if self._pusher is None:
            try:
                route = self._new_route()
            except MilesError as error:  # on all ranks
                return error
            self._pusher = Pusher(self.orders, route, full_every=self.full_every)
            self._pusher.begin_publish()
        if not self._pusher.knows(shards):
            answer: list[Any] = [None]
            if rank_here() == 0:
                try:
                    self._finish_loading()
                    answer = [self._pusher.ask(shards)]
                except MilesError as error:
                    answer = [error]
            dist.broadcast_object_list(answer, src=0)
            if isinstance(answer[0], MilesError):
                return answer[0]
            self._pusher.learn(shards, answer[0])
        return self._pusher.messages(shards)

    def send(self, buckets: Iterator[Bucket] | Iterator[Shards]) -> None:
        if self._pusher is not None:
            self._pusher.begin_publish()
        super().send(buckets)

    def verify(self, buckets: Iterator[Bucket] | Iterator[Shards]) -> None:
        if self._pusher is not None:
            self._pusher.begin_check()
        super().verify(buckets)

    def _free(self) -> None:
        self._shards = []
        if self._pusher is not None:
            self._pusher.forget(has_failed=sys.exc_info()[1] is not None)

    def close(self) -> None:
        """Leave the engines."""
        if self._pusher is not None:
            self._pusher.close()
        self._pusher = None
        super().close()


class DistributedChannel(PushChannel):
    """Sends through process groups: gloo on a CPU, NCCL (or RCCL) on a GPU, which is untested.
    Shards go from every trainer rank to the engine ranks that hold them, whole tensors from rank 0
    to all."""

    def __init__(self, **settings: Any) -> None:
        """Accept the settings of every channel."""
        super().__init__(**settings)
        self._group: WeightGroup | None = None
        self._route: GroupRoute | None = None

    def open(self, engines: list[EngineAddress]) -> None:
        """Form the group. Collective: it returns, or raises, on every rank."""
        super().open(engines)
        agree(error_of(self._form_group) if rank_here() == 0 else None)

    def _form_group(self) -> None:
        self._group = WeightGroup(self.orders, backend=self._backend, host=self._host)

    def _new_route(self) -> GroupRoute:
        self._route = GroupRoute(self.orders, backend=self._backend, host=self._host)
        return self._route

    def _flatten(self, bucket: Any, index: int) -> Any:
        if bucket and isinstance(bucket[0], Shard):
            self._shards = bucket
            return self._messages(bucket)
        self._shards = []
        if rank_here() != 0:
            return None
        slices = layout(bucket)
        flat = torch.empty(slices[-1].end, dtype=torch.uint8, device=bucket[0][1].device)
        write_flat(bucket, flat)
        return flat, slices

    def _collect(self, own: Any) -> Any:
        """Let every rank send its messages, unless rank 0 has had a failure: nobody would receive
        them. Returns on rank 0 the messages of all ranks."""
        if not self._shards or isinstance(own, MilesError):
            return own
        everyones: list[Any] = [None] * dist.get_world_size()
        described = [each.described() for each in own]
        dist.gather_object(described, everyones if rank_here() == 0 else None, dst=0)
        goes_on = [not self._failed]
        dist.broadcast_object_list(goes_on, src=0)
        if goes_on[0]:
            assert self._route is not None
            self.sent_bytes += self._route.send(own)
        return everyones

    def _begin_loading(self, whole: Any) -> None:
        """Start the transfer. The bytes have left when this returns, or are on their way; the
        engines put them into place in the meantime."""
        if isinstance(whole, MilesError):
            raise whole
        if self._shards:
            assert self._pusher is not None
            self._loading = self._pusher.begin(self._shards, whole)
            return
        assert self._group is not None, "send before open"
        self._loading = self._group.broadcast(*whole)
        self.sent_bytes += whole[0].numel()

    def close(self) -> None:
        """Leave the groups on both sides."""
        if self._group is not None:
            self._group.close()
        self._group = self._route = None
        super().close()


def rank_here() -> int:
    """Return this process's rank among the trainer ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def error_of(action, *arguments: object) -> MilesError | None:
    """Run `action` and return the MilesError that it raises, so that the ranks can agree on it
    first. Any other exception is a bug and passes through."""
    try:
        action(*arguments)
    except MilesError as error:
        return error
    return None


def agree(failure: MilesError | None) -> None:
    """Raise rank 0's error on every rank, if it has one. If the ranks have lost each other too,
    rank 0 still raises its first error."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        box = [failure]
        try:
            dist.broadcast_object_list(box, src=0)
        except RuntimeError:
            if failure is None:
                raise
        failure = box[0]
    if failure is not None:
        raise failure
