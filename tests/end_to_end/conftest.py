"""One folder where `miles` is called for all end-to-end tests of a session. Each test makes runs of
its own in it; what several need is a fixture, which they only read: who goes on with one takes a
copy of it (`Workplace.copy_run`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from milescli.cluster.nodes import planning_machine
from milescli.recipe.load import load
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.runtime.planning import plan_without_plugins
from milescli.runtime.prestart import lend_engines
from tests.end_to_end.runs import Finished, Workplace
from tests.shared_memory import entries

PPO_OF_DIALOGUES = (
    *("train.algorithm=ppo", "train.critic.lr=1e-3", "train.critic.warmup_steps=1"),
    *("train.updates_per_step=2", "checkpoint.every=1", "eval.num_prompts=2"),
    *("rollout.agent=tests.end_to_end.agents:dialogue", "rollout.max_response_tokens=128"),
)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """Where `miles` is called. Runs of the tiny recipe share a process that has imported SGLang, as
    the trials of a sweep do; others start their own."""
    workplace = Workplace(tmp_path_factory.mktemp("workplace"))
    with ExitStack() as held:
        with mock.patch.dict(os.environ, workplace.environment, clear=True):
            loaded = load("tiny.yaml", environ=os.environ, cwd=workplace.folder, home=Path.home())
            facts = planned_facts(loaded.recipe)
            plan = plan_without_plugins(loaded, planning_machine(loaded), facts=facts)
            shared = held.enter_context(lend_engines(loaded.recipe, plan, facts))
        workplace.environment |= shared
        yield workplace


@pytest.fixture(scope="session")
def shared_memory() -> set[str]:
    """What lay in /dev/shm before."""
    return entries()


@pytest.fixture(scope="session")
def whole(workplace: Workplace) -> Finished:
    """Six steps without a break."""
    finished = workplace.miles("launch", "--recipe", "tiny.yaml", "--name", "whole")
    assert finished.code == 0, finished
    return finished


@pytest.fixture(scope="session")
def ppo(workplace: Workplace) -> str:
    """The name of a run that does three steps of PPO with an agent of several turns."""
    words = [word for setting in PPO_OF_DIALOGUES for word in ("--set", setting)]
    launch = ("launch", "--recipe", "tiny.yaml", "--name", "ppo", "--steps", "3")
    finished = workplace.miles(*launch, *words)
    assert finished.code == 0, finished
    return "ppo"


@pytest.fixture(scope="session")
def ppo_again(workplace: Workplace, ppo: str) -> str:
    """The name of the same run, whose last step was done again after a resume."""
    return workplace.resume_without(ppo, step=3)


@pytest.fixture(scope="session")
def exported(workplace: Workplace, whole: Finished) -> Path:
    """The last step of the whole run as a Hugging Face folder."""
    return workplace.export("whole", step=6)
