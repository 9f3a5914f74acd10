"""`miles envs`, `miles tools`, `miles env`: what there is, whether it does what one must, and one
episode at the terminal, by a person or by a model behind an endpoint."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from milescli.rollout.environments import Step
from tests.commands.conftest import Miles

HERE = "tests.agents.user_environments"


@pytest.mark.parametrize(("verb", "names"), [("envs", "frozen_lake"), ("tools", "calculator")])
def test_what_there_is_is_listed(miles: Miles, verb: str, names: str) -> None:
    said = miles(verb)
    assert said.code == 0 and names in said.out
    rows = json.loads(miles(verb, "--json").out)["environments" if verb == "envs" else verb]
    (row,) = [row for row in rows if row["name"] == names]
    assert row["about"] and row["takes"] and row["lacks"] is None


def test_packages_with_an_environment_of_their_own_are_listed(
    miles: Miles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MILES_ENVIRONMENTS", str(tmp_path))
    rows = {row["name"]: row for row in json.loads(miles("envs", "--json").out)["packages"]}
    assert list(rows) == ["verifiers", "openenv", "harbor"]
    assert rows["harbor"]["mend"] == "miles env install harbor"
    said = miles("envs")
    assert f"verifiers is not installed in {tmp_path}/verifiers" in said.out + said.err
    said = miles("env", "install", "verifier")
    assert said.code == 3 and "miles env install verifiers" in said.err + said.out
    said = miles("env", "install", "harbor", "--python", str(tmp_path / "none"))
    assert said.code == 4 and "there is no suitable Python for harbor" in said.err + said.out


def test_a_good_environment_is_told_in_numbers(miles: Miles) -> None:
    said = miles("env", "check", "frozen_lake", "--data", "task:frozen_lake")
    assert said.code == 0 and "meets the contract of an environment" in said.out
    assert "Walk from P to G" in said.out
    settings = "{length: 2}"
    found = json.loads(miles("env", "check", f"{HERE}:Count", "--settings", settings, "--json").out)
    assert found["num_episodes"] == 32 and found["num_steps"] == 64


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([f"{HERE}:Forgets"], "the same seed (0) and actions do not give the same"),
        ([f"{HERE}:Count", "--settings", "{size: 3}"], "does not accept its settings"),
        (["frozen_leak"], "no environment `frozen_leak`"),
        ([f"{HERE}:Step"], "has no reset and no step"),
    ],
)
def test_a_bad_one_is_refused(miles: Miles, words: list[str], told: str) -> None:
    said = miles("env", "check", *words)
    assert said.code == 3 and told in said.err + said.out


def test_a_person_plays_an_episode(miles: Miles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nbb\nccc\n"))
    said = miles("env", "play", f"{HERE}:Count", "--row", "5")
    assert said.code == 0 and "begin 4" in said.out and "a bb" in said.out
    assert "the episode ended: 3 turns, reward 6" in said.out
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    said = miles("env", "play", f"{HERE}:Count")
    assert said.code == 0 and "the game was left" in said.err + said.out
    said = miles("env", "play", f"{HERE}:Count", "--row", "99")
    assert said.code == 3 and "there is no row 99" in said.err


class _Model(BaseHTTPRequestHandler):
    """Says how many messages it was given."""

    def do_GET(self) -> None:
        """Its only model."""
        self._reply({"data": [{"id": "counter"}]})

    def do_POST(self) -> None:
        """A chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = "x" * len(body["messages"])
        self._reply({"choices": [{"message": {"role": "assistant", "content": said}}]})

    def _reply(self, told: object) -> None:
        data = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_model_behind_an_endpoint_is_watched(miles: Miles, endpoint: str) -> None:
    said = miles("env", "play", f"{HERE}:Count", "--model", endpoint)
    assert said.code == 0 and "counter: xxx" in said.out
    assert "the episode ended: 3 turns, reward 9" in said.out  # 1, 3 and 5 messages
    refused = miles("env", "play", f"{HERE}:Count", "--model", endpoint, "--set", "eval.top_p=0.5")
    assert refused.code == 2 and "--set changes the engines of a model" in refused.err


def test_engines_are_started_for_a_run_or_a_model(
    miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = miles("env", "play", f"{HERE}:Count", "--model", "mine")
    assert refused.code == 6 and "no run `mine`" in refused.err
    asked = list[dict[str, Any]]()

    def of_run(path: Path, **options: Any) -> list[Any]:
        asked.append({"of": path.name, **options})
        options["use_engines"].__self__.on_turn(
            "a", Step(observation="seen", reward=1.0, ended=True)
        )
        return []

    def of_model(model: str, **options: Any) -> list[Any]:
        asked.append({"of": model, **options})
        return []

    monkeypatch.setattr("milescli.runtime.evaluation.evaluate.evaluate_run", of_run)
    monkeypatch.setattr("milescli.runtime.evaluation.evaluate.evaluate_model", of_model)
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/recipe.yaml").write_text("")
    said = miles("env", "play", f"{HERE}:Count", "--model", "mine@20", "--settings", "{length: 2}")
    assert said.code == 0 and "mine: a" in said.out and "1 turns, reward 1" in said.out
    words = ["--model", "org/small", "--set", "rollout.max_turn_tokens=9", "--max-turns", "3"]
    assert miles("env", "play", f"{HERE}:Count", *words).code == 0
    of_a_run, of_a_model = ([*one["eval_options"].sets] for one in asked)
    assert asked[0]["of"] == "mine" and asked[0]["steps"] == "20"
    assert 'rollout.environment.settings={"length": 2}' in of_a_run
    assert not any(text.startswith("rollout.max_response_tokens") for text in of_a_run)
    assert asked[1]["of"] == "org/small"
    assert "rollout.max_turn_tokens=9" in of_a_model and "rollout.max_turns=3" in of_a_model
