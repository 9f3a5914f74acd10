"""The panel fits its terminal, whatever the run says."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from milescli.console.columns import COLUMNS, fitting_columns
from milescli.console.live import milestone, step_line
from milescli.console.panel import frame
from milescli.core.events import AdapterEvent, Event, PhaseStarted, VerdictGiven, stamped
from milescli.core.history import History
from tests.fake_run import eval_done, events, step_done

GOLDEN = Path(__file__).parent / "golden"
ANY = st.floats(allow_nan=True, allow_infinity=True)


def feed(history: History, event: Event) -> None:
    history.feed(stamped(event))


def drawn(history: History, width: int, height: int = 30) -> list[str]:
    elapsed_s = 0.0 if math.isnan(history.took_s) else history.took_s
    screen = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    screen.print(frame(history, elapsed_s=elapsed_s, width=width, height=height))
    return screen.file.getvalue().splitlines()  # type: ignore[attr-defined]


def after(num_events: int | None, **options) -> History:  # type: ignore[no-untyped-def]
    history = History(name="quickstart-1")
    for event in list(events(**options))[:num_events]:
        feed(history, event)
    return history


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("moment", "num_events"), [("start", 1), ("warmup", 40), ("train", 90), ("done", None)]
)
def test_the_panel_looks_as_it_was_approved(
    width: int, moment: str, num_events: int | None
) -> None:
    """To approve a new look: delete the golden file, run the test, look at the file, commit it."""
    drawing = "\n".join(drawn(after(num_events), width)) + "\n"
    file = GOLDEN / f"panel-{moment}-{width}.txt"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(drawing)
        pytest.fail(f"{file} was not there and has been written: look at it, and commit it")
    assert drawing == file.read_text()


@settings(max_examples=150, deadline=None)
@given(
    width=st.integers(30, 220),
    height=st.integers(8, 70),
    reward=ANY,
    loss=ANY,
    seconds=ANY,
    diff=ANY,
    accuracy=ANY,
)
def test_no_figure_and_no_terminal_breaks_the_panel(
    width: int,
    height: int,
    reward: float,
    loss: float,
    seconds: float,
    diff: float,
    accuracy: float,
) -> None:
    history = after(None)
    feed(history, eval_done(40, accuracy))
    odd = step_done(41, 42, reward=reward, loss=loss, step_s=seconds, diff=diff)
    feed(
        history,
        replace(
            odd,
            rollout_tokens_per_s=seconds,
            report=replace(odd.report, grad_norm=loss, figures={"kl": loss, "entropy": loss}),
        ),
    )
    lines = drawn(history, width, height)
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize("height", [18, 24, 30, 50])
def test_the_panel_is_not_higher_than_the_terminal(height: int) -> None:
    assert len(drawn(after(None), 80, height)) <= height


@pytest.mark.parametrize("height", [18, 24, 30, 50])
def test_the_verdict_stands_below_with_the_worst_that_is_wrong(height: int) -> None:
    findings = {"one": "the first", "two": "the second", "three": "the third"}
    told = VerdictGiven(step=40, headline="It is learning.", is_learning=True, findings=findings)
    history = after(None)
    feed(history, told)
    lines = drawn(history, 80, height)
    shown = "\n".join(lines)
    assert len(lines) <= height and "verdict It is learning." in shown
    assert "! the first" in shown and "! the second" in shown and "the third" not in shown
    line = milestone(told)
    assert line is not None and line.plain == "verdict   step 40: It is learning."


def test_after_an_evaluation_the_phase_before_it_goes_on() -> None:
    history = History(name="mine")
    feed(history, PhaseStarted(phase="train", detail="steps 1 to 40"))
    feed(history, PhaseStarted(phase="eval", detail="200 prompts"))
    assert "eval" in drawn(history, 80)[-1]
    feed(history, eval_done(10, 0.5))
    assert (history.phase, history.phase_detail) == ("train", "steps 1 to 40")


@given(st.integers(10, 200))
def test_columns_are_dropped_by_rank_and_keep_their_order(width: int) -> None:
    kept = fitting_columns(width)
    assert kept[0].word == "step" and kept[1].word == "reward"
    ordered = [column for column in kept if column in COLUMNS]
    assert ordered == [column for column in COLUMNS if column in kept]


def test_what_is_not_finite_is_said_as_it_is() -> None:
    history = after(None)
    feed(history, step_done(41, 42, reward=0.5, loss=float("nan")))
    assert "nan" in "\n".join(drawn(history, 120))


def test_the_parts_of_the_reward_are_shown_on_the_panel_and_in_the_log() -> None:
    done = step_done(1, 10, reward=0.5)
    rollout = replace(done.rollout, reward_parts={"math": 0.45, "format": 0.9})
    history = History(name="mine")
    feed(history, replace(done, rollout=rollout))
    assert "math 0.450  format 0.900" in "\n".join(drawn(history, 100))
    line = step_line(replace(done, rollout=rollout))
    assert line is not None and "reward 0.500  math 0.450  format 0.900" in line.plain
    assert len(drawn(history, 100, height=20)) <= 20


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_panel_of_several_adapters_shows_how_far_each_is(width: int) -> None:
    history = History(name="both")
    feed(history, PhaseStarted(phase="start", detail="1 trainer ranks, 1 engines"))
    for name, num_events in (("sums", 90), ("words", 100)):
        for event in list(events())[:num_events]:
            feed(history, AdapterEvent(adapter=name, event=event))
    lines = drawn(history, width)
    shown = "\n".join(lines)
    steps = [one.step for one in history.adapters.values()]
    assert len(set(steps)) == 2
    for name, step in zip(("sums", "words"), steps, strict=True):
        assert shown.index(name) < shown.index(f"step {step}/40")
    assert max(map(len, lines)) <= width and "start" not in lines[-1]
    many = History(name="many")
    for number in range(100):
        feed(many, AdapterEvent(adapter=f"a{number}", event=step_done(1, 40, reward=0.5)))
    assert len(drawn(many, width, height=24)) <= 24
