"""Provides a tool that runs Python in the sandbox. Variables persist between the calls of an
episode."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Rollout

if TYPE_CHECKING:
    from milescli.sandbox.base import RunResult, Session

_MIB = 1024**2
_EPISODE_S = 3600.0
"""Longest life of an interpreter, with all calls and the waits between them."""
MAX_OPEN = 128
"""Largest number of interpreters of a driver, each a process of about 10 MiB; further episodes
wait."""
_OF_TOOL_TIMEOUT = 0.8
"""Fraction of `rollout.tool_timeout_s` for the code itself; the rest is for the overhead."""


class Python:
    """Run Python code and see what it prints, and the value of its last line. Variables live on."""

    def __init__(self, settings: Rollout) -> None:
        """The limits are those of `rollout.code`."""
        self._settings = settings
        self._session: Session | None = None
        self._slot: asyncio.Semaphore | None = None

    async def open(self) -> None:
        """Wait until there is room for one more interpreter."""
        slot = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_OPEN))
        await slot.acquire()
        self._slot = slot

    async def __call__(self, code: str) -> str:
        """Run Python code and see what it prints, and the value of its last line. Variables live
        on.

        Args:
            code: one or more lines

        Raises MachineError where there is no sandbox.
        """
        lost = ""
        if self._session is not None and not self._session.is_open:
            self._session, lost = None, "the interpreter was started anew; variables are gone\n"
        if self._session is None:
            self._session = await self._opened()
        ran = await self._session.execute(
            code,
            wall_s=self._settings.tool_timeout_s * _OF_TOOL_TIMEOUT,
            output_bytes=4 * self._settings.tool_output_characters,
        )
        return lost + result_text(ran)

    async def close(self) -> None:
        """End the interpreter, with all that it started."""
        try:
            if self._session is not None:
                await self._session.close()
        finally:
            if self._slot is not None:
                self._slot.release()
            self._slot = None

    @staticmethod
    def require(settings: Rollout) -> None:
        """Raise MachineError if the machine cannot sandbox the model's code, RecipeError if the
        recipe runs code on a server."""
        from milescli.sandbox.choose import choose

        if settings.code.url is not None:
            raise RecipeError(
                "the tool `python` must run on this machine",
                why="its variables persist between calls, but a sandbox-fusion server "
                f"(`rollout.code.url` {settings.code.url}) keeps none",
                fix="--set rollout.code.url=null",
            )
        choose(packages=settings.code.packages)

    async def _opened(self) -> Session:
        from milescli.sandbox.base import Limits
        from milescli.sandbox.choose import choose

        code = self._settings.code
        choice = await asyncio.to_thread(lambda: choose(packages=code.packages))
        limits = Limits(
            wall_s=_EPISODE_S,
            cpu_s=self._settings.tool_timeout_s * self._settings.max_turns,
            memory_bytes=code.memory_mib * _MIB,
        )
        return await choice.sandbox.open(limits=limits)


_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)


def result_text(ran: RunResult) -> str:
    """Return the text that the model is shown of a run."""
    parts = [ran.stdout.rstrip("\n"), ran.stderr.rstrip("\n")]
    if ran.why:
        parts.append(f"error: {ran.why}")
    elif ran.is_truncated:
        parts.append("error: the rest of the output was thrown away")
    return "\n".join(part for part in parts if part) or "(it printed nothing)"
