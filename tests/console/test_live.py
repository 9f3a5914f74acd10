"""A run on the screen, in a log, as JSON, and as a picture."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from milescli.console.live import LiveRun
from milescli.console.output import Mode, Output
from milescli.core.events import Notice
from tests.console.conftest import said
from tests.fake_run import events, step_done

Speak = Callable[..., Output]


def watch(output: Output, **options) -> LiveRun:  # type: ignore[no-untyped-def]
    with LiveRun(output, name="quickstart-1") as view:
        for event in events(**options):
            view(event)
    return view


def test_a_log_gets_one_aligned_line_a_step(speak: Speak) -> None:
    output = speak()
    watch(output, num_steps=12)
    stdout, stderr = said(output)
    assert stdout == ""
    steps = [line for line in stderr.splitlines() if line.startswith("step")]
    assert len(steps) == 12
    assert {line.index("logprob_diff_max") for line in steps} == {
        steps[0].index("logprob_diff_max")
    }
    assert "\x1b" not in stderr


def test_a_log_holds_few_lines_of_a_long_warm_up(speak: Speak) -> None:
    output = speak()
    watch(output, num_warmup=1000, num_steps=1)
    lines = [
        line
        for line in said(output)[1].splitlines()
        if line.startswith("warmup ") and "loss" in line
    ]
    assert len(lines) == 10 and "1000/1000" in lines[-1]


def test_json_gives_every_event_on_a_line_of_its_own(speak: Speak) -> None:
    output = speak(Mode.JSON)
    watch(output, num_steps=3)
    records = [json.loads(line) for line in said(output)[0].splitlines()]
    assert len(records) == len(list(events(num_steps=3)))
    assert {record["kind"] for record in records} == {"event"} and {
        record["schema"] for record in records
    } == {1}
    assert [record["step"] for record in records if record["event"] == "StepDone"] == [1, 2, 3]


def test_quiet_tells_warnings_only(speak: Speak) -> None:
    output = speak(Mode.QUIET)
    watch(output)
    assert said(output) == ("", "")
    LiveRun(output, name="x")(Notice(text="disk is full soon", level="warning"))
    assert said(output)[1] == "warning: disk is full soon\n"


def test_a_terminal_shows_the_panel_and_keeps_the_milestones(speak: Speak) -> None:
    output = speak(terminal=True)
    watch(output)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said(output)[1])
    assert "step 40/40" in text and "accuracy 40.5% of 200 prompts" in text and "╰" in text
    assert said(output)[0] == ""


def test_the_terminal_is_given_back_when_the_run_fails(speak: Speak) -> None:
    output = speak(terminal=True)
    with pytest.raises(RuntimeError), LiveRun(output, name="x") as view:
        view(step_done(1, 2, reward=0.5))
        raise RuntimeError("engine died")
    stderr = said(output)[1]
    assert stderr.rindex("\x1b[?25h") > stderr.rindex("\x1b[?25l"), "the cursor stays hidden"


def test_closing_twice_is_harmless(speak: Speak) -> None:
    view = LiveRun(speak(terminal=True), name="x").__enter__()
    view.close()
    view.close()


def test_a_run_outlives_its_terminal(speak: Speak) -> None:
    output = speak()
    view = LiveRun(output, name="x")
    output.narration.file.close()
    for event in events():
        view(event)
    assert view.history.step == 40


def test_the_picture_is_an_svg_of_the_last_frame(speak: Speak, tmp_path: Path) -> None:
    view = watch(speak(Mode.QUIET))
    view.save_svg(tmp_path / "run.svg", command="miles launch --recipe quickstart")
    root = ElementTree.parse(tmp_path / "run.svg").getroot()
    words = "".join(root.itertext()).replace("\xa0", " ")
    assert root.tag.endswith("svg")
    assert "woff" not in (tmp_path / "run.svg").read_text(), "a picture loads nothing from the web"
    assert "$ miles launch --recipe quickstart" in words and "step 40/40" in words
