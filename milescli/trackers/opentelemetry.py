"""Sends spans of a run's phases by OTLP over HTTP to OTEL_EXPORTER_OTLP_ENDPOINT: run > step >
rollout, pack, train, save, publish; evaluations, checkpoints and healings beside the steps. A
resumed run continues the same trace."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import TYPE_CHECKING, Any

from milescli.core.events import PHASES
from milescli.core.scalars import STEP_EVENTS, Record, figures_below, scalars_in
from milescli.trackers.base import TrackedRun, Tracker, require_package

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_FLUSH_MS = 10_000
_SPAN_EVENTS = ("PhaseStarted", "Notice", "WorkerLost", "WorkerSilent", "EngineTrainerChecked")


class OpenTelemetry(Tracker):
    """Sends the phases of a run as spans, with their numbers as attributes."""

    def __init__(self, *, run: TrackedRun, exporter: SpanExporter | None = None) -> None:
        """Begin the trace. `exporter`: replaces the exporter by OTLP."""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._failures = _Failures()
        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or run.project}
        self._provider = TracerProvider(
            resource=Resource.create(
                {**named, "miles.run": run.name, "miles.version": run.version}
            ),
            id_generator=_one_trace(run.id),
            shutdown_on_exit=False,  # `close` bounds it
            # a recipe has more keys than the 128 attributes that a span has by itself
            span_limits=SpanLimits(max_span_attributes=SpanLimits.UNSET),
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _otlp()))
        self._tracer = self._provider.get_tracer("miles", run.version)
        about = {"miles.run.id": run.id, "miles.first_step": run.first_step}
        recipe = {f"miles.recipe.{key}": _attribute(value) for key, value in run.recipe.items()}
        self._run = self._tracer.start_span("run", attributes={**about, **recipe})
        self._within_run = trace.set_span_in_context(self._run)
        self._set_in_context = trace.set_span_in_context

    @staticmethod
    def require() -> None:
        """Raise RecipeError if something is missing."""
        for module in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"):
            require_package(module, tracker="opentelemetry")

    def event(self, record: Record) -> None:
        """Make spans of a record. Raises the error that kept earlier spans from being sent."""
        kind, end_s = record["event"], record["unix_s"]
        if kind in STEP_EVENTS:
            self._step(record)
        elif kind == "WarmupStepDone":
            self._span("warmup step", end_s, record["step_s"], record)
        elif kind in ("EvalDone", "ValidationDone"):
            self._span("eval", end_s, record["seconds"], record)
        elif kind == "CheckpointSaved":
            self._span("checkpoint", end_s, record["seconds"], record)
        elif kind == "WorkerReplaced":
            self._span("healing", end_s, record["seconds"], record)
        elif kind in _SPAN_EVENTS:
            self._run.add_event(kind, _plain(record), timestamp=_ns(end_s))
        self._failures.raise_one()

    def close(self, outcome: str) -> None:
        """Send what is buffered, and the outcome."""
        from opentelemetry.trace import StatusCode

        self._run.set_attribute("miles.outcome", outcome)
        if outcome == "failed":
            self._run.set_status(StatusCode.ERROR)
        self._run.end()
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()
        self._failures.close()
        self._failures.raise_one()

    def _step(self, record: Record) -> None:
        """Send a step, and its phases, which follow each other from its beginning."""
        scalars = scalars_in(record)
        assert scalars is not None, record
        seconds, end_s = figures_below(scalars[1], "time"), record["unix_s"]
        step = self._span("step", end_s, seconds["step_s"], record)
        at_s = end_s - seconds["step_s"]
        for phase in PHASES:
            if (lasted_s := seconds.get(f"{phase}_s")) is not None:
                at_s += lasted_s
                self._span(phase, at_s, lasted_s, {"step": record["step"]}, within=step)

    def _span(
        self, name: str, end_s: float, lasted_s: float, record: Record, *, within: Any = None
    ) -> Any:
        scalars = scalars_in(record) if "event" in record else None
        numbers = scalars[1] if scalars is not None else {}
        span = self._tracer.start_span(
            name,
            context=self._within_run if within is None else self._set_in_context(within),
            start_time=_ns(end_s - lasted_s),
            attributes={
                **_plain(record),
                **{f"miles.{name.replace('/', '.')}": value for name, value in numbers.items()},
            },
        )
        span.end(_ns(end_s))
        return span


class _Failures(logging.Handler):
    """Catches what the library would print on the user's screen: keeps the first error for the run
    to report, and ignores notes about retries."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._first: str | None = None
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Store the first error. Called by the exporter's thread."""
        if record.levelno >= logging.ERROR:
            self._first = self._first or record.getMessage()

    def close(self) -> None:
        """Stop listening."""
        logging.getLogger("opentelemetry").removeHandler(self)
        super().close()

    def raise_one(self) -> None:
        """Raise the stored error as OSError, once."""
        if (error := self._first) is not None:
            self._first = None
            raise OSError(error)


def _otlp() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _one_trace(run_id: str) -> Any:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class OneTrace(RandomIdGenerator):
        """Gives all attempts at a run the same trace id."""

        def generate_trace_id(self) -> int:
            return int.from_bytes(hashlib.blake2b(run_id.encode(), digest_size=16).digest())

    return OneTrace()


def _plain(record: Record) -> dict[str, Any]:
    """Return the record's fields that are not mappings."""
    return {
        f"miles.{name}": value
        for name, value in record.items()
        if isinstance(value, str | int | float) and name not in ("event", "time", "unix_s")
    }


def _attribute(value: object) -> str | bool | int | float:
    return value if isinstance(value, str | bool | int | float) else json.dumps(value)


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)
