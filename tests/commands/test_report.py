"""`miles report`: a file, or stdout, or one object."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.commands.conftest import Miles
from tests.report.run_folders import make_planted


@pytest.fixture
def two(miles: Miles) -> None:
    make_planted(Path("runs/one"), seed=1, lr=1e-6)
    make_planted(Path("runs/two"), seed=2, lr=2e-6)


def test_html_and_markdown_are_chosen_by_the_name_of_the_file(miles: Miles, two: None) -> None:
    said = miles("report", "one", "--to", "report.html")
    assert said.code == 0 and said.out == "" and "report.html, " in said.err
    assert Path("report.html").read_text().startswith("<!doctype html>")
    assert miles("report", "one", "--to", "report.md", "--quiet").err == ""
    assert Path("report.md").read_text().splitlines()[2] == "## one"


def test_without_a_file_it_is_markdown_on_stdout(miles: Miles, two: None) -> None:
    for options in ([], ["--to", "-"]):
        said = miles("report", "one", "two", *options)
        assert said.code == 0 and said.err == ""
        assert "| recipe | `train.optimizer.lr` | `1e-06` | `2e-06` |" in said.out


def test_json_has_the_figures_and_writes_the_file_too(miles: Miles, two: None) -> None:
    told = json.loads(miles("report", "one", "--json", "--to", "one.html").out)
    assert (told["kind"], told["run"], told["path"]) == ("report", "one", "one.html")
    assert told["summary"]["step"] == 80 and len(told["curve"]["values"]) == 80
    assert Path("one.html").exists()
    both = json.loads(miles("report", "one", "two", "--json").out)
    assert both["curve"]["num_steps"] == 80 and both["path"] is None


def test_another_file_is_not_written_over_unless_forced(miles: Miles, two: None) -> None:
    Path("notes.md").write_text("mine")
    said = miles("report", "one", "--to", "notes.md")
    assert said.code == 1 and "--force" in said.err and Path("notes.md").read_text() == "mine"
    assert miles("report", "one", "--to", "notes.md", "--force").code == 0
    assert miles("report", "two", "--to", "notes.md").code == 0
    assert "## two" in Path("notes.md").read_text()


def test_a_report_that_could_not_be_written_is_not_told_of(
    miles: Miles, two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    said = miles("report", "one", "--json", "--to", "one.html")
    assert said.code == 4 and said.out == "" and "No space left" in said.err


def test_what_cannot_be_is_refused_by_what_it_is(miles: Miles, two: None) -> None:
    assert miles("report", "one", "--to", "report.pdf").code == 2
    assert miles("report", "three").code == 6
    assert miles("report", "one", "--to", "nowhere/report.html").code == 4
    assert miles("report").code == 2


def test_recipes_are_compared_over_the_runs_before_and_after_two_dashes(miles: Miles) -> None:
    for name, seed, lr in (("a1", 1, 1e-6), ("a2", 2, 1e-6), ("b1", 3, 2e-6), ("b2", 4, 2e-6)):
        make_planted(Path("runs") / name, seed=seed, lr=lr)
    said = miles("compare", "a1", "a2", "--", "b1", "b2")
    assert said.code == 0 and said.out.startswith("A: a1, a2\nB: b1, b2\n")
    assert "mean reward of 80 steps" in said.out and "runs of A have equal seeds" in said.err
    told = json.loads(miles("compare", "--json", "a1", "a2", "--", "b1", "b2").out)
    assert (told["a_runs"], told["b_runs"]) == (["a1", "a2"], ["b1", "b2"])
    one = miles("compare", "a1", "--", "b1")
    assert one.code == 1 and "fix: miles compare A1 A2 A3 -- B1 B2 B3" in one.err
    assert miles("compare", "a1", "a2", "b1").code == 2
