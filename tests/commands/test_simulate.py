"""`miles simulate`: its table, its object, its command, and what it refuses."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.commands.conftest import Miles

ON = ("--recipe", "qwen2.5-7b", "--on", "8xH100", "--window", "6")


def test_it_shows_candidates_a_reason_a_picture_and_the_command(miles: Miles) -> None:
    said = miles("simulate", *ON, "--price-per-gpu-hour", "2")
    assert said.code == 0
    for part in ("cost", "recommended", "because", "engines idle", "█", "response_sigma", "next"):
        assert part in said.out + said.err
    assert "nothing was started" in said.err


def test_its_object_has_all_figures_and_the_command_of_the_recommended_one(miles: Miles) -> None:
    told = miles("simulate", *ON, "--json", "--seed", "3", "--set", "train.steps=40").result
    best = told["candidates"][told["recommended"]]
    assert best["hours"] == pytest.approx(best["step_s"] * 40 / 3600)
    assert {"samples_per_s", "engines_idle", "trainer_wait", "staleness_mean"} <= best.keys()
    assert "cost" not in best
    words = shlex.split(told["command"])
    assert words[:4] == ["miles", "launch", "--recipe", "qwen2.5-7b"]
    sets = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    assert set(best["sets"]) <= set(sets) and "train.steps=40" in sets
    again = miles("simulate", *ON, "--json", "--seed", "3", "--set", "train.steps=40").result
    assert again == told
    dry = miles(*words[1:], "--on", "8xH100", "--dry-run", "--json")
    assert dry.code == 0 and dry.result["kind"] == "plan"


@pytest.mark.parametrize(
    ("argv", "code", "what"),
    [
        (["--recipe", "qwen2.5-7b", "--on", "8xH999"], 4, "H999"),
        ([*ON, "--set", "parallel.tp=3"], 5, "illegal"),
        (["--recipe", "qwen2.5-7b", "--on", "8xH100", "--assume", "mtbf=3"], 3, "mtbf_hours"),
        (["--recipe", "qwen2.5-7b", "--on", "8xH100", "--window", "1"], 2, "--window"),
        (["--recipe", "quickstart", "--on", "cpu"], 4, "--from RUN"),
        (["--recipe", "quickstart", "--on", "cpu", "--from", "none"], 6, "no run"),
        (["--on", "8xH100"], 2, "name a recipe"),
    ],
)
def test_what_is_refused(miles: Miles, argv: list[str], code: int, what: str) -> None:
    said = miles("simulate", *argv, "--json")
    assert said.code == code and said.out == ""
    told = json.loads(said.err.splitlines()[-1])
    assert what in json.dumps(told) and told["fix"]
