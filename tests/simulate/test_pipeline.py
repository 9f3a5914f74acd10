"""A simulated run keeps the rules of a real one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.simulate.engine import EngineSpeed
from milescli.simulate.lengths import LogNormal
from milescli.simulate.pipeline import Failures, Settings, Simulation

SPEED = EngineSpeed(
    step_s=0.01, request_s=1e-4, context_s=1e-7, prefill_s=1e-4, slots=16, cache_tokens=4000
)
SETTINGS = Settings(
    num_engines=3,
    speed=SPEED,
    train_token_s=2e-4,
    publish_s=0.5,
    prompts_per_step=8,
    samples_per_prompt=4,
    prompt_tokens=20,
)
LENGTHS = LogNormal(mean=120, sigma=1.0, longest=600)
settings = st.builds(
    replace,
    st.just(SETTINGS),
    staleness=st.integers(1, 4),
    order=st.sampled_from(["prompts", "done"]),
    stale_groups=st.sampled_from(["wait", "retry", "drop"]),
    on_update=st.sampled_from(["continue", "drain", "abort"]),
    train_token_s=st.sampled_from([2e-5, 2e-4, 1e-3]),
    turns=st.sampled_from([(1, 0.0, 0.0), (3, 0.5, 0.2)]),
    kept_share=st.sampled_from([1.0, 0.7]),
    straggler_share=st.sampled_from([0.0, 0.34]),
    straggler_factor=st.just(2.0),
    failures=st.sampled_from(
        [
            None,
            Failures(engine_mtbf_s=30, trainer_mtbf_s=60, restart_s=2, save_every=2),
            Failures(engine_mtbf_s=9, trainer_mtbf_s=1e9, restart_s=20, save_every=2),
        ]
    ),
)


def simulation(own: Settings, *, steps: int = 9, seed: int = 0) -> Simulation:
    return Simulation(own, LENGTHS, steps, seed)


@given(own=settings, seed=st.integers(0, 9))
def test_each_group_is_trained_once_or_carried_and_none_is_too_old(
    own: Settings, seed: int
) -> None:
    run = simulation(own, seed=seed)
    outcome = run.run()
    assert len(run.trained) == len(set(run.trained)) == 9 * own.prompts_per_step
    carried = {group.number for group in run.ready} | set(run.open_groups)
    assert not carried & set(run.trained)
    assert run.num_begun == len(run.trained) + len(carried)
    assert run.num_begun <= own.prompts_per_step * (run.version + 1 + own.staleness)
    assert min(run.ages) >= 0 and outcome.staleness_max == max(run.ages[24:]) <= own.staleness
    open_requests = sum(engine.num_open for engine in run.fleet.engines)
    running = sum(len(engine.running) + len(engine.queue) for engine in run.fleet.engines)
    assert open_requests == running
    for share in (outcome.engines_idle, outcome.rollout_idle, outcome.trainer_wait):
        assert -1e-9 <= share <= 1 + 1e-9


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    first, again, other = (simulation(SETTINGS, seed=seed).run() for seed in (1, 1, 2))
    assert first == again and first.step_s != other.step_s


def test_on_policy_steps_take_turns() -> None:
    run = simulation(SETTINGS)
    outcome = run.run()
    assert outcome.staleness_max == 0
    trained = 2e-4 * outcome.tokens_per_s + 0.5 / outcome.step_s
    assert outcome.trainer_wait == pytest.approx(1 - trained)
    assert outcome.rollout_idle == pytest.approx(trained), "nothing runs while the trainer works"


def test_asynchrony_hides_the_shorter_phase() -> None:
    strict = simulation(SETTINGS).run()
    ahead = simulation(replace(SETTINGS, staleness=2, order="done")).run()
    longest = max(strict.trainer_wait, 1 - strict.trainer_wait) * strict.step_s
    assert ahead.step_s < strict.step_s and ahead.step_s > 0.5 * longest


def test_steps_in_order_take_the_groups_of_their_prompts() -> None:
    run = simulation(replace(SETTINGS, staleness=2))
    run.run()
    for step in range(9):
        taken = run.trained[8 * step : 8 * step + 8]
        assert sorted(taken) == list(range(8 * step, 8 * step + 8))


def test_over_sampling_gives_up_what_is_not_needed() -> None:
    plain = simulation(SETTINGS)
    more = simulation(replace(SETTINGS, over_sampling=1.5))
    without, outcome = plain.run(), more.run()
    assert more.num_given_up == 9 * 4 and len(more.trained) == 9 * 8
    assert outcome.step_s < without.step_s


def test_an_engine_that_dies_costs_time_and_no_sample() -> None:
    often = Failures(engine_mtbf_s=10, trainer_mtbf_s=1e12, restart_s=5, save_every=1)
    plain, failing = simulation(SETTINGS), simulation(replace(SETTINGS, failures=often))
    without, outcome = plain.run(), failing.run()
    assert outcome.failures > 3 and outcome.step_s > without.step_s
    assert sorted(failing.trained) == sorted(plain.trained)


def test_a_trainer_that_dies_trains_again_what_no_checkpoint_has() -> None:
    fatal = Failures(engine_mtbf_s=1e12, trainer_mtbf_s=4, restart_s=3, save_every=3)
    run = simulation(replace(SETTINGS, failures=fatal), steps=30)
    run.run()
    replaced = [one.end_s - one.begin_s for one in run.spans if one.what == "replaced"]
    one_step = 2e-4 * 8 * 4 * 140
    assert replaced and min(replaced) == pytest.approx(3.0)
    assert 3 + one_step / 2 < max(replaced) < 3 + 3 * one_step


def test_a_bound_on_open_responses_is_kept() -> None:
    run = simulation(
        replace(SETTINGS, staleness=50, order="done", stale_groups="keep", max_open=40)
    )
    outcome = run.run()
    assert 30 < outcome.running_mean <= 40


def test_whole_groups_are_slower_than_samples_alone() -> None:
    grouped = replace(SETTINGS, staleness=0.25, order="done", stale_groups="keep", parts=4)
    alone = replace(grouped, prompts_per_step=32, samples_per_prompt=1)
    assert simulation(grouped).run().step_s > simulation(alone).run().step_s


def test_a_response_costs_one_event() -> None:
    run = simulation(SETTINGS)
    assert run.run().num_events <= 8 * 4 * (9 + 1)
