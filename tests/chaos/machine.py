"""Harms of what a run lives on: disk, memory, clock, nodes and network. Each says why it cannot be
done here, what must be there before the run starts, and how it is done. Called by `trial`."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos import nodes
from tests.chaos.faults import Fault
from tests.chaos.place import Attempt, Place
from tests.end_to_end.cluster.small_cluster import SmallCluster
from tests.end_to_end.cluster.small_cluster import why_impossible as why_no_cluster

DISK_MIB = 160
SHM_MIB = 256
BALLAST = "ballast"
"""The file that fills the disk of a run."""
GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
"""(where control groups of memory are, file of their limit), of cgroup v1 and v2."""
LIMIT_BYTES = 2**20
OOM_WITHIN_S = 20.0
CLOCK = "clock"
"""The file that says by how much the clock of a run is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where harm is done."""

    attempt: Attempt
    place: Place
    victims: list[psutil.Process]
    chance: random.Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """One of the table below."""

    do: Callable[[Scene], str]
    """Returns what was done, for the line of the trial."""
    why_not: Callable[[], str | None] = lambda: None
    """The reason why it cannot be done here."""
    around: Callable[[Place, str], AbstractContextManager[None]] = lambda place, name: nullcontext()
    """What must be there for the run of this name, from before it starts."""
    undo: Callable[[Place, str], None] = lambda place, name: None
    """Before `miles resume`."""


def why_impossible(fault: Fault) -> str | None:
    """The reason why this machine cannot do it."""
    if fault.nodes > 1 and (reason := why_no_cluster()):
        return reason
    return HARMS[fault.harm].why_not() if fault.harm in HARMS else None


@contextmanager
def stage(fault: Fault, place: Place, name: str) -> Iterator[Place]:
    """Where the run of this name is started and hurt."""
    with nodes.two_nodes(place) if fault.nodes > 1 else nullcontext(place) as where:
        where.calm(fault.sets)  # before anything is other than usual
        harm = HARMS.get(fault.harm)
        with harm.around(where, name) if harm is not None else nullcontext():
            yield where


def _why_no_mount() -> str | None:
    return None if os.geteuid() == 0 else "mounting a small disk needs root"


@contextmanager
def _small_disk(place: Place, name: str) -> Iterator[None]:
    run = place.run(name)
    place.wipe(name)
    run.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", run], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", run], check=True)


def fill_up(ballast: Path) -> None:
    """A file that takes all that is free beside it."""
    for size_bytes in (2**20, 2**12):
        with suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(bytes(size_bytes)):
                pass


def _fill(scene: Scene) -> str:
    fill_up(scene.attempt.run / BALLAST)
    return "disk full"


def _fill_awhile(scene: Scene) -> str:
    _fill(scene)
    seconds = scene.chance.uniform(0.5, 6.0)
    scene.attempt.pause(seconds)
    (scene.attempt.run / BALLAST).unlink(missing_ok=True)
    return f"disk full for {seconds:.1f} s"


@contextmanager
def _own_shm(place: Place, name: str) -> Iterator[None]:
    mount = f'mount -t tmpfs -o size={SHM_MIB}m tmpfs /dev/shm && exec "$@"'
    place.before = ("unshare", "--mount", "sh", "-c", mount, "sh")
    try:
        yield
    finally:
        place.before = ()


def _fill_shm_awhile(scene: Scene) -> str:
    folder = Path(f"/proc/{scene.attempt.process.pid}/root/dev/shm")
    seconds = scene.chance.uniform(0.5, 4.0)
    fill_up(folder / BALLAST)
    scene.attempt.pause(seconds)
    (folder / BALLAST).unlink(missing_ok=True)
    return f"/dev/shm full for {seconds:.1f} s"


def _free(place: Place, name: str) -> None:
    (place.run(name) / BALLAST).unlink(missing_ok=True)


def _groups() -> tuple[Path, str] | None:
    for root, limit in GROUPS:
        trial = root / f"chaos-{os.getpid()}"
        with suppress(OSError):
            trial.mkdir()
            try:
                if os.access(trial / limit, os.W_OK):
                    return root, limit
            finally:
                trial.rmdir()
    return None


def _why_no_groups() -> str | None:
    return None if _groups() else "no control group of memory can be made"


def _starve(scene: Scene) -> str:
    """The kernel ends the victim as soon as it wants one page more."""
    found = _groups()
    assert found is not None, "asked before"
    victim, (root, limit) = scene.victims[0], found
    group = root / f"chaos-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(LIMIT_BYTES))
        (group / "cgroup.procs").write_text(str(victim.pid))
        began = time.monotonic()
        while _is_alive(victim) and time.monotonic() < began + OOM_WITHIN_S:
            scene.attempt.pause(0.05)
        assert not _is_alive(victim), f"the kernel has left process {victim.pid} alone"
        return f"out of memory {time.monotonic() - began:.1f} s later"
    finally:
        _remove(group)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 5.0
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):  # a zombie in it keeps it a moment longer
            group.rmdir()
        time.sleep(0.05)


@contextmanager
def _own_clock(place: Place, name: str) -> Iterator[None]:
    library, offset = place.folder / "clock.so", place.folder / CLOCK
    source = Path(__file__).with_name("clock.c")
    command = ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    offset.write_bytes(struct.pack("d", 0.0))
    place.variables |= {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(offset)}
    try:
        yield
    finally:
        del place.variables["LD_PRELOAD"], place.variables["CHAOS_CLOCK"]


def _step_clock(direction: int) -> Callable[[Scene], str]:
    def do(scene: Scene) -> str:
        seconds = direction * scene.chance.choice((30, 3600, 86400))
        with (scene.place.folder / CLOCK).open("r+b") as offset:
            offset.write(struct.pack("d", float(seconds)))
        return f"{seconds:+d} s"

    return do


def _of_nodes(do: Callable[[nodes.TwoNodes, Scene], str]) -> Callable[[Scene], str]:
    def harm(scene: Scene) -> str:
        assert isinstance(scene.place, nodes.TwoNodes), "of two nodes alone"
        return do(scene.place, scene)

    return harm


def _end_node(place: nodes.TwoNodes, scene: Scene) -> str:
    place.cluster.end(1)
    return "node 2 ended"


def _cut(place: nodes.TwoNodes, scene: Scene) -> str:
    nodes.cut(place.cluster)
    return "cable out"


def _network_awhile(
    begin: Callable[[SmallCluster], None],
    end: Callable[[SmallCluster], None],
    *,
    seconds: tuple[float, float],
    what: str,
) -> Callable[[nodes.TwoNodes, Scene], str]:
    def do(place: nodes.TwoNodes, scene: Scene) -> str:
        lasts_s = scene.chance.uniform(*seconds)
        begin(place.cluster)
        scene.attempt.pause(lasts_s)
        end(place.cluster)
        return f"{what} for {lasts_s:.1f} s"

    return do


def _why_no_compiler() -> str | None:
    return None if shutil.which("gcc") else "gcc is not installed"


def _why_no_tc() -> str | None:
    return None if shutil.which("tc") else "tc is not installed"


_DISK = {"why_not": _why_no_mount, "around": _small_disk, "undo": _free}
_CLOCK = {"why_not": _why_no_compiler, "around": _own_clock}
_CUT_AWHILE = _network_awhile(nodes.cut, nodes.mend, seconds=(1.0, 8.0), what="cable out")
_SLOW = _network_awhile(nodes.slow, nodes.fast, seconds=(5.0, 15.0), what="slow")
HARMS: dict[str, Harm] = {
    "fill": Harm(do=_fill, **_DISK),
    "fill-awhile": Harm(do=_fill_awhile, **_DISK),
    "fill-shm": Harm(do=_fill_shm_awhile, why_not=_why_no_mount, around=_own_shm),
    "oom": Harm(do=_starve, why_not=_why_no_groups),
    "clock-forward": Harm(do=_step_clock(1), **_CLOCK),
    "clock-back": Harm(do=_step_clock(-1), **_CLOCK),
    "end-node": Harm(do=_of_nodes(_end_node)),
    "cut": Harm(do=_of_nodes(_cut)),
    "cut-awhile": Harm(do=_of_nodes(_CUT_AWHILE)),
    "slow": Harm(do=_of_nodes(_SLOW), why_not=_why_no_tc),
}
