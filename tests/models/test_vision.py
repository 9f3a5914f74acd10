"""What of a vision-language config is read, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from milescli.core.errors import CheckpointError, FitError, RecipeError
from milescli.models import ModelFacts, parse_facts, table
from milescli.models.facts import Rope
from milescli.models.precision import choose
from milescli.models.vision import with_vision
from milescli.plan.legal import check_layout
from milescli.plan.types import TrainerLayout
from milescli.recipe.load import load
from tests.families.cases import ALL


def facts_of(
    case: str, changes: Mapping[str, Mapping[str, object]] = MappingProxyType({})
) -> ModelFacts:
    """Of a case of the families, with parts of its sections changed."""
    config = dict(ALL[case].config)
    for section, fields in changes.items():
        config[section] = {**config[section], **fields}
    return parse_facts(config)


def rope(**fields: object) -> dict[str, dict[str, object]]:
    """A rotary embedding in the place of the config's."""
    return {"text_config": {"rope_parameters": {"rope_theta": 10000.0, **fields}}}


@pytest.mark.parametrize(
    "written",
    [
        rope(type="mrope", mrope_section=[2, 1, 1]),
        rope(rope_type="mrope", mrope_section=[2, 1, 1]),
        rope(rope_type="default", type="mrope", mrope_section=[2, 1, 1]),
    ],
)
def test_every_way_to_write_multimodal_positions_is_read(written: dict) -> None:
    expected = Rope(theta=10000.0, sections=(2, 1, 1))
    assert facts_of("qwen2-5-vl", written).rope == expected


@pytest.mark.parametrize(
    ("case", "changes", "what"),
    [
        ("qwen2-5-vl", rope(rope_type="default"), "mrope_section"),
        ("qwen2-5-vl", rope(rope_type="default", mrope_section=[2, 1, 2]), "mrope_section"),
        ("qwen2-5-vl", rope(mrope_section=[2, 1, 1], mrope_interleaved=True), "mrope_interleaved"),
        ("qwen3-vl", rope(mrope_section=[4, 2, 2], mrope_interleaved=False), "mrope_interleaved"),
        ("qwen3-vl", rope(rope_type="default", mrope_section=[4, 4]), "mrope_section"),
        ("qwen3-vl", {"vision_config": {"out_hidden_size": 40}}, "out_hidden_size"),
        ("qwen3-vl-moe", {"text_config": {"moe_intermediate_size": 24}}, "square"),
        ("qwen3-vl-moe", {"text_config": {"moe_intermediate_size": 48}}, "square"),
        ("qwen3-vl-moe", {"text_config": {"norm_topk_prob": False}}, "norm_topk_prob"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(case: str, changes: dict, what: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        facts_of(case, changes)
    assert what in refused.value.what


def test_a_tower_without_a_config_is_refused() -> None:
    config = {**ALL["qwen3-vl"].config, "vision_config": None}
    with pytest.raises(CheckpointError, match="vision_config"):
        parse_facts(config)


def test_a_first_stage_shorter_than_deepstack_is_refused() -> None:
    facts = facts_of("qwen3-vl")
    check_layout(TrainerLayout(pp=2, first_stage_layers=2), facts)
    with pytest.raises(FitError) as refused:
        check_layout(TrainerLayout(pp=2, first_stage_layers=1), facts)
    assert refused.value.fixes == ["--set parallel.first_stage_layers=2"]
    with pytest.raises(FitError) as refused:
        check_layout(TrainerLayout(pp=3), facts)
    assert refused.value.fixes == ["--set parallel.pp=1"]
    check_layout(TrainerLayout(pp=3), facts_of("qwen2-5-vl"))


@pytest.mark.parametrize(
    ("trained", "names"),
    [("frozen", ()), ("projector", ("merger", "deepstack_merger_list")), ("all", None)],
)
def test_what_is_trained_is_what_engines_are_sent(trained, names) -> None:
    weights = table(with_vision(facts_of("qwen3-vl"), trained))
    sent = {entry.megatron for entry in weights.without_frozen_tower().entries}
    tower = {entry.megatron for entry in weights.entries if entry.rule.of_vision}
    expected = {name for name in tower if names is None or name.split(".")[1] in names}
    assert sent & tower == expected
    assert sent - tower == {entry.megatron for entry in weights.entries} - tower
    assert expected == {e.megatron for e in weights.entries if e.rule.of_vision} & {
        e.megatron for e in weights.entries if weights.trains(e)
    }


def test_a_tower_is_trained_only_where_there_is_one_and_no_adapter() -> None:
    with pytest.raises(CheckpointError, match="no vision tower"):
        with_vision(facts_of("qwen3-5-tied-beside-vision"), "all")
    assert with_vision(facts_of("qwen3"), "frozen") == facts_of("qwen3")
    with pytest.raises(RecipeError, match=r"model\.vision=all"):
        load(
            "qwen3-vl-8b",
            sets=["model.vision=all", "train.lora.rank=8"],
            environ={},
            cwd=Path("/"),
            home=Path("/"),
        )


def test_number_formats_leave_the_tower_alone() -> None:
    facts = parse_facts(
        {
            **ALL["qwen2-5-vl"].config,
            "text_config": {
                **ALL["qwen2-5-vl"].config["text_config"],
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_attention_heads": 16,
            },
            "vision_config": {
                **ALL["qwen2-5-vl"].config["vision_config"],
                "hidden_size": 128,
                "intermediate_size": 128,
                "out_hidden_size": 128,
            },
        }
    )
    choices = choose(table(facts), "fp8")
    assert {name for name, choice in choices.items() if choice.form and "visual" in name} == set()
    assert any(choice.form for choice in choices.values())
