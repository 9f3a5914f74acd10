"""What a CPU can hold: refused with the sum, or made to fit by smaller microbatches, recompute and
smaller caches, in that order."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from milescli.core.errors import ExitCode, FitError
from milescli.core.units import GIB
from milescli.plan.main_memory import ENOUGH_TOKENS, bytes_by_phase
from milescli.plan.make import make_plan
from milescli.plan.types import Plan
from milescli.platform.machine import Machine, parse_machine
from milescli.recipe.load import load
from milescli.runtime.inputs.model_facts import facts_of_recipe


def _plan(name: str, *sets: str, memory_gib: float, free_gib: float | None = None) -> Plan:
    recipe = load(
        name, sets=["machine.gpus=0", *sets], environ={}, cwd=Path("/"), home=Path("/")
    ).recipe
    machine: Machine = parse_machine("1xH100")
    node = replace(
        machine.nodes[0],
        memory_bytes=int(memory_gib * GIB),
        available_bytes=int(free_gib * GIB) if free_gib else None,
    )
    nodes = [node] * recipe.machine.nodes
    return make_plan(recipe, replace(machine, nodes=nodes), facts_of_recipe(recipe.model))


def _told(plan: Plan, key: str) -> tuple[str, str]:
    (decision,) = (made for made in plan.decisions if made.key == key)
    return decision.value, decision.reason


def test_a_model_that_outgrows_main_memory_is_refused_with_the_sum() -> None:
    with pytest.raises(
        FitError, match="does not fit in the main memory of a CPU with 24 GiB"
    ) as caught:
        _plan("qwen3.6", memory_gib=24)
    assert caught.value.exit_code is ExitCode.DOES_NOT_FIT
    assert "weights 129.1 + gradients 129.1 + optimizer 258.2" in caught.value.why, (
        "34.7B numbers of 4, 4 and 8 bytes"
    )


def test_what_fits_is_listed_part_by_part() -> None:
    plan = _plan("quickstart", memory_gib=8)
    value, reason = _told(plan, "memory")
    assert (
        value.endswith("GiB")
        and re.search(r"1 trainer rank: weights [\d.]+ MiB \+ gradients [\d.]+ MiB", reason)
        and "an estimate" in reason
    )
    assert plan.engines.num * (plan.engines.max_total_tokens or 0) == 256 * 544 * 1.25
    assert plan.trainer.recompute == "none"


def test_two_engines_become_one_where_main_memory_is_short() -> None:
    roomy, short = _plan("quickstart", memory_gib=8), _plan("quickstart", memory_gib=3.4)
    assert (roomy.engines.num, short.engines.num) == (2, 1)
    assert short.engines.max_total_tokens == 256 * 544 * 1.25


def test_microbatches_are_no_larger_than_is_worth_their_activations() -> None:
    short = ("rollout.max_response_tokens=128", "data.max_prompt_tokens=128")
    caps = {
        name: _plan(name, *short, memory_gib=2048).batch.max_tokens_per_microbatch
        for name in ("quickstart", "qwen3-0.6b")
    }
    assert caps == {"quickstart": 8192, "qwen3-0.6b": ENOUGH_TOKENS}


def test_what_others_hold_of_main_memory_is_not_planned_with() -> None:
    alone = _plan("quickstart", memory_gib=24)
    beside = _plan("quickstart", memory_gib=24, free_gib=3.2)
    assert (alone.engines.num, beside.engines.num) == (2, 1)
    assert "of 24 GiB, of which 3.2 are free" in _told(beside, "memory")[1]
    with pytest.raises(FitError, match=r"of which 1\.0 are free"):
        _plan("quickstart", memory_gib=24, free_gib=1)


def test_each_process_has_its_phases_and_they_make_the_sum() -> None:
    plan = _plan("quickstart", memory_gib=24)
    names = [process.name for process in plan.processes]
    assert names == ["trainer-rank-0", "engine-0", "engine-1", "others"]
    whole = max(bytes_by_phase(plan.processes).values())
    assert _told(plan, "memory")[0] == f"{whole / GIB:.1f} GiB"
    rank, engine, _, others = plan.processes
    assert rank.shared_bytes == engine.shared_bytes > others.shared_bytes == 0
    each = sum(process.phases["publish"] for process in plan.processes)
    assert bytes_by_phase(plan.processes)["publish"] == each - 2 * rank.shared_bytes, "there once"
    assert Plan.from_json(plan.to_json()).processes == plan.processes


def test_less_memory_means_recompute_then_a_smaller_cache() -> None:
    roomy = _plan("qwen3-0.6b", memory_gib=2048)
    assert roomy.trainer.recompute == "none"
    recompute, caches = [], []
    for memory_gib in (96, 40, 26, 24, 20):
        plan = _plan("qwen3-0.6b", memory_gib=memory_gib)
        recompute.append(plan.trainer.recompute)
        caches.append(plan.engines.max_total_tokens or 0)
        assert float(_told(plan, "memory")[0].split()[0]) <= 0.95 * memory_gib + 0.05
    assert recompute[-1] == "full" and recompute == sorted(recompute, reverse=True), (
        "none before full"
    )
    assert caches[-1] < (roomy.engines.max_total_tokens or 0)
    assert all(cache >= 2560 for cache in caches), "one sequence fits at least"


def test_a_pin_is_kept_or_refused() -> None:
    pinned = _plan(
        "qwen3-0.6b", "train.max_tokens_per_microbatch=4096", "train.recompute=full", memory_gib=24
    )
    assert (pinned.batch.max_tokens_per_microbatch, pinned.trainer.recompute) == (4096, "full")
    with pytest.raises(FitError, match="main memory") as caught:
        _plan("qwen3-0.6b", "train.max_tokens_per_microbatch=65536", memory_gib=24)
    assert any("train.max_tokens_per_microbatch=null" in fix for fix in caught.value.fixes), (
        caught.value.fixes
    )


def test_ranks_that_share_a_node_are_summed_and_those_of_others_are_not() -> None:
    alone = _plan("qwen3-0.6b", memory_gib=64)
    together = _plan("qwen3-0.6b", "parallel.dp=2", memory_gib=64)
    apart = _plan("qwen3-0.6b", "parallel.dp=2", "engines.num=2", "machine.nodes=2", memory_gib=64)
    assert "1 trainer rank:" in _told(alone, "memory")[1]
    assert "2 trainer ranks:" in _told(together, "memory")[1]
    assert (
        "1 trainer rank:" in _told(apart, "memory")[1]
        and "1 engine rank:" in _told(apart, "memory")[1]
    )


@pytest.mark.parametrize(
    ("sets", "merged"),
    [
        ((), True),
        (("train.lora.publish=adapter",), False),
        (("train.precision=bf16",), False),
        (("train.precision=bf16", "train.lora.publish=merged"), True),
    ],
)
def test_engines_of_one_float32_adapter_are_sent_the_merged_model(
    sets: tuple[str, ...], merged: bool
) -> None:
    plan = _plan("smollm2-135m", "train.lora.rank=16", *sets, memory_gib=24)
    assert plan.merges_adapter is merged
    assert _told(plan, "adapter.publish")[0] == ("merged" if merged else "adapter")
