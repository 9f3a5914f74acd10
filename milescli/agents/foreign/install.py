"""Installs a package of environments in a virtual environment of its own. An incomplete
installation does not count; a complete one is not repeated. Called by `miles env install`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from milescli.agents.foreign.packages import BEGUN, RECORD, Package
from milescli.core.errors import MachineError

PIP_TIMEOUT_S = 1800.0
"""Seconds for pip to download and install everything."""
VENV_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 180.0
"""Time for the first import of the package's program."""
ASK_TIMEOUT_S = 30.0
_TAIL_CHARACTERS = 2000
_END_TIMEOUT_S = 5.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Describes the result of `install`."""

    package: Package
    python: str
    """Version of the interpreter."""
    was_there: bool
    """True if it was installed already, so that nothing was done."""


def install(package: Package, *, python: str | None, say: Say) -> Installed:
    """Install the package. `python`: path or name of an interpreter; None: search for a suitable
    one. `say` receives a line per step. Raises MachineError."""
    package.folder.parent.mkdir(parents=True, exist_ok=True)
    with _install_lock(package):
        record = package.record
        if package.lack is None and record is not None:
            return Installed(package=package, python=record["python"], was_there=True)
        interpreter, version = find_interpreter(package, python)
        _make_empty_folder(package)
        say(f"Python {version} ({interpreter}) in {package.folder}")
        made = [interpreter, "-m", "venv", str(package.folder)]
        _run(made, what="create its virtual environment", package=package, timeout_s=VENV_TIMEOUT_S)
        say(f"pip install {' '.join(package.requirements)}: minutes, where it is not cached")
        fetched = ["-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        _run(
            [str(package.interpreter), *fetched, *package.requirements],
            what=f"install {' '.join(package.requirements)}",
            package=package,
            timeout_s=PIP_TIMEOUT_S,
        )
        say("trying it")
        _run(
            [str(package.interpreter), str(package.program)],
            what="start the program that runs there",
            package=package,
            timeout_s=LOAD_TIMEOUT_S,
        )
        record = {"requirements": package.requirements, "python": version}
        path = package.folder / RECORD
        path.with_suffix(".new").write_text(json.dumps(record), encoding="utf-8")
        path.with_suffix(".new").replace(path)
        return Installed(package=package, python=version, was_there=False)


def _make_empty_folder(package: Package) -> None:
    """Create the package's folder, in place of an earlier installation. Raises MachineError if the
    folder holds anything else."""
    folder = package.folder
    if folder.is_dir() and any(folder.iterdir()):
        if not any((folder / name).exists() for name in (RECORD, BEGUN)):
            raise MachineError(
                f"{package.name} cannot be installed in {folder}",
                why="the folder has files, and miles did not install them",
                fix=[
                    f"export MILES_ENVIRONMENTS=/path/to/another/folder; {package.command}",
                    f"rm -r {shlex.quote(str(folder))}; {package.command}   # if none is needed",
                ],
            )
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    (folder / BEGUN).touch()


def find_interpreter(package: Package, python: str | None) -> tuple[str, str]:
    """Return (interpreter for the package, its version). Raises MachineError if there is none, or
    if the given one is unsuitable."""
    candidates = [python] if python is not None else interpreters(package)
    rejected = []
    for candidate in candidates:
        version = version_of(candidate)
        if version is None:
            continue
        if package.python <= version[:2] < package.python_below:
            return candidate, ".".join(map(str, version))
        rejected.append(f"{candidate} is {'.'.join(map(str, version))}")
    oldest, below = (".".join(map(str, v)) for v in (package.python, package.python_below))
    why = f"{package.name} runs on Python from {oldest} and below {below}; "
    why += "; ".join(rejected) or f"{' and '.join(candidates[:3])} cannot be started"
    raise MachineError(
        f"there is no suitable Python for {package.name}",
        why=why,
        fix=f"miles env install {package.name} --python PATH   # with a compatible version",
    )


def interpreters(package: Package) -> list[str]:
    """List candidates, unchecked: our own interpreter, those on PATH, and those of pyenv."""
    (major, first), (_, below) = package.python, package.python_below
    names = [f"python{major}.{minor}" for minor in range(first, below)]
    on_path = [path for name in names if (path := shutil.which(name))]
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    of_pyenv = sorted(str(path) for path in root.glob("versions/*/bin/python3"))
    return [sys.executable, *on_path, *of_pyenv]


def version_of(interpreter: str) -> tuple[int, ...] | None:
    """Return the version, such as (3, 12, 1); None if it cannot be started, or is not a Python."""
    command = [interpreter, "-c", "import sys; print(*sys.version_info[:3])"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
        )
        return tuple(map(int, done.stdout.split()))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


@contextlib.contextmanager
def _install_lock(package: Package) -> Iterator[None]:
    """Hold the package's lock. Raises MachineError if another process is installing it."""
    with package.folder.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise MachineError(
                f"another process is installing {package.name}",
                why=f"another process holds the lock on {lock.name}",
                fix=f"{package.command}   # when that process is done",
            ) from None
        yield


def _run(command: Sequence[str], *, what: str, package: Package, timeout_s: float) -> None:
    """Run a command without input. Raises MachineError with the end of its output if it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:  # Ctrl-C too: nothing may go on writing there
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate(timeout=_END_TIMEOUT_S)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise _failed(what, f"it took longer than {timeout_s:g} s", printed, package) from None
    if process.returncode:
        raise _failed(what, f"exit code {process.returncode}", printed, package)


def _failed(what: str, why: str, printed: bytes, package: Package) -> MachineError:
    tail = printed.decode("utf-8", "replace").strip()[-_TAIL_CHARACTERS:]
    return MachineError(
        f"could not {what}",
        why=why + (f"; it printed last:\n{tail}" if tail else ""),
        fix=f"{package.command}   # starts over",
    )
