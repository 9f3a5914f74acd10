"""What is refused when the model's facts are known, before a machine is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.backends.sglang.launch.servable import cpu_family, fault_of_record
from milescli.core.errors import FitError, MachineError, RecipeError
from milescli.core.files import read_json
from milescli.listings.recipes import NO_MACHINE
from milescli.platform.machine import parse_machine
from milescli.recipe.load import load
from milescli.recipe.templates import MODELS_FILE, template_names, templates_dir
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.runtime.planning import plan_only, plan_without_plugins
from tests.families.cases import ALL


def unchanged(*, spec: object, config: object, facts: object, layer: int) -> object:
    """As it is."""
    return spec


@pytest.mark.parametrize("recipe", ["nemotron-3-nano", "gemma-4-26b-a4b", "qwen3-8b"])
def test_routes_that_no_engine_tells_are_refused_by_the_family_name(
    tmp_path: Path, recipe: str
) -> None:
    sets = ["train.routing_replay=true"]
    loaded = load(recipe, sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises(RecipeError, match=r"the routing of a `\w+` model cannot be replayed"):
        plan_only(loaded)


@pytest.mark.parametrize(
    ("model_type", "sets", "more", "says"),
    [
        ("deepseek_v32", [], {}, "a `deepseek_v32` model cannot be served on a CPU yet"),
        (
            "deepseek_v3",
            ["train.lora.rank=4", "train.lora.publish=adapter"],
            {},
            "an adapter over this `deepseek_v3` model",
        ),
        (
            "qwen3",
            [],
            {"quantization_config": {"quant_method": "fp8"}},
            "the quantised `qwen3` model cannot be served on a CPU",
        ),
        (
            "qwen3",
            [],
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "the quantised `qwen3` model cannot be trained in this way",
        ),
        (
            "gpt_oss",
            ["rollout.speculative.kind=ngram"],
            {},
            "a model of type `gpt_oss` cannot speculate on a CPU",
        ),
    ],
)
def test_a_model_that_engines_here_do_not_serve_is_refused_by_the_plan(
    tmp_path: Path, model_type: str, sets: list[str], more: dict[str, object], says: str
) -> None:
    config = {**ALL[model_type.replace("_", "-")].config, **more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sets = [*sets, f"model.path={tmp_path}", "model.scratch=null", "warmup.steps=0"]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises((MachineError, RecipeError), match=says):
        plan_only(loaded, parse_machine("cpu"))


def test_a_layer_spec_of_a_hybrid_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    sets = [f"model.layer_spec={__name__}:unchanged"]
    loaded = load("nemotron-3-nano-4b", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises(RecipeError, match="cannot change a model of type `nemotron_h`"):
        plan_only(loaded)


def test_recipes_replay_routing_of_families_whose_record_was_compared_and_of_no_others(
    tmp_path: Path,
) -> None:
    """With experts, SGLang keeps the record, and an engine on a CPU was held against transformers:
    tests/backends/sglang/test_families.py."""
    replayed = set[str]()
    for name in template_names():
        loaded = load(name, sets=[], environ={}, cwd=tmp_path, home=tmp_path)
        if loaded.recipe.learns_from_rows:
            continue
        facts = planned_facts(loaded.recipe)
        is_right = fault_of_record(facts) is None and cpu_family(facts) is not None
        assert loaded.recipe.train.routing_replay == is_right, (name, facts.family)
        replayed |= {facts.family} if is_right else set()
    assert replayed == {
        "deepseek_v3",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
    }


@pytest.mark.parametrize(
    ("sets", "fixes"),
    [
        (
            ["rollout.max_response_tokens=100000"],
            ["--set rollout.max_response_tokens=40704"],
        ),
        (
            ["eval.max_response_tokens=40900"],
            [
                "--set eval.max_response_tokens=40704",
                "--set data.max_prompt_tokens=60",
            ],
        ),
    ],
)
def test_a_length_that_the_model_has_no_positions_for_is_refused_by_the_plan(
    tmp_path: Path, sets: list[str], fixes: list[str]
) -> None:
    loaded = load(
        "qwen3-0.6b",
        sets=["data.max_prompt_tokens=256", *sets],
        environ={},
        cwd=tmp_path,
        home=tmp_path,
    )
    with pytest.raises(FitError, match="exceed the model's positions") as refused:
        plan_only(loaded, parse_machine("8xH200"))
    assert refused.value.fixes == fixes
    mended = ["data.max_prompt_tokens=256", fixes[0].removeprefix("--set ")]
    fixed = load("qwen3-0.6b", sets=mended, environ={}, cwd=tmp_path, home=tmp_path)
    assert plan_only(fixed, parse_machine("8xH200")).engines.num


def test_the_reward_of_a_source_of_a_mix_is_loaded_by_the_plan(tmp_path: Path) -> None:
    sets = ["data.prompts=null", "data.mix=[{path: task:sums, reward: gms8k}, {path: task:words}]"]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises(RecipeError, match="gms8k"):
        plan_only(loaded, parse_machine("cpu"))


SMALLEST = read_json(templates_dir() / MODELS_FILE)["smallest_machines"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALLEST if SMALLEST[name] != NO_MACHINE])
def test_a_recipe_is_planned_for_the_smallest_machine_that_the_list_names(
    tmp_path: Path, name: str
) -> None:
    machine = parse_machine(SMALLEST[name])
    sets = [f"machine.nodes={len(machine.nodes)}"]
    loaded = load(name, sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    facts = planned_facts(loaded.recipe)
    assert plan_without_plugins(loaded, machine, facts=facts).engines.num
