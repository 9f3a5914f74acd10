"""Turns a stream of events into metrics for Prometheus. `Exposition` is pure: it reads records of a
running run, or the lines of events.jsonl and memory.jsonl of a finished one, and returns the text
of `/metrics`. The names come from `core.metric_names`; templates/grafana/miles.json uses them.
`MetricsServer` serves the text while the run is running."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from milescli.core.errors import MachineError
from milescli.core.history import EVAL, EVALUATED, CurrentPhase
from milescli.core.metric_names import ANY, METRICS, SECONDS, SHARE, Metric, metric_of
from milescli.core.scalars import STEP_EVENTS, Record, scalars_in
from milescli.platform.memory_record import has_sizes, sizes_by_name
from milescli.platform.ports import port_holders

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Collected


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "miles_"
COUNTER, GAUGE = "counter", "gauge"
PHASES = "miles_phase_seconds_total"


@dataclass(frozen=True, slots=True)
class Family:
    """Describes one metric of Prometheus."""

    name: str
    """A name that ends in `_total` only grows: new values are added to it."""
    about: str
    labels: tuple[str, ...] = ()
    """Names of the labels of its series, besides `adapter`; for `events`, field names."""
    events: tuple[str, ...] = ()
    """Events that set its value."""
    value: str = ""
    """Field of these events with the value; empty: 1."""

    @property
    def kind(self) -> str:
        """Return counter or gauge, by the convention of the name."""
        return COUNTER if self.name.endswith("_total") else GAUGE


_NAMES = {
    "rollout/generated_tokens": "rollout_tokens_total",
    "rollout/dropped_groups": "dropped_groups_total",
    "train/num_tokens": "train_tokens_total",
    "train/num_loss_tokens": "train_loss_tokens_total",
    "publish/wait_s": "publish_wait_seconds_total",
    "publish/discarded_tokens": "publish_discarded_tokens_total",
    "flow/idle_s": "flow_idle_seconds_total",
    "flow/stale_groups": "flow_stale_groups_total",
    "flow/wasted_tokens": "flow_wasted_tokens_total",
    "rollout/reward_mean": "reward_mean",
    "rollout/reward_std": "reward_std",
    "time/step_s": "step_duration_seconds",
    "speed/rollout_tokens_per_s": "rollout_tokens_per_second",
    "speed/train_tokens_per_s": "train_tokens_per_second",
    "weights/version": "weight_version",
}
"""Scalars with other names than the rule gives; the first ones are added up over the steps."""
_SAVED, _LOST, _REPLACED = ("CheckpointSaved",), ("WorkerLost",), ("WorkerReplaced",)
_OF_EVENTS = (
    Family("miles_run_info", "1", ("run", "version")),
    Family(
        "miles_run_state",
        "1 of the state that the run is in: start, train, eval, ..., done, stopped, failed",
        ("state",),
    ),
    Family("miles_step", "optimizer steps done", (), STEP_EVENTS, "step"),
    Family(
        "miles_steps_wanted", "optimizer steps that the run is to do", (), STEP_EVENTS, "num_steps"
    ),
    Family(PHASES, "seconds in each phase of a step", ("phase",)),
    Family("miles_checkpoints_total", "checkpoints that are complete", (), _SAVED),
    Family("miles_checkpoint_step", "of the newest complete checkpoint", (), _SAVED, "step"),
    Family("miles_checkpoint_bytes", "size of the newest checkpoint", (), _SAVED, "size_bytes"),
    Family("miles_checkpoint_seconds_total", "writing checkpoints", (), _SAVED, "seconds"),
    Family("miles_worker_losses_total", "processes that died or hung", ("worker",), _LOST),
    Family(
        "miles_worker_restarts_total",
        "processes that took the place of lost ones",
        ("worker",),
        _REPLACED,
    ),
    Family(
        "miles_worker_restart_seconds_total",
        "from noticing losses to having replaced them",
        ("worker",),
        _REPLACED,
        "seconds",
    ),
    Family("miles_warnings_total", "warnings that the user was given"),
    Family(
        "miles_process_resident_bytes",
        "memory of each process of the run on this computer",
        ("process",),
    ),
    Family(
        "miles_worker_memory_bytes",
        "of each rank, engine and device at the last step: peak, reserved, used, total",
        ("worker", "device", "kind"),
    ),
    Family(
        "miles_learning",
        "1: the verdict says that it is learning; 0: that it is not; none: too early to say",
    ),
    Family(
        "miles_finding",
        "1 of each diagnosis that the newest verdict has, by name: docs/verdict.md",
        ("finding",),
    ),
    Family("miles_oom_kills", "processes that the kernel ended for memory"),
)
_PHASE_OF = {**dict.fromkeys(EVALUATED, EVAL), "WarmupStepDone": "warmup"}
"""Events that end a phase which runs beside the steps, and contain its seconds."""


def family_of(metric: Metric) -> Family:
    """Return the family of a metric, by the conventions of Prometheus: unabbreviated units at the
    end, `_total` if it only grows."""
    section, _, name = metric.name.partition("/")
    if section == "time" and name != "step_s":
        return families()[PHASES]
    if metric.name.endswith(ANY):
        words = metric.name.removesuffix(f"/{ANY}").replace("/", "_")
        base = "reward_part" if words == "reward" else f"{words}_figure"
        return Family(PREFIX + base, metric.about, ("name",))
    words = _NAMES.get(metric.name) or _with_unit(metric.name.replace("/", "_"), metric.unit)
    return Family(PREFIX + words, metric.about)


def _with_unit(words: str, unit: str) -> str:
    if unit == SECONDS:
        return words.removesuffix("_s") + "_seconds"
    if unit == SHARE:
        return words.removesuffix("_fraction").removesuffix("_rate") + "_ratio"
    return words.replace("_per_s", "_per_second")


@cache
def families() -> Mapping[str, Family]:
    """Return every family that a run may show, by name."""
    known = {family.name: family for family in _OF_EVENTS}
    for metric in METRICS:
        if not metric.name.startswith("time/") or metric.name == "time/step_s":
            made = family_of(metric)
            known.setdefault(made.name, made)
    return known


class Exposition:
    """Holds the metrics of one run, from all records fed so far. Threads may feed and read."""

    def __init__(self, *, run: str, version: str, labels: Mapping[str, str] | None = None) -> None:
        """Start without values. `labels`: labels of every sample, e.g. if several runs share one
        page."""
        self._labels = dict(labels or {})
        self._values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self._phases: dict[str, CurrentPhase] = {}
        self._lock = threading.Lock()
        self._set("miles_run_info", 1.0, run=run, version=version)

    def feed(self, record: Record) -> None:
        """Process a line of events.jsonl, or of memory.jsonl; unknown lines are ignored."""
        with self._lock:
            if has_sizes(record):
                self._memory(record)
            elif "event" in record:
                who = {"adapter": str(record["adapter"])} if "adapter" in record else {}
                self._event(record, who)
                self._scalars(record, who)

    def text(self) -> str:
        """Return the text that Prometheus reads."""
        from prometheus_client import generate_latest

        with self._lock:
            known = families()
            made = [self._shown(known[name]) for name in known if self._values.get(name)]
        return generate_latest(_Snapshot(made)).decode()

    def _event(self, record: Record, who: Mapping[str, str]) -> None:
        kind = record["event"]
        for family in _OF_EVENTS:
            if kind in family.events:
                labels = {label: record[label] for label in family.labels}
                value = record[family.value] if family.value else 1
                self._take(family, value, **who, **labels)
        phase = self._phases.setdefault(who.get("adapter", ""), CurrentPhase())
        if kind == "RunEnded":
            self._state(record["outcome"], who)
        elif kind == "PhaseStarted":
            phase.begin(record["phase"])
            self._state(phase.name, who)
        elif kind in EVALUATED and phase.name == EVAL:
            phase.end_evaluation()
            self._state(phase.name, who)
        elif kind == "Notice" and record["level"] == "warning":
            self._add("miles_warnings_total", 1, **who)
        elif kind == "MemorySeen":
            self._workers(record["workers"])
        elif kind == "VerdictGiven":
            self._verdict(record, who)
        if (beside := _PHASE_OF.get(kind)) is not None:
            seconds = record["step_s"] if kind == "WarmupStepDone" else record["seconds"]
            self._add(PHASES, seconds, phase=beside, **who)

    def _scalars(self, record: Record, who: Mapping[str, str]) -> None:
        found = scalars_in(record)
        for name, value in (found[1] if found is not None else {}).items():
            if (metric := metric_of(name)) is None:
                continue
            family = family_of(metric)
            own = dict(who)
            if family.name == PHASES:
                own["phase"] = name.partition("/")[2].removesuffix("_s")
            elif family.labels:
                own["name"] = name.removeprefix(metric.name.removesuffix(ANY))
            self._take(family, value, **own)

    def _memory(self, record: Record) -> None:
        self._values.pop("miles_process_resident_bytes", None)
        for name, size in sizes_by_name(record).items():
            self._set("miles_process_resident_bytes", size, process=name)
        if record.get("oom_kills") is not None:
            self._set("miles_oom_kills", record["oom_kills"])

    def _workers(self, workers: Sequence[Mapping[str, Any]]) -> None:
        for worker in workers:
            own = {"worker": worker["worker"], "device": worker["device"]}
            for kind in ("peak", "reserved", "used", "total"):
                if (size := worker.get(f"{kind}_bytes")) is not None:
                    self._set("miles_worker_memory_bytes", size, kind=kind, **own)

    def _verdict(self, record: Record, who: Mapping[str, str]) -> None:
        """Set the findings of the newest verdict; earlier findings become 0."""
        self._values.setdefault("miles_learning", {}).pop(tuple(who.items()), None)
        if record["is_learning"] is not None:
            self._set("miles_learning", float(record["is_learning"]), **who)
        for labels in self._values.get("miles_finding", {}):
            if dict(labels).get("adapter") == who.get("adapter"):
                self._values["miles_finding"][labels] = 0.0
        for name in record["findings"]:
            self._set("miles_finding", 1.0, finding=name, **who)

    def _state(self, state: str, who: Mapping[str, str]) -> None:
        states = self._values.setdefault("miles_run_state", {})
        for labels in [key for key in states if who.items() == dict(key).items() - _state_of(key)]:
            states[labels] = 0.0
        self._set("miles_run_state", 1.0, state=state, **who)

    def _take(self, family: Family, value: float, **labels: str) -> None:
        change = self._add if family.kind == COUNTER else self._set
        change(family.name, value, **labels)

    def _set(self, family: str, value: float, **labels: str) -> None:
        self._values.setdefault(family, {})[tuple(sorted(labels.items()))] = float(value)

    def _add(self, family: str, value: float, **labels: str) -> None:
        values, key = self._values.setdefault(family, {}), tuple(sorted(labels.items()))
        values[key] = values.get(key, 0.0) + float(value)

    def _shown(self, family: Family) -> Collected:
        from prometheus_client.metrics_core import Metric as Collected

        # the client writes the `_total` of a counter's name itself
        name = family.name.removesuffix("_total")
        collected = Collected(name, family.about, family.kind)
        for labels, value in self._values[family.name].items():
            collected.add_sample(family.name, {**self._labels, **dict(labels)}, value)
        return collected


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Holds the metrics at one time, in the form that the client's writer reads."""

    made: Sequence[Collected]

    def collect(self) -> Sequence[Collected]:
        return self.made


