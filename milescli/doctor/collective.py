"""Runs the processes that meet, connect to each other, compare clocks and run all-reduces: one for
each device of a machine, or one on each node of a cluster. Only measures; `links` and
`node_comparison` judge. Run by `trials`."""

from __future__ import annotations

import itertools
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from milescli.core.units import MIB

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

PLACE_VARIABLE = "MILES_DOCTOR_PLACE"
"""Variable that holds the `Place` of a trial's process, as JSON."""
MEETING_TIMEOUT_S = 60.0
"""Time limit of the wait for all processes."""
STEP_TIMEOUT_S = 30.0
"""Time limit of each common step, including the creation of the devices' communicators."""
CONNECT_TIMEOUT_S = 5.0
"""Time limit of a connection between two processes."""
NUM_PINGS = 20
"""Number of pings, of which the fastest counts."""
MAX_PAIRS = 28
"""All pairs of eight processes. With more, only neighbours are measured."""
BUFFER_BYTES = {"cpu": 4 * MIB, "cuda": 256 * MIB}
"""Size of the buffer of one all-reduce: enough to saturate a link, and still fast."""
ROUNDS = 5
"""Number of measured rounds, after one that is not measured; the result is their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Describes one process of the collective."""

    rank: int
    names: list[str]
    """[rank] names for people: numbers of devices, or addresses of nodes."""
    addresses: list[str]
    """[rank] address on which the process listens; every process must reach all of them."""
    meeting: tuple[str, int]
    """Address and port where rank 0 waits for the others."""
    backend: Literal["gloo", "nccl"]
    device: int | None = None
    """Index of the accelerator, as torch counts; None: on the host."""


@dataclass(slots=True, kw_only=True)
class Report:
    """Holds what one process observed; rank 0's report has the results of all."""

    offsets: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name -> (seconds that its clock is ahead of rank 0's, largest error of that)."""
    unreachable: list[tuple[str, str, str]] = field(default_factory=list)
    """(from, to, why)."""
    pairs: dict[str, float] = field(default_factory=dict)
    """`0-1` -> bytes per second that one process sends in an all-reduce of the two."""
    everyone: float = 0.0
    """Bytes per second that one process sends in an all-reduce of all."""
    step: str = "meeting"
    """Last step that was started; empty if all were completed."""
    problem: str = ""
    """Why that step failed; empty if the process was killed."""


def first_broken(reports: Sequence[Report]) -> Report | None:
    """Return the first report with a problem, else the first with an incomplete step."""
    return next(
        (report for report in reports if report.problem),
        next((report for report in reports if report.step), None),
    )


def run_all_steps(
    place: Place,
    *,
    on_step: Callable[[Report], None] = lambda _: None,
    clock: Callable[[], float] = time.time,
) -> Report:
    """Run all steps in order: meet, connect to each other and read clocks, then all-reduce in pairs
    and over all. Calls `on_step` at the start of each step, so that a step that hangs is known.
    Records errors of the network or a device in the report instead of raising them."""
    import torch.distributed as dist

    # a collective that hangs raises at its bound, in the step that it belongs to
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    report = Report()
    try:
        with _listener(place.addresses[place.rank], clock) as port:
            store = _meet(place)
            store.set(f"port/{place.rank}", str(port))
            _begin(report, "reaching each other", on_step)
            _reach(place, store, report, clock)
        if not report.unreachable:
            _run_all_reduces(place, store, report, on_step)
            report.step = ""
        return report
    except (RuntimeError, OSError) as error:  # DistError and DistStoreError are RuntimeErrors
        report.problem = next(iter(str(error).splitlines()), type(error).__name__)
        return report
    finally:
        on_step(report)
        if dist.is_initialized():
            dist.destroy_process_group()


def write_report(file: Path, report: Report) -> None:
    """Write the report atomically, so that a process that is killed leaves its last step."""
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(report)))
    temporary.replace(file)


def read_report(file: Path) -> Report:
    """Read a report; without a file, return that the process did not start."""
    return (
        Report(**json.loads(file.read_text(encoding="utf-8")))
        if file.exists()
        else Report(step="starting", problem="the process did not start")
    )


def pairs_of(count: int) -> list[tuple[int, int]]:
    """Return all pairs, or those of neighbours in a ring if there are too many."""
    every = list(itertools.combinations(range(count), 2))
    return (
        every
        if len(every) <= MAX_PAIRS
        else [(rank, rank + 1) for rank in range(count - 1)] + [(0, count - 1)]
    )


