"""The fleet of SGLang engines as the rollout package sees it: a request goes to the engine with the
fewest requests, an order goes to every engine.

Token ids in, token ids out. A pause aborts the running requests, and after `resume`, `generate`
keeps their tokens and requests the rest (continue), or requests everything again (abort); or a
pause waits until no request is running (drain)."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from milescli.backends.sglang.client.admission import Load
from milescli.backends.sglang.client.batching import NotSent, RequestBatcher, Stream
from milescli.backends.sglang.client.http import EngineDied, EngineHttp
from milescli.backends.sglang.client.reply import PartialResponse, prompt_logprobs, read_reply
from milescli.core.errors import WaitTimeout
from milescli.core.events import PublishStats
from milescli.core.types import EngineAddress, StopReason, WeightVersion
from milescli.core.units import format_duration
from milescli.recipe.rollout import OnUpdate
from milescli.rollout.base import Completion, GenerateRequest

ORDER_TIMEOUT_S = 120.0
"""Time limit of an order: engines need seconds, on a busy machine more."""
ABORT_RETRY_S = 0.05
"""Seconds between two aborts: an abort misses a request that is still on its way to the scheduler,
so it is repeated until no request is running."""


class Followers(Protocol):
    """Defines other clients of a fleet's engines, in separate processes, which do to their requests
    what the fleet does to its own."""

    async def pause(self) -> PublishStats:
        """Pause as `SglangFleet.pause`."""
        ...

    async def reopen(self, version: WeightVersion) -> None:
        """Continue as `SglangFleet.reopen`."""

    async def pause_some(self, urls: Collection[str]) -> PublishStats:
        """Pause some engines as `SglangFleet.pause_some`."""
        ...

    async def reopen_some(self, urls: Collection[str]) -> None:
        """Send requests to them again as `SglangFleet.reopen_some`."""

    def use(self, engines: Sequence[EngineAddress]) -> None:
        """Use these engines from now on, because one has died or was replaced."""

    def num_waiting(self, url: str) -> int:
        """Return the number of their requests without a reply from the engine at this URL."""
        ...

    def silent_s(self, url: str) -> float:
        """Return the seconds since that engine replied to one of them; infinity if never."""
        ...


async def _no_requests() -> PublishStats:
    return PublishStats()


class SglangFleet:
    """Implements `milescli.rollout.base.RolloutEngine`. Belongs to one event loop."""

    def __init__(
        self,
        *,
        engines: list[EngineAddress],
        response_timeout_s: float = 3600.0,
        order_timeout_s: float = ORDER_TIMEOUT_S,
        routing_shape: tuple[int, int] | None = None,
        adapter: str | None = None,
        shares_engines: bool = False,
        on_update: OnUpdate = "continue",
        stop_ids: Sequence[int] = (),
        max_running: int | None = None,
    ) -> None:
        """Create a client of `engines`.

        `response_timeout_s` bounds one response, `order_timeout_s` one order to the engines.
        `routing_shape`: the model's (layers, topk) if routed experts are recorded. `adapter`: that
        of every request; None: the model itself. `shares_engines`: other fleets use the same
        engines for other adapters, and continue when this one is replaced. `on_update`: what
        happens to running requests at a pause. `stop_ids`: tokens that end a response, besides
        those that the engines know. `max_running`: requests that an engine can run: it gets few
        more, and fewer while its cache is full (`admission`); None: it gets all at once."""
        self.http = EngineHttp(engines, caller="the rollout")
        self.followers: Followers | None = None
        """Other processes that ask the same engines; None: there are none."""
        self.on_death: Callable[[EngineDied], None] | None = None
        """Told of an engine that was removed, to put another in its place; None: an engine's death
        is an error of whoever asks."""
        self._batcher = RequestBatcher(
            {engine.url: self._stream_of(engine) for engine in engines},
            max_running=max_running,
            read_load=self._read_load,
        )
        self._response_timeout_s = response_timeout_s
        self._order_timeout_s = order_timeout_s
        self._routing_shape = routing_shape
        self._adapter, self._shares_engines = adapter, shares_engines
        self._stop_ids = list(stop_ids)
        self.version = WeightVersion(0)
        """That the engines hold."""
        self._loaded: Path | None = None
        """The folder of their weights, where they were told to load one."""
        self._changing = asyncio.Lock()
        """Held by who changes the weights by a folder, or adds an engine."""
        self._is_paused = False
        self.closed = frozenset[str]()
        """URLs of engines that are paused while others sample."""
        self._open = asyncio.Event()
        self._set_open()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._on_update = "drain" if shares_engines else on_update
        self._num_aborts = self._num_scored = 0
        self.num_answers = 0
        """Number of responses that were completed."""
        self._num_discarded = 0
        """Tokens that were given up since the last pause."""

    def _stream_of(self, engine: EngineAddress) -> Stream:
        return lambda body, timeout_s: self.http.stream(
            engine, "/generate", body, timeout_s=timeout_s
        )

    async def _read_load(self, url: str) -> Load | None:
        for engine in self.http.engines:
            if engine.url == url and (loads := await self.http.loads(engine)):
                return Load.of(loads)
        return None

    @property
    def engines(self) -> Sequence[EngineAddress]:
        return self.http.engines

    @property
    def _to(self) -> dict[str, str]:
        """Return the fields that every request's body contains. If engines are shared, their caches
        cannot be emptied; the version then separates what older weights computed."""
        fields = {} if self._adapter is None else {"lora_path": self._adapter}
        return {**fields, "extra_key": str(self.version)} if self._shares_engines else fields

    def num_waiting(self, url: str) -> int:
        """Return the number of requests without a reply from the engine at this URL."""
        own = self._batcher.num_open(url)
        return own + (self.followers.num_waiting(url) if self.followers is not None else 0)

    def silent_s(self, url: str) -> float:
        """Return the seconds since the engine at this URL last responded."""
        own = self.http.silent_s(url)
        return min(own, self.followers.silent_s(url)) if self.followers is not None else own

    async def answers(self, url: str) -> bool:
        """Return True if the engine at this URL responds; called while the engine is busy."""
        matching = [engine for engine in self.http.engines if engine.url == url]
        return not matching or await self.http.is_alive(matching[0])

    async def close(self) -> None:
        """Close the sockets; the engines keep running."""
        await self._batcher.close()
        await self.http.close()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return one response. Raises WaitTimeout after `response_timeout_s` (pauses count),
        EngineDied if an engine is dead and not replaced."""
        response = PartialResponse(request=request, stop_ids=self._stop_ids)
        deadline = time.monotonic() + self._response_timeout_s
        try:
            while (reason := await self._request_rest(response, deadline)) is None:
                if self._on_update == "abort":
                    self._num_discarded += len(response.token_ids)
                    response = PartialResponse(request=request, stop_ids=self._stop_ids)
                response.drop_begun()
        except asyncio.CancelledError:
            self._num_discarded += len(response.token_ids)
            raise
        self.num_answers += 1
        return response.completion(reason, routing_shape=self._routing_shape)

    async def _request_rest(self, response: PartialResponse, deadline: float) -> StopReason | None:
        """Request the missing part of a response once. Return its stop reason, or None if a pause
        cut it short. Raises as `generate`."""
        while True:
            async with self._slot(deadline):
                aborts_before = self._num_aborts
                timeout_s = max(deadline - time.monotonic(), 0.001)
                try:
                    raw = await self._ask(response, timeout_s=timeout_s)
                    reply = read_reply(raw)
                    if self._shares_engines:  # they know no version of each adapter
                        reply = reply.all_of(self.version)
                    break
                except NotSent:  # there is a pause, and it goes on after it
                    continue
                except EngineDied as error:
                    self._remove_dead(error)
        response.extend(reply)
        if reply.stop_reason is not StopReason.ABORT:
            return reply.stop_reason
        if response.is_full:
            return StopReason.LENGTH
        # where nobody paused, the engine gave up by itself
        return StopReason.ABORT if self._num_aborts == aborts_before else None

    async def _ask(self, response: PartialResponse, *, timeout_s: float) -> dict[str, Any]:
        """Request the rest of a response, in one call with other requests of the same moment, and
        return the reply."""
        request = response.request
        callback, before = request.on_tokens, [*response.token_ids]
        return await self._batcher.ask(
            {**response.body, **self._to},
            timeout_s=timeout_s,
            conversation=request.conversation,
            on_part=callback
            and (lambda part: callback([*before, *(part.get("output_ids") or ())])),
        )

    async def score(self, token_ids: list[int]) -> array[float]:
        """Return [len(token_ids) - 1] log-probs at temperature 1, from one prefill."""
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            **self._to,
        }
        deadline = time.monotonic() + self._response_timeout_s
        while True:
            async with self._slot(deadline):
                timeout_s = max(deadline - time.monotonic(), 0.001)
                engines = self.http.engines
                engines = [one for one in engines if one.url not in self.closed] or engines
                self._num_scored += 1
                engine = engines[self._num_scored % len(engines)]
                try:
                    reply = await self.http.ask(engine, "/generate", body, timeout_s=timeout_s)
                except EngineDied as error:
                    self._remove_dead(error)
                    continue
            if reply["meta_info"]["finish_reason"]["type"] != StopReason.ABORT:
                return prompt_logprobs(reply)

    def _remove_dead(self, error: EngineDied) -> None:
        """Send the dead engine no more requests: they go to the others, or wait for a replacement.
        Raises the error if the engine will not be replaced."""
        if self.on_death is None:
            raise error
        self.remove(error)
        self.on_death(error)

    def remove(self, error: EngineDied) -> None:
        """Stop sending requests to this engine, and resend its open ones to the others.
        Idempotent."""
        assert error.url is not None, error
        left = [engine for engine in self.http.engines if engine.url != error.url]
        if len(left) < len(self.http.engines):
            self.http.engines = left
            self._batcher.remove(error.url, error)
            self._set_open()
            if self.followers is not None:
                self.followers.use(left)

    async def remove_dead(self) -> bool:
        bound_s = self._order_timeout_s
        error = await self.http.find_dead(self.http.engines, within_s=bound_s)
        if error is not None:
            self._remove_dead(error)
        return error is not None

    async def admit(self, engine: EngineAddress, version: WeightVersion) -> None:
        async with self._changing:
            if self._loaded is not None:
                await self._load_into(engine, self._loaded)
            if not self._shares_engines:
                await self._prepare_engine(engine, version)
            self.add(engine)
            if self.followers is not None:
                self.followers.use(self.http.engines)

    def add(self, engine: EngineAddress) -> None:
        """Send requests to this engine too; it must hold the same weights as the others."""
        self.http.engines = [*self.http.engines, engine]
        self._batcher.add(engine.url, self._stream_of(engine))
        self._set_open()

    def _set_open(self) -> None:
        """Allow requests if there is an engine and no pause."""
        if self._is_paused or not self.http.engines:
            self._open.clear()
        else:
            self._open.set()

    @asynccontextmanager
    async def _slot(self, deadline: float) -> AsyncIterator[None]:
        """Wait while the fleet is paused, then count as a running request."""
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                await self._open.wait()
        except TimeoutError:
            raise self._paused_timeout() from None
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    def _paused_timeout(self) -> WaitTimeout:
        bound = format_duration(self._response_timeout_s)
        if self._is_paused:
            return WaitTimeout(
                "a request timed out waiting for the weight update to finish",
                why=f"the fleet was paused for a weight update and did not continue within {bound}",
                fix="read the trainer's log: the publish did not finish",
            )
        return WaitTimeout(
            "a request timed out waiting for an engine",
            why=f"every engine died, and no replacement started within {bound}",
            fix="read the engines' logs",
        )

    async def pause(self) -> PublishStats:
        """Pause all engines. Raises WaitTimeout if requests do not end: aborted ones after
        `order_timeout_s`, others after `response_timeout_s`. Requests of other fleets to the same
        engines wait until `resume`, and then continue undisturbed."""
        stats = await self.stop_requests()
        if self._shares_engines:
            await self._order_all("/pause_generation", {"mode": "in_place"})
        return stats

    async def stop_requests(self) -> PublishStats:
        """Send nothing until `reopen`, and wait until no request of this fleet is running, as
        `pause` does. Requests of other fleets to the same engines continue."""
        num_running, began = self._in_flight - self._batcher.return_unsent(), time.monotonic()
        self._is_paused = True
        self._set_open()
        followed = self.followers.pause() if self.followers is not None else _no_requests()
        own = self._drain() if self._on_update == "drain" else self._abort()
        _, others = await asyncio.gather(own, followed)
        return self._stats(others, num_running=num_running, began=began)

    def _stats(self, others: PublishStats, *, num_running: int, began: float) -> PublishStats:
        """Return the statistics of a pause that began at `began`, including those of other
        clients."""
        discarded, self._num_discarded = self._num_discarded, 0
        retractions, held = self._batcher.pressure()
        return PublishStats(
            num_running=num_running + others.num_running,
            wait_s=time.monotonic() - began,
            discarded_tokens=discarded + others.discarded_tokens,
            retractions=retractions + others.retractions,
            held_requests=held + others.held_requests,
        )

    async def _drain(self) -> None:
        """Wait until all running requests have ended by themselves."""
        try:
            async with asyncio.timeout(self._response_timeout_s):
                await self._idle.wait()
        except TimeoutError:
            raise WaitTimeout(
                f"the weight update timed out waiting for {self._in_flight} running responses",
                why="rollout.on_update=drain waits for them, and they did not end within "
                f"{format_duration(self._response_timeout_s)}",
                fix=[
                    "--set rollout.on_update=continue   # responses continue with the new weights",
                    "--set rollout.max_response_tokens=N   # shorter responses",
                ],
            ) from None

    async def _abort(self) -> None:
        """Order the engines to abort until no request is running."""
        self._num_aborts += 1
        deadline = time.monotonic() + self._order_timeout_s
        while self._in_flight:
            await self._order_all("/abort_request", {"rid": "", "abort_all": True})
            try:
                async with asyncio.timeout(ABORT_RETRY_S):
                    await self._idle.wait()
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise WaitTimeout(
                        f"{self._in_flight} responses keep running although the fleet is paused",
                        why="miles has asked the engines to abort them for "
                        f"{format_duration(self._order_timeout_s)}",
                        fix="read the engines' logs",
                    ) from None

    async def pause_some(self, urls: Collection[str]) -> PublishStats:
        """Pause some engines while the others sample: their requests continue there, start again,
        or end first, as in `pause`. Raises as `pause`."""
        stats = await self.stop_some(urls)
        if self._shares_engines:
            await self._order_all("/pause_generation", {"mode": "in_place"}, urls)
        return stats

    async def stop_some(self, urls: Collection[str]) -> PublishStats:
        """Stop the requests to some engines, as `stop_requests` does for all."""
        began, urls = time.monotonic(), frozenset(urls)
        self.closed |= urls
        for url in urls:
            self._batcher.close_to(url, is_closed=True)
        num_running = sum(self._batcher.num_open(url) for url in urls)
        followed = self.followers.pause_some(urls) if self.followers is not None else _no_requests()
        _, others = await asyncio.gather(self._empty(urls), followed)
        return self._stats(others, num_running=num_running, began=began)

    async def _empty(self, urls: frozenset[str]) -> None:
        """Wait until these engines run nothing; abort their requests, unless `rollout.on_update` is
        drain."""
        is_drained = self._on_update == "drain"
        bound_s = self._response_timeout_s if is_drained else self._order_timeout_s
        deadline = time.monotonic() + bound_s
        self._num_aborts += not is_drained
        body: dict[str, object] = {"rid": "", "abort_all": True}
        while num_open := sum(self._batcher.num_open(url) for url in urls):
            if not is_drained:
                await self._for_all(lambda one: self._order(one, "/abort_request", body), urls)
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"the weight update timed out waiting for {num_open} responses of {len(urls)} "
                    "engines",
                    why=f"they did not end within {format_duration(bound_s)}",
                    fix="read the engines' logs",
                )
            await asyncio.sleep(ABORT_RETRY_S)

    async def resume_some(self, urls: Collection[str], version: WeightVersion) -> None:
        """Prepare these engines, which hold `version`, as `resume` does, and use them again."""
        if self._shares_engines:
            await self._order_all("/continue_generation", {}, urls)
        else:
            await self._for_all(lambda engine: self._prepare_engine(engine, version), urls)
        await self.reopen_some(urls)

    async def reopen_some(self, urls: Collection[str]) -> None:
        """Send requests to these engines again; they must be ready."""
        self.closed -= frozenset(urls)
        for url in urls:
            self._batcher.close_to(url, is_closed=False)
        if self.followers is not None:
            await self.followers.reopen_some(urls)

    async def resume(self, version: WeightVersion) -> None:
        """Empty the prefix caches, which belong to older weights; set the version; let requests
        continue."""
        if self._is_paused:
            if self._shares_engines:
                await self._order_all("/continue_generation", {})
            else:
                await self._for_all(lambda engine: self._prepare_engine(engine, version))
            await self.hold(version)

    async def hold(self, version: WeightVersion) -> None:
        """Record that all engines hold `version` and are ready, and let requests continue."""
        self.reopen(version)
        if self.followers is not None:
            await self.followers.reopen(version)

    def reopen(self, version: WeightVersion) -> None:
        """Let requests continue, to engines that hold `version` and are ready."""
        self.version, self._is_paused = version, False
        self._set_open()

    @property
    def is_paused(self) -> bool:
        """Return True between `pause` and `resume`."""
        return self._is_paused

    async def _prepare_engine(self, engine: EngineAddress, version: WeightVersion) -> None:
        await self._flush(engine)
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._order(engine, "/update_weight_version", body)

    async def load(self, folder: Path, version: WeightVersion) -> None:
        """Load the weights of another Hugging Face folder of the same model, which every engine can
        read. Raises EngineRefused if one cannot, WaitTimeout after `response_timeout_s`."""
        async with self._changing:
            await self.pause()
            self._loaded = folder
            await self._for_all(lambda engine: self._load_into(engine, folder))
            await self.resume(version)

    async def _load_into(self, engine: EngineAddress, folder: Path) -> None:
        body = {"model_path": str(folder), "flush_cache": False}
        bound_s = self._response_timeout_s
        await self.http.order(engine, "/update_weights_from_disk", body, timeout_s=bound_s)

    async def _flush(self, engine: EngineAddress) -> None:
        """Empty the engine's prefix cache. The engine replies once its last request is gone, so
        this proves that it is idle."""
        await self._order(engine, f"/flush_cache?timeout={self._order_timeout_s / 2:.0f}", {})

    async def sleep(self) -> None:
        """Release weights and KV cache. On a CPU SGLang has no memory saver: the order succeeds and
        does nothing."""
        await self._for_all(self._flush)  # SGLang dies of this order while it is not idle
        await self._order_all("/release_memory_occupation", {})

    async def sleep_weights(self) -> None:
        """Release the weights, when there is no KV cache."""
        await self._order_all("/release_memory_occupation", {"tags": ["weights"]})

    async def wake_weights(self) -> None:
        """Allocate the weights again; their content is undefined until the next publication."""
        await self._order_all("/resume_memory_occupation", {"tags": ["weights"]})

    async def wake_cache(self) -> None:
        """Allocate the KV cache (and captured graphs) again."""
        await self._order_all("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})

    async def _order(self, engine: EngineAddress, path: str, body: dict[str, object]) -> None:
        await self.http.order(engine, path, body, timeout_s=self._order_timeout_s)

    async def _order_all(
        self, path: str, body: dict[str, object], urls: Collection[str] | None = None
    ) -> None:
        await self._for_all(lambda engine: self._order(engine, path, body), urls)

    async def _for_all(
        self, order: Callable[[EngineAddress], Awaitable[None]], urls: Collection[str] | None = None
    ) -> None:
        """Order all engines, or those at `urls`, at once. Remove engines that die of the order, or
        have died before."""
        orders = [
            order(engine) for engine in self.http.engines if urls is None or engine.url in urls
        ]
        results = await asyncio.gather(*orders, return_exceptions=True)
        for error in results:
            if isinstance(error, EngineDied):
                self._remove_dead(error)
            elif error is not None:
                raise error
