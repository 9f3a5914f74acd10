"""Calls plain functions and objects of the user in a process of their own, for the driver. All
plug-ins of a lane share one process and run one at a time, so that they share module state."""

from __future__ import annotations

import atexit
import concurrent.futures
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from milescli.core import user_code
from milescli.core.errors import RecipeError
from milescli.core.imports import import_object
from milescli.core.registry import PlugPoint
from milescli.workers.worker import CallFailed, UserWorker

_CLOSING_S = 10.0
"""Seconds for the user's exit handlers, e.g. of a tracker that sends its last lines."""
MAX_YIELDED = 2_000_001
"""Largest number of values taken from an iterator; callers refuse that many."""


class NoReply(Exception):
    """Reports that a call did not return in time, with the lines that it was executing, if
    known."""


@dataclass(slots=True)
class _Lane:
    """Holds one process, started when it is needed."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    process: UserWorker | None = None

    def call(self, *args: Any, bound_s: float) -> Any:
        """Call `call_in_process`, with the lock. Raises CallFailed, also if the process has ended
        since the last call (its state is lost, so it is not replaced silently), and NoReply after
        `bound_s`. After either, the next call starts another process."""
        if self.process is None:
            self.process = UserWorker(f"{__name__}:call_in_process", shows_output=True)
        process = self.process
        try:
            process.ready.result()  # bounded by the process itself
            _, reply = process.call(os.getcwd(), list(sys.path), *args)
            if not concurrent.futures.wait([reply], timeout=bound_s).done:
                raise NoReply(process.end_and_locate())
            return reply.result()
        finally:
            if not process.lives:
                self.process = None


_NUMBERS = itertools.count()
_LANES: dict[str, _Lane] = {}
DEFAULT_LANE = "pieces"
"""Default lane of plug-ins."""


def lanes() -> list[_Lane]:
    """Return the lanes that were used so far."""
    return list(_LANES.values())


def close_lanes() -> None:
    """End all processes, at once if they are in the middle of a call. Idempotent; a later call
    starts a new process."""
    for lane in lanes():
        process = lane.process
        if process is None:
            continue
        if not lane.lock.acquire(blocking=False):
            process.end("nobody waits for it any more")
            continue
        try:
            process.close(_CLOSING_S)
            lane.process = None
        finally:
            lane.lock.release()


atexit.register(close_lanes)


class IsolatedPlugin:
    """Calls the object that an import path names in another process. Attributes are read from the
    plug-in in this process, except those in `live`; methods are called in the other process."""

    def __init__(
        self,
        path: str,
        *,
        what: str,
        plugin: object,
        made_with: Mapping[str, Any] | None = None,
        live: tuple[str, ...] = (),
        lane: str = DEFAULT_LANE,
        bound_s: float | None = None,
        longer: str = "",
    ) -> None:
        """Set the plug-in. `what`: its name in errors, such as "the filter `mypkg:strict`".
        `made_with`: the path names a factory, which is called in the process once with these
        arguments. `bound_s`: time limit of one call; None: `BOUND_S`. `longer`: how the user raises
        that limit."""
        self._path, self._what, self._plugin = path, what, plugin
        self._made_with = None if made_with is None else dict(made_with)
        self._live, self._lane, self._longer = live, lane, longer
        self._number = next(_NUMBERS)
        self._bound_s = user_code.BOUND_S if bound_s is None else bound_s

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the plug-in. Raises RecipeError if it raises, ends its process, or takes too
        long."""
        return self._call(None, args, options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        if name == "__name__":
            return user_code.name_of(self._plugin)
        if name in self._live and hasattr(type(self._plugin), name):
            return self._call(name, (), None)
        found = getattr(self._plugin, name)
        if not callable(found):
            return found
        return lambda *args, **options: self._call(name, args, options)

    def _call(self, attribute: str | None, args: tuple[Any, ...], options: Any) -> Any:
        lane, mend = _LANES.setdefault(self._lane, _Lane()), user_code.plugin_fix(self._plugin)
        target = (self._path, self._number, self._made_with, attribute, args, options)
        with lane.lock:
            try:
                return lane.call(*target, bound_s=self._bound_s)
            except CallFailed as error:
                raise RecipeError(f"{self._what} failed", why=str(error), fix=mend) from None
            except NoReply as error:
                raise RecipeError(
                    f"{self._what} did not return within {self._bound_s:g} s",
                    why=f"it was at{error}" if str(error) else "its position is unknown",
                    fix=[self._longer, mend] if self._longer else mend,
                ) from None


def resolve_isolated(point: PlugPoint, name: str, **options: Any) -> Any:
    """Resolve `name` for the driver: a plug-in of the user's is called in a process of its own.
    `options`: as in `IsolatedPlugin`. Raises as `PlugPoint.resolve`."""
    plugin = point.resolve(name)
    if name in point.builtin or user_code.in_user_process:
        return plugin
    what = f"the {point.kind} `{name}`"
    return IsolatedPlugin(point.path_of(name), what=what, plugin=plugin, lane=point.lane, **options)


_INSTANCES: dict[int, Any] = {}
"""In the plug-ins' process: number of the IsolatedPlugin -> the object that its factory made."""


def call_in_process(
    folder: str,
    paths: list[str],
    path: str,
    number: int,
    made_with: Mapping[str, Any] | None,
    attribute: str | None,
    args: tuple[Any, ...],
    options: Mapping[str, Any] | None,
) -> Any:
    """Call, in the plug-ins' process, the object that `path` names, or the object that it makes, or
    a method of that; without `options`, return an attribute of it. Imports from `paths`, with
    `folder` as working directory."""
    _change_folder(folder)
    sys.path[:] = paths
    target: Any = import_object(path)
    if made_with is not None:
        if number not in _INSTANCES:
            _INSTANCES[number] = target(**made_with)
        target = _INSTANCES[number]
    if attribute is not None:
        target = getattr(target, attribute)
    if options is None:
        return target
    made = target(*args, **options)
    return list(islice(made, MAX_YIELDED)) if isinstance(made, Iterator) else made


def _change_folder(folder: str) -> None:
    """Change to the caller's current folder. If a process's working directory was deleted, it
    cannot even import torch, because oneMKL is not found then."""
    global _followed
    if folder != _followed:
        os.chdir(folder)
        _followed = folder


_followed = ""
"""Working directory of the last call."""
