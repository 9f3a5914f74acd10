"""The fleet of SGLang engines as the rollout room sees it: requests go to the router or, where
there is none, to the engine with the fewest; orders go to every engine.

Token ids in, token ids out. A pause aborts what is in flight; `generate` keeps the tokens and asks
for the rest after `resume`.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from milescli.backends.sglang.batching import RequestBatcher, Stream
from milescli.backends.sglang.http import EngineHttp
from milescli.backends.sglang.reply import PartialResponse, prompt_logprobs, read_reply
from milescli.core.errors import WaitTimeout
from milescli.core.types import EngineAddress, StopReason, WeightVersion
from milescli.core.units import format_duration
from milescli.rollout.base import Completion, GenerateRequest

ORDER_TIMEOUT_S = 120.0
"""An engine does what it is ordered within seconds; a busy machine may take a while."""
ABORT_RETRY_S = 0.05
"""An abort misses a request that is still on its way to the scheduler; so it is repeated until
nothing is in flight."""


class SglangFleet:
    """Implements `milescli.rollout.base.RolloutEngine`. Belongs to one event loop."""

    def __init__(
        self,
        *,
        router_url: str | None,
        engines: list[EngineAddress],
        response_timeout_s: float = 3600.0,
        order_timeout_s: float = ORDER_TIMEOUT_S,
        routing_shape: tuple[int, int] | None = None,
    ) -> None:
        """`router_url`: the router before the engines; None: they are asked themselves.
        `response_timeout_s` bounds one response, `order_timeout_s` one order to the engines.
        `routing_shape`: (layers, topk) of the model, where routed experts will be asked for."""
        self.http = EngineHttp(engines, caller="the rollout", router_url=router_url)
        self._batcher = RequestBatcher([self._stream_of(engine) for engine in engines])
        self._response_timeout_s = response_timeout_s
        self._order_timeout_s = order_timeout_s
        self._routing_shape = routing_shape
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._num_pauses = 0

    def _stream_of(self, engine: EngineAddress) -> Stream:
        return lambda body, timeout_s: self.http.stream(
            engine, "/generate", body, timeout_s=timeout_s
        )

    async def close(self) -> None:
        """Give the sockets back; the engines live on."""
        await self._batcher.close()
        await self.http.close()

    async def generate(self, request: GenerateRequest) -> Completion:
        """One response. Raises WaitTimeout after `response_timeout_s` (pauses count), WorkerDied
        where an engine is dead."""
        response = PartialResponse(request=request)
        deadline = time.monotonic() + self._response_timeout_s
        while True:
            async with self._slot(deadline):
                pauses_before = self._num_pauses
                timeout_s = max(deadline - time.monotonic(), 0.001)
                reply = read_reply(await self._ask(response.body, timeout_s=timeout_s))
            response.extend(reply)
            if reply.stop_reason is not StopReason.ABORT:
                return response.completion(reply.stop_reason, routing_shape=self._routing_shape)
            if response.is_full:
                return response.completion(StopReason.LENGTH, routing_shape=self._routing_shape)
            if self._num_pauses == pauses_before:  # nobody paused: the engine gave up by itself
                return response.completion(StopReason.ABORT, routing_shape=self._routing_shape)

    async def _ask(self, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """A router takes one request a call; an engine takes what is asked at one moment
        together."""
        if self.http.router_url is None:
            return await self._batcher.ask(body, timeout_s=timeout_s)
        return await self.http.ask_any("/generate", body, timeout_s=timeout_s)

    async def score(self, token_ids: list[int]) -> array[float]:
        """[len(token_ids) - 1] log-probs at temperature 1, from one prefill."""
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        deadline = time.monotonic() + self._response_timeout_s
        while True:
            async with self._slot(deadline):
                reply = await self.http.ask_any(
                    "/generate", body, timeout_s=max(deadline - time.monotonic(), 0.001)
                )
            if reply["meta_info"]["finish_reason"]["type"] != StopReason.ABORT:
                return prompt_logprobs(reply)

    @asynccontextmanager
    async def _slot(self, deadline: float) -> AsyncIterator[None]:
        """Waits while the fleet is paused, then counts as in flight."""
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                await self._open.wait()
        except TimeoutError:
            raise WaitTimeout(
                "a request waited for the end of a pause in vain",
                why="the fleet was paused for its weights and not resumed within "
                f"{format_duration(self._response_timeout_s)}",
                fix="read the trainer's log: the publish did not end",
            ) from None
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def pause(self) -> None:
        """Returns when no request is in flight."""
        self._open.clear()
        self._num_pauses += 1
        deadline = time.monotonic() + self._order_timeout_s
        while self._in_flight:
            await self._order_all("/abort_request", {"rid": "", "abort_all": True})
            try:
                async with asyncio.timeout(ABORT_RETRY_S):
                    await self._idle.wait()
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise WaitTimeout(
                        f"{self._in_flight} responses do not end although the fleet is paused",
                        why="the engines were ordered to abort for "
                        f"{format_duration(self._order_timeout_s)}",
                        fix="read the engines' logs",
                    ) from None

    async def resume(self, version: WeightVersion) -> None:
        """Empty the prefix caches, which are of older weights; say the version; let requests go
        on."""
        if self._open.is_set():
            return
        await self._flush()
        await self._order_all(
            "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )
        self._open.set()

    async def load(self, folder: Path, version: WeightVersion) -> None:
        """Take the weights of another Hugging Face folder of the same model, which every engine can
        read. Raises EngineRefused where one cannot, WaitTimeout after `response_timeout_s`."""
        await self.pause()
        await self.http.order_all(
            "/update_weights_from_disk",
            {"model_path": str(folder), "flush_cache": False},
            timeout_s=self._response_timeout_s,
        )
        await self.resume(version)

    async def _flush(self) -> None:
        """Empty the prefix caches. An engine replies when the last request is cleared away, so this
        proves it idle."""
        await self._order_all(f"/flush_cache?timeout={self._order_timeout_s / 2:.0f}", {})

    async def sleep(self) -> None:
        """Release weights and KV cache. On a CPU SGLang has no memory saver: the order is answered
        and changes nothing."""
        await self._flush()  # SGLang dies of this order while it is not idle
        await self._order_all("/release_memory_occupation", {})

    async def wake_weights(self) -> None:
        """Memory of the weights back; content undefined until the next publish."""
        await self._order_all("/resume_memory_occupation", {"tags": ["weights"]})

    async def wake_cache(self) -> None:
        """Memory of the KV cache (and of captured graphs) back."""
        await self._order_all("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})

    async def _order_all(self, path: str, body: dict[str, object]) -> None:
        await self.http.order_all(path, body, timeout_s=self._order_timeout_s)