def _state_of(labels: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    return {pair for pair in labels if pair[0] == "state"}


KEY = "run.metrics_address"
_PATH = "/metrics"
_CLOSE_S = 2.0
_REQUEST_S = 10.0
"""Bound on sending one request."""


class MetricsServer:
    """Serves the result of `text`. Only one server can use an address."""

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        """Listen at the address. Raises MachineError if that is not possible."""
        family = _family_of(host, port)
        server = type("_Server", (_Server,), {"address_family": family})
        try:
            self._server: Any = server((host, port), _Handler)
        except OSError as error:
            raise _refusal(host, port, error) from error
        self._server.set_app(_app(text))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Return the address as Prometheus and curl take it."""
        host, port = self._server.server_address[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{_PATH}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLOSE_S)


def require_free(host: str, port: int) -> None:
    """Raise MachineError if nothing can listen there; nothing does afterwards."""
    try:
        with socket.socket(_family_of(host, port), socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
            tried.listen(1)
    except OSError as error:
        raise _refusal(host, port, error) from error


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # WSGIServer's own asks a name server who it is
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect, which would be printed on the user's screen."""


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


def _app(text: Callable[[], str]) -> Callable[..., Iterable[bytes]]:
    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD") or environ["PATH_INFO"] != _PATH:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [f"there is {_PATH} alone\n".encode()]
        body = text().encode()
        headers = [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(body)))]
        start_response("200 OK", headers)
        return [body]

    return app


def _family_of(host: str, port: int) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise _refusal(host, port, error) from error


def _refusal(host: str, port: int, error: OSError) -> MachineError:
    whose = _port_user(port) if error.errno == errno.EADDRINUSE else ""
    return MachineError(
        f"cannot listen at {host}:{port} for `{KEY}`",
        why=f"{error.strerror or error}{whose}",
        fix=[f"--set {KEY}={host}:{port + 1 if port < 65535 else 0}", f"--set {KEY}=null"],
    )


def _port_user(port: int) -> str:
    """Return `; python (process 123) does`, naming the process that uses the port, if it can be
    found."""
    import psutil

    with suppress(psutil.Error, OSError):
        for (pid, name), _ in port_holders([port]):
            return f"; {name} (process {pid}) does"
    return ""
