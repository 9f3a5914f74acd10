"""Defines the routes of the page's server: each passes a request to one plain function, in a
thread, and sends its result. `gate` decides who may read, and who may change something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from milescli.core.concurrency import in_thread
from milescli.core.files import parse_json
from milescli.insight.run_state import RunStates
from milescli.trackers.prometheus import CONTENT_TYPE
from milescli.web import columns, endpoints, evaluations, samples
from milescli.web.control import Control
from milescli.web.endpoints import summary
from milescli.web.files import static_file
from milescli.web.gate import CONTROL, Gate, Gated, refuse
from milescli.web.histories import Histories
from milescli.web.live import LiveStreams, Stream
from milescli.web.logs import Logs, attempts
from milescli.web.metrics import Metrics
from milescli.web.responses import (
    BadRequest,
    Body,
    Busy,
    NotFound,
    Refusal,
    WrongMethod,
    body_of,
    to_json,
)
from milescli.web.run_request import Json, Query, RunRequest
from milescli.web.samples import find_samples
from milescli.web.shown import ShownRun, ShownRuns

T = TypeVar("T")

NUM_READERS = 4
"""Largest number of requests that read at the same time."""
NUM_SEARCHES = 2
"""Largest number of requests that search through text at the same time, besides the readers."""
CALL_S = 60.0
"""Time limit of one call in seconds."""
WAIT_S = 30.0
"""Longest time in seconds that a call waits for a thread."""


class Threads:
    """Runs at most `count` calls at a time in threads, for one event loop."""

    def __init__(self, count: int, *, what: str, wait_s: float = WAIT_S) -> None:
        """Set the limit. `what`: the kind of calls, for errors."""
        self._turns = asyncio.Semaphore(count)
        self._count, self._what, self._wait_s = count, what, wait_s

    async def run(self, call: Callable[[], T], *, call_s: float = CALL_S) -> T:
        """Run a call in a thread and return its result. Raises Busy if no thread is free in time or
        the call takes too long, and what the call raises."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turns.acquire()
        except TimeoutError:
            raise Busy(
                f"the server of the page waited {self._wait_s:g} s for its turn to {self._what}",
                why=f"{self._count} others do so, and none has ended",
                fix="ask again",
            ) from None
        task = asyncio.ensure_future(in_thread(call))
        task.add_done_callback(self._done)
        done, _ = await asyncio.wait({task}, timeout=call_s)
        if not done:
            raise Busy(
                f"the disk did not reply within {call_s:g} s",
                why=f"the server of the page waits for it to {self._what}",
                fix="look whether the runs folder can be read: ls",
            )
        return task.result()

    def _done(self, task: asyncio.Future[object]) -> None:
        self._turns.release()
        if not task.cancelled():
            task.exception()  # whoever asked may be gone


Endpoint = Callable[[RunRequest], Json]
READS: dict[str, Endpoint] = {
    "summary": summary,
    "why": endpoints.why,
    "beginning": endpoints.beginning,
    "names": columns.names,
    "columns": columns.columns,
    "notices": endpoints.notices,
    "timeline": endpoints.timeline,
    "memory": endpoints.memory,
    "recipe": endpoints.recipe,
    "plan": endpoints.plan,
    "manifest": endpoints.manifest,
    "sample-steps": samples.steps,
    "samples": samples.samples,
    "evaluations": evaluations.evaluations,
    "logs": attempts,
}
"""Last part of the URL -> the function that replies."""


