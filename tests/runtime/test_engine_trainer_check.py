"""The check of engine against trainer. A real engine that computes wrongly cannot be had on demand:
here it is a function with a fault."""

from __future__ import annotations

import asyncio
import random
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from milescli.core.errors import MismatchError
from milescli.core.types import EngineAddress, Prompt, StopReason, VersionSpan, WeightVersion
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.rollout.base import Completion, GenerateRequest
from milescli.runtime import engine_trainer_check
from milescli.runtime.devices import Devices
from milescli.train.base import TrainBatch
from tests.plans import PLAN
from tests.runtime.recording.journal_rig import WRITTEN_S, Rig
from tests.runtime.test_loop import REPORT
from tests.samples import rewarded

NUM_LAYERS = 6
EXACT = replace(PLAN, on_policy="exact")


@dataclass
class Pair:
    """Engine and trainer whose log-prob of every token is a sum over layers; the engine's layer
    `faulty` adds too much."""

    faulty: int | None
    error: float = 0.01
    floor: float = 1e-6
    """How far the trainer's log-probs move when it is rounded otherwise."""
    grows: bool = False
    """Each layer adds its part of the error."""
    wrong_weight: str | None = None
    layers: int = NUM_LAYERS
    published: int = NUM_LAYERS
    silenced: list[int] = field(default_factory=list)
    holder: str = "trainer"
    """Whose weights are on the shared device."""
    engines: tuple[EngineAddress, ...] = (EngineAddress(url="http://127.0.0.1:1"),)

    def _engine_logprob(self) -> float:
        off = self.error if self.faulty is not None and self.faulty < self.published else 0.0
        if self.grows:
            off = self.error * 2.0**self.published
        return -1.0 - 0.1 * self.published - off

    async def generate(self, request: GenerateRequest) -> Completion:
        assert self.holder == "engines"
        span = VersionSpan(start=0, end=3, version=WeightVersion(1))
        return Completion(
            response_ids=[5, 6, 7],
            logprobs=array("f", [self._engine_logprob()] * 3),
            stop_reason=StopReason.LENGTH,
            version_spans=[span],
        )

    async def score(
        self, batch: TrainBatch, *, with_other_rounding: bool = False
    ) -> list[np.ndarray]:
        assert self.holder == "trainer"
        moved = self.floor if with_other_rounding else 0.0
        scores: list[np.ndarray] = [np.zeros(0)] * batch.num_sequences
        for shard in batch.shards:
            for number, size in zip(shard.sequence_ids, np.diff(shard.cu_seqlens), strict=True):
                scores[number] = np.full(size, -1.0 - 0.1 * self.layers + moved, np.float32)
        return scores

    async def verify(self, fleet: str) -> None:
        if self.wrong_weight:
            raise MismatchError(f"`{self.wrong_weight}` differs", why="1 of 9 elements", fix="-")

    async def bypass_layers(self, first: int) -> None:
        assert self.holder == "trainer"
        self.layers = first
        self.silenced.append(first)

    async def publish(self, version: WeightVersion, fleet: str) -> None:
        assert self.holder in ("trainer", "both")
        self.published = self.layers

    async def wake(self) -> None:
        assert self.holder == "nobody"
        self.holder = "trainer"

    async def sleep(self) -> None:
        """Of whoever is awake: the trainer after a publish, the engines before a training step."""
        self.holder = "engines" if self.holder == "both" else "nobody"

    async def wake_weights(self) -> None:
        self.holder = "both"

    async def nothing(self, *_: object) -> None:
        """An order that changes no memory."""

    offload_optimizer_state = pause = resume = wake_cache = connect_engines = nothing


async def _run(pair: Pair, *, colocated: bool, plan: Plan):
    devices = Devices(shares_memory=colocated, trainer=pair, engines=pair, engines_asleep=colocated)  # type: ignore[arg-type]
    await devices.publish(WeightVersion(1))
    check = engine_trainer_check.EngineTrainerCheck(
        recipe=Recipe(),
        plan=plan,
        num_layers=NUM_LAYERS,
        has_experts=False,
        devices=devices,
        run_typed="runs/x",
    )
    checked = await check.run(
        [Prompt(index=index, token_ids=[1, 2, 3, 4], text="?") for index in range(3)]
    )
    assert not devices.engines_asleep
    return checked


