"""Engines of tests, forked from a process that imported SGLang before, as those of a run are: one
that imports it itself takes ten times the processor time to start, and seconds to end."""

from __future__ import annotations

import atexit
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from milescli.backends.sglang.launch.command import own_environment
from milescli.backends.sglang.launch.server import EngineServer
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.backends.sglang.launch.warm import WarmProcess

MAX_PROCESSES = 2
"""Each holds half a gigabyte; engines outlive theirs."""
_warm: dict[tuple[tuple[str, str], ...], tuple[WarmProcess, Path]] = {}
"""By the variables that its engines have."""


def engine_of(spec: EngineSpec) -> EngineServer:
    """An engine that was not started yet."""
    key = tuple(sorted(own_environment(spec).items()))
    if key not in _warm:
        while len(_warm) >= MAX_PROCESSES:
            _stop(next(iter(_warm)))
        process = WarmProcess()
        process.start({**os.environ, **dict(key)})
        _warm[key] = process, process.listen(Path(tempfile.mkdtemp(prefix="warm-")))
    return EngineServer(replace(spec, warm=_warm[key][1]))


def _stop(key: tuple[tuple[str, str], ...]) -> None:
    process, address = _warm.pop(key)
    process.stop()
    for file in address.parent.iterdir():
        file.unlink()
    address.parent.rmdir()


@atexit.register
def _stop_all() -> None:
    for key in list(_warm):
        _stop(key)