@dataclass(slots=True, kw_only=True)
class Site:
    """Holds the state of one server; belongs to one event loop."""

    shown: ShownRuns
    on_fault: Callable[[str], None]
    """Receives a sentence about each fault of the server itself."""
    histories: Histories = field(default_factory=Histories)
    states: RunStates = field(default_factory=RunStates)
    streams: LiveStreams = field(default_factory=LiveStreams)
    readers: Threads = field(
        default_factory=lambda: Threads(NUM_READERS, what="read the files of a run")
    )
    searches: Threads = field(
        default_factory=lambda: Threads(NUM_SEARCHES, what="search through text", wait_s=10.0)
    )
    metrics: Metrics = field(default_factory=Metrics)
    logs: Logs = field(default_factory=Logs)
    control: Control | None = None
    """None: the page only reads."""
    evaluation_samples: evaluations.EvaluationSamples = field(
        default_factory=evaluations.EvaluationSamples
    )

    def run_request(self, request: Request) -> RunRequest:
        """Return the request about a run. Raises NotFound if the run is not shown."""
        return RunRequest(
            shown=self.shown.find(request.path_params["id"]),
            histories=self.histories,
            query=query_of(request),
            names=request.path_params,
        )

    async def reply(
        self, request: Request, call: Callable[[], object], *, threads: Threads
    ) -> Response:
        """Run a call in a thread, and send its result as JSON."""

        def body() -> Body:
            return body_of(to_json(call()), may_pack=_may_pack(request))

        return send(request, await threads.run(body), "application/json")


def make_app(site: Site, gate: Gate) -> ASGIApp:
    """Create the ASGI application, behind its gate."""

    def reading(endpoint: Endpoint) -> Callable[[Request], object]:
        async def respond(request: Request) -> Response:
            threads = site.searches if request.query_params.get("q") else site.readers
            return await site.reply(
                request, lambda: endpoint(site.run_request(request)), threads=threads
            )

        return respond

    async def runs(request: Request) -> Response:
        return await site.reply(request, lambda: list_runs(site), threads=site.readers)

    async def live(request: Request) -> Stream | Response:
        if request.method == "HEAD":  # which has no body that could end
            return Response(media_type="text/event-stream")
        run_request = await site.readers.run(lambda: site.run_request(request))
        return site.streams.open(run_request, site.readers.run)

    async def file(request: Request) -> Response:
        name = request.path_params.get("file", "index.html")

        def read() -> tuple[Body, str]:
            data, media_type = static_file(name)
            return body_of(data, may_pack=_may_pack(request)), media_type

        return send(request, *await site.readers.run(read))

    async def image(request: Request) -> Response:
        def read() -> Body:
            return body_of(samples.image(site.run_request(request)), may_pack=False)

        return send(request, await site.readers.run(read), "image/png")

    async def metrics(request: Request) -> Response:
        def read() -> Body:
            return body_of(site.metrics.text(site.shown), may_pack=_may_pack(request))

        return send(request, await site.readers.run(read), CONTENT_TYPE)

    of_run = "/api/runs/{id}"
    routes = [
        *_control_routes(site),
        Route("/", file),
        Route("/static/{file:path}", file),
        Route("/metrics", metrics),
        Route("/api/runs", runs),
        Route(f"{of_run}/live", live),
        Route(f"{of_run}/images/{{sha256}}", image),
        Route(f"{of_run}/find-samples", reading(find_samples)),
        Route(f"{of_run}/logs/{{attempt}}/{{file:path}}", reading(site.logs.lines)),
        Route(f"{of_run}/evaluation-samples", reading(site.evaluation_samples.samples)),
        *(Route(f"{of_run}/{name}", reading(endpoint)) for name, endpoint in READS.items()),
    ]

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal), error
        return refuse(error, path=request.url.path)

    async def unknown(request: Request, error: Exception) -> Response:
        return refuse(_no_page(request.url.path), path=request.url.path)

    async def fault(request: Request, error: Exception) -> Response:
        site.on_fault(f"{request.url.path}: {type(error).__name__}: {error}")
        return refuse(_our_fault(error), path=request.url.path)

    handlers = {Refusal: refused, HTTPException: unknown, OSError: fault, Exception: fault}
    return Gated(Starlette(routes=routes, exception_handlers=handlers), gate)


