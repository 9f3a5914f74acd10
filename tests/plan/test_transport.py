"""What travels in a step is planned: the object store's size, copies of what was sent, and the
bytes of a publish."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from milescli.core.units import GIB, MIB
from milescli.models import parse_facts, table
from milescli.models.facts import ModelFacts
from milescli.plan.devices import DEVICES, Efficiency
from milescli.plan.make import make_plan
from milescli.plan.memory import memory_model
from milescli.plan.time import TimeModel, Work
from milescli.plan.transport import MIN_STORE, Transfer, transfer
from milescli.plan.types import EngineLayout, Plan, TrainerLayout
from milescli.platform.machine import parse_machine
from milescli.recipe.load import load
from milescli.recipe.templates import shipped_shape
from milescli.runtime.inputs.model_facts import facts_of_recipe

LONG = (
    "rollout.prompts_per_step=2048",
    "rollout.max_response_tokens=16000",
    "model.scratch.max_position_embeddings=20000",
)
DELTA = ("weights.full_every=4", "weights.channel=distributed")


def _plan(name: str, *sets: str, on: str = "1xH100", shm_gib: float = 64.0) -> Plan:
    recipe = load(name, sets=list(sets), environ={}, cwd=Path("/"), home=Path("/")).recipe
    machine = parse_machine(on)
    size = {"memory_bytes": 512 * GIB, "shm_bytes": int(shm_gib * GIB)}
    nodes = [replace(node, **size) for node in machine.nodes]
    return make_plan(recipe, replace(machine, nodes=nodes), facts_of_recipe(recipe.model))


def _keys(plan: Plan) -> dict[str, str]:
    return {made.key: made.reason for made in plan.decisions}


def _in_step(plan: Plan, name: str) -> int:
    return sum(one.phases["step"] for one in plan.processes if one.name.startswith(name))


def test_a_small_batch_takes_the_least_store() -> None:
    plan = _plan("quickstart", "machine.gpus=0")
    assert plan.object_store_bytes == MIN_STORE
    assert "/dev/shm" not in _keys(plan)


def test_a_large_batch_has_room_and_is_counted_as_main_memory() -> None:
    small = _plan("quickstart", "machine.gpus=0", *LONG[1:])
    large = _plan("quickstart", "machine.gpus=0", *LONG)
    tokens = 2048 * 8 * 16000
    assert large.object_store_bytes > 13 * tokens
    counted = _in_step(large, "others") - _in_step(small, "others")
    assert counted > 0.9 * 13 * tokens * (1 - 32 / 2048)


def test_collected_batches_that_ranks_may_repeat_lie_in_the_store() -> None:
    here = _plan("quickstart", "machine.gpus=0", *LONG)
    apart = _plan("quickstart", "machine.gpus=0", *LONG, "machine.collectors=2")
    assert apart.object_store_bytes - here.object_store_bytes == 4 * GIB, "fault.kept_gib"


def test_a_small_shared_memory_bounds_the_store_and_says_what_follows() -> None:
    plan = _plan("quickstart", "machine.gpus=0", *LONG, shm_gib=2)
    assert MIN_STORE < plan.object_store_bytes < 2 * GIB
    assert "to disk" in _keys(plan)["/dev/shm"]


def test_the_size_of_the_store_is_no_other_plan() -> None:
    small = _plan("quickstart", "machine.gpus=0", *LONG, shm_gib=2)
    large = _plan("quickstart", "machine.gpus=0", *LONG)
    assert small.object_store_bytes != large.object_store_bytes
    assert small.fingerprint == large.fingerprint


@pytest.mark.parametrize("process", ["trainer-rank", "engine"])
def test_copies_of_sent_weights_are_counted_on_both_sides(process: str) -> None:
    cpu = ("machine.gpus=0", "engines.num=1", "weights.channel=distributed")
    without, kept = _plan("qwen3-0.6b", *cpu), _plan("qwen3-0.6b", *cpu, *DELTA)
    grown = _in_step(kept, process) - _in_step(without, process)
    assert grown == pytest.approx(0.6e9 * 4, rel=0.3), f"{grown / MIB:.0f} MiB"


def test_waves_need_what_was_sent_before_until_the_last_is_updated() -> None:
    cpu = ("machine.gpus=0", "engines.num=1", "weights.channel=distributed", *DELTA)
    once, waves = (_plan("qwen3-0.6b", *cpu, *more) for more in ((), ("weights.wave_share=0.5",)))
    grown = _in_step(waves, "trainer-rank") - _in_step(once, "trainer-rank")
    assert grown == pytest.approx(0.6e9 * 4, rel=0.3), f"{grown / MIB:.0f} MiB"
    assert _in_step(waves, "engine") == _in_step(once, "engine")


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("train.lora.rank=8", "an adapter is trained"),
        ("weights.format=mine:format", "`weights.format` is your own"),
    ],
)
def test_whole_tensors_are_sent_each_time_and_nothing_is_kept(setting: str, why: str) -> None:
    cpu = ("machine.gpus=0", "engines.num=1", "weights.channel=distributed", setting)
    without, every = _plan("qwen3-0.6b", *cpu), _plan("qwen3-0.6b", *cpu, "weights.full_every=4")
    assert why in _keys(every)["weights.full_every"] and why in _keys(every)["weights.transfer"]
    assert _in_step(every, "trainer-rank") == _in_step(without, "trainer-rank")


def test_shared_memory_keeps_no_copies() -> None:
    cpu = ("machine.gpus=0", "engines.num=1")
    without = _plan("qwen3-0.6b", *cpu)
    shared = _plan("qwen3-0.6b", *cpu, "weights.full_every=4")
    assert _in_step(shared, "trainer-rank") == _in_step(without, "trainer-rank")


@pytest.mark.parametrize(
    ("channel", "words"), [("disk", "files of the run"), ("rdma", "memory that Mooncake reads")]
)
def test_what_engines_read_elsewhere_is_offered_once_and_whole(channel: str, words: str) -> None:
    cpu = ("machine.gpus=0", "engines.num=2", f"weights.channel={channel}")
    without, every = _plan("qwen3-0.6b", *cpu), _plan("qwen3-0.6b", *cpu, "weights.full_every=4")
    assert words in _keys(every)["weights.transfer"]
    assert _keys(every)["weights.full_every"] == f"all weights are in {words} each time"
    assert ("asks for no key" in _keys(every)["weights.channel"]) == (channel == "rdma")
    assert _in_step(every, "trainer-rank") == _in_step(without, "trainer-rank")


def test_through_a_store_each_cut_is_written_once_and_changes_are_kept() -> None:
    cpu = ("machine.gpus=0", "engines.num=3", "weights.store=s3://bucket/w")
    without, every = _plan("qwen3-0.6b", *cpu), _plan("qwen3-0.6b", *cpu, "weights.full_every=4")
    said = _keys(every)["weights.transfer"]
    assert every.channel == "store" and "to `weights.store`" in said
    assert "3 of 4 publishes send only what changed" in said
    assert _in_step(every, "trainer-rank") > _in_step(without, "trainer-rank") + 1.5e9


def test_engines_that_are_compared_have_room_for_a_second_model() -> None:
    cpu = ("machine.gpus=0", "engines.num=1")
    plain, verified = _plan("qwen3-0.6b", *cpu), _plan("qwen3-0.6b", *cpu, "weights.verify=true")
    (before,), (after,) = (
        [one for one in plan.processes if one.name == "engine-0"] for plan in (plain, verified)
    )
    grown = after.phases["publish"] - before.phases["publish"]
    assert grown > 0.6e9 * 2, "a model of 4 bytes a number, but what sampling needs is free"
    assert after.phases["step"] == before.phases["step"]


def test_the_host_memory_of_devices_has_the_copies_too() -> None:
    split = ("engines.placement=split",)
    plans = [_plan("qwen3-8b", *split, *more, on="8xH100") for more in ((), DELTA[:1])]
    hosts = [plan.forecast.host_bytes for plan in plans if plan.forecast is not None]
    assert hosts[1] > hosts[0]


def _facts(name: str) -> ModelFacts:
    shape = shipped_shape(name)
    assert shape is not None, name
    return parse_facts(shape)


def _transfer(trainer: TrainerLayout, engines: EngineLayout, *, shared: bool) -> Transfer:
    memory = memory_model(_facts("Qwen/Qwen3-8B"))
    return transfer(memory, trainer, engines, size=2, shared=shared)


def test_each_byte_leaves_the_trainer_once_for_each_tree_of_engines() -> None:
    eight = TrainerLayout(tp=2, dp=4)
    one = _transfer(eight, EngineLayout(num=1, tp=2), shared=False)
    assert (one.trees, one.children, one.levels) == (1, 0, 1)
    many = _transfer(eight, EngineLayout(num=64, tp=2), shared=False)
    assert (many.trees, many.children, many.levels) == (4, 2, 5), "16 engines a tree"
    assert many.sent == 4 * one.sent == 4 * 2 * one.received
    assert many.busiest == pytest.approx(1.2 * many.sent / 8)
    assert many.largest == 2 * many.received, "an engine sends to two others"


def test_shared_memory_has_each_byte_once() -> None:
    shared = _transfer(TrainerLayout(dp=8), EngineLayout(num=4, tp=2), shared=True)
    assert shared.sent == pytest.approx(2 * 8.2e9, rel=0.01) and not shared.trees


def _seconds(trainer: TrainerLayout, engines: EngineLayout, **how: Any) -> float:
    facts = _facts("Qwen/Qwen3-235B-A22B")
    model = TimeModel(
        table=table(facts),
        memory=memory_model(facts),
        device=DEVICES["H100"],
        devices_per_node=8,
        efficiency=Efficiency(),
    )
    work = Work(
        num_samples=512,
        num_prompts=64,
        prompt_tokens=300,
        response_tokens=4000,
        longest_response=8000,
        updates=1,
        extra_forwards=0,
        size=2,
        bucket_bytes=512 * MIB,
        sends_whole=how.pop("whole", False),
    )
    return model.publish_seconds(trainer, engines, work, **how)


def test_a_publish_in_pieces_takes_less_than_whole_tensors_and_less_with_more_ranks() -> None:
    trainer, engines = TrainerLayout(tp=4, dp=16, ep=8), EngineLayout(num=8, tp=8)
    pieces = _seconds(trainer, engines, shared=False)
    assert pieces < _seconds(trainer, engines, shared=False, whole=True)
    assert _seconds(TrainerLayout(tp=4, dp=4, ep=8), engines, shared=False) > pieces
    assert _seconds(trainer, EngineLayout(num=32, tp=8), shared=False) > pieces, "passed on"
    assert _seconds(trainer, engines, shared=True) < pieces, "within nodes"


def test_a_node_without_the_whole_model_is_sent_whole_tensors() -> None:
    parted, engines = TrainerLayout(tp=4, pp=2, dp=8), EngineLayout(num=8, tp=8)
    whole = _seconds(parted, engines, shared=True, whole=True)
    assert _seconds(parted, engines, shared=True) == whole


def test_the_bytes_of_a_publish_are_stated_for_each_side() -> None:
    shared = _keys(_plan("quickstart", "machine.gpus=0"))["weights.transfer"]
    sent = _keys(_plan("quickstart", "machine.gpus=0", *DELTA))["weights.transfer"]
    assert "shared memory" in shared
    assert "sends at most" in sent and "3 of 4 publishes" in sent
