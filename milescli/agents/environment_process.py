"""The environments of one process: made, reset, stepped and closed here, in several threads. The
process is begun by `environment_fleet`, which alone speaks to it."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milescli.rollout.environments import Environment, Step, checked, checked_start, made

NUM_LINES_TOLD = 6
"""Of where a call is, the innermost."""
MAX_IDLE = 256
"""Environments that are kept for later episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """A new episode, and what was done in it before its process had to be ended."""

    name: str
    settings: dict[str, Any]
    prompt: str
    label: str | None
    seed: int
    actions: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Act:
    """One turn of the policy."""

    text: str


@dataclass(frozen=True, slots=True)
class Where:
    """Asks at which lines an episode's environment is."""


@dataclass(frozen=True, slots=True)
class End:
    """The episode is over."""


Asked = Begin | Act | Where | End
_PLAYING: dict[int, Environment] = {}
_IDLE: list[Environment] = []
_THREADS: dict[int, int] = {}
"""By episode, of what is called now."""


def act(episode: int, what: Asked) -> str | Step | None:
    """Begin gives the first observation, Act a Step, Where text, End nothing. Raises ValueError
    where the environment gives something else, and what it raises."""
    return _where(episode) if isinstance(what, Where) else _acted(episode, what)


act.in_threads = True  # type: ignore[attr-defined]  # many at once: see core.worker_threads


def _acted(episode: int, what: Asked) -> str | Step | None:
    _THREADS[episode] = threading.get_ident()
    try:
        return _done(episode, what)
    finally:
        del _THREADS[episode]


def _done(episode: int, what: Asked) -> str | Step | None:
    if isinstance(what, End):
        _end(episode)
        return None
    if isinstance(what, Act):
        environment = _PLAYING.pop(episode)  # one that raises is not used again
        step = checked(environment.step(what.text))
        _PLAYING[episode] = environment
        return step
    assert isinstance(what, Begin)
    environment = _IDLE.pop() if _IDLE else made(what.name, what.settings)
    start = checked_start(environment.reset(prompt=what.prompt, label=what.label, seed=what.seed))
    for action in what.actions:
        environment.step(action)
    _PLAYING[episode] = environment
    return start


def _end(episode: int) -> None:
    environment = _PLAYING.pop(episode, None)
    if environment is None:
        return
    if len(_IDLE) < MAX_IDLE:
        _IDLE.append(environment)
    elif (close := getattr(environment, "close", None)) is not None:
        close()


def _where(episode: int) -> str:
    """The lines that its call is at, innermost last; empty where it is in none."""
    frame = sys._current_frames().get(_THREADS.get(episode, 0))
    told = list[str]()
    for line in traceback.extract_stack(frame) if frame is not None else ():
        told.append(f"\n  {line.filename}, line {line.lineno}, in {line.name}")
        if line.filename == __file__:  # the environment's own come after ours
            told.clear()
    return "".join(told[-NUM_LINES_TOLD:])
