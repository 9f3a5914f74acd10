"""A Ray actor that hosts any object of a run: it has its own log file, a phase that can be queried,
and errors that cross the process border completely.

Not for direct use: `cluster.Cluster.spawn` makes it and returns an `ActorHandle`."""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from milescli.core.errors import MilesError, WorkerDied
from milescli.core.imports import without_gc


@runtime_checkable
class ScatteredArgument(Protocol):
    """Defines an argument whose parts are in other processes: the called method gets the result of
    `whole`."""

    pieces: Sequence[Any]
    """References to the parts."""

    def whole(self, pieces: Sequence[Any]) -> Any:
        """Return the argument, assembled of its parts."""
        ...


class Host:
    """Hosts an object in its own process. `run` executes one call at a time, always on the same
    thread; `status` answers meanwhile."""

    def __init__(self, *, name: str, target: str) -> None:
        """Start to import `target` (`module:Class`) on the work thread."""
        self.name = name
        self.phase = "starting"
        self.since = time.monotonic()
        self._target = target
        self._object: object | None = None
        self._work = ThreadPoolExecutor(max_workers=1, thread_name_prefix="work")
        self._class = self._work.submit(self._load)

    def _load(self) -> Callable[..., object]:
        module, _, attribute = self._target.partition(":")
        with without_gc():
            return getattr(importlib.import_module(module), attribute)

    async def start(self, kwargs: bytes, log_path: str, secrets: dict[str, str]) -> int:
        """Build the target object from pickled `kwargs`, on the work thread; return the pid. From
        now on the process's output goes to the log. `secrets` are added to the environment."""
        os.environ.update(secrets)
        _redirect_output(Path(log_path))
        faulthandler.enable()
        await self._on_work_thread("start", lambda: self._build(kwargs))
        return os.getpid()

    def _build(self, kwargs: bytes) -> None:
        """Build the object, unpickling its arguments after the imports. If Ray unpickles them, it
        imports in another thread, and two threads may see half-imported modules."""
        target = self._class.result()
        self._object = target(**pickle.loads(kwargs))

    async def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the target object."""
        import ray

        assert self._object is not None, f"{self.name}: `run` before `start`"
        args = tuple([await value if isinstance(value, ray.ObjectRef) else value for value in args])
        args = tuple([await _fetched(value) for value in args])
        function = getattr(self._object, method, None)
        assert function is not None, f"{self._target} has no method `{method}`"
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        return await self._on_work_thread(method, lambda: function(*args, **kwargs))

    async def peek(self, method: str, *args: Any) -> Any:
        """Call a quick, thread-safe method of the target object beside the work thread."""
        return getattr(self._object, method)(*args) if self._object is not None else None

    async def status(self) -> tuple[str, float]:
        """Return (current activity of the work thread, seconds since it began)."""
        return self.phase, time.monotonic() - self.since

    async def _on_work_thread(self, phase: str, function: Any) -> Any:
        self.phase, self.since = phase, time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._work, function)
        except MilesError:
            raise
        except Exception as error:
            traceback.print_exc()
            raise WorkerDied(
                f"{self.name} failed in `{phase}`",
                why=f"{type(error).__name__}: {error}\n{_last_frames(error)}",
                fix="read its log (logs/latest in the run directory)",
            ) from None
        finally:
            self.phase, self.since = f"idle after {phase}", time.monotonic()


async def _fetched(value: Any) -> Any:
    if not isinstance(value, ScatteredArgument):
        return value
    pieces = await asyncio.gather(*value.pieces)
    return await asyncio.to_thread(value.whole, pieces)


def _last_frames(error: BaseException, count: int = 3) -> str:
    return "".join(traceback.format_tb(error.__traceback__)[-count:]).rstrip()


def _redirect_output(log_path: Path) -> None:
    """Send all output of this process, including that of C libraries, to its own file."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
