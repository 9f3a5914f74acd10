"""Watches for notices that this machine will be taken away, and when: SLURM's signal before a time
limit, and a cloud's metadata service for spot instances, which a thread polls. `PaceEstimate`
estimates whether a step and a save still fit before the end. Only reports; see `Attempt`."""

from __future__ import annotations

import math
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from milescli.core.errors import MilesError
from milescli.core.events import (
    AdapterEvent,
    CheckpointMirrored,
    CheckpointSaved,
    Event,
    RowStepDone,
    StepDone,
)
from milescli.core.files import parse_json
from milescli.core.units import parse_time

GRACE_VARIABLE, ADDRESS_VARIABLE = "MILES_GRACE_S", "MILES_METADATA_URL"
"""Seconds from SIGUSR1 to the end of this machine; base address of the metadata service."""
GRACE_S = 120.0
GCE_GRACE_S = 30.0
"""Seconds that Google gives; it does not say when they began."""
EVERY_S, ANSWER_S = 5.0, 2.0
"""Seconds between two requests; time limit of one."""
MAX_REPLY_BYTES = 1 << 20
_TOKEN_S = 21_600
_ENDING = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""Scheduled events of Azure that end the processes of a machine."""
_MARGIN, _ROOM_S = 1.5, 3.0
"""A save may take this multiple of the longest of the last ones, plus this many seconds."""
# a proxy is no way to this machine's own metadata
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Describes the announcement that this machine will be taken away."""

    why: str
    """Source of the notice."""
    deadline_s: float
    """Time of the end, in seconds since 1970."""


def of_signal(environ: Mapping[str, str]) -> Preemption:
    """Return the notice that SIGUSR1 means."""
    try:
        grace_s = float(environ.get(GRACE_VARIABLE) or GRACE_S)
    except ValueError:
        grace_s = GRACE_S
    return Preemption(
        why=f"SIGUSR1: this machine is taken away in {grace_s:g} s",
        deadline_s=time.time() + grace_s,
    )


NoticeQuery = Callable[[str, dict[str, str]], Preemption | None]
"""(base address, state to keep until the next query) -> the notice, or None. Raises OSError,
ValueError, LookupError, TypeError if the service replies in another form."""


def _aws(base: str, state: dict[str, str]) -> Preemption | None:
    """Ask EC2's metadata service, version 2, about a spot instance."""
    if "token" not in state:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        state["token"] = _reply(f"{base}/latest/api/token", headers, method="PUT") or ""
    headers = {"X-aws-ec2-metadata-token": state["token"]}
    try:
        text = _reply(f"{base}/latest/meta-data/spot/instance-action", headers, none_is_404=True)
    except PermissionError:
        del state["token"]  # it has expired
        return None
    if text is None:
        return None
    notice = parse_json(text)
    why = f"AWS will {notice['action']} this spot instance at {notice['time']}"
    deadline_s = parse_time(notice["time"])
    return Preemption(
        why=why, deadline_s=time.time() + GRACE_S if math.isnan(deadline_s) else deadline_s
    )


def _gcp(base: str, _: dict[str, str]) -> Preemption | None:
    """Ask Google's metadata server whether this instance was preempted."""
    headers = {"Metadata-Flavor": "Google"}
    text = _reply(f"{base}/computeMetadata/v1/instance/preempted", headers)
    if (answer := (text or "").strip()) not in ("TRUE", "FALSE"):
        raise ValueError(f"`preempted` is `{answer[:20]}`")
    why = f"Google preempts this instance in {GCE_GRACE_S:g} s"
    return Preemption(why=why, deadline_s=time.time() + GCE_GRACE_S) if answer == "TRUE" else None


def _azure(base: str, state: dict[str, str]) -> Preemption | None:
    """Ask Azure for scheduled events of this machine."""
    headers, instance = {"Metadata": "true"}, f"{base}/metadata/instance/compute/name"
    if "name" not in state:
        state["name"] = (
            _reply(f"{instance}?api-version=2021-02-01&format=text", headers) or ""
        ).strip()
    text = _reply(f"{base}/metadata/scheduledevents?api-version=2020-07-01", headers)
    for event in parse_json(text or "")["Events"]:
        if event["EventType"] in _ENDING and state["name"] in event["Resources"]:
            not_before = event.get("NotBefore")  # empty: it has begun
            deadline_s = (
                parsedate_to_datetime(not_before).timestamp() if not_before else time.time()
            )
            why = f"Azure: {event['EventType']} of this machine {not_before or 'now'}"
            return Preemption(why=why, deadline_s=deadline_s)
    return None


