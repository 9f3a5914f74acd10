"""The time model beside what others report. The bounds say how far it is off: rooflines with
guessed shares are no better."""

from __future__ import annotations

import pytest

from milescli import models
from milescli.core.units import GIB
from milescli.plan.devices import DEVICES, Efficiency
from milescli.plan.memory import memory_model
from milescli.plan.time import TimeModel, Work
from milescli.plan.types import EngineLayout, TrainerLayout
from milescli.platform.machine import DEVICE_MODELS
from milescli.recipe.templates import shipped_shape
from tests.plan.reported_times import PUBLICATIONS, STEP, Publication

TRAINER = TrainerLayout(
    tp=4, dp=2, sequence_parallel=True, recompute="full", offload_optimizer=True
)


def _model(name: str, device: str) -> TimeModel:
    shape = shipped_shape(name)
    assert shape is not None, name
    facts = models.parse_facts(shape)
    return TimeModel(
        table=models.table(facts),
        memory=memory_model(facts),
        device=DEVICES[device],
        devices_per_node=8,
        efficiency=Efficiency(),
    )


def _work(*, response: float = 4000, extra_forwards: int = 0) -> Work:
    return Work(
        num_samples=STEP.samples,
        num_prompts=32,
        prompt_tokens=300,
        response_tokens=response,
        longest_response=int(2 * response),
        updates=1,
        extra_forwards=extra_forwards,
        size=2,
        bucket_bytes=10**9,
    )


@pytest.mark.parametrize(
    "publication", PUBLICATIONS, ids=lambda publication: publication.model.rpartition("/")[2]
)
def test_publications_take_what_is_reported_within_a_factor_of_two(
    publication: Publication,
) -> None:
    model = _model(publication.model, "H100")
    seconds = model.publish_whole_seconds(
        TrainerLayout(dp=publication.devices), _work(), num_receivers=publication.devices
    )
    assert 0.5 < seconds / publication.seconds < 2.0


@pytest.mark.parametrize(("fraction", "tokens"), STEP.cache_tokens)
def test_an_engine_of_a_hybrid_model_holds_as_many_tokens_as_reported(
    fraction: float, tokens: int
) -> None:
    model = _model(STEP.model, "H200")
    layout = EngineLayout(num=8, tp=1, memory_fraction=fraction)
    cache = model.memory.engine(
        layout,
        memory_bytes=DEVICE_MODELS["H200"].memory_gib * GIB,
        size=2,
        longest=16384,
        efficiency=model.efficiency,
    ).cache
    assert model.memory.cache_tokens(layout, cache_bytes=cache, size=2) == pytest.approx(
        tokens, rel=0.12
    )


def _response_tokens(model: TimeModel) -> float:
    """Mean length of the responses, from the time that scoring them took: one forward pass over all
    tokens."""
    response = 4000.0
    for _ in range(20):
        seconds = (
            model.train(TRAINER, _work(response=response, extra_forwards=1), cap=8192).compute / 5
        )
        response *= (STEP.scoring_s / seconds) ** 0.9
    return response


def test_a_step_takes_what_is_reported_once_its_responses_are_as_long() -> None:
    model = _model(STEP.model, "H200")
    response = _response_tokens(model)
    fetching_s = STEP.reference_s - STEP.scoring_s
    train = model.train(TRAINER, _work(response=response, extra_forwards=2), cap=8192)
    assert 0.6 < train.total / (STEP.train_s - fetching_s) < 1.4, (response, train)
    layout = EngineLayout(num=8, tp=1, memory_fraction=0.8, max_running_requests=512)
    cache = model.memory.engine(
        layout,
        memory_bytes=DEVICE_MODELS["H200"].memory_gib * GIB,
        size=2,
        longest=16384,
        efficiency=model.efficiency,
    ).cache
    rollout = model.rollout(layout, _work(response=response), cache_bytes=cache)
    assert 0.6 < rollout.total / STEP.rollout_s < 1.6, (response, rollout)
    rate = STEP.samples / 8 * response / rollout.total
    assert 0.4 < rate / STEP.decode_rate < 1.5, rate


def test_logits_are_computed_once_more_for_the_gradients_and_the_rest_only_in_a_recompute() -> None:
    model, work = _model("Qwen/Qwen3-8B", "H100"), _work()
    once, again = (
        model.train(TrainerLayout(dp=8, recompute=recompute), work, cap=8192).compute
        for recompute in ("none", "full")
    )
    facts = model.table.facts
    rest = model.flops.forward_mean(work.typical_tokens) - 2 * facts.vocab_size * facts.hidden_size
    rate = model.device.bf16_flops * model.efficiency.train_share
    assert again - once == pytest.approx(work.rank_tokens(8) * rest / rate, rel=1e-6)
