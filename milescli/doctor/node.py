"""Composes the checks of one computer: this one, or each node of a cluster. The checks themselves
know nothing of each other."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from milescli.core.errors import MilesError
from milescli.doctor.disk import check_disk, check_scratch
from milescli.doctor.finding import Check, Finding
from milescli.doctor.host import check_platform, check_ports, check_shm, check_visibility, shm_sizes
from milescli.doctor.links import check_topology
from milescli.doctor.network import check_host_name, check_interfaces, check_rdma, list_interfaces
from milescli.doctor.settings import (
    check_kernels,
    check_limits,
    check_memory,
    check_pins,
    check_python,
    check_ray_version,
    check_threads,
    check_variables,
)
from milescli.doctor.torch_build import judge_trial
from milescli.doctor.trial import run_trial
from milescli.platform.machine import Machine
from milescli.platform.probe import find_accelerators, probe, run_tool
from milescli.recipe.load import LoadedRecipe

TOOLS_TIMEOUT_S = 120.0
"""Time limit of the vendors' tools: a few calls of 20 s each if the driver hangs."""
DEVICES = ("visibility",)
"""Checks that must pass before the machine's devices are known."""
T = TypeVar("T")


class ComputedOnce(Generic[T]):
    """Computes a value once for many threads, and also remembers an error. The vendors' tools take
    seconds."""

    def __init__(self, make: Callable[[], T]) -> None:
        """Call `make` at the first request."""
        self._make, self._lock = make, threading.Lock()
        self._values: list[T] = []
        self._error: MilesError | None = None

    def __call__(self) -> T:
        """Return the value. Raises what making it raised."""
        with self._lock:
            if not self._values and self._error is None:
                try:
                    self._values.append(self._make())
                except MilesError as error:
                    self._error = error
        if self._error is not None:
            raise self._error
        return self._values[0]


def node_checks(
    *,
    runs_dir: Path,
    machine: Callable[[], Machine],
    loaded: LoadedRecipe | None,
    environ: Mapping[str, str],
    address: str = "127.0.0.1",
) -> list[Check]:
    """List the checks of a node in the order in which they are shown. `address` is the one by which
    the other nodes know this one."""
    accelerators = ComputedOnce(lambda: find_accelerators(run_tool))

    def of_machine(name: str, run: Callable[[], list[Finding]], *needs: str) -> Check:
        return Check(name=name, run=run, timeout_s=TOOLS_TIMEOUT_S, needs=(*DEVICES, *needs))

    return [
        Check(name="python", run=check_python),
        Check(name="pins", run=check_pins),
        Check(
            name="kernels",
            run=lambda: check_kernels(machine()),
            timeout_s=TOOLS_TIMEOUT_S,
            needs=DEVICES,
        ),
        of_machine("platform", lambda: check_platform(machine())),
        Check(
            name="visibility",
            run=lambda: check_visibility(accelerators(), environ=environ),
            timeout_s=TOOLS_TIMEOUT_S,
        ),
        Check(
            name="topology", run=lambda: check_topology(accelerators()), timeout_s=TOOLS_TIMEOUT_S
        ),
        of_machine("memory", lambda: _memory(machine())),
        Check(name="disk", run=lambda: check_disk(runs_dir), timeout_s=60.0),
        Check(name="scratch", run=check_scratch),
        Check(name="shm", run=_shm),
        Check(name="limits", run=check_limits),
        Check(name="threads", run=check_threads),
        Check(name="ports", run=check_ports),
        of_machine(
            "network",
            lambda: check_interfaces(list_interfaces(), environ=environ, kind=machine().kind),
        ),
        Check(name="hostname", run=lambda: check_host_name(address=address)),
        Check(name="rdma", run=lambda: check_rdma(environ=environ)),
        of_machine("ray version", lambda: check_ray_version(kind=machine().kind)),
        of_machine("variables", lambda: _variables(loaded, machine(), environ), "model", "reward"),
    ]


def trial_checks(
    *, machine: Callable[[], Machine], environ: Mapping[str, str], own_ray: bool
) -> list[Check]:
    """List the trials of the real parts, each in a separate process. `own_ray` True adds the start
    of a Ray session, as a run on one machine does."""

    def trial(name: str, *, timeout_s: float, names: tuple[str, ...] = ()) -> Check:
        return Check(
            name=name,
            run=lambda: run_trial(
                name, device_kind=machine().kind, timeout_s=timeout_s, names=names, environ=environ
            ),
            timeout_s=timeout_s + 30.0,
            is_heavy=True,
            needs=DEVICES,
        )

    def torch() -> list[Finding]:
        return judge_trial(
            run_trial("torch", device_kind=machine().kind, timeout_s=120.0, environ=environ),
            machine(),
        )

    return [
        Check(name="torch", run=torch, timeout_s=150.0, is_heavy=True, needs=DEVICES),
        *([trial("ray", timeout_s=180.0)] if own_ray else []),
        trial("collective", timeout_s=300.0, names=("collective", "links")),
        trial("engine", timeout_s=420.0, names=("engine", "trainer", "agreement", "weights")),
    ]


def this_machine(environ: Mapping[str, str]) -> ComputedOnce[Machine]:
    """Probe this machine with the vendors' tools, under the visibility variables of `environ`."""
    return ComputedOnce(lambda: probe(environ=environ))


def heavy_at_once() -> int:
    """Return how many checks that take a core or more may run at the same time."""
    return os.cpu_count() or 1


def _memory(machine: Machine) -> list[Finding]:
    node = machine.nodes[0]
    return check_memory(
        total_bytes=node.memory_bytes, available_bytes=node.available_bytes or node.memory_bytes
    )


def _shm() -> list[Finding]:
    size_bytes, free_bytes = shm_sizes()
    return check_shm(size_bytes=size_bytes, free_bytes=free_bytes)


def _variables(
    loaded: LoadedRecipe | None, machine: Machine, environ: Mapping[str, str]
) -> list[Finding]:
    """Check the variables against the plan; without a plan (the check `plan` reports why), check
    only for what harms any run."""
    from milescli.runtime.planning import plan_only

    plan = None
    with contextlib.suppress(MilesError):
        plan = plan_only(loaded, machine) if loaded else None
    return check_variables(plan, environ=environ)
