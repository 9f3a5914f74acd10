"""Manages sessions, adapters and samplers of a service's clients: ids, the order of requests and
ownership. The trainer's ranks and the engines compute."""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from milescli.core.concurrency import in_thread
from milescli.core.errors import WorkerDied
from milescli.core.types import StopReason
from milescli.export.adapter import adapter_of, write_adapter
from milescli.models import ModelFacts, table
from milescli.models.adapter import LoraShape, adapter_table
from milescli.rollout.base import GenerateRequest
from milescli.runtime.service.datums import Limits, batch_of
from milescli.runtime.service.futures import JsonResult
from milescli.runtime.service.samplers import Samplers
from milescli.runtime.service.states import EPHEMERAL, Info, Kind, States
from milescli.runtime.service.trainer import ServiceTrainer
from milescli.runtime.service.wire import (
    ClientError,
    PassRequest,
    PassResult,
    SampledSequence,
    SampleResult,
)
from milescli.train.base import StepResult
from milescli.train.optimizers import AdamStep

SILENT_S = 1800.0
"""A session without a heartbeat for this many seconds has ended; clients send one every 10 s."""
MAX_ADAPTERS = 64
MEMORY_SHARE = 0.8
"""Share of the main memory available when the server is ready that adapters may use between
turns."""
"""Adapters that are trained at a time: each lies in host memory with its moments."""
KEEP_SAMPLERS = 32
"""Number of the newest unnamed samplers that are kept of an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceModel:
    """Describes the model that a service trains."""

    name: str
    """Name of the base model, as clients use it."""
    model_dir: Path
    facts: ModelFacts
    shape: LoraShape
    limits: Limits

    @property
    def adapter(self) -> str:
        """Return the shape of all adapters, in words."""
        shape = self.shape
        without = f" without {', '.join(shape.exclude)}" if shape.exclude else ""
        return (
            f"{shape.kind} of rank {shape.rank} and alpha {shape.alpha:g} at "
            f"{', '.join(shape.targets)}{without}, experts {shape.experts}"
        )

    def adapter_notice(self) -> str:
        """Return a notice that states the shape of every adapter, whatever a client requests."""
        return (
            f"adapters of this server: {self.adapter}; the output layer has none, also with "
            "train_unembed=True"
        )

    def require_own(self, info: Info) -> None:
        """Raise ClientError for a state of another model, or of an adapter of another shape."""
        its, own = (info.base_model, info.adapter), (self.name, self.adapter)
        if its != own:
            raise ClientError(
                f"{info.path} is of {' and '.join(its)}, and this server serves {' and '.join(own)}"
            )


@dataclass(slots=True, kw_only=True)
class Session:
    """Holds one client's session, from `create_session` on."""

    tenant: str
    last_heartbeat: float = field(default_factory=time.monotonic)


