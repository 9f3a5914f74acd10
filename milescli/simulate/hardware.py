"""Computes the seconds of engines, trainer and publications: predicted by the planner's rooflines
for a layout, or measured in a run. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from milescli.plan.on_devices import TrainerEnginePair
from milescli.plan.time import Work
from milescli.plan.types import EngineLayout
from milescli.simulate.assumptions import Assumptions
from milescli.simulate.engine import EngineSpeed
from milescli.simulate.measured import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Holds the speeds of one layout."""

    num_engines: int
    engine: EngineSpeed
    train_token_s: float
    """Seconds of training for each token, prompts included."""
    publish_s: float
    """Seconds of a publication, including the switches between colocated phases."""


def predicted(pair: TrainerEnginePair, assume: Assumptions) -> Speeds:
    """Return the speeds of a pair that the planner chose, by its rooflines."""
    work, time = _work(pair, assume), pair.space.time
    layout = pair.engines.layout
    a, c, k = time.decode_line(layout, work, running=pair.engines.seconds.running)
    prefill = time.flops.forward_mean(max(1, int(work.prompt_tokens)))
    rate = layout.tp * time.device.bf16_flops * time.efficiency.prefill_share
    factor = assume.decode_factor
    return Speeds(
        num_engines=layout.num - work.engines_apart,
        engine=EngineSpeed(
            step_s=a * factor,
            request_s=c * factor,
            context_s=k * factor,
            prefill_s=prefill / rate * factor,
            slots=layout.max_running_requests,
            cache_tokens=pair.engines.cache_tokens,
        ),
        train_token_s=_train_token_s(pair, work) * assume.train_factor,
        publish_s=(pair.sync_s + pair.switch_s) * assume.publish_factor,
    )


def _work(pair: TrainerEnginePair, assume: Assumptions) -> Work:
    return replace(
        pair.space.work,
        prompt_tokens=assume.prompt_tokens,
        response_tokens=assume.response_tokens,
    )


def _train_token_s(pair: TrainerEnginePair, work: Work) -> float:
    trainer = pair.trainer
    return pair.space.time.train(trainer.layout, work, cap=trainer.cap).total / work.tokens


def factors(measured: Measured, pair: TrainerEnginePair) -> dict[str, float]:
    """Return the ratios of a run's seconds to the predictions for the run's own layout, as names of
    assumptions. `pair` has the same model and device."""
    plan, time = measured.plan, pair.space.time
    batch, forecast = plan.batch, plan.forecast
    assert forecast is not None, "a run on a CPU has no forecast"
    work = replace(
        pair.space.work,
        num_samples=batch.num_samples,
        num_prompts=batch.prompts_per_step,
        updates=batch.updates_per_step,
        prompt_tokens=measured.prompt_tokens,
        response_tokens=measured.lengths.mean,
    )
    a, c, k = time.decode_line(plan.engines, work, running=measured.running)
    context = measured.prompt_tokens + measured.lengths.mean / 2
    step_s = a + measured.running * (c + k * context)
    train_s = time.train(plan.trainer, work, cap=batch.max_tokens_per_microbatch).total
    return {
        "decode_factor": (measured.step_s + measured.request_s * measured.running) / step_s,
        "train_factor": measured.train_token_s * work.tokens / train_s,
        "publish_factor": measured.publish_s / forecast.sync_s if forecast.sync_s else 1.0,
    }


def of_run(measured: Measured) -> Speeds:
    """Return the speeds of the run's own layout, which may be on a CPU."""
    layout: EngineLayout = measured.plan.engines
    return Speeds(
        num_engines=layout.num - measured.plan.engines_apart,
        engine=EngineSpeed(
            step_s=measured.step_s,
            request_s=measured.request_s,
            slots=layout.max_running_requests,
            cache_tokens=layout.max_total_tokens or float("inf"),
        ),
        train_token_s=measured.train_token_s,
        publish_s=measured.publish_s,
    )
