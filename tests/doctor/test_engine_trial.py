"""Tests of the trial of engine, trainer and weights with faults planted: an engine that responds
with garbage, one that forgets, weights that were changed on their way. A real engine cannot be made
to fail so; whether the real ones pass is asked in test_run."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from milescli.core.errors import MismatchError
from milescli.core.types import StopReason
from milescli.doctor import engine_trial
from milescli.doctor.engine_trial import check_response, exercise, judge_agreement
from milescli.doctor.finding import Status
from milescli.doctor.tiny_trainer import tiny_plan
from milescli.rollout.base import Completion


def _completion(token: int, logprob: float) -> Completion:
    return Completion(
        response_ids=[token],
        logprobs=array("d", [logprob]),
        stop_reason=StopReason.STOP,
        version_spans=[],
    )


@dataclass
class _Engine:
    """Gives these responses, one after the other."""

    responses: list[Completion]

    async def generate(self, request: object) -> Completion:
        return self.responses.pop(0)

    async def pause(self) -> None:
        """Nothing to do."""

    async def resume(self, version: object) -> None:
        """Nothing to do."""


@dataclass
class _Trainer:
    """Finds every response as likely as it says."""

    scores: list[float]
    plan: Any = field(default_factory=lambda: tiny_plan("cpu"))
    facts: Any = field(default_factory=lambda: SimpleNamespace(num_experts=0))


def _score(trainer: _Trainer, prompt: object, response: object, *, with_other_rounding: bool):
    return [trainer.scores.pop(0) if with_other_rounding else trainer.scores[0]]


def _exercise(
    monkeypatch: pytest.MonkeyPatch,
    later: Completion,
    scores: list[float],
    *,
    publish: MismatchError | None = None,
) -> dict[str, Status]:
    def send(trainer: object, url: str) -> None:
        if publish is not None:
            raise publish

    monkeypatch.setattr(engine_trial, "take_step", lambda trainer: "fine")
    monkeypatch.setattr(engine_trial, "publish_exactly", send)
    monkeypatch.setattr(engine_trial, "score", _score)
    findings = asyncio.run(
        exercise(_Engine([later]), _Trainer(scores), _completion(7, -2.0), url="http://here")
    )  # type: ignore[arg-type]
    return {finding.check: finding.status for finding in findings}


def test_an_engine_that_repeats_itself_is_ok_and_one_that_does_not_is_a_fail() -> None:
    async def status(*responses: Completion) -> Status:
        return (await check_response(_Engine(list(responses)), start_s=1.0))[0][0].status  # type: ignore[arg-type]

    assert asyncio.run(status(_completion(7, -2.0), _completion(7, -2.0))) is Status.OK
    assert asyncio.run(status(_completion(7, -2.0), _completion(8, -2.0))) is Status.FAIL


def test_parts_that_agree_before_and_after_a_publish_are_ok(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = _exercise(monkeypatch, _completion(9, -1.0), [-2.0, -1.0])
    assert findings == dict.fromkeys(("agreement", "trainer", "weights"), Status.OK)


def test_an_engine_that_responds_with_garbage_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _exercise(monkeypatch, _completion(9, -1.0), [-5.0, -1.0])["agreement"] is Status.FAIL


def test_an_engine_that_ignores_new_weights_or_computes_otherwise_with_them_is_a_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _exercise(monkeypatch, _completion(7, -2.0), [-2.0, -2.0])["weights"] is Status.FAIL
    assert _exercise(monkeypatch, _completion(9, -1.0), [-2.0, -1.1])["weights"] is Status.FAIL


def test_a_weight_that_was_changed_on_its_way_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = MismatchError(
        "engine 0 holds other weights", why="`norm` differs", fix="miles doctor"
    )
    findings = _exercise(monkeypatch, _completion(9, -1.0), [-2.0], publish=changed)
    assert findings == {"agreement": Status.OK, "trainer": Status.OK, "weights": Status.FAIL}


@pytest.mark.parametrize(
    ("engine", "rounded", "status"),
    [
        ([-1.0, -2.0], [-1.0, -2.0], Status.OK),
        ([-1.0, -2.001], [-1.0, -2.0], Status.FAIL),
        ([-1.0, -2.001], [-1.001, -2.001], Status.OK),
        ([-1.0, float("nan")], [-1.01, -2.01], Status.FAIL),
        ([float("nan"), -2.0], [-1.0, -2.0], Status.FAIL),
    ],
)
def test_agreement_is_judged_by_what_a_run_allows(
    engine: list[float], rounded: list[float], status: Status
) -> None:
    [found] = judge_agreement("agreement", "now", engine, trainer=[-1.0, -2.0], rounded=rounded)
    assert found.status is status