@dataclass(slots=True, kw_only=True)
class Model:
    """Describes one adapter that is trained."""

    id: str
    tenant: str
    session: str
    seed: int
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Its requests are processed in the order in which they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Describes what one sampling client uses."""

    tenant: str
    session: str
    folder: Path | None
    """PEFT folder; None: the base model."""
    path: str | None = None
    """URI of the state, if it has a name."""
    model: str | None = None
    """Id of the adapter of which it is an unnamed sampler; None: it has a name, or samples the base
    model."""


@dataclass(slots=True, kw_only=True)
class Clients:
    """Manages all clients of a service. Belongs to one event loop. Methods raise ClientError,
    worded for the client, for requests that cannot be met."""

    service_model: ServiceModel
    trainer: ServiceTrainer
    samplers: Samplers
    states: States
    max_adapters: int = MAX_ADAPTERS
    sessions: dict[str, Session] = field(default_factory=dict)
    _models: dict[str, Model] = field(default_factory=dict)
    _sampling: dict[str, Sampler] = field(default_factory=dict)
    _adapter_slot: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def limit_adapters(self, available_bytes: int) -> int:
        """Limit the number of adapters to those that fit into main memory between their turns, but
        at least one. Return the bytes of each."""
        of_ranks: list[int] = await self.trainer.call("client_bytes")
        each = sum(of_ranks)
        room = int(MEMORY_SHARE * available_bytes) // each
        self.max_adapters = max(1, min(MAX_ADAPTERS, room))
        return each

    def new_session(self, tenant: str) -> str:
        """Create a session; return its id."""
        number = secrets.token_hex(16)
        self.sessions[number] = Session(tenant=tenant)
        return number

    def record_heartbeat(self, session: str, tenant: str) -> None:
        """Record that the session's client is alive."""
        self._session(session, tenant).last_heartbeat = time.monotonic()

    def _session(self, number: str, tenant: str) -> Session:
        found = self.sessions.get(number)
        if found is None or found.tenant != tenant:
            raise ClientError(
                f"you have no session {number}: it ended, or the server was restarted"
            )
        return found

    def model(self, number: str, tenant: str) -> Model:
        """Return the tenant's model of this id."""
        found = self._models.get(number)
        if found is None or found.tenant != tenant:
            raise ClientError(f"you have no model {number}: load a saved state into a new one")
        return found

    async def create(self, number: str, session: str, tenant: str, wanted: dict[str, Any]) -> Model:
        """Create an adapter as a client's `lora_config` describes."""
        rank = wanted.get("rank", self.service_model.shape.rank)
        if rank != self.service_model.shape.rank:
            raise ClientError(
                f"this server trains adapters of rank {self.service_model.shape.rank}, not {rank}: "
                f"pass rank={self.service_model.shape.rank}, or start it with --lora {rank}"
            )
        if not (wanted.get("train_mlp", True) and wanted.get("train_attn", True)):
            notice = self.service_model.adapter_notice()
            raise ClientError(f"train_mlp and train_attn must be True: {notice}")
        seed = wanted.get("seed")
        return await self._begin(number, session, tenant, seed=seed)

    async def _begin(self, number: str, session: str, tenant: str, *, seed: int | None) -> Model:
        async with self._adapter_slot:
            if number in self._models:
                raise ClientError(f"there is a model {number} already")
            if len(self._models) >= self.max_adapters:
                raise ClientError(
                    f"the server already trains {self.max_adapters} adapters: try later"
                )
            seed = secrets.randbelow(2**31) if seed is None else int(seed) % 2**63
            made = Model(id=number, tenant=tenant, session=session, seed=seed)
            await self.trainer.call("begin_adapter", seed, adapter=number)
            self._models[number] = made
            return made

    async def unload(self, model: Model) -> None:
        """Remove an adapter; its saved states stay."""
        async with model.turn:
            if self._models.pop(model.id, None) is not None:
                await self.trainer.call("drop_adapter", model.id)

    async def compute(self, model: Model, request: PassRequest) -> PassResult:
        """Run a pass, which adds to the model's gradients unless it is only forward."""
        async with model.turn:
            batch = await in_thread(lambda: batch_of(request, self.service_model.limits))
            each: list[StepResult] = await self.trainer.call(
                "accumulate", batch, adapter=model.id, backward=not request.forward_only
            )
        logprobs = {n: own for one in each for n, own in one.logprobs.items()}
        return PassResult(
            logprobs=[logprobs[number][1:] for number in range(batch.num_sequences)],
            metrics={"loss:sum": each[0].report.loss},
        )

    async def step(self, model: Model, adam: dict[str, Any]) -> JsonResult:
        """Run an optimizer step."""
        step = AdamStep(
            lr=_number(adam, "learning_rate", 1e-4),
            beta1=_number(adam, "beta1", 0.9, below=1.0),
            beta2=_number(adam, "beta2", 0.95, below=1.0),
            eps=_number(adam, "eps", 1e-12),
            weight_decay=_number(adam, "weight_decay", 0.0),
            clip_grad=_number(adam, "grad_clip_norm", 0.0),
        )
        async with model.turn:
            norms: list[float] = await self.trainer.call("apply", step, adapter=model.id)
        return JsonResult({"metrics": {"grad_norm:mean": norms[0]}})

    def _info(self, model: Model, kind: Kind, name: str) -> Info:
        return Info(
            tenant=model.tenant,
            model_id=model.id,
            kind=kind,
            name=name,
            base_model=self.service_model.name,
            adapter=self.service_model.adapter,
            rank=self.service_model.shape.rank,
            seed=model.seed,
            saved_at=time.time(),
        )

    async def save(self, model: Model, name: str, *, overwrite: bool) -> JsonResult:
        """Save a training state."""
        info = self._info(model, "weights", name)

        async def fill(folder: Path) -> None:
            await self.trainer.call("save_adapter", folder, adapter=model.id)

        async with model.turn:
            await self.states.add(info, fill, overwrite=overwrite)
        return JsonResult({"type": "save_weights", "path": info.path})

    async def load(self, model: Model, path: str, *, with_optimizer: bool) -> JsonResult:
        """Continue from a training state."""
        folder, info = self.states.find(path, tenant=model.tenant, kind="weights")
        self.service_model.require_own(info)
        async with model.turn:
            await self.trainer.call(
                "load_adapter", folder, adapter=model.id, with_optimizer=with_optimizer
            )
        return JsonResult({"type": "load_weights", "path": info.path, "model_id": model.id})

    async def create_from(
        self, number: str, session: str, tenant: str, path: str, *, with_optimizer: bool
    ) -> JsonResult:
        """Create an adapter from a training state."""
        _, info = self.states.find(path, tenant=tenant, kind="weights")
        model = await self._begin(number, session, tenant, seed=info.seed)
        try:
            return await self.load(model, path, with_optimizer=with_optimizer)
        except BaseException:
            await self.unload(model)
            raise

    async def publish(self, model: Model, name: str | None, sampler: str | None) -> JsonResult:
        """Save the current weights for sampling, under a name or for the new sampler of an id."""
        info = self._info(model, "sampler_weights", name or f"{EPHEMERAL}{secrets.token_hex(8)}")
        served = self.service_model

        async def fill(folder: Path) -> None:
            found = await self.trainer.call("adapter_tensors", adapter=model.id)
            of_adapter = adapter_table(table(served.facts), served.shape)
            made = adapter_of(found[0], of_adapter, served.shape, base_model=served.model_dir)
            await in_thread(lambda: write_adapter(folder, made))

        async with model.turn:
            folder = await self.states.add(info, fill)
        if name is None and sampler is not None:
            made = Sampler(
                tenant=model.tenant, session=model.session, folder=folder, model=model.id
            )
            self._sampling[sampler] = made
            own = [n for n, each in self._sampling.items() if each.model == model.id]
            await self._drop_samplers(own[:-KEEP_SAMPLERS])
        place = {"path": info.path} if name is not None else {"sampling_session_id": sampler}
        return JsonResult({"type": "save_weights_for_sampler", **place})

    def new_sampler(self, number: str, session: str, tenant: str, path: str | None) -> None:
        """Create a sampling client of a saved adapter; None: of the base model."""
        self._session(session, tenant)
        folder = None
        if path is not None:
            folder, info = self.states.find(path, tenant=tenant, kind="sampler_weights")
            self.service_model.require_own(info)
        self._sampling[number] = Sampler(tenant=tenant, session=session, folder=folder, path=path)

    def sampler(self, number: str, tenant: str) -> Sampler:
        """Return the tenant's sampler of this id."""
        found = self._sampling.get(number)
        if found is None or found.tenant != tenant:
            raise ClientError(f"you have no sampler {number}")
        return found

    async def sample(
        self, sampler: Sampler, request: GenerateRequest, count: int, *, scores_prompt: bool
    ) -> SampleResult:
        """Sample `count` sequences, each with its own seed."""
        seed = random.randrange(2**31) if request.seed is None else request.seed
        async with self.samplers.fleet_with(sampler.folder) as fleet:
            requests = [fleet.generate(replace(request, seed=seed + i)) for i in range(count)]
            scoring = [fleet.score(list(request.prompt_ids))] if scores_prompt else []
            made, scores = await asyncio.gather(asyncio.gather(*requests), asyncio.gather(*scoring))
        sequences = [
            SampledSequence(
                tokens=each.response_ids,
                logprobs=list(each.logprobs),
                is_cut=each.stop_reason is StopReason.LENGTH,
            )
            for each in made
        ]
        of_prompt = [math.nan, *scores[0]] if scores else None
        return SampleResult(sequences=sequences, prompt_logprobs=of_prompt)

    async def end_silent_sessions(self, note: Callable[[str], None]) -> None:
        """End sessions without a heartbeat, with their adapters and samplers, and with those that
        were still being made when their session ended."""
        past = time.monotonic() - SILENT_S
        silent = {n for n, each in self.sessions.items() if each.last_heartbeat < past}
        for number in silent:
            note(f"a session of {self.sessions.pop(number).tenant} has ended without a heartbeat")
        for model in [one for one in self._models.values() if one.session not in self.sessions]:
            with suppress(ValueError, WorkerDied):
                await self.unload(model)
        await self._drop_samplers(
            [n for n, each in self._sampling.items() if each.session not in self.sessions]
        )

    async def _drop_samplers(self, numbers: Sequence[str]) -> None:
        """Remove samplers, and the files of those without a name."""
        gone = [self._sampling.pop(number) for number in numbers]
        for folder in [each.folder for each in gone if each.folder and each.model]:
            await in_thread(partial(shutil.rmtree, folder, ignore_errors=True))


def _number(given: dict[str, Any], name: str, usual: float, *, below: float = math.inf) -> float:
    value = given.get(name, usual)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < below:
        bound = "" if below == math.inf else f" and below {below:g}"
        raise ClientError(f"`{name}` must be a number from 0{bound}")
    return float(value)
