"""How well the slots of many engines are used, beside sglang-router:

    python bench/many_engines.py [--engines 8] [--slots 256] [--requests 2048] [--hold 10]

Engines are stand-ins, one process each, that answer a request after 0.5 to 1.5 times `--hold`
seconds and compute nothing. A burst of all requests is sent by miles's client of the engines, and,
where `pip install sglang-router==0.3.2` was run, through that router (cache_aware), one request a
call and with no bound on connections. Prints seconds, the largest number of requests that an engine
had at once, and the CPU seconds of the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import logging
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
from aiohttp import web
from sides import exit_on_term

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.core.types import EngineAddress
from milescli.platform.ports import free_ports
from milescli.rollout.base import GenerateRequest

START_S = 60.0
TOKENS = 4
REPLY = {
    "text": "",
    "output_ids": [1] * TOKENS,
    "meta_info": {
        "id": "",
        "finish_reason": {"type": "length", "length": TOKENS},
        "output_token_logprobs": [[-0.1, 1, None]] * TOKENS,
        "prompt_tokens": TOKENS,
        "completion_tokens": TOKENS,
        "cached_tokens": 0,
        "weight_version": "0",
        "num_retractions": 0,
    },
}


class StandIn:
    """Answers as SGLang's server does, and computes nothing."""

    def __init__(self, hold_s: float) -> None:
        self.hold_s, self.open, self.most = hold_s, 0, 0

    async def _one(self, index: int) -> dict[str, Any]:
        await asyncio.sleep(self.hold_s * random.uniform(0.5, 1.5))
        self.open -= 1
        return {**REPLY, "index": index}

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """One request, or a list of them whose replies are streamed."""
        body = await request.json()
        is_list = isinstance(body["input_ids"][0], list)
        count = len(body["input_ids"]) if is_list else 1
        self.open += count
        self.most = max(self.most, self.open)
        if not is_list:
            return web.json_response(await self._one(0))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for reply in asyncio.as_completed([self._one(index) for index in range(count)]):
            await response.write(b"data: " + json.dumps(await reply).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def other(self, _: web.Request) -> web.Response:
        """What a router asks an engine, and what this program does."""
        return web.json_response({"model_path": "none", "most": self.most})

    def serve(self, port: int) -> None:
        """Until a signal."""
        logging.getLogger("aiohttp.server").disabled = True  # a router tries HTTP/2 first
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/generate", self.generate)
        app.router.add_route("*", "/{path:.*}", self.other)
        web.run_app(app, host="127.0.0.1", port=port, print=None, backlog=4096)


def asked(url: str) -> dict[str, Any]:
    """Reply to a GET, once somebody listens."""
    for _ in range(int(START_S / 0.1)):
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as reply:
            return json.loads(reply.read())
        time.sleep(0.1)
    raise SystemExit(f"{url} did not answer within {START_S:g} s")


@contextlib.contextmanager
def processes(commands: list[list[str]]) -> Iterator[None]:
    """Programs of this Python, ended afterwards."""
    started = [
        subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL) for words in commands
    ]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def measure(name: str, urls: list[str], send: Callable[[], Awaitable[None]]) -> float:
    """Print a line; returns the seconds."""
    began, cpu = time.perf_counter(), time.process_time()
    asyncio.run(send())
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    most = [asked(f"{url}/server_info")["most"] for url in urls]
    print(
        f"{name:14} {seconds:6.1f} s, at most {min(most)} to {max(most)} at once, CPU {cpu:.2f} s"
    )
    return seconds


def main() -> None:
    """The command line."""
    exit_on_term()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--hold", type=float, default=10.0)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        StandIn(options.hold).serve(options.serve)
        return
    prompts = [[3, 4, 5, 6 + number] for number in range(options.requests)]

    async def by_miles() -> None:
        engines = [EngineAddress(url=url, name=f"engine {n}") for n, url in enumerate(urls)]
        fleet = SglangFleet(engines=engines, max_running=options.slots)
        try:
            await asyncio.gather(
                *(
                    fleet.generate(GenerateRequest(prompt_ids=ids, max_new_tokens=TOKENS, seed=0))
                    for ids in prompts
                )
            )
        finally:
            await fleet.close()

    async def by_router() -> None:
        connector, unbounded = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=unbounded) as session:

            async def one(ids: list[int]) -> None:
                parameters = {"max_new_tokens": TOKENS, "sampling_seed": 0}
                body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True}
                async with session.post(f"{router}/generate", json=body) as reply:
                    assert reply.status == 200, await reply.text()
                    await reply.json()

            await asyncio.gather(*(one(ids) for ids in prompts))

    sides = {"miles": by_miles}
    if importlib.util.find_spec("sglang_router") is not None:
        sides["sglang-router"] = by_router
    found = dict[str, float]()
    for name, send in sides.items():
        ports = free_ports(options.engines + 2)
        urls = [f"http://127.0.0.1:{port}" for port in ports[2:]]
        serve = [__file__, "--hold", str(options.hold), "--serve"]
        with processes([[*serve, str(port)] for port in ports[2:]]):
            for url in urls:
                asked(f"{url}/health")
            router = f"http://127.0.0.1:{ports[0]}"
            words = ["-c", "from sglang_router.launch_router import main; main()", "--worker-urls"]
            words += [*urls, "--port", str(ports[0]), "--prometheus-port", str(ports[1])]
            words += ["--max-concurrent-requests", "65536", "--log-level", "warn"]
            with processes([words] if send is by_router else []):
                if send is by_router:
                    asked(f"{router}/readiness")
                found[name] = measure(name, urls, send)
    if len(found) == 2:
        print(f"miles / sglang-router: {found['miles'] / found['sglang-router']:.2f}")


if __name__ == "__main__":
    main()
