"""The plan's memory model against what trainer ranks really hold: weights, gradients, optimizer,
and what autograd keeps, within 5 %."""

from __future__ import annotations

import pytest

from milescli.backends.megatron.layers.dsa import QUERIES
from milescli.models import parse_facts, table
from milescli.models.adapter import adapter_table
from milescli.models.latent import with_indexer
from milescli.models.mtp import with_mtp
from milescli.plan.activations import INDEXED_QUERIES, Packing
from milescli.plan.memory import MemoryModel, TrainerBytes, TrainerLoad, shape_of
from milescli.plan.types import TrainerLayout
from milescli.recipe.lora import Lora
from tests.backends.megatron.conftest import Worlds
from tests.backends.megatron.memory_cases import MEMORY, MemoryCase
from tests.backends.megatron.tiny_models import MODELS

WITHIN = 0.05


def planned(case: MemoryCase) -> list[TrainerBytes]:
    """[pp] by the model: rows of one sequence, and experts that get alike."""
    layout = TrainerLayout(**case.layout)  # type: ignore[arg-type]
    wish = TrainerLoad(
        critic="none",
        size=2 if case.precision == "bf16" else 4,
        row_tokens=case.tokens // layout.cp,
        num_microbatches=layout.pp,
        keeps_reference=False,
        sleeps=False,
        bucket_bytes=0,
        packing=Packing(fill=1.0, imbalance=1.0, longest=case.tokens),
        on_host=True,
        fused_swiglu=case.precision == "fp32",
    )
    facts = with_indexer(parse_facts(MODELS[case.model]), case.indexer)
    if case.model.startswith("mtp"):
        facts = with_mtp(facts)
    base, adapter = table(facts), None
    if case.rank:
        adapter = adapter_table(base, shape_of(Lora(rank=case.rank)))
    return MemoryModel(base, adapter).stages(layout, wish)


def test_the_plan_counts_as_many_scored_queries_as_a_rank_computes_at_a_time() -> None:
    assert INDEXED_QUERIES == QUERIES


@pytest.mark.parametrize(
    ("which", "case"),
    [(which, case) for which, listed in MEMORY.items() for case in listed],
    ids=str,
)
def test_the_plan_knows_what_every_rank_holds(worlds: Worlds, which: str, case: MemoryCase) -> None:
    ranks = worlds.get(which)[case.name]
    stages = planned(case)
    per_stage = len(ranks) // len(stages)
    for number, stage in enumerate(stages):
        held = ranks[number * per_stage : (number + 1) * per_stage]
        for part in ("weights", "gradients", "optimizer", "host"):
            for rank in held:
                # stand-ins for weights on the host have a few bytes each
                assert rank[part] == pytest.approx(getattr(stage, part), rel=WITHIN, abs=512), (
                    part,
                    number,
                    ranks,
                )
        # whose experts get more tokens is up to the router: the ranks of a stage together keep what
        # is planned, but where each is at its peak in another microbatch than the others
        kept = sum(rank["activations"] for rank in held) / len(held)
        apart = {"ep", "pp"} <= set(case.layout)
        within = 2 * WITHIN if apart else WITHIN
        assert kept == pytest.approx(stage.activations, rel=within), (number, ranks)


def test_an_optimizer_on_the_host_learns_the_same(worlds: Worlds) -> None:
    results = worlds.get("two")
    for precision in ("bf16", "fp32"):
        assert results[f"steps {precision} host"] == results[f"steps {precision} device"], precision


def test_an_optimizer_on_the_host_goes_on_from_a_checkpoint(worlds: Worlds) -> None:
    checksums = worlds.get("two")["delta bfloat16 host"]
    assert checksums["loaded"] == checksums["saved"] != checksums["later"]
    assert worlds.get("two")["delta bfloat16"]["later"] == checksums["later"]


def test_a_fused_optimizer_learns_the_same(worlds: Worlds) -> None:
    results = worlds.get("two")
    for mine, theirs in zip(results["steps bf16 fused"], results["steps bf16 device"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)


def test_a_fused_optimizer_goes_on_from_a_checkpoint(worlds: Worlds) -> None:
    checksums = worlds.get("two")["delta bfloat16 fused"]
    assert checksums["loaded"] == checksums["saved"] != checksums["later"]
