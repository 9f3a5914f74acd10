"""Chooses the sandbox by testing which one works on this machine: bubblewrap, else Landlock, else
none, with the reason. Called by code that runs a model's code, and by `miles doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from milescli.core.errors import MachineError, MilesError
from milescli.sandbox import landlock, seccomp
from milescli.sandbox.base import Limits, Sandbox
from milescli.sandbox.local import LocalSandbox

OWN_PACKAGES = "own"
_INSTALL = "apt-get install -y bubblewrap"
_TRIAL = "import os; print(6 * 7)"
_TRIAL_S = 30.0
_SYS_PTRACE = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Holds a sandbox, and the reason for it."""

    sandbox: Sandbox
    reason: str
    fixes: tuple[str, ...] = ()
    """Commands by which the machine would have a better one."""


def choose(*, packages: str | None = None) -> Choice:
    """Return the best sandbox that works here, tested once per process. `packages` is as in
    LocalSandbox; `own` means those of the environment that runs this. Do not call it in an event
    loop. Raises MachineError if no sandbox can contain a model's code."""
    folder = sysconfig.get_path("purelib") if packages == OWN_PACKAGES else packages
    if folder and not Path(folder).expanduser().is_dir():
        raise MachineError(
            "the packages for the model's code do not exist",
            why=f"{folder} is not a folder",
            fix=f"--set rollout.code.packages={OWN_PACKAGES}",
        )
    folder = folder and str(Path(folder).expanduser().resolve())
    with _lock:
        if folder not in _chosen:
            _chosen[folder] = _choose(folder)
        return _chosen[folder]


def kinds() -> dict[str, Callable[[str | None], LocalSandbox]]:
    """Map each local kind to its constructor, best first, without testing it."""
    bwrap = shutil.which("bwrap") or ""
    return {
        "bubblewrap": lambda packages: LocalSandbox("bubblewrap", bwrap=bwrap, packages=packages),
        "landlock": lambda packages: LocalSandbox("landlock", packages=packages),
    }


def fault_of(kind: str, *, packages: str | None = None) -> MilesError | None:
    """Test a kind of sandbox; return the error if it does not work here, else None."""
    if fault := _missing(kind):
        return fault
    sandbox = kinds()[kind](packages)
    try:
        return _trial_error(sandbox)
    finally:
        sandbox.close()


def sees_processes() -> bool:
    """Return True if this process may inspect those of other users, as root usually may."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _SYS_PTRACE & 1)
    return False


_chosen: dict[str | None, Choice] = {}
_lock = threading.Lock()


def _choose(packages: str | None) -> Choice:
    faults = dict[str, MilesError]()
    for kind, make in kinds().items():
        fault = _missing(kind)
        sandbox = None if fault else make(packages)
        if sandbox is not None and (fault := _trial_error(sandbox)):
            sandbox.close()
        if fault is None:
            assert sandbox is not None, kind
            others = [f"{name}: {_sentence(error)}" for name, error in faults.items()]
            fixes = tuple(fix for error in faults.values() for fix in error.fixes)
            whose = "another user for each run" if os.geteuid() == 0 else "our own user"
            return Choice(
                sandbox=sandbox, reason="; ".join([f"{kind} works, {whose}", *others]), fixes=fixes
            )
        faults[kind] = fault
    raise MachineError(
        "this machine cannot isolate the model's code",
        why="; ".join(f"{name}: {_sentence(error)}" for name, error in faults.items()),
        fix=[
            *dict.fromkeys(fix for error in faults.values() for fix in error.fixes),
            "--set rollout.code.url=http://HOST:8080   # a sandbox-fusion server",
        ],
    )


def _sentence(error: MilesError) -> str:
    return f"{error.what} ({error.why})"


def _missing(kind: str) -> MilesError | None:
    """Return what is missing before a trial makes sense; None if nothing is."""
    if not sys.platform.startswith("linux") or not seccomp.supported():
        return MachineError(
            "there is no seccomp filter for it",
            why=f"{sys.platform} on {os.uname().machine}; only x86_64 and aarch64 Linux are "
            "supported",
            fix="run it on a supported machine",
        )
    if kind == "landlock":
        if landlock.version() > 0:
            return None
        why = "it is there since Linux 5.13, where `lsm=` of the boot parameters names it"
        return MachineError("the kernel has no Landlock", why=why, fix=_as_root(_INSTALL))
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return MachineError(
            "bubblewrap is not installed", why="no `bwrap` in PATH", fix=_as_root(_INSTALL)
        )
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        help_text = subprocess.run([bwrap, "--help"], capture_output=True, text=True, timeout=20.0)
        if "--disable-userns" in help_text.stdout + help_text.stderr:
            return None if os.geteuid() != 0 or sees_processes() else _blind_error()
    return MachineError(
        "bubblewrap is too old",
        why=f"{bwrap} does not support --disable-userns, which bubblewrap 0.8.0 introduced",
        fix=_as_root(f"{_INSTALL}   # from a newer release of the system"),
    )


def _blind_error() -> MilesError:
    return MachineError(
        "root cannot inspect other users' processes",
        why="without CAP_SYS_PTRACE, miles cannot count the files that a run creates in memory",
        fix="docker run --cap-add SYS_PTRACE ...",
    )


def _trial_error(sandbox: LocalSandbox) -> MilesError | None:
    try:
        limits = Limits(wall_s=_TRIAL_S, cpu_s=_TRIAL_S)
        result = asyncio.run(sandbox.run(_TRIAL, limits=limits))
    except MilesError as error:
        return MachineError(error.what, why=error.why, fix=_fixes_for(error))
    if result.stdout.strip() != "42":
        return MachineError("its trial failed", why=f"{result}", fix=_fixes_for(None))
    return None


def _fixes_for(error: MilesError | None) -> list[str]:
    """Return fixes for a jail that failed; the usual cause is that namespaces are forbidden."""
    if error is not None and any(fix.startswith("chmod") for fix in error.fixes):
        return [_as_root(fix) for fix in error.fixes]
    return [
        _as_root("sysctl -w kernel.apparmor_restrict_unprivileged_userns=0   # Ubuntu"),
        "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined ...",
    ]


def _as_root(command: str) -> str:
    return command if os.geteuid() == 0 else f"sudo {command}"
