"""One folder where `miles` is called for all end-to-end tests of a session. Each test makes runs of
its own in it; what several need is a fixture, which they only read: who goes on with one takes a
copy of it (`Workplace.copy_run`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import Finished, Workplace
from tests.shared_memory import entries

PPO_OF_DIALOGUES = (
    *("train.algorithm=ppo", "train.critic.lr=1e-3", "train.critic.warmup_steps=1"),
    *("train.updates_per_step=2", "checkpoint.every=1", "eval.num_prompts=2"),
    *("rollout.agent=tests.end_to_end.agents:dialogue", "rollout.max_response_tokens=128"),
)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Where `miles` is called."""
    return Workplace(tmp_path_factory.mktemp("workplace"))


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