def read_clock(host: str, port: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return (seconds that the clock of the listener there is ahead of ours, largest error of
    that). The time stamp lies between request and reply, and is assumed to be in the middle (RFC
    5905, section 8, with one time stamp of the server). Raises OSError."""
    best = (0.0, float("inf"))
    with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(NUM_PINGS):
            sent_at = clock()
            connection.sendall(b"?")
            theirs: float = struct.unpack("!d", _receive_exactly(connection, 8))[0]
            answered = clock()
            error = (answered - sent_at) / 2
            if error < best[1]:
                best = (theirs - (sent_at + answered) / 2, error)
    return best


@contextmanager
def _listener(address: str, clock: Callable[[], float]) -> Iterator[int]:
    """Open a port that sends the time to each connection, while the context lasts."""
    with socket.create_server((address, 0), backlog=1024) as server:

        def serve(connection: socket.socket) -> None:
            with connection:
                while connection.recv(1):
                    connection.sendall(struct.pack("!d", clock()))

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed: the end
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("it closed the connection")
        data += part
    return data


def _meet(place: Place) -> Store:
    import torch.distributed as dist

    host, port = place.meeting
    return dist.TCPStore(
        host,
        port,
        len(place.names),
        is_master=place.rank == 0,
        timeout=timedelta(seconds=MEETING_TIMEOUT_S),
        wait_for_workers=False,
    )


def _reach(place: Place, store: Store, report: Report, clock: Callable[[], float]) -> None:
    """Connect to all other processes, and find which ones the others could not reach. Raises
    RuntimeError if one does not arrive."""
    for rank, name in enumerate(place.names):
        try:
            port = int(store.get(f"port/{rank}"))
        except RuntimeError:
            raise RuntimeError(
                f"{name} did not connect to {place.meeting[0]}:{place.meeting[1]} within "
                f"{MEETING_TIMEOUT_S:g} s"
            ) from None
        if rank == place.rank:
            continue
        try:
            report.offsets[name] = read_clock(place.addresses[rank], port, clock)
        except OSError as error:
            report.unreachable.append((place.names[place.rank], name, str(error)))
    store.set(f"reached/{place.rank}", json.dumps(report.unreachable))
    # every rank waits for all others here, so that none leaves before all have asked
    reached = [json.loads(store.get(f"reached/{rank}")) for rank in range(len(place.names))]
    report.unreachable = [tuple(pair) for pairs in reached for pair in pairs]


def _run_all_reduces(
    place: Place, store: Store, report: Report, on_step: Callable[[Report], None]
) -> None:
    import torch
    import torch.distributed as dist

    size, bound = len(place.names), timedelta(seconds=STEP_TIMEOUT_S)
    device = torch.device("cpu" if place.device is None else f"cuda:{place.device}")
    if place.device is not None:
        torch.cuda.set_device(device)
    _begin(report, "forming a group", on_step)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=size, timeout=bound)
    speeds: dict[str, float] = {}
    for a, b in pairs_of(size):
        _begin(report, f"adding numbers of {place.names[a]} and {place.names[b]}", on_step)
        group = dist.new_group([a, b], backend=place.backend, timeout=bound)
        if place.rank in (a, b):
            speeds[f"{place.names[a]}-{place.names[b]}"] = bus_bandwidth(device, group, 2)
            dist.destroy_process_group(group)
        dist.monitored_barrier(timeout=bound)
    _begin(report, "adding numbers of all", on_step)
    report.everyone = bus_bandwidth(
        device, dist.new_group(backend=place.backend, timeout=bound), size
    )
    gathered: list[dict[str, float]] = [{} for _ in range(size)]
    dist.all_gather_object(gathered, speeds)
    report.pairs = {name: speed for own in gathered for name, speed in own.items()}


def bus_bandwidth(device: torch.device, group: ProcessGroup, size: int) -> float:
    """Return the bytes per second that one rank sends in an all-reduce of BUFFER_BYTES: 2 (n - 1) /
    n of the buffer (ring); 0 for a single rank. Raises RuntimeError if the sum is wrong."""
    import torch
    import torch.distributed as dist

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    value = torch.ones(BUFFER_BYTES[device.type] // 4, device=device)
    dist.all_reduce(value, group=group)
    if not bool((value == size).all()):
        raise RuntimeError(f"{size} ones add up to {value[value != size][0].item():g}, not {size}")
    value.fill_(0.0)
    settle()
    start = time.monotonic()
    for _ in range(ROUNDS):
        dist.all_reduce(value, group=group)
    settle()
    return 2 * (size - 1) / size * BUFFER_BYTES[device.type] * ROUNDS / (time.monotonic() - start)


def _begin(report: Report, step: str, on_step: Callable[[Report], None]) -> None:
    report.step = step
    on_step(report)
