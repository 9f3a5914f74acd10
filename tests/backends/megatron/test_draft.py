"""A draft model that is trained beside the policy learns what was sampled, alike under every
layout, leaves the policy as it is, and goes on from a checkpoint."""

from __future__ import annotations

import pytest

from tests.backends.megatron.conftest import Worlds
from tests.backends.megatron.draft_cases import LAYOUTS, WITHOUT


def test_it_learns_and_the_policy_is_as_without_it(worlds: Worlds) -> None:
    seen = worlds.get("one")["draft"]
    losses = [report.figures["draft_loss"] for report in seen["reports"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3
    assert all(report.grad_norm == 0.0 for report in seen["reports"]), "the policy stays"
    assert seen["policy"] == worlds.get("one")[WITHOUT]["policy"]


def test_a_checkpoint_has_it(worlds: Worlds) -> None:
    seen = worlds.get("one")["draft"]
    assert seen["loaded"] == seen["learned"] != seen["later"]


@pytest.mark.parametrize("name", LAYOUTS["two"])
def test_layouts_teach_it_the_same(worlds: Worlds, name: str) -> None:
    one, many = worlds.get("one")["draft"], worlds.get("two")[name]
    for expected, report in zip(one["reports"], many["reports"], strict=True):
        assert report.figures["draft_loss"] == pytest.approx(expected.figures["draft_loss"], 1e-5)
        assert report.figures["draft_grad_norm"] == pytest.approx(
            expected.figures["draft_grad_norm"], rel=1e-4
        )
    assert many["loaded"] == one["learned"], "another layout goes on from its checkpoint"
