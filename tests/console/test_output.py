"""Data on stdout, narration on stderr, in three modes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from milescli.console.output import Mode, Output
from milescli.core.errors import FitError
from tests.console.conftest import said

Speak = Callable[..., Output]

ERROR = FitError(
    "`qwen` does not fit on 4 GPUs",
    why="35B parameters need 630 GB;\n4 x 141 GB = 564 GB",
    fix=["miles a", "miles b"],
)


def say_everything(output: Output) -> None:
    output.json("thing", {"value": 1})
    output.table(["name", "count"], [("a", 1), ("b", None)])
    output.kv({"path": "runs/x"})
    output.text("as it stands\n")
    output.note("a note")
    output.success("reached")
    output.warn("careful")
    output.error(ERROR)
    output.next_steps({"miles eval x": "measure"})


def test_for_people_data_and_narration_are_apart(speak: Speak) -> None:
    output = speak()
    say_everything(output)
    stdout, stderr = said(output)
    assert stdout == "name   count\na          1\nb          -\npath  runs/x\nas it stands\n"
    assert stderr.splitlines() == [
        "a note",
        "✓ reached",
        "warning: careful",
        "error: `qwen` does not fit on 4 GPUs",
        "  why: 35B parameters need 630 GB;",
        "       4 x 141 GB = 564 GB",
        "  fix: miles a",
        "   or: miles b",
        "next",
        "  miles eval x   measure",
    ]


def test_for_programs_every_line_is_one_json_object(speak: Speak) -> None:
    output = speak(Mode.JSON)
    say_everything(output)
    stdout, stderr = said(output)
    assert [json.loads(line) for line in stdout.splitlines()] == [
        {"schema": 1, "kind": "thing", "value": 1}
    ]
    kinds = [json.loads(line)["kind"] for line in stderr.splitlines()]
    assert kinds == ["note", "success", "warning", "error"]
    error = json.loads(stderr.splitlines()[-1])
    assert error == {
        "schema": 1,
        "kind": "error",
        "type": "FitError",
        "error": ERROR.what,
        "why": ERROR.why,
        "fix": ["miles a", "miles b"],
        "exit_code": 5,
    }


def test_quiet_leaves_bare_data_warnings_and_errors(speak: Speak) -> None:
    output = speak(Mode.QUIET)
    say_everything(output)
    stdout, stderr = said(output)
    assert stdout == "a\t1\nb\t\npath\truns/x\nas it stands\n"
    assert stderr.splitlines()[0] == "warning: careful" and stderr.splitlines()[1].startswith(
        "error: "
    )


def test_json_has_no_nan(speak: Speak) -> None:
    output = speak(Mode.JSON)
    output.json(
        "thing", {"loss": float("nan"), "all": [1.0, float("inf")], "deep": {"x": float("-inf")}}
    )
    assert json.loads(said(output)[0], parse_constant=pytest.fail) == {
        "schema": 1,
        "kind": "thing",
        "loss": None,
        "all": [1.0, None],
        "deep": {"x": None},
    }


def test_text_of_users_is_not_markup(speak: Speak) -> None:
    output = speak()
    output.warn("[red]x[/red] :smile:")
    output.kv({"[bold]": "[link=x]"})
    assert "[red]x[/red] :smile:" in said(output)[1]
    assert "[bold]  [link=x]" in said(output)[0]


def test_a_long_fix_stays_on_one_line_so_that_it_can_be_pasted(speak: Speak) -> None:
    command = "miles launch " + " ".join(f"--set key_{n}=value" for n in range(40))
    output = speak(terminal=True)
    output.error(FitError("a", why="b", fix=command))
    assert any(command in line for line in said(output)[1].splitlines())


def test_no_color_is_honoured(speak: Speak, monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = speak(terminal=True)
    coloured.warn("x")
    assert "\x1b[33m" in said(coloured)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    plain = speak(terminal=True)
    plain.warn("x")
    assert said(plain)[1] == "warning: x\n"


def test_a_pipe_gets_no_escapes_whatever_the_environment_says(
    speak: Speak, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS"):
        monkeypatch.setenv(name, "1")
    output = speak()
    say_everything(output)
    assert "\x1b" not in "".join(said(output))
