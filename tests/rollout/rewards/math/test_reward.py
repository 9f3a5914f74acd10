"""Tests of the `math` reward with the real library in its own process."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import RewardError
from milescli.rollout.rewards.math import reward as module
from milescli.rollout.rewards.math.reward import PLAIN_NUMBER, MathReward, math
from milescli.workers.worker import UserWorker


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
        ("\\boxed{36}", "\\$36"),
        ("\\boxed{\\$36}", "36"),
        ("\\boxed{\\$36}", "\\$36"),
        ("\\boxed{7\\text{ cm}}", "7"),
        ("\\boxed{7}", "7\\,\\mathrm{cm}"),
        ("\\boxed{50}\\%", "50\\%"),
        ("\\boxed{7}", "As asked: $3 + 4 = \\boxed{7}$."),
    ],
)
def test_equal_values_are_accepted_in_any_form(response: str, label: str) -> None:
    assert _grade(response, label) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{3} … wait … \\boxed{7}",
        "\\boxed{3} so wait, it is \\boxed{7}",
        "$\\boxed{3}$, no: $$\\boxed{7}$$",
        "\\boxed{3}, no: \\fbox{7}",
        "\\boxed{7}, or is it \\boxed{3",
        "\\boxed{7} as asked in \\boxed{}",
        "\\boxed{7}. The final answer is $3$. I hope it is correct.",
        "\\boxed{3 + \\boxed{4}}",
        "\\boxed{x = \\boxed{7}}",
        "\\text{so it is \\boxed{7}} }",
    ],
)
def test_the_last_boxed_result_alone_counts(response: str) -> None:
    assert _grade(response, "7") == 1.0
    assert _grade(response, "3") == 0.0


@pytest.mark.parametrize(
    "response",
    [
        *("", "no idea", "\\boxed{73}", "72 or 73", "\x00{}}\\boxed{", "72, I mean \\boxed{yes}"),
        *("\\boxed{\\max(i, 72)}", "\\boxed{72 \\pmod{" + "1" * 5000 + "}}"),
    ],
)
def test_other_values_and_nonsense_are_refused(response: str) -> None:
    assert _grade(response, "72") == 0.0


def test_a_label_that_is_no_mathematics_is_the_fault_of_the_data() -> None:
    with pytest.raises(ValueError, match="cannot be graded: it is empty"):
        _grade("1", "####")


@pytest.mark.parametrize("label", ["so\n#### ", "\\boxed{}", "{}", "\\frac{1}{2", "1}{2", "1}"])
def test_a_label_that_cannot_be_graded_is_a_fault(label: str) -> None:
    assert math.check_label(label) == "it is empty, or its braces do not balance"


def test_a_label_that_cannot_be_decided_in_time_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.GraderPool, "grade", lambda *_args, **_kwargs: None)
    assert MathReward(limit_s=2.0).check_label("x + 1") == (
        "it is not decided within 2 s whether it equals itself"
    )


@pytest.mark.parametrize(
    "label",
    [
        "36",
        "\\$36",
        "$36$",
        "-1,234.50",
        "x = 7",
        "(1,2]",
        "\\{1, 2\\}",
        "\\text{Tuesday}",
        "A",
        "1/0",
        "\\frac{1}{2}",
        "7\\text{ cm}^2",
        "so it is \\boxed{7}.",
        "3\n#### 7",
        "50\\%",
        "0.333...",
    ],
)
def test_a_label_that_can_be_graded_is_without_fault(label: str) -> None:
    assert math.check_label(label) is None


def test_a_missing_label_is_a_fault() -> None:
    assert math.check_label(None) == "`math` needs a label"


@given(st.from_regex(PLAIN_NUMBER, fullmatch=True))
@settings(max_examples=50, deadline=None)
def test_a_plain_number_is_without_fault_in_the_process_too(label: str) -> None:
    """So it need not be asked."""
    assert math(prompt="", response=f"\\boxed{{{label}}}", label=label) == 1.0


def test_it_works_from_many_threads_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        rewards = list(pool.map(lambda n: _grade(f"\\boxed{{{n % 3}}}", "1"), range(48)))
    assert rewards == [float(n % 3 == 1) for n in range(48)]


ENDLESS = "\\boxed{9^{9^{9^9}}}"


def test_an_answer_that_would_compute_for_ever_scores_zero_and_the_next_one_is_graded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "cpu_seconds", lambda pid: time.monotonic())  # however busy it is
    reward = MathReward(limit_s=0.5)
    assert reward(prompt="", response=ENDLESS, label="4") == 0.0
    assert reward.num_undecided == 1
    assert _grade("\\boxed{4}", "4") == 1.0


def test_an_answer_whose_grader_was_kept_waiting_is_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "cpu_seconds", lambda pid: 0.0)
    with pytest.raises(RewardError, match="too little processor time"):
        MathReward(limit_s=0.2)(prompt="", response=ENDLESS, label="4")


@pytest.mark.parametrize(("deaths", "reply"), [(1, {"reward": 1.0}), (2, None)])
def test_a_grader_that_dies_once_is_not_the_answers_fault(
    monkeypatch: pytest.MonkeyPatch, deaths: int, reply: dict[str, object] | None
) -> None:
    class Killed(UserWorker):
        num = 0

        def call(self, *args: Any) -> tuple[int, Future[Any]]:
            made = super().call(*args)
            if "response" in args[0] and Killed.num < deaths:
                Killed.num += 1
                os.kill(self.pid, signal.SIGKILL)
            return made

    monkeypatch.setattr(module, "UserWorker", Killed)
    asked = {"label": "x + 1", "response": "\\boxed{1 + x}"}
    assert module.GraderPool(1).grade(asked, limit_s=60.0) == reply
    assert Killed.num == deaths


def test_an_undecided_answer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.GraderPool, "grade", lambda *_args, **_kwargs: None)
    reward = MathReward(limit_s=1.0)
    assert reward(prompt="", response="x", label="1") == 0.0
    assert reward.num_undecided == 1


def test_a_process_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER", "milescli.rollout.rewards.no_such_module:answer")
    with pytest.raises(RewardError, match="did not start") as refused:
        module.GraderPool(1).grade({"label": "1"}, limit_s=10.0)
    assert "No module named" in refused.value.why


def test_a_call_ends_before_the_scorers_bound_also_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MathReward().within(30.0).max_s < 30.0
    monkeypatch.setattr(module, "cpu_seconds", lambda pid: 0.0)
    with pytest.raises(RewardError, match="too little processor time"):
        MathReward(limit_s=3600.0, max_s=0.3)(prompt="", response=ENDLESS, label="4")


def test_its_bound_stays_below_the_scorers() -> None:
    assert MathReward().within(4.0).limit_s == 2.0
    assert MathReward().within(1000.0).limit_s == 10.0
