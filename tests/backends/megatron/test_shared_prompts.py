"""Prompts that sequences of a row share are computed once, and nothing else differs."""

from __future__ import annotations

import pytest

from milescli.models import parse_facts, table
from milescli.plan.memory import MemoryModel
from milescli.plan.static_memory import TrainerLoad
from milescli.plan.types import TrainerLayout
from tests.backends.megatron.algorithm_cases import VARIANTS
from tests.backends.megatron.conftest import Worlds
from tests.backends.megatron.layouts import ALGORITHM_EXAMPLES
from tests.backends.megatron.shared_cases import SHARING
from tests.backends.megatron.tiny_models import MODELS


@pytest.mark.parametrize("model", SHARING)
def test_shared_prompts_give_the_gradients_of_whole_sequences(worlds: Worlds, model: str) -> None:
    seen = worlds.get("one")[f"shared prompts {model}"]
    apart, shared = seen["apart"], seen["shared"]
    assert shared["positions"] < 0.9 * apart["positions"]
    assert seen["gradients"] < 2e-6
    assert shared["report"].loss == pytest.approx(apart["report"].loss, abs=1e-7)
    assert shared["report"].grad_norm == pytest.approx(apart["report"].grad_norm, rel=1e-6)
    assert shared["report"].figures == pytest.approx(apart["report"].figures, rel=1e-5, abs=1e-6)
    assert shared["report"].num_tokens == apart["report"].num_tokens
    for number, row in apart["logprobs"].items():
        assert shared["logprobs"][number] == pytest.approx(row, abs=2e-6)
    assert seen["scores"], "a score is of every position, so that it shares nothing"


@pytest.mark.parametrize("model", ["dense", "tied", "llama"])
def test_the_plan_knows_what_is_kept_of_sequences_that_share_prompts(
    worlds: Worlds, model: str
) -> None:
    """Never less than a rank keeps, and less than of whole sequences."""
    seen, facts = worlds.get("one")[f"shared prompts {model}"], parse_facts(MODELS[model])
    apart, shared = seen["apart"], seen["shared"]

    def planned(distinct: int | None) -> int:
        load = TrainerLoad(
            critic="none",
            size=4,
            row_tokens=apart["longest_row"],
            distinct_tokens=distinct,
            num_microbatches=1,
            keeps_reference=False,
            sleeps=False,
            bucket_bytes=0,
            on_host=True,
            fused_swiglu=True,
        )
        return MemoryModel(table(facts)).stages(TrainerLayout(), load)[0].activations

    assert shared["kept_bytes"] < 0.95 * apart["kept_bytes"]
    assert apart["kept_bytes"] <= planned(None) * 1.02
    assert shared["kept_bytes"] <= planned(shared["longest_row"]) * 1.02
    assert planned(shared["longest_row"]) < 0.95 * planned(None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_algorithm_has_the_loss_and_gradients_of_whole_sequences(
    worlds: Worlds, variant: str
) -> None:
    apart, shared = worlds.get("one")["algorithms"], worlds.get("one")["algorithms shared"]
    num_left = 0
    for seed in range(ALGORITHM_EXAMPLES):
        one, many = apart[f"{variant} {seed}"], shared[f"{variant} {seed}"]
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5, abs=1e-6)
        left = one["gradients"].keys() - many["gradients"].keys()
        assert not any(one["gradients"][place] for place in left)
        num_left += len(left)
        expected = {place: one["gradients"][place] for place in many["gradients"]}
        assert many["gradients"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert num_left
