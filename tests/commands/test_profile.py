"""`miles profile` before it asks for anything: what it refuses, and how."""

from __future__ import annotations

import json

from tests.commands.conftest import Miles
from tests.commands.test_runs import make_run


def test_a_run_that_has_ended_is_refused_with_the_way_to_go_on(miles: Miles) -> None:
    run = make_run("one", outcome="failed", steps=3)
    said = miles("profile", "one", "--steps", "4")
    assert said.code == 1 and said.out == ""
    assert "run `one` is not running" in said.err and "its state is failed" in said.err
    assert "miles resume" in said.err and "miles profile one --steps 4" in said.err
    assert not (run / "profiles").exists()
    told = json.loads(miles("profile", "one", "--json").err)
    assert (told["kind"], told["exit_code"]) == ("error", 1)


def test_a_name_with_a_space_is_quoted_in_the_command(miles: Miles) -> None:
    make_run("my run", outcome="done", steps=3)
    told = miles("profile", "my run").err
    assert "miles profile 'my run' --steps 2" in told and "miles resume 'runs/my run'" in told
    assert "miles rm --yes 'my run'" in miles("rm", "my run").err
    said = miles("report", "my run", "--to", "no folder/report.md")
    assert "fix: mkdir -p 'no folder'" in said.err


def test_numbers_that_are_none_are_usage_errors(miles: Miles) -> None:
    make_run("one", outcome="done", steps=3)
    for words in (("--ranks", "0,a"), ("--engines", "-1"), ("--steps", "0"), ("--steps", "11")):
        said = miles("profile", "one", *words)
        assert said.code == 2, (words, said)
    assert miles("profile", "two").code == 6
