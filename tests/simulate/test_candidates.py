"""Which layouts and settings are simulated, which is recommended, and what `--from RUN` changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import ExitCode, MilesError, RecipeError
from milescli.plan.make import make_plan
from milescli.platform.machine import Machine, parse_machine
from milescli.recipe.load import load
from milescli.recipe.schema import Recipe
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.simulate.assumptions import assumptions
from milescli.simulate.candidates import SIMILAR_FACTOR, Comparison, reason, with_measured
from milescli.simulate.measured import read_measured
from tests.simulate.runs import write_run


def comparison(
    name: str, machine: Machine, *sets: str, assume: Sequence[str] = (), steps: int = 6
) -> Comparison:
    def vary(further: Sequence[str]) -> Recipe:
        nodes = [f"machine.nodes={len(machine.nodes)}"]
        return load(
            name, sets=[*nodes, *sets, *further], environ={}, cwd=Path(), home=Path("/nowhere")
        ).recipe

    recipe = vary([])
    return Comparison(
        vary=vary,
        machine=machine,
        facts=planned_facts(recipe),
        assume=assumptions(recipe, assume),
        steps=steps,
    )


@pytest.fixture(scope="module")
def compared() -> Comparison:
    made = comparison("qwen2.5-7b", parse_machine("2x8xH100"))
    made.run()
    return made


def test_layouts_are_compared_and_the_best_split_is_varied(compared: Comparison) -> None:
    names = [one.layout.name for one in compared.candidates]
    assert names[0] == "colocated" and len(set(names)) >= 3
    settings = {(one.staleness, one.recipe.rollout.order) for one in compared.candidates}
    assert {(0, "prompts"), (1, "done"), (2, "done"), (4, "done")} <= settings
    for one in compared.candidates:
        assert one.outcome.staleness_max <= one.staleness
        assert one.gpu_hours == pytest.approx(16 * one.hours)


def test_a_split_between_two_of_the_planner_s_is_tried_where_it_balances_both() -> None:
    made = comparison("qwen3-4b-search", parse_machine("8xH200"))
    made.run()
    rates = {one.layout.name: one.outcome.samples_per_s for one in reversed(made.candidates)}
    assert rates["5 + 3"] > max(rates["4 + 4"], rates["6 + 2"])


def test_the_command_of_a_candidate_plans_its_layout(compared: Comparison) -> None:
    for one in compared.candidates:
        plan = make_plan(compared.vary(one.sets), compared.machine, compared.facts)
        assert plan.colocated == one.layout.colocated
        assert plan.engines.num * plan.engines.tp == one.layout.engine_devices
        assert plan.trainer.world_size == one.layout.trainer_devices


def test_of_those_about_as_fast_the_least_stale_is_recommended(compared: Comparison) -> None:
    best, made = compared.recommended, compared.candidates
    fastest = max(one.outcome.samples_per_s for one in made)
    assert best.outcome.samples_per_s * SIMILAR_FACTOR >= fastest
    fresher = [one for one in made if one.staleness < best.staleness]
    assert all(one.outcome.samples_per_s * SIMILAR_FACTOR < fastest for one in fresher)
    assert f"{best.outcome.samples_per_s:.3g} samples/s" in reason(best, made)


def test_a_setting_that_the_recipe_rules_out_is_named() -> None:
    made = comparison("qwen2.5-7b", parse_machine("8xH100"), "rollout.over_sampling=1.5", steps=6)
    made.run()
    assert any("done" in name and "over_sampling" in why for name, why in made.skipped.items())
    assert {one.recipe.rollout.order for one in made.candidates} == {"prompts"}


def test_placement_that_the_recipe_pins_is_kept() -> None:
    made = comparison("qwen2.5-7b", parse_machine("8xH100"), "engines.placement=colocated")
    made.run()
    assert [one.layout.name for one in made.candidates] == ["colocated"]


def test_a_layout_that_a_launch_refuses_is_not_simulated() -> None:
    sets = ("eval.engines=own", "eval.every=1", "data.eval=held_out.jsonl")
    made = comparison("qwen2.5-7b", parse_machine("8xH100"), *sets)
    made.run()
    assert not any(one.layout.colocated for one in made.candidates)
    assert "cannot answer while the trainer works" in made.skipped["colocated"]


def test_a_shorter_recipe_cuts_the_responses_of_the_run(tmp_path: Path) -> None:
    made = comparison("quickstart", parse_machine("cpu"))
    write_run(tmp_path / "one", made.facts)
    measured = read_measured(RunDir(tmp_path / "one"))
    longest = int(measured.lengths.mean / 2)
    short = comparison("quickstart", parse_machine("cpu"), f"rollout.max_response_tokens={longest}")
    recipe = short.vary([])
    short.measured, short.assume = measured, with_measured(short.assume, measured, recipe)
    assert short.assume.response_tokens <= longest
    groups = short.run().simulation.lengths.draw(np.random.default_rng(0), groups=9, samples=2)
    assert groups.max() <= longest


def test_assumptions_change_what_comes_out() -> None:
    machine, pins = parse_machine("8xH100"), ("engines.placement=colocated",)
    plain, slow, long = (
        comparison("qwen2.5-7b", machine, *pins, assume=assume).run().outcome.step_s
        for assume in ([], ["train_factor=3", "decode_factor=2"], ["response_tokens=3500"])
    )
    assert slow > 1.8 * plain and long > plain


@pytest.mark.parametrize(
    ("name", "machine", "sets", "code"),
    [
        ("quickstart-sft", "8xH100", [], ExitCode.INVALID),
        ("quickstart", "cpu", [], ExitCode.NOT_READY),
        ("deepseek-v3", "8xH100", [], ExitCode.DOES_NOT_FIT),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    name: str, machine: str, sets: list[str], code: ExitCode
) -> None:
    with pytest.raises(MilesError) as refused:
        comparison(name, parse_machine(machine), *sets).run()
    assert refused.value.exit_code is code


def test_a_run_on_a_cpu_gives_the_seconds_of_its_own_layout(tmp_path: Path) -> None:
    made = comparison("quickstart", parse_machine("cpu"))
    write_run(tmp_path / "one", made.facts)
    made.measured = read_measured(RunDir(tmp_path / "one"))
    made.assume = with_measured(made.assume, made.measured, made.vary([]))
    best = made.run()
    assert best.layout.name == "as in one" and best.layout.speeds.num_engines == 1
    strict = next(one for one in made.candidates if one.staleness == 0)
    recipe = strict.recipe.rollout
    trained_s = strict.outcome.step_s * (1 - strict.outcome.trainer_wait)
    samples = recipe.prompts_per_step * recipe.samples_per_prompt
    mean = made.assume.response_tokens + made.measured.prompt_tokens
    expected = made.measured.train_token_s * samples * mean + made.measured.publish_s
    assert trained_s == pytest.approx(expected, rel=0.1)


def test_a_run_of_another_model_is_refused_on_a_cpu(tmp_path: Path) -> None:
    made = comparison("quickstart", parse_machine("cpu"))
    write_run(tmp_path / "one", comparison("qwen2.5-7b", parse_machine("cpu")).facts)
    made.measured = read_measured(RunDir(tmp_path / "one"))
    with pytest.raises(RecipeError, match="another model"):
        made.run()


def test_a_run_on_the_same_devices_corrects_the_predictions(tmp_path: Path) -> None:
    machine = parse_machine("8xH100")
    made = comparison("qwen2.5-7b", machine, "engines.placement=colocated")
    plain = made.run()
    plan = make_plan(made.vary([]), machine, made.facts)
    write_run(tmp_path / "one", made.facts, plan=plan)
    made = comparison("qwen2.5-7b", machine, "engines.placement=colocated")
    made.measured = read_measured(RunDir(tmp_path / "one"))
    made.assume = replace(made.assume, origins={"response_tokens": "test"})
    best = made.run()
    rows = {name: origin for name, _, origin in made.assume.rows()}
    assert rows["train_factor"] == rows["decode_factor"] == "run one, over its prediction"
    own = best.layout.speeds.train_token_s / plain.layout.speeds.train_token_s
    assert own == pytest.approx(made.assume.train_factor)
    other = comparison("qwen2.5-7b", parse_machine("8xH200"), "engines.placement=colocated")
    other.measured = made.measured
    other.run()
    assert other.assume.train_factor == 1.0, "a run on an H100 says nothing of an H200"
