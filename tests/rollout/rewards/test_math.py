"""Tests of the `math` reward with the real library in its own process."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from milescli.core.errors import RewardError
from milescli.rollout.rewards import math as module
from milescli.rollout.rewards.math import MathReward, math


def _grade(response: str, label: str) -> float:
    return math(prompt="", response=response, label=label)


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("so it is \\boxed{\\frac{1}{2}}.", "0.5"),
        ("#### 72", "7 * 10 = 70\n#### 72"),
        ("therefore $x^2+1$", "1+x^2"),
        ("The answer is 1,234", "1234"),
        ("\\boxed{(1,2]}", "$(1,2]$"),
    ],
)
def test_equal_values_are_accepted_in_any_form(response: str, label: str) -> None:
    assert _grade(response, label) == 1.0


@pytest.mark.parametrize("response", ["", "no idea", "\\boxed{73}", "72 or 73", "\x00{}}\\boxed{"])
def test_other_values_and_nonsense_are_refused(response: str) -> None:
    assert _grade(response, "72") == 0.0


def test_a_label_that_is_no_mathematics_is_the_fault_of_the_data() -> None:
    with pytest.raises(ValueError, match="not mathematics"):
        _grade("1", "####")


def test_it_works_from_many_threads_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        rewards = list(pool.map(lambda n: _grade(f"\\boxed{{{n % 3}}}", "1"), range(48)))
    assert rewards == [float(n % 3 == 1) for n in range(48)]


def test_an_answer_that_would_compute_for_ever_scores_zero_and_the_next_one_is_graded() -> None:
    reward = MathReward(limit_s=0.5)
    assert reward(prompt="", response="\\boxed{9^{9^{9^9}}}", label="4") == 0.0
    assert reward.num_undecided == 1
    assert _grade("\\boxed{4}", "4") == 1.0


def test_an_undecided_answer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Workers, "ask", lambda *_args, **_kwargs: None)
    reward = MathReward(limit_s=1.0)
    assert reward(prompt="", response="x", label="1") == 0.0
    assert reward.num_undecided == 1


def test_a_worker_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(RewardError, match="ended with status 1"):
        module._Worker()


def test_its_bound_stays_below_the_scorers() -> None:
    assert MathReward().within(4.0).limit_s == 2.0
    assert MathReward().within(1000.0).limit_s == 10.0


def test_the_process_ends_when_its_input_closes() -> None:
    command = [sys.executable, "-m", "milescli.rollout.rewards.math_worker"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, b'{"ready": true}\n')
