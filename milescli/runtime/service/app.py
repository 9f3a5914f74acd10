"""Serves the Tinker API over HTTP: routes, keys, and errors of requests. `clients` does the
work."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from milescli.agents.proxy import MAX_BODY_BYTES, TooLarge, as_object, read_body
from milescli.rollout.base import GenerateRequest
from milescli.runtime.service.clients import Clients
from milescli.runtime.service.datums import Limits
from milescli.runtime.service.futures import Futures, JsonResult, Result, TooMany, Unknown
from milescli.runtime.service.wire import (
    ClientError,
    PassRequest,
    PassResult,
    SampleResult,
    pass_from_json,
    pass_from_proto,
    tokens_of,
)

PREFIX = "/api/v1"
PROTO = "application/x-protobuf"
WAIT_S = 20.0
"""Longest wait of a request for a result; clients repeat it, and give up after 45 s."""
MAX_SAMPLES = 1024
"""Largest number of sequences of one request."""
_ONE_AFTER_THE_OTHER = {"parallel_fwdbwd_chunks": False}
"""Tells clients to send the parts of a pass in order, so that sums are the same each time."""

Body = dict[str, Any]
Handler = Callable[[Body, str], Awaitable[Any]]
"""(body, tenant) -> fields of the response. Raises ClientError."""


@dataclass(slots=True, kw_only=True)
class Api:
    """Answers requests. Belongs to one event loop."""

    clients: Clients
    futures: Futures
    keys: Mapping[str, str] = field(repr=False)
    """Key -> tenant."""

    def app(self) -> Starlette:
        """Return the ASGI application."""
        posts: dict[str, Handler] = {
            "client/config": _constant(_ONE_AFTER_THE_OTHER),
            "client/dynamic_config": _constant({}),
            "telemetry": _constant({"status": "accepted"}),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._info,
            "unload_model": self._unload,
            "forward": self._pass_of_json,
            "optim_step": self._step,
            "save_weights": self._save,
            "load_weights": self._load,
            "save_weights_for_sampler": self._publish,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
        }
        gets: dict[str, Handler] = {
            "get_server_capabilities": self._capabilities,
            "samplers/{id}": self._sampler_info,
            "training_runs/{id}": self._training_run,
            "training_runs/{id}/checkpoints": self._checkpoints,
        }
        routes = [
            Route(f"{PREFIX}/healthz", lambda _: JSONResponse({"status": "ok"})),
            Route(f"{PREFIX}/retrieve_future", self._retrieve, methods=["POST"]),
            Route(f"{PREFIX}/forward_backward", self._pass, methods=["POST"]),
            *(Route(f"{PREFIX}/{p}", self._post(h), methods=["POST"]) for p, h in posts.items()),
            *(Route(f"{PREFIX}/{path}", self._get(handler)) for path, handler in gets.items()),
        ]
        return Starlette(routes=routes)

    def _tenant(self, request: Request) -> str | None:
        given = request.headers.get("x-api-key", "").encode()
        found = None
        for key, tenant in self.keys.items():  # all of them: time says nothing of a match
            found = tenant if hmac.compare_digest(given, key.encode()) else found
        return found

    def _post(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(tenant: str, request: Request) -> Response:
            return JSONResponse(await handler(as_object(await read_body(request)), tenant))

        return self._guarded(answer)

    def _get(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(tenant: str, request: Request) -> Response:
            return JSONResponse(await handler(dict(request.path_params), tenant))

        return self._guarded(answer)

    def _guarded(
        self, answer: Callable[[str, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler for tenants only, which replies with an error for a bad request."""

        async def guarded(request: Request) -> Response:
            tenant = self._tenant(request)
            if tenant is None:
                return _failed(401, "this server does not know the key (X-API-Key)")
            try:
                return await answer(tenant, request)
            except TooLarge:
                return _failed(413, f"a request has at most {MAX_BODY_BYTES:,} bytes")
            except TooMany:
                return _failed(429, "too many requests are open")
            except Unknown as error:
                return _failed(404, f"there is no request {error}: its result was forgotten")
            except (KeyError, TypeError, AttributeError, OverflowError) as error:
                return _failed(400, f"the request lacks a field, or has a wrong one: {error}")
            except ValueError as error:
                return _failed(400, str(error))

        return guarded

    async def _retrieve(self, request: Request) -> Response:
        async def answer(tenant: str, request: Request) -> Response:
            number = str(as_object(await read_body(request))["request_id"])
            result = await self.futures.result(number, tenant, within_s=WAIT_S)
            if result is None:
                again = {"type": "try_again", "request_id": number, "queue_state": "active"}
                return JSONResponse(again, status_code=408)
            if PROTO in request.headers.get("accept", "") and isinstance(
                result, PassResult | SampleResult
            ):
                return Response(result.to_proto(), media_type=PROTO)
            return JSONResponse(result.to_json())

        return await self._guarded(answer)(request)

    def _begin(
        self, number: str, tenant: str, work: Callable[[], Awaitable[Result]], **more: Any
    ) -> Body:
        self.futures.begin(number, tenant, work)
        return {"request_id": number, **more}

    async def _capabilities(self, _: Body, tenant: str) -> Body:
        served = self.clients.service_model
        described = {
            "model_name": served.name,
            "max_context_length": served.limits.max_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [described]}

    async def _create_session(self, _: Body, tenant: str) -> Body:
        number = self.clients.new_session(tenant)
        notice = self.clients.service_model.adapter_notice()
        return {"type": "create_session", "session_id": number, "info_message": notice}

    async def _heartbeat(self, body: Body, tenant: str) -> Body:
        self.clients.record_heartbeat(str(body["session_id"]), tenant)
        return {"type": "session_heartbeat"}

    async def _create_model(self, body: Body, tenant: str) -> Body:
        session = str(body["session_id"])
        self.clients.record_heartbeat(session, tenant)
        number = f"{session}:train:{int(body['model_seq_id'])}"
        self._require_base(body["base_model"])
        if (body.get("optimizer_config") or {}).get("type", "adamw") != "adamw":
            raise ClientError("the only optimizer is adamw")
        wanted = dict(body.get("lora_config") or {})

        async def work() -> Result:
            model = await self.clients.create(number, session, tenant, wanted)
            return JsonResult({"type": "create_model", "model_id": model.id})

        return self._begin(f"{number}:0", tenant, work, model_id=number)

    def _require_base(self, name: object) -> None:
        if name not in (None, self.clients.service_model.name):
            raise ClientError(f"this server serves {self.clients.service_model.name}, not {name}")

    async def _info(self, body: Body, tenant: str) -> Body:
        model, served = (
            self.clients.model(str(body["model_id"]), tenant),
            self.clients.service_model,
        )
        data = {
            "arch": served.facts.family,
            "model_name": served.name,
            "tokenizer_id": str(served.model_dir),
        }
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_name": served.name,
            "model_data": data,
            "is_lora": True,
            "lora_rank": served.shape.rank,
        }

    async def _unload(self, body: Body, tenant: str) -> Body:
        model = self.clients.model(str(body["model_id"]), tenant)

        async def work() -> Result:
            await self.clients.unload(model)
            return JsonResult({"type": "unload_model", "model_id": model.id})

        return self._begin(f"{model.id}:unload", tenant, work, model_id=model.id)

    async def _pass(self, request: Request) -> Response:
        async def answer(tenant: str, request: Request) -> Response:
            body = await read_body(request)
            if PROTO in request.headers.get("content-type", ""):
                return JSONResponse(self._begin_pass(pass_from_proto(body), tenant))
            return JSONResponse(await self._pass_of_json(as_object(body), tenant))

        return await self._guarded(answer)(request)

    async def _pass_of_json(self, body: Body, tenant: str) -> Body:
        return self._begin_pass(pass_from_json(body), tenant)

    def _begin_pass(self, wanted: PassRequest, tenant: str) -> Body:
        model = self.clients.model(wanted.model_id, tenant)
        return self._begin(
            f"{model.id}:{wanted.seq_id}",
            tenant,
            lambda: self.clients.compute(model, wanted),
            model_id=model.id,
        )

    async def _step(self, body: Body, tenant: str) -> Body:
        model = self.clients.model(str(body["model_id"]), tenant)
        if body.get("optimizer_params") is not None:
            raise ClientError("the only optimizer is adamw: pass AdamParams")
        adam = dict(body["adam_params"])
        return self._begin(
            f"{model.id}:{body['seq_id']}", tenant, lambda: self.clients.step(model, adam)
        )

    async def _save(self, body: Body, tenant: str) -> Body:
        model = self.clients.model(str(body["model_id"]), tenant)
        name, overwrite = str(body.get("path") or body["seq_id"]), bool(body.get("overwrite"))
        return self._begin(
            f"{model.id}:{body['seq_id']}",
            tenant,
            lambda: self.clients.save(model, name, overwrite=overwrite),
        )

    async def _load(self, body: Body, tenant: str) -> Body:
        path, optimizer = str(body["path"]), bool(body["optimizer"])
        self._require_base(body.get("base_model"))
        if body.get("model_id") is not None:
            model = self.clients.model(str(body["model_id"]), tenant)
            return self._begin(
                f"{model.id}:{body['seq_id']}",
                tenant,
                lambda: self.clients.load(model, path, with_optimizer=optimizer),
            )
        session = str(body["session_id"])
        self.clients.record_heartbeat(session, tenant)
        number = f"{session}:train:{int(body['model_seq_id'])}"
        return self._begin(
            f"{number}:0",
            tenant,
            lambda: self.clients.create_from(
                number, session, tenant, path, with_optimizer=optimizer
            ),
            model_id=number,
        )

    async def _publish(self, body: Body, tenant: str) -> Body:
        model = self.clients.model(str(body["model_id"]), tenant)
        name, sampler = body.get("path"), None
        if body.get("kind", "snapshot") != "snapshot":
            raise ClientError("samplers of kind `inflight` are not supported: use `snapshot`")
        if body.get("sampling_session_seq_id") is not None:
            sampler = f"{model.session}:sample:{int(body['sampling_session_seq_id'])}"
        return self._begin(
            f"{model.id}:{body['seq_id']}",
            tenant,
            lambda: self.clients.publish(model, name, sampler),
        )

    async def _weights_info(self, body: Body, tenant: str) -> Body:
        _, info = self.clients.states.find(str(body["tinker_path"]), tenant=tenant)
        return {"base_model": info.base_model, "is_lora": True, "lora_rank": info.rank}

    async def _training_run(self, path: Body, tenant: str) -> Body:
        """Return a model's training run; if an earlier server trained it, from its saved state."""
        saved = self.clients.states.all_of(tenant=tenant, model_id=path["id"])
        if not saved:
            self.clients.model(path["id"], tenant)
        return {
            "training_run_id": path["id"],
            "base_model": self.clients.service_model.name,
            "model_owner": tenant,
            "is_lora": True,
            "lora_rank": self.clients.service_model.shape.rank,
            "corrupted": False,
            "last_request_time": _time(saved[-1].saved_at if saved else 0.0),
        }

    async def _checkpoints(self, path: Body, tenant: str) -> Body:
        saved = self.clients.states.all_of(tenant=tenant, model_id=path["id"])
        return {
            "checkpoints": [
                {
                    "checkpoint_id": f"{each.kind}/{each.name}",
                    "checkpoint_type": "training" if each.kind == "weights" else "sampler",
                    "time": _time(each.saved_at),
                    "tinker_path": each.path,
                }
                for each in saved
            ]
        }

    async def _create_sampler(self, body: Body, tenant: str) -> Body:
        session = str(body["session_id"])
        number = f"{session}:sample:{int(body['sampling_session_seq_id'])}"
        self._require_base(body.get("base_model"))
        self.clients.new_sampler(number, session, tenant, body.get("model_path"))
        return {"type": "create_sampling_session", "sampling_session_id": number}

    async def _sampler_info(self, path: Body, tenant: str) -> Body:
        sampler = self.clients.sampler(path["id"], tenant)
        named = {"sampler_id": path["id"], "base_model": self.clients.service_model.name}
        return {**named, "model_path": sampler.path}

    async def _sample(self, body: Body, tenant: str) -> Body:
        number = str(body["sampling_session_id"])
        sampler, count = self.clients.sampler(number, tenant), int(body.get("num_samples", 1))
        if not 1 <= count <= MAX_SAMPLES:
            raise ClientError(f"`num_samples` must be from 1 to {MAX_SAMPLES}")
        request = _generate_request(body, self.clients.service_model.limits)
        scores_prompt = bool(body.get("prompt_logprobs"))
        future = f"{number}:{body['seq_id']}"
        return self._begin(
            future,
            tenant,
            lambda: self.clients.sample(sampler, request, count, scores_prompt=scores_prompt),
            sample_sequence_ids=[f"{future}:{each}" for each in range(count)],
        )


