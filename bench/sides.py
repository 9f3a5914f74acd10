"""A side of a benchmark as a process of its own, which lives through all pairs and idles while the
other works: both ends of the pipe. JSON lines; knows nothing of what is measured."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 300.0
"""Bound on the first reply: imports, models and engines."""
ORDER_TIMEOUT_S = 900.0
"""Bound on one run."""
END_TIMEOUT_S = 60.0
"""Bound on an orderly end, after which the process group is killed."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class SideDied(RuntimeError):
    """A side ended, or did not answer in time; bears the end of its log."""


class Side:
    """The end that gives orders. The process is started at once and has its own group, which is
    gone after `with`."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path) -> None:
        self.name, self._log = name, log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=side_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
                start_new_session=True,
            )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process)

    def ready(self) -> dict[str, Any]:
        """What it says of itself when it has started."""
        return self._reply("its start", START_TIMEOUT_S)

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Have it do one thing, and wait for the reply."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died("took no order") from None
        return self._reply(f"`{order}`", ORDER_TIMEOUT_S)

    def _reply(self, what: str, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready:
            raise self._died(f"did not reply to {what} within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._died(f"ended before its reply to {what}")
        return json.loads(line)

    def _died(self, how: str) -> SideDied:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return SideDied("\n".join([f"the side `{self.name}` {how}; its log ends:", *lines[-30:]]))


def side_environment() -> dict[str, str]:
    """As a user's shell: without a number of threads that somebody set for another program, and
    without a hub that would be asked."""
    kept = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    return kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def end(process: subprocess.Popen[bytes]) -> None:
    """Close its input, which ends it; its process group is killed where that takes too long."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_TIMEOUT_S)
    if process.stdout is not None:
        process.stdout.close()


def parse_as_side(
    parser: argparse.ArgumentParser, **sides: Callable[[argparse.Namespace], Awaitable[None]]
) -> argparse.Namespace | None:
    """The command line of a benchmark that starts itself as its own sides. None: it was one of
    `sides`, and has ended."""
    parser.add_argument("--side", choices=sides, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is None:
        exit_on_term()
        return options
    asyncio.run(sides[options.side](options))
    return None


def exit_on_term() -> None:
    """SIGTERM ends a benchmark as Ctrl-C does: nothing that it started outlives it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class Orders:
    """The end that obeys. What libraries print goes to the log: the pipe has replies alone."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    async def obey(
        self, handle: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]], **about: Any
    ) -> None:
        """Say that it is ready, with `about`; then one reply for each order, until the input ends.
        The event loop runs on in between."""
        self._say(about)
        while line := await asyncio.to_thread(sys.stdin.readline):
            self._say(await handle(json.loads(line)))

    def _say(self, reply: dict[str, Any]) -> None:
        self._replies.write(json.dumps(reply) + "\n")
