"""An adapter trains alike under every layout, is what it is merged into, and is all that a
checkpoint holds."""

from __future__ import annotations

import pytest

from tests.backends.megatron.conftest import Worlds
from tests.backends.megatron.lora_cases import KINDS, LORA


@pytest.mark.parametrize("name", [case["name"] for case in LORA["two"]])
def test_losses_and_gradients_are_those_of_one_process(worlds: Worlds, name: str) -> None:
    one, many = worlds.get("one")[name.split()[0]], worlds.get("two")[name]
    assert many["checksums"] == one["checksums"], "adapters begin alike under every layout"
    for expected, report in zip(one["reports"], many["reports"], strict=True):
        assert report.loss == pytest.approx(expected.loss, abs=1e-6)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert expected.grad_norm > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_the_model_that_it_is_merged_into(worlds: Worlds, kind: str) -> None:
    seen = worlds.get("one")[f"merged-{kind}"]
    # products of other shapes round otherwise, which the router of `latent` amplifies
    assert seen["difference"] < 1e-4 < 1e-2 < seen["learned"]
    assert seen["base_is_same"] and seen["given"] == 0.0
    assert not seen["sent"] and not seen["unsent"]


@pytest.mark.parametrize("name", ["lora moe tp2 rest", "lora moe pp2 rest", "shared moe tp2 rest"])
def test_a_checkpoint_goes_on_under_another_layout(worlds: Worlds, name: str) -> None:
    [report] = worlds.get("two")[name]["reports"]
    expected = worlds.get("one")[f"{name.split()[0]} four"]["reports"][3]
    assert report.loss == pytest.approx(expected.loss, abs=1e-6)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def test_recomputation_with_dropout_differentiates_the_loss_that_it_reports(
    worlds: Worlds,
) -> None:
    seen = worlds.get("one")["lora dropout"]
    (scored, _), *plain = seen["none"]
    _, *recomputed = seen["full"]
    for (loss, gradients), (again, same) in zip(plain, recomputed, strict=True):
        assert again == pytest.approx(loss, abs=1e-6)
        assert (same - gradients).abs().max() < 1e-5 < gradients.abs().max()
    losses = [loss for loss, _ in recomputed]
    assert len({round(loss, 4) for loss in [scored, *losses]}) == 4, "the masks do not change"
