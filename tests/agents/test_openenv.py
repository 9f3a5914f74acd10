"""Environments behind OpenEnv's reset and step, by a server of its own classes. Left out where that
package has no virtual environment here."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from milescli.agents.openenv import OpenEnvEnvironment
from milescli.core.errors import AgentError, MachineError, RecipeError
from milescli.rollout.environment_contract import check_environment
from milescli.rollout.environments import Step
from tests.agents.foreign.sessions import GIVEN, ended, needs

SERVER = {"server": "miles_counting:app"}
__all__ = ["ended"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run would be begun."""
    monkeypatch.chdir(GIVEN)


@needs("openenv")
def test_text_or_a_json_object_is_an_action() -> None:
    environment = OpenEnvEnvironment(**SERVER)
    assert environment.reset(prompt="", label=None, seed=7) == "begin 7"
    said = ["8", '```json\n{"text": "9"}\n```', " x "]
    assert [environment.step(text) for text in said] == [
        Step(observation="8 is right", reward=1.0),
        Step(observation="9 is right", reward=1.0),
        Step(observation="x is wrong", ended=True),
    ]
    environment.close()
    told = check_environment("openenv", settings=SERVER, actions=["1", "2"])
    assert told.num_ended == told.num_episodes


@needs("openenv")
def test_what_the_environment_raises_is_told_and_a_lost_server_is_begun_anew() -> None:
    environment = OpenEnvEnvironment(**SERVER)
    environment.reset(prompt="", label=None, seed=1)
    with pytest.raises(AgentError) as caught:
        environment.step("raise")
    assert "of the environment" in caught.value.why
    guards = psutil.Process().children()
    (guard,) = [one for one in guards if "miles_openenv.py" in " ".join(one.cmdline())]
    begun = guard.children(recursive=True)
    os.kill(guard.pid, signal.SIGTERM)
    psutil.wait_procs(begun, timeout=120)
    with pytest.raises(AgentError):
        environment.step("2")
    assert environment.reset(prompt="", label=None, seed=2) == "begin 2"
    environment.close()


@needs("openenv")
def test_it_has_one_server() -> None:
    with pytest.raises(RecipeError, match="needs exactly one server"):
        OpenEnvEnvironment(url="http://127.0.0.1:8000", **SERVER)
    with pytest.raises(AgentError) as caught:
        OpenEnvEnvironment(server="miles_nothing:app").reset(prompt="", label=None, seed=0)
    assert 'Could not import module "miles_nothing"' in caught.value.why


def test_without_its_virtual_environment_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("MILES_ENVIRONMENTS", str(tmp_path))
    with pytest.raises(MachineError) as caught:
        OpenEnvEnvironment.require({})
    assert caught.value.fixes == ["miles env install openenv"]
