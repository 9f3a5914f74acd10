"""Environments in processes, and sessions over HTTP, without a model:

    python bench/agents.py [--pairs 3]

Episodes of FrozenLake a second with 1, 64 and 1,024 environments at once, and what a step costs the
driver, beside gymnasium's AsyncVectorEnv (a process for each environment; 1,024 do not fit, so that
64 stand for it); and what a chat completion over HTTP costs at 1,024
open sessions, beside the same reply of a plain starlette server that records nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from array import array
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import psutil
from pairs import Machine, Table, command_line, report, take_turns

from milescli.agents.environment_fleet import EnvironmentFleet
from milescli.agents.proxy import SessionProxy
from milescli.core.types import Prompt, StopReason, VersionSpan, WeightVersion
from milescli.data.scratch_tokenizer import MIN_VOCAB_SIZE, make_scratch_tokenizer
from milescli.data.tokenizer import load_tokenizer
from milescli.recipe.agents import EnvironmentSettings
from milescli.rollout.base import Completion, GenerateRequest
from milescli.rollout.episode.session import ChatForm, RecordingSession

ACTIONS = ("left", "down", "right", "up")
SETTINGS = {"id": "FrozenLake-v1", "is_slippery": False, "actions": list(ACTIONS)}
SECONDS = 6.0
"""Of each measurement."""
MAX_STEPS = 100
NUM_SESSIONS, NUM_REQUESTS, AT_ONCE = 1024, 4096, 64
REPLY = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "42"}}],
    "object": "chat.completion",
}


async def fleet_rate(count: int) -> dict[str, float]:
    """Episodes a second, with `count` at once, and microseconds of the driver a step."""
    settings = EnvironmentSettings(name="gymnasium", settings=SETTINGS)
    fleet = EnvironmentFleet(settings, num_processes=1)
    steps = episodes = 0

    async def play(number: int, until: float) -> None:
        nonlocal steps, episodes
        rng = random.Random(number)
        while time.monotonic() < until:
            async with fleet.episode("", None, rng.randrange(1 << 30)) as episode:
                await episode.reset()
                for _ in range(MAX_STEPS):
                    step = await episode.step(rng.choice(ACTIONS))
                    steps += 1
                    if step.ended:
                        break
            episodes += 1

    try:
        await asyncio.gather(*(play(number, time.monotonic() + 1) for number in range(count)))
        steps = episodes = 0
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.gather(*(play(number, began + SECONDS) for number in range(count)))
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    finally:
        fleet.close()
    return {f"rate_{count}": episodes / seconds, f"driver_us_{count}": 1e6 * cpu / steps}


def vector_rate(count: int) -> dict[str, float]:
    """The same by gymnasium's own vector of processes."""
    import gymnasium

    def make() -> object:
        return gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")

    environments = gymnasium.vector.AsyncVectorEnv([make] * min(count, 64))
    rng = random.Random(0)
    try:
        environments.reset(seed=0)
        episodes = rounds = 0
        began, cpu = time.monotonic(), time.process_time()
        while time.monotonic() < began + SECONDS:
            actions = [rng.randrange(4) for _ in range(environments.num_envs)]
            _, _, ended, _, _ = environments.step(actions)
            environments.call("render")
            episodes, rounds = episodes + int(ended.sum()), rounds + 1
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    finally:
        environments.close()
    steps = rounds * environments.num_envs
    return {f"rate_{count}": episodes / seconds, f"driver_us_{count}": 1e6 * cpu / steps}


class _Engine:
    """Answers at once."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Eight tokens."""
        return Completion(
            response_ids=[40] * 8,
            logprobs=array("f", [-1.0] * 8),
            stop_reason=StopReason.STOP,
            version_spans=[VersionSpan(start=0, end=8, version=WeightVersion(0))],
        )


async def serve_sessions() -> None:
    """Say where, and the keys; serve until standard input ends."""
    with TemporaryDirectory() as folder:
        make_scratch_tokenizer(["What is 6 * 7?"], MIN_VOCAB_SIZE, folder)
        tokenizer = load_tokenizer(folder)
    proxy = SessionProxy(tokenizer=tokenizer, model="policy", max_model_len=4096)
    form = ChatForm(tokenizer=tokenizer, session_server=proxy)
    addresses = [
        proxy.open(
            RecordingSession(
                _Engine(),  # type: ignore[arg-type]
                prompt=Prompt(index=number, token_ids=[], text=""),
                seed=number,
                settings=GenerateRequest(prompt_ids=(), max_new_tokens=64),
                max_tokens=4096,
                decode=tokenizer.decode,
                chat_form=form,
            )
        )
        for number in range(NUM_SESSIONS)
    ]
    print(
        json.dumps([addresses[0].base_url, [address.api_key for address in addresses]]), flush=True
    )
    await asyncio.to_thread(sys.stdin.read)
    await proxy.stop()


