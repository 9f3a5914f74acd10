"""An MTP layer that is trained is counted: numbers of each stage, and work."""

from __future__ import annotations

import pytest

from milescli.core.errors import FitError
from milescli.models import parse_facts, table
from milescli.models.costs import token_flops
from milescli.models.mtp import with_mtp
from milescli.plan.choices import note_mtp
from milescli.plan.memory import memory_model
from milescli.plan.placement import choose_channel
from milescli.plan.types import Log, Slot, TrainerLayout
from milescli.recipe.schema import Recipe
from tests.backends.megatron.tiny_models import MODELS

WITHOUT = parse_facts(MODELS["mtp"])
WITH = with_mtp(WITHOUT)


def test_the_last_stage_holds_it_and_a_copy_of_the_embedding() -> None:
    own, layout = table(WITH).num_mtp_parameters, TrainerLayout(pp=3)
    [one] = memory_model(WITH).counter.stages(TrainerLayout())
    [plain] = memory_model(WITHOUT).counter.stages(TrainerLayout())
    assert one.total - plain.total == own > 0
    *first, last = memory_model(WITH).counter.stages(layout)
    *before, beside = memory_model(WITHOUT).counter.stages(layout)
    assert first == before
    assert last.total - beside.total == own + WITH.vocab_size * WITH.hidden_size


def test_its_work_is_that_of_a_layer_and_an_output_layer() -> None:
    more = token_flops(table(WITH)).matmul - token_flops(table(WITHOUT)).matmul
    assert more > 2 * WITH.vocab_size * WITH.hidden_size
    assert table(WITH).num_parameters - table(WITHOUT).num_parameters == (
        table(WITH).num_mtp_parameters
    )


def test_the_plan_says_whether_the_layer_that_guesses_learns() -> None:
    guessing = {"rollout": {"speculative": {"kind": "mtp"}}}
    said = []
    for facts, settings in (
        (WITHOUT, {}),
        (WITHOUT, guessing),
        (WITH, {**guessing, "train": {"mtp": {"loss_weight": 0.1}}}),
    ):
        log = Log()
        note_mtp(Recipe(**settings), facts, log)
        said.append([decision.value for decision in log.decisions])
    assert said == [[], ["off"], ["0.1"]]


@pytest.mark.parametrize(
    "has_mtp",
    [{"rollout": {"speculative": {"kind": "mtp"}}}, {"train": {"mtp": {"loss_weight": 1}}}],
)
def test_weights_reach_the_layer_or_the_plan_is_refused(has_mtp: dict) -> None:
    """On devices of their own engines are sent them by a way that reaches it not."""

    def channel(settings: dict, *, on_cpu: bool) -> str:
        return choose_channel(Recipe(**settings), slots, colocated=False, on_cpu=on_cpu, log=Log())

    slots = [Slot(node=0, device=0, trainer_rank=0), Slot(node=0, device=1, engine=0)]
    assert channel({}, on_cpu=True) == channel({}, on_cpu=False) == "distributed"
    assert channel(has_mtp, on_cpu=True) == "tensor"
    with pytest.raises(FitError, match="would not reach the layer that guesses"):
        channel(has_mtp, on_cpu=False)