def query_of(request: Request) -> Query:
    """Return the query parameters of a request."""
    return Query(tuple(request.query_params.multi_items()))


def send(request: Request, body: Body, media_type: str) -> Response:
    """Send the body, or only `not changed` if the page has it already."""
    headers = {"etag": body.etag, "cache-control": "private, no-cache", "vary": "accept-encoding"}
    if body.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if body.is_packed:
        headers["content-encoding"] = "gzip"
    return Response(body.data, headers=headers, media_type=media_type)


def _control_routes(site: Site) -> list[Route]:
    """Return the routes by which the page starts and stops runs."""

    async def changing(request: Request) -> Response:
        body = await _json_of(request)
        return await site.reply(
            request, lambda: _changed(site, request, body), threads=site.readers
        )

    async def reading(request: Request) -> Response:
        names = request.path_params
        return await site.reply(request, lambda: _control_state(site, names), threads=site.readers)

    control = CONTROL.rstrip("/")
    return [
        Route(f"{control}/jobs", reading),
        Route(f"{control}/jobs/{{job:int}}", reading),
        Route(f"{control}/chats/{{number:int}}", reading),
        Route(f"{control}/launch", changing, methods=["POST"]),
        Route(f"{control}/runs/{{id}}/{{act}}", changing, methods=["POST"]),
        Route(f"{control}/chats/{{number:int}}/{{act}}", changing, methods=["POST"]),
    ]


MAX_BODY_BYTES = 128 * 1024
"""Largest body of a request that changes something."""


async def _json_of(request: Request) -> Json:
    """Return the body of a request. Raises BadRequest if it is too long, or not a JSON object."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            break
    try:
        value = parse_json(body or b"{}") if len(body) <= MAX_BODY_BYTES else None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BadRequest(
            "the request cannot be read",
            why=f"it holds no JSON object of at most {MAX_BODY_BYTES} bytes",
            fix='send one, such as {"text": "hello"}',
        )
    return value


def _control_of(site: Site) -> Control:
    if site.control is None:
        raise WrongMethod(
            "this page may not start or stop runs",
            why="`miles ui` was started without --control",
            fix="miles ui --control",
        )
    return site.control


def _changed(site: Site, request: Request, body: Json) -> Json:
    """Run the command that a POST requests, and return its result. Raises Refusal."""
    control, names = _control_of(site), request.path_params
    act = names.get("act", "launch")
    if "id" in names and act in ("stop", "resume", "note", "chat", "rewards"):
        done: Json = getattr(control, act)(site.shown.find(names["id"]).run, body)
    elif "number" in names and act in ("say", "end"):
        done = getattr(control, act)(names["number"], body)
    elif "act" not in names:
        done = control.launch(body)
    else:
        raise _no_page(request.url.path)
    return done


def _control_state(site: Site, names: Mapping[str, Any]) -> Json:
    control = _control_of(site)
    if "job" in names:
        return control.job(names["job"])
    return control.chat_of(names["number"]).as_json() if "number" in names else control.jobs()


def list_runs(site: Site) -> Json:
    """List the runs that are shown, newest first, with their states."""
    lines = [_line(site, shown) for shown in site.shown.all()]
    return {"runs": lines, "can_control": site.control is not None}


def _line(site: Site, shown: ShownRun) -> Json:
    return {"id": shown.id, "adapters": shown.adapters, **asdict(site.states.of(shown.run))}


def _may_pack(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


def _no_page(path: str) -> NotFound:
    return NotFound(
        f"there is no page `{path[:200]}`",
        why="the server has no such URL",
        fix="open /, or ask for /api/runs",
    )


class _OurFault(Refusal):
    """Reports a fault of the server itself."""

    status = 500


def _our_fault(error: Exception) -> Refusal:
    return _OurFault(
        "the server of the page failed in a way that is its own fault",
        why=f"{type(error).__name__}: {error}",
        fix="please report it",
    )
