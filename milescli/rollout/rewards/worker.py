"""The process behind a reward of the user's: `python -m milescli.rollout.rewards.worker PATH BYTES
SECONDS` imports it, then reads {id, prompt, response, label} by the line and writes {id, reward} or
{id, error}. Plain rewards run one at a time, async ones all at once."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from milescli.core.errors import MilesError
from milescli.core.user_code import user_traceback
from milescli.rollout.scoring import finite_reward, is_async

_PR_SET_PDEATHSIG = 1


def main(path: str, memory_bytes: int, timeout_s: float) -> None:
    """Reply until standard input closes, or the process that asks is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this process
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # works inside C, too
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the reward prints must not look like a reply
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    from milescli.rollout.rewards import REWARDS

    try:
        reward: Any = REWARDS.resolve(path, key="rollout.reward")
    except MilesError as error:
        _reply(replies, {"refused": [error.what, error.why]})
        return
    if (within := getattr(reward, "within", None)) is not None:
        reward = within(timeout_s)
    if is_async(reward):
        _reply(replies, {"ready": "async"})
        asyncio.run(_serve_all_at_once(reward, replies))
    else:
        _reply(replies, {"ready": "plain"})
        for line in sys.stdin.buffer:
            question = json.loads(line)
            _reply(replies, _outcome(question, lambda asked=question: _ask(reward, asked)))


def _ask(reward: Any, question: dict[str, Any]) -> Any:
    return reward(prompt=question["prompt"], response=question["response"], label=question["label"])


async def _serve_all_at_once(reward: Any, replies: TextIO) -> None:
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    questions: asyncio.Queue[bytes | None] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(questions.put_nowait, line)
        loop.call_soon_threadsafe(questions.put_nowait, None)

    async def answer(question: dict[str, Any]) -> None:
        value, failure = None, None
        try:
            value = await _ask(reward, question)
        except BaseException as error:
            failure = error

        def outcome() -> Any:
            if failure is not None:
                raise failure
            return value

        _reply(replies, _outcome(question, outcome))

    threading.Thread(target=read, daemon=True).start()
    while (line := await questions.get()) is not None:
        task = loop.create_task(answer(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _outcome(question: dict[str, Any], call: Callable[[], Any]) -> dict[str, Any]:
    """What is told of one call."""
    try:
        return {"id": question["id"], "reward": finite_reward(call())}
    except BaseException as error:  # SystemExit and the like must not end the process in silence
        shown = user_traceback(error) if isinstance(error, Exception) else f"it raised {error!r}"
        return {"id": question["id"], "error": shown}


def _reply(replies: TextIO, reply: dict[str, Any]) -> None:
    print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
