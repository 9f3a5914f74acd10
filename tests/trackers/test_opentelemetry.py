"""Spans of a run, as an exporter is given them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from milescli.core.events import PHASES
from milescli.platform.ports import free_ports
from milescli.trackers.opentelemetry import OpenTelemetry
from tests.trackers.running import BEGAN_S, events, records, run_in, tell


def spans(folder: Path, *steps: int, first_step: int = 0) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracker = OpenTelemetry(run=run_in(folder, first_step=first_step), exporter=exporter)
    tell(tracker, events(*steps))
    return list(exporter.get_finished_spans())


def seconds(span: ReadableSpan) -> tuple[float, float]:
    """Begin and end, since the run's first event."""
    assert span.start_time is not None and span.end_time is not None
    return span.start_time / 1e9 - BEGAN_S, span.end_time / 1e9 - BEGAN_S


def test_a_run_has_steps_and_a_step_has_phases_that_follow_each_other(tmp_path: Path) -> None:
    made = spans(tmp_path, 1, 2)
    [run] = [span for span in made if span.name == "run"]
    assert run.parent is None
    attributes = dict(run.attributes or {})
    assert attributes["miles.recipe.train.steps"] == 4 and attributes["miles.outcome"] == "done"
    assert [event.name for event in run.events] == ["PhaseStarted"]
    for step in [span for span in made if span.name == "step"]:
        assert step.parent is not None and step.parent.span_id == run.context.span_id
        own = [s for s in made if s.parent and s.parent.span_id == step.context.span_id]
        own.sort(key=lambda span: span.start_time or 0)
        assert [span.name for span in own] == list(PHASES)
        assert seconds(own[0])[0] == pytest.approx(seconds(step)[0], abs=1e-3)
        ends = [seconds(span)[1] for span in own[:-1]]
        assert ends == pytest.approx([seconds(span)[0] for span in own[1:]], abs=1e-3)
        assert seconds(own[-1])[1] == pytest.approx(seconds(step)[1], abs=0.1)


def test_what_comes_beside_the_steps_has_spans_with_attributes(tmp_path: Path) -> None:
    made = {span.name: span for span in spans(tmp_path, 1)}
    assert seconds(made["eval"]) == pytest.approx((27.8, 30.0), abs=1e-3)
    assert seconds(made["checkpoint"]) == pytest.approx((38.0, 40.0), abs=1e-3)
    assert seconds(made["healing"]) == pytest.approx((47.0, 50.0), abs=1e-3)
    assert dict(made["healing"].attributes or {})["miles.worker"] == "engine 1"
    assert dict(made["eval"].attributes or {})["miles.eval.accuracy"] == 0.5
    assert dict(made["step"].attributes or {})["miles.rollout.reward_mean"] == 0.1


def test_a_run_that_is_resumed_is_in_the_same_trace(tmp_path: Path) -> None:
    both = spans(tmp_path, 1) + spans(tmp_path, 2, first_step=1)
    assert len({span.context.trace_id for span in both}) == 1
    assert len([span for span in both if span.name == "run"]) == 2


def test_a_server_that_is_not_there_is_an_error_and_nothing_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed"
    )
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracker = OpenTelemetry(run=run_in(tmp_path))
    for record in records(events(1)):
        tracker.event(record)
    with pytest.raises(OSError, match="xport"):
        tracker.close("done")
    left = {type(handler).__module__ for handler in logging.getLogger("opentelemetry").handlers}
    assert "milescli.trackers.opentelemetry" not in left
    said = capfd.readouterr()
    assert not said.out and not said.err