_NOT_SAMPLED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
    "record_stability_info",
)


def _generate_request(body: Body, limits: Limits) -> GenerateRequest:
    """Read a SampleRequest. Raises ClientError."""
    if unsupported := [name for name in _NOT_SAMPLED if body.get(name)]:
        raise ClientError(f"`{unsupported[0]}` is not supported")
    prompt, given = tokens_of(body["prompt"]).tolist(), body["sampling_params"]
    room = limits.max_tokens - len(prompt)
    if not prompt or room < 1:
        raise ClientError(
            f"the prompt has {len(prompt)} tokens; prompt and response have at most "
            f"{limits.max_tokens}"
        )
    wanted = given.get("max_tokens")
    stop = given.get("stop")
    if isinstance(stop, list) and not stop:
        raise ClientError("`stop=[]` is not supported: a response ends with the end of sequence")
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    temperature, top_p = float(given.get("temperature", 1)), float(given.get("top_p", 1))
    if not (0 <= temperature <= 10 and 0 < top_p <= 1):
        raise ClientError("`temperature` must be from 0 to 10, `top_p` above 0 and at most 1")
    stop_ids, top_k = [each for each in stops if isinstance(each, int)], int(given.get("top_k", -1))
    if top_k != -1 and top_k < 1:
        raise ClientError("`top_k` must be at least 1, or -1 for all tokens")
    # an engine would die of another token
    if not all(0 <= each < limits.vocab_size for each in (*prompt, *stop_ids)):
        raise ClientError(f"a token is not one of the {limits.vocab_size} of the vocabulary")
    seed = given.get("seed")
    return GenerateRequest(
        prompt_ids=prompt,
        max_new_tokens=room if wanted is None else max(1, min(int(wanted), room)),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=[each for each in stops if isinstance(each, str)],
        stop_ids=stop_ids,
        seed=None if seed is None else int(seed) % 2**31,
    )


def _time(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _constant(fields: Body) -> Handler:
    async def answer(_: Body, tenant: str) -> Body:
        return fields

    return answer


def _failed(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)