async def serve_plainly() -> None:
    """A server that reads JSON and gives a fixed reply."""
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def reply(request: Request) -> JSONResponse:
        await request.json()
        return JSONResponse(REPLY)

    routes = [Route("/v1/chat/completions", reply, methods=["POST"])]
    config = uvicorn.Config(
        Starlette(routes=routes), log_config=None, access_log=False, lifespan="off"
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    serving = asyncio.create_task(uvicorn.Server(config).serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    print(json.dumps([url, ["none"] * NUM_SESSIONS]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    serving.cancel()


async def request_cost(server: str) -> dict[str, float]:
    """Microseconds of CPU that `server`, one of the two above, spends on a chat completion."""
    command = [sys.executable, __file__, "--serve", server]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        url, keys = json.loads(process.stdout.readline())
        body = {"model": "policy", "messages": [{"role": "user", "content": "What is 6 * 7?"}]}
        free = asyncio.Semaphore(AT_ONCE)

        async def ask(http: aiohttp.ClientSession, key: str) -> None:
            headers = {"Authorization": f"Bearer {key}"}
            async with (
                free,
                http.post(f"{url}/chat/completions", json=body, headers=headers) as got,
            ):
                told: dict[str, Any] = await got.json()
                assert got.status == 200 and told["choices"], told

        async with aiohttp.ClientSession() as http:
            await asyncio.gather(*(ask(http, key) for key in keys))
            spent, began = psutil.Process(process.pid).cpu_times(), time.monotonic()
            chosen = [keys[number % len(keys)] for number in range(NUM_REQUESTS)]
            await asyncio.gather(*(ask(http, key) for key in chosen))
            now, seconds = psutil.Process(process.pid).cpu_times(), time.monotonic() - began
        process.stdin.close()
        process.wait(timeout=30)
    cpu = now.user + now.system - spent.user - spent.system
    return {"request_us": 1e6 * cpu / NUM_REQUESTS, "requests_s": NUM_REQUESTS / seconds}


def ours() -> dict[str, float]:
    """All figures of miles."""
    made: dict[str, float] = {}
    for count in (1, 64, 1024):
        made |= asyncio.run(fleet_rate(count))
    return made | asyncio.run(request_cost("sessions"))


def theirs() -> dict[str, float]:
    """All figures of the peers."""
    made = vector_rate(1)
    for count in (64, 1024):
        made |= vector_rate(count)
    return made | asyncio.run(request_cost("plain"))


def main() -> None:
    """The command line."""
    parser = command_line(__doc__, num_pairs=3)
    parser.add_argument("--serve", choices=("sessions", "plain"), help="be one of the servers")
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve_sessions() if options.serve == "sessions" else serve_plainly())
        return
    result = Table(
        peer="gymnasium's AsyncVectorEnv; for requests a plain starlette server",
        machine=Machine.read(),
    )
    result.notes.append(
        "AsyncVectorEnv steps all environments together, each in a process of its own, and 64 of "
        "them stand for 1,024; ours each go on by themselves, all in one process. The plain server "
        "renders, tokenises, records and checks nothing."
    )
    pairs = take_turns(lambda _: ours(), lambda _: theirs(), num_pairs=options.pairs)
    for count in (1, 64, 1024):
        what = f"FrozenLake, {count} at once: "
        result.add(
            pairs, name=f"rate_{count}", what=what + "episodes", unit="episodes/s", better="more"
        )
        result.add(
            pairs, name=f"driver_us_{count}", what=what + "driver a step", unit="us", better="less"
        )
    result.add(
        pairs,
        name="request_us",
        what=f"a chat completion, {NUM_SESSIONS:,} sessions open: CPU",
        unit="us",
        better="less",
    )
    result.add(pairs, name="requests_s", what="the same: rate", unit="requests/s", better="more")
    report(result, options)


if __name__ == "__main__":
    main()