_CLOUDS: dict[str, NoticeQuery] = {"aws": _aws, "gcp": _gcp, "azure": _azure}
_ADDRESS = "http://169.254.169.254"
"""Address of the metadata service, equal in all these clouds."""


def _reply(
    url: str, headers: Mapping[str, str], *, method: str = "GET", none_is_404: bool = False
) -> str | None:
    """Return the text of a reply; None if the status is 404 and `none_is_404`. Raises OSError,
    PermissionError if the token is not accepted."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with _OPENER.open(request, timeout=ANSWER_S) as reply:
            return reply.read(MAX_REPLY_BYTES).decode(errors="replace")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 401:
            raise PermissionError("HTTP 401") from None
        if error.code == 404 and none_is_404:
            return None
        raise


class PreemptionWatch:
    """Polls the metadata service of a cloud in a thread until it announces the end."""

    def __init__(
        self,
        cloud: str,
        *,
        environ: Mapping[str, str],
        on_notice: Callable[[Preemption], object],
        on_trouble: Callable[[str], object],
        every_s: float = EVERY_S,
    ) -> None:
        """Set up the thread. `on_notice`, `on_trouble`: called at most once each, in the thread."""
        self._base = (environ.get(ADDRESS_VARIABLE) or _ADDRESS).rstrip("/")
        self._cloud, self._kept, self._every_s = _CLOUDS[cloud], dict[str, str](), every_s
        self._on_notice, self._on_trouble = on_notice, on_trouble
        self._is_over, self._is_told = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="preemption", daemon=True)

    def start(self) -> None:
        """Start polling: at once, and then every few seconds."""
        self._thread.start()

    def close(self) -> None:
        """Stop polling, without waiting for the thread."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            if (notice := self._poll()) is not None and not self._is_over.is_set():
                self._on_notice(notice)
                return
            self._is_over.wait(self._every_s)

    def _poll(self) -> Preemption | None:
        try:
            return self._cloud(self._base, self._kept)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, MilesError) as error:
            if not self._is_told and not self._is_over.is_set():
                self._is_told = True
                self._on_trouble(
                    f"the metadata service {self._base} does not answer `machine.preemption` "
                    f"({type(error).__name__}: {error}); the run continues and keeps asking, and "
                    "sees no notice until it answers"
                )
            return None


class PaceEstimate:
    """Estimates how long steps, saves and copies of this attempt take. A listener of events."""

    def __init__(self) -> None:
        self._steps, self._saves = deque[float](maxlen=5), deque[float](maxlen=3)
        self._copies = deque[float](maxlen=3)
        self._last = time.monotonic()
        """Time at which the last step was completed."""

    def __call__(self, event: Event) -> None:
        """Record the seconds that an event reports."""
        if isinstance(event, AdapterEvent):
            event = event.event
        if isinstance(event, StepDone | RowStepDone):
            is_rows = isinstance(event, RowStepDone)
            self._steps.append(event.step_s if is_rows else event.seconds.step_s)
            self._last = time.monotonic()
        elif isinstance(event, CheckpointSaved):
            self._saves.append(event.seconds)
        elif isinstance(event, CheckpointMirrored):
            self._copies.append(event.seconds)

    @property
    def step_left_s(self) -> float:
        """Return the estimated remaining seconds of the current step, by the mean of the last ones;
        a whole step if it is overdue, infinity if no step was done."""
        if not self._steps:
            return math.inf
        mean = sum(self._steps) / len(self._steps)
        since = time.monotonic() - self._last
        return mean - since if since < mean else mean

    @property
    def save_s(self) -> float:
        """Return the seconds to allow for a save and its copy; infinity if nothing was saved."""
        if not self._saves:
            return math.inf
        return _MARGIN * (max(self._saves) + max(self._copies, default=0.0)) + _ROOM_S
