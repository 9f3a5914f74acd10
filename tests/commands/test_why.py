"""`miles why`: one page, or one line, or one object."""

from __future__ import annotations

import json
from pathlib import Path

from milescli.core.errors import WorkerDied
from tests.commands.conftest import Miles
from tests.commands.test_runs import make_run


def test_a_bad_end_is_a_page_and_an_object(miles: Miles) -> None:
    run = make_run("one", outcome="failed", steps=3)
    error = WorkerDied("engine 0 died", why="SIGKILL", fix="less log").as_dict()
    verdict = run / "logs" / "attempt_1" / "verdict.json"
    verdict.write_text(json.dumps({"outcome": "failed", "step": 3, "error": error}))
    said = miles("why", "one")
    assert said.code == 0 and said.err == ""
    assert said.out.startswith("one failed at step 3: engine 0 died\n")
    assert f"miles resume {Path('runs/one')}" in said.out
    found = json.loads(miles("why", "one", "--json").out)
    assert (found["kind"], found["outcome"], found["cause"]) == ("why", "failed", error)
    assert found["first"] == "engine 0" and found["next"][0] == "less log"


def test_a_good_end_is_a_line_and_no_run_is_an_error(miles: Miles) -> None:
    make_run("one", outcome="done", steps=3)
    assert miles("why", "one").out == "one finished normally at step 3\n"
    said = miles("why", "two")
    assert said.code == 6 and "no run `two`" in said.err
