"""Compiles `cpu_kernels.c` for this processor once, and keeps the library in the user's cache.
Without a compiler there is no library, and PyTorch's own calls are used."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu_kernels.c")
FLAGS = (
    "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=gnu11",
    # rounding in vectors, too; nothing that lets the compiler compute another formula
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
ANOTHER_COMPILER = "export CC=gcc   # or another that knows OpenMP"
COMPILE_TIMEOUT_S = 60.0
"""Time limit of compiling, which takes a second."""


class NoKernels(Exception):
    """Reports why there are no kernels; `fix` is a command that may help."""

    def __init__(self, why: str, *, fix: str) -> None:
        super().__init__(why)
        self.fix = fix


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library, compiled if necessary; return None, with a log message, if that fails."""
    try:
        return loaded()
    except NoKernels as error:
        logging.getLogger(__name__).warning("no compiled kernels for this CPU: %s", error)
        return None


def loaded() -> ctypes.CDLL:
    """Return the library. Raises NoKernels if it cannot be compiled."""
    path = compiled()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # a home that nothing may be run from, a library that was cut short
        fix = f"rm {shlex.quote(str(path))}"
        raise NoKernels(f"{path} cannot be loaded: {error}", fix=fix) from None


def compiled() -> Path:
    """Return the library's path. Raises NoKernels if there is no compiler, or if it fails."""
    compiler = find_compiler()
    if compiler is None:
        fix = "sudo apt-get install gcc   # or as your system calls it"
        raise NoKernels("no C compiler (cc, gcc or clang) is on the PATH", fix=fix)
    path = _folder() / f"{_key(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    return path


def find_compiler() -> str | None:
    """Return the compiler that CC names, or the first usual one on the PATH."""
    names = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _key(compiler: str) -> str:
    """Return the key of the library's file: each source, compiler and processor has its own."""
    made = os.stat(compiler)
    parts = (SOURCE.read_text(), *FLAGS, compiler, made.st_size, made.st_mtime_ns, _processor())
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def _processor() -> str:
    """Return the processor's name and instruction sets, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    description = {
        line.split(":", 1)[0].strip(): line
        for line in lines
        if line.startswith(("model name", "flags", "Features", "CPU part"))
    }
    return "\0".join([platform.machine(), platform.processor(), *description.values()])


def _folder() -> Path:
    """Return a folder in the user's cache, or among temporary files; nobody else may write to it,
    since its content is executed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    temporary = Path(tempfile.gettempdir()) / f"miles-{os.getuid()}"
    for base in (cache / "miles", temporary) if cache.is_absolute() else (temporary,):
        folder = base / "kernels"
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        is_ours = all(_is_private(part.stat()) for part in (base, folder))
        if is_ours and os.access(folder, os.W_OK | os.X_OK):
            return folder
    where = cache / "miles"
    fix = f"chmod -R go-w {where}   # or export XDG_CACHE_HOME=FOLDER"
    raise NoKernels(f"{where} is not writable, or others can write to it", fix=fix)


def _is_private(of: os.stat_result) -> bool:
    return of.st_uid == os.getuid() and not of.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(compiler: str, path: Path) -> None:
    """Compile to a temporary name, and rename: several processes may compile at once."""
    part = path.with_suffix(f".{os.getpid()}.part")
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(part), "-lm"]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
        )
        os.replace(part, path)
    except subprocess.TimeoutExpired:
        why = f"{compiler} took more than {COMPILE_TIMEOUT_S:.0f} s"
        raise NoKernels(why, fix=ANOTHER_COMPILER) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise NoKernels(f"{compiler} failed: {lines[0]}", fix=ANOTHER_COMPILER) from None
    except OSError as error:
        raise NoKernels(f"{compiler}: {error}", fix=ANOTHER_COMPILER) from None
    finally:
        part.unlink(missing_ok=True)
