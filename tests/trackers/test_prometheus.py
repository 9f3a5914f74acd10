"""What Prometheus is shown of a run, and that names keep to its conventions."""

from __future__ import annotations

import json
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from milescli.checkpoint.run_dir import read_jsonl
from milescli.core.errors import MachineError
from milescli.core.events import (
    AdapterEvent,
    MemorySeen,
    Notice,
    PhaseStarted,
    RunEnded,
    ValidationDone,
    VerdictGiven,
    WorkerLost,
    WorkerMemory,
    to_record,
)
from milescli.core.metric_names import METRICS
from milescli.trackers.prometheus import (
    PHASES,
    Exposition,
    MetricsServer,
    families,
    family_of,
    require_free,
)
from tests.fake_run import eval_done, step_done
from tests.fake_run import events as whole_run
from tests.trackers.running import events

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def exposition(records: Iterable[Any], **options: Any) -> Exposition:
    made = Exposition(run="sums-1", version="0.1.0", **options)
    for record in records:
        made.feed(record)
    return made


def samples(made: Exposition) -> Samples:
    """As a Prometheus client parses them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(made.text())
        for sample in family.samples
    }


def told(*happened: Any) -> Samples:
    return samples(exposition(map(to_record, happened)))


def test_figures_of_the_last_step_stand_beside_sums_over_all() -> None:
    seen = told(*events(1, 2))
    assert seen["miles_run_info", (("run", "sums-1"), ("version", "0.1.0"))] == 1.0
    assert seen["miles_step", ()] == 2.0 and seen["miles_steps_wanted", ()] == 4.0
    assert seen["miles_reward_mean", ()] == 0.2
    assert seen["miles_eval_accuracy", ()] == 0.5
    assert seen["miles_rollout_tokens_total", ()] == 2 * 9400
    rollout = seen[PHASES, (("phase", "rollout"),)]
    assert abs(rollout - 2 * 3.1 * 0.66) < 1e-9
    assert seen[PHASES, (("phase", "eval"),)] == 2.2
    assert seen["miles_checkpoint_bytes", ()] == 10.0
    assert seen["miles_worker_restarts_total", (("worker", "engine 1"),)] == 1.0


def test_losses_and_warnings_are_counted_and_one_state_holds() -> None:
    lost = WorkerLost(worker='engine "1"\\', what="died", why="", step=1, restart=1)
    seen = told(
        PhaseStarted(phase="start"),
        PhaseStarted(phase="train"),
        lost,
        lost,
        Notice(text="slow", level="warning"),
        Notice(text="hello"),
        RunEnded(outcome="done", step=2, seconds=1.0),
    )
    assert seen["miles_worker_losses_total", (("worker", 'engine "1"\\'),)] == 2.0
    assert seen["miles_warnings_total", ()] == 1.0
    states = {labels[0][1]: value for (name, labels), value in seen.items() if "state" in name}
    assert states == {"start": 0.0, "train": 0.0, "done": 1.0}


@pytest.mark.parametrize(
    "done", [eval_done(2, 0.5), ValidationDone(step=2, loss=1.0, num_rows=8, seconds=5.0)]
)
def test_after_an_evaluation_the_run_is_in_the_state_of_before(done: Any) -> None:
    began = PhaseStarted(phase="train"), PhaseStarted(phase="eval")
    states = ("miles_run_state", (("state", "train"),)), ("miles_run_state", (("state", "eval"),))
    assert [told(*began)[state] for state in states] == [0.0, 1.0]
    assert [told(*began, done)[state] for state in states] == [1.0, 0.0]


def test_names_that_a_recipe_chose_are_labels() -> None:
    done = step_done(1, 4, reward=0.5)
    parts = replace(done.rollout, reward_parts={"math": 0.4}, figures={"lookups": 3.0})
    report = replace(done.report, figures={**done.report.figures, "of_my_own": 2.0})
    seen = told(replace(done, rollout=parts, report=report))
    assert seen["miles_reward_part", (("name", "math"),)] == 0.4
    assert seen["miles_agent_figure", (("name", "lookups"),)] == 3.0
    assert seen["miles_train_figure", (("name", "of_my_own"),)] == 2.0
    assert seen["miles_train_clip_ratio", ()] == 0.012


def test_adapters_have_series_of_their_own() -> None:
    both = [
        AdapterEvent(adapter=name, event=event)
        for name, step in (("sums", 1), ("words", 3))
        for event in (PhaseStarted(phase="train"), step_done(step, 4, reward=step / 10))
    ]
    seen = told(*both, PhaseStarted(phase="stop"))
    assert seen["miles_step", (("adapter", "sums"),)] == 1.0
    assert seen["miles_reward_mean", (("adapter", "words"),)] == 0.3
    assert seen["miles_run_state", (("adapter", "sums"), ("state", "train"))] == 1.0
    assert seen["miles_run_state", (("state", "stop"),)] == 1.0


def test_memory_is_that_of_the_last_look() -> None:
    looks = [
        {"time": 1, "oom_kills": 0, "resident_bytes": {"7": 10, "8": 5}, "names": {"7": "driver"}},
        {
            "time": 2,
            "oom_kills": 1,
            "resident_bytes": {"7": 20, "9": 1, "10": 2},
            "names": {"7": "driver", "9": "engine-0", "10": "engine-0"},
        },
    ]
    seen = samples(exposition(looks, labels={"at": "here"}))
    resident = {
        dict(labels)["process"]: value for (name, labels), value in seen.items() if "res" in name
    }
    assert resident == {"driver": 20.0, "engine-0": 3.0}
    assert seen["miles_oom_kills", (("at", "here"),)] == 1.0


def test_a_run_that_is_read_from_disk_gives_what_it_gave_while_it_went_on(tmp_path: Path) -> None:
    happened = [to_record(event) for event in whole_run(num_warmup=3, num_steps=4)]
    log = tmp_path / "events.jsonl"
    log.write_text("".join(f"{json.dumps({'time': 'now', **one})}\n" for one in happened))
    from_disk = exposition(read_jsonl(log))
    assert from_disk.text() == exposition(happened).text()
    shown = {name for name, _ in samples(from_disk)}
    assert shown <= set(families()) and len(shown) > 40
    assert samples(from_disk)[PHASES, (("phase", "warmup"),)] > 0


def test_what_it_does_not_know_is_left_out() -> None:
    assert samples(exposition([{}, {"event": "OfTomorrow", "step": 1}])) == samples(exposition([]))


def test_names_keep_to_the_conventions() -> None:
    for name in families():
        assert re.fullmatch(r"miles_[a-z][a-z0-9_]*", name), name
        assert not re.search(r"_(s|ms|fraction|rate|percent)(_total)?$", name), name


def test_each_number_has_a_name_and_no_two_share_one() -> None:
    own = [family_of(metric).name for metric in METRICS]
    twice = {name for name in own if own.count(name) > 1}
    assert twice == {PHASES}


def test_what_workers_hold_and_the_newest_verdict_are_shown() -> None:
    rank = WorkerMemory(worker="trainer rank 0", device="cuda:0", peak_bytes=7, total_bytes=80)
    flat = VerdictGiven(step=1, headline="", is_learning=False, findings={"reward-flat": "is"})
    better = VerdictGiven(step=2, headline="", is_learning=True)
    seen = told(MemorySeen(step=1, workers=(rank,)), flat, better)
    own = {"device": "cuda:0", "worker": "trainer rank 0"}
    sizes = {
        kind: seen["miles_worker_memory_bytes", tuple(sorted({**own, "kind": kind}.items()))]
        for kind in ("peak", "total")
    }
    assert sizes == {"peak": 7.0, "total": 80.0}
    assert seen["miles_learning", ()] == 1.0
    assert seen["miles_finding", (("finding", "reward-flat"),)] == 0.0
    unsure = VerdictGiven(step=3, headline="", is_learning=None)
    assert ("miles_learning", ()) not in told(flat, better, unsure)


BOUND_S = 120.0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer("127.0.0.1", 0, lambda: "miles_step 3.0\n")
    yield made
    made.close()


def test_it_gives_figures_and_nothing_else(server: MetricsServer) -> None:
    with urllib.request.urlopen(server.url, timeout=BOUND_S) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert reply.read() == b"miles_step 3.0\n"
    for request in (
        server.url.replace("/metrics", "/"),
        urllib.request.Request(server.url, data=b"x", method="POST"),
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(request, timeout=BOUND_S)


def test_it_listens_on_this_machine_alone(server: MetricsServer) -> None:
    ours = [
        one.laddr
        for one in psutil.Process(os.getpid()).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and f":{one.laddr.port}/" in server.url
    ]
    assert [address.ip for address in ours] == ["127.0.0.1"]


def test_who_goes_away_or_says_nothing_holds_up_nobody(server: MetricsServer) -> None:
    port = int(server.url.split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.send(b"GET /metr")
        with urllib.request.urlopen(server.url, timeout=BOUND_S) as reply:
            assert reply.status == 200


def test_a_port_in_use_is_refused_with_who_has_it(server: MetricsServer) -> None:
    port = int(server.url.split(":")[2].split("/")[0])
    with pytest.raises(MachineError, match=f"cannot listen at 127.0.0.1:{port}") as refused:
        require_free("127.0.0.1", port)
    assert f"(process {os.getpid()}) does" in refused.value.why
    assert refused.value.fixes[0] == f"--set run.metrics_address=127.0.0.1:{port + 1}"
    with pytest.raises(MachineError, match="cannot listen"):
        MetricsServer("127.0.0.1", port, lambda: "")


def test_a_port_is_free_again_when_it_is_closed() -> None:
    made = MetricsServer("127.0.0.1", 0, lambda: "")
    port = int(made.url.split(":")[2].split("/")[0])
    with urllib.request.urlopen(made.url, timeout=BOUND_S):
        pass
    made.close()
    require_free("127.0.0.1", port)


def test_a_host_that_is_none_is_refused() -> None:
    with pytest.raises(MachineError, match="no-such-host"):
        require_free("no-such-host.invalid", 9464)