def _check(pair: Pair, plan: Plan = PLAN):
    return asyncio.run(_run(pair, colocated=True, plan=plan))


def test_agreement_is_reported_with_its_figures() -> None:
    checked = _check(Pair(faulty=None))
    assert checked.num_tokens == 9
    assert checked.diff_max < 1e-6
    assert checked.floor_max == pytest.approx(1e-6, rel=0.2)
    assert checked.agreement == "equal"


@pytest.mark.parametrize("faulty", range(NUM_LAYERS))
def test_the_first_layer_that_computes_otherwise_is_named(faulty: int) -> None:
    pair = Pair(faulty=faulty)
    with pytest.raises(MismatchError, match=r"differ by 1\.00e-02 on average") as caught:
        _check(pair)
    assert f"layer {faulty} (of {NUM_LAYERS}" in caught.value.why
    assert len(pair.silenced) <= 4, "the number of layers is halved"


def test_an_error_of_the_size_of_the_floor_is_no_fault() -> None:
    assert _check(Pair(faulty=0, floor=0.01)).agreement == "equal"


def test_a_difference_without_layers_is_told_so() -> None:
    with pytest.raises(MismatchError, match="disagree") as caught:
        _check(Pair(faulty=-1))
    assert "embedding, final norm or output layer" in caught.value.why


def test_no_layer_is_blamed_for_what_grows_through_all_of_them() -> None:
    with pytest.raises(MismatchError) as caught:
        _check(Pair(faulty=None, grows=True, error=1e-6))
    assert "not located" in caught.value.why


def test_a_wrong_weight_is_named_before_any_layer_is_touched() -> None:
    pair = Pair(faulty=2, wrong_weight="model.norm.weight")
    with pytest.raises(MismatchError) as caught:
        _check(pair)
    assert "model.norm.weight" in caught.value.why
    assert pair.silenced == []


def test_nan_is_no_agreement() -> None:
    with pytest.raises(MismatchError):
        _check(Pair(faulty=0, error=float("nan")))


def test_an_exact_run_asks_for_no_difference_and_marks_any_later_one() -> None:
    checked = _check(Pair(faulty=None), EXACT)
    assert (checked.diff_max, checked.bound_max, checked.agreement) == (0.0, 0.0, "equal")


def test_an_exact_run_does_not_start_with_one_bit_of_difference() -> None:
    pair = Pair(faulty=2, error=2.0**-22)
    assert _check(replace(pair)).agreement == "equal"
    with pytest.raises(
        MismatchError, match=r"9 of 9 tokens differ, by at most 2\.38e-07"
    ) as caught:
        _check(pair, EXACT)
    assert f"layer 2 (of {NUM_LAYERS}" in caught.value.why
    assert any("resume runs/x --set train.on_policy=auto" in fix for fix in caught.value.fixes)


def test_a_step_that_is_not_exact_is_refused_and_sampled_again_by_a_resumed_run(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path / "journal", random.Random(0), {})
    journal = rig.journal()
    journal.record_group(3, rewarded([0.0, 1.0], version=4))
    apart = replace(REPORT, logprob_diff_max=1e-7, logprob_diff_tokens=3)
    run = {"step": 4, "run": "runs/x", "journal": journal}
    for plan, report in ((EXACT, REPORT), (PLAN, apart)):
        engine_trainer_check.require_exact(plan, report, **run)
    assert journal.wait_written(WRITTEN_S) and set(rig.held()) == {3}
    with pytest.raises(MismatchError, match=r"step 4: the log-probs of 3 of \d+ trained tokens"):
        engine_trainer_check.require_exact(EXACT, apart, **run)
    journal.close(WRITTEN_S)
    assert not rig.held(), "the same log-probs would end the run again"
    with pytest.raises(MismatchError):
        engine_trainer_check.require_exact(EXACT, apart, **{**run, "journal": None})
