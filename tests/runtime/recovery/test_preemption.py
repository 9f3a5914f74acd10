"""Notices of a machine that is taken away: what each cloud says, what a signal means, and whether a
step is finished before the save."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from milescli.core.errors import Stopped, Terminated
from milescli.core.events import CheckpointMirrored, CheckpointSaved
from milescli.runtime.recovery import preemption
from milescli.runtime.recovery.preemption import (
    ADDRESS_VARIABLE,
    GRACE_VARIABLE,
    PaceEstimate,
    Preemption,
    PreemptionWatch,
    of_signal,
)
from milescli.runtime.recovery.supervise import StopFlag, StopSignals, run_watched
from tests.fake_run import row_step_done, step_done
from tests.loopback_services import Metadata, metadata_server
from tests.waiting import until, until_async

TOKEN = ("PUT /latest/api/token", (200, "a-token"))
ACTION = "GET /latest/meta-data/spot/instance-action"
PREEMPTED = "GET /computeMetadata/v1/instance/preempted"
EVENTS = "GET /metadata/scheduledevents"
SOON = "2031-05-01T08:00:00Z"


@pytest.fixture
def service() -> Iterator[Metadata]:
    with metadata_server() as service:
        yield service


class Watched:
    """What a watch of a service says."""

    def __init__(self, cloud: str, service: Metadata) -> None:
        self.notices: list[Preemption] = []
        self.troubles: list[str] = []
        self.watch = PreemptionWatch(
            cloud,
            environ={ADDRESS_VARIABLE: service.url, "http_proxy": "http://127.0.0.1:9"},
            on_notice=self.notices.append,
            on_trouble=self.troubles.append,
            every_s=0.01,
        )
        self.watch.start()

    def notice(self) -> Preemption:
        until(lambda: self.notices, "a notice")
        assert len(self.notices) == 1
        return self.notices[0]


def test_aws_tells_a_spot_instance_when_it_ends(service: Metadata) -> None:
    service.replies |= dict([TOKEN])
    watched = Watched("aws", service)
    until(lambda: [one for one, _ in service.seen].count(ACTION) > 2, "some questions")
    assert not watched.notices and not watched.troubles
    service.replies[ACTION] = 401, ""  # the token has expired
    until(lambda: [one for one, _ in service.seen].count(TOKEN[0]) > 1, "another token")
    service.replies[ACTION] = 200, json.dumps({"action": "terminate", "time": SOON})
    notice = watched.notice()
    assert notice.why == f"AWS will terminate this spot instance at {SOON}"
    assert time.gmtime(notice.deadline_s)[:4] == (2031, 5, 1, 8)
    headers = dict(service.seen)[ACTION]
    assert headers["x-aws-ec2-metadata-token"] == "a-token"


def test_google_gives_half_a_minute(service: Metadata) -> None:
    service.replies[PREEMPTED] = 200, "FALSE"
    watched = Watched("gcp", service)
    until(lambda: len(service.seen) > 2)
    assert not watched.notices and service.seen[0][1]["metadata-flavor"] == "Google"
    service.replies[PREEMPTED] = 200, "TRUE"
    assert 0 < watched.notice().deadline_s - time.time() <= 30


def test_azure_tells_of_this_machine_among_others(service: Metadata) -> None:
    service.replies["GET /metadata/instance/compute/name"] = 200, "mine"
    when = formatdate(1.9e9, usegmt=True)
    others = [
        {"EventType": "Preempt", "Resources": ["other"], "NotBefore": when},
        {"EventType": "Freeze", "Resources": ["mine"], "NotBefore": when},
    ]
    service.replies[EVENTS] = 200, json.dumps({"Events": others})
    watched = Watched("azure", service)
    until(lambda: [one for one, _ in service.seen].count(EVENTS) > 2)
    assert not watched.notices
    own = {"EventType": "Preempt", "Resources": ["mine"], "NotBefore": when}
    service.replies[EVENTS] = 200, json.dumps({"Events": [*others, own]})
    assert watched.notice() == Preemption(
        why=f"Azure: Preempt of this machine {when}", deadline_s=1.9e9
    )


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("reply", [None, (500, ""), (200, "no JSON"), (200, "[]"), (200, "{}")])
def test_a_service_that_says_something_else_is_told_once_and_asked_on(
    cloud: str, reply: tuple[int, str] | None, service: Metadata
) -> None:
    names = (TOKEN[0], ACTION, EVENTS, PREEMPTED) if reply else ()
    service.replies |= dict.fromkeys(names, reply)
    watched = Watched(cloud, service)
    until(lambda: len(service.seen) > 8)
    watched.watch.close()
    assert not watched.notices and len(watched.troubles) == 1


def test_a_watch_that_nobody_answers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "ANSWER_S", 0.1)
    watched = Watched("aws", Metadata(url="http://127.0.0.1:9"))
    assert "does not answer `machine.preemption`" in until(lambda: watched.troubles)[0]
    watched.watch.close()


@pytest.mark.parametrize(("told", "seconds"), [("30", 30), ("", 120), ("soon", 120)])
def test_a_signal_means_the_grace_period_of_the_machine(told: str, seconds: float) -> None:
    notice = of_signal({GRACE_VARIABLE: told})
    assert 0 < notice.deadline_s - time.time() <= seconds
    assert notice.why == f"SIGUSR1: this machine is taken away in {seconds} s"


def test_pace_is_unknown_until_a_step_and_a_save_were_done() -> None:
    pace = PaceEstimate()
    assert pace.step_left_s == pace.save_s == math.inf
    pace(row_step_done(1))
    pace(step_done(2, 9, reward=0.0))
    assert 0 < pace.step_left_s < 60 and pace.save_s == math.inf
    pace(CheckpointSaved(step=2, path="x", size_bytes=1, seconds=2.0))
    alone = pace.save_s
    pace(CheckpointMirrored(step=2, url="s3://b/x", size_bytes=1, seconds=4.0))
    assert 2.0 < alone < pace.save_s - 4.0


def _signalled(on_notice, *numbers: signal.Signals) -> list[str]:
    """Returns what was asked of a run that gets these signals."""
    asked: list[str] = []

    def stop() -> bool:
        asked.append("stop")
        return True

    def notice(told: Preemption) -> bool:
        asked.append("notice")
        return on_notice(told)

    async def work() -> None:
        for number in numbers:
            seen = len(asked)
            os.kill(os.getpid(), number)
            is_new = number != signal.SIGUSR1 or "notice" not in asked
            await until_async(lambda seen=seen, is_new=is_new: len(asked) > seen or not is_new)

    signals = StopSignals(on_stop=stop, resume_command=lambda: "miles resume it", on_notice=notice)
    asyncio.run(run_watched(work(), [], signals))
    return asked


def test_a_notice_is_no_first_stop_and_only_one_counts() -> None:
    numbers = (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM)
    assert _signalled(lambda _: True, *numbers) == ["notice", "stop"]


def test_a_notice_with_nothing_to_save_ends_at_once_and_says_why() -> None:
    with pytest.raises(Terminated) as caught:
        _signalled(lambda _: False, signal.SIGUSR1, signal.SIGTERM)
    assert caught.value.why.startswith("SIGUSR1: this machine is taken away in")


def test_a_stop_after_the_step_cancels_nothing_before() -> None:
    async def main() -> None:
        flag = StopFlag()
        flag.is_after_step, flag.why = True, "AWS"
        assert await flag.unless_set(asyncio.sleep(0, "samples")) == "samples"
        with pytest.raises(Stopped) as caught:
            flag.check()
        assert caught.value.why == "AWS"

    asyncio.run(main())
