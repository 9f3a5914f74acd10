"""Every layout computes what one process computes: weights in and out, scores, losses and figures
of real policy steps."""

from __future__ import annotations

import math

import pytest

from tests.backends.megatron.algorithm_cases import VARIANTS
from tests.backends.megatron.conftest import Worlds
from tests.backends.megatron.layouts import (
    ALGORITHM_EXAMPLES,
    ALGORITHM_LAYOUTS,
    CLOSER,
    FOUR,
    PACKED,
    PACKED_EXAMPLES,
    ROUTED,
    TWO,
)

LOSS_BOUND = 1e-6


def _cases() -> list[tuple[str, str]]:
    return [("two", case["name"]) for case in TWO] + [("four", case["name"]) for case in FOUR]


@pytest.mark.parametrize(("size", "name"), _cases())
def test_losses_over_three_steps_equal_those_of_one_process(
    worlds: Worlds, size: str, name: str
) -> None:
    expected = worlds.get("one")[name.split()[0]]["reports"]
    reports = worlds.get(size)[name]["reports"]
    for one, many in zip(expected, reports, strict=True):
        assert many.loss == pytest.approx(one.loss, abs=LOSS_BOUND)
        assert many.figures == pytest.approx(one.figures, abs=LOSS_BOUND, rel=1e-6)
        assert (many.num_tokens, many.num_loss_tokens) == (one.num_tokens, one.num_loss_tokens)
        assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        assert many.logprob_diff_max == pytest.approx(one.logprob_diff_max, abs=5e-6)


@pytest.mark.parametrize(("size", "name"), _cases())
def test_weights_come_out_as_they_went_in_bit_for_bit(worlds: Worlds, size: str, name: str) -> None:
    model = {"toy": "dense"}.get(short := name.split()[0].removesuffix("-r3"), short)
    assert worlds.get(size)[name]["checksums"] == worlds.get("one")[model]["checksums"]
    assert worlds.get(size)[name]["in_shards"] == worlds.get("one")[model]["checksums"]


@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
def test_published_weights_are_the_bytes_of_the_folder(
    worlds: Worlds, models: dict[str, str], model: str
) -> None:
    import hashlib

    from safetensors.torch import load_file

    stored = load_file(f"{models[model]}/model.safetensors")
    expected = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in stored.items()
    }
    assert worlds.get("one")[model]["checksums"] == expected


@pytest.mark.parametrize(("size", "name"), _cases())
def test_scores_equal_those_of_one_process(worlds: Worlds, size: str, name: str) -> None:
    expected = worlds.get("one")[name.split()[0]]["scores"]
    scores = worlds.get(size)[name]["scores"]
    assert [len(row) for row in scores] == [len(row) for row in expected]
    for one, many in zip(expected, scores, strict=True):
        assert many == pytest.approx(one, abs=5e-6)


def test_what_is_kept_in_float32_is_published_so_from_a_bfloat16_model(worlds: Worlds) -> None:
    assert worlds.get("two")["glm bfloat16"] == []


def test_steps_change_the_loss_so_that_the_comparison_means_something(worlds: Worlds) -> None:
    reports = worlds.get("one")["dense"]["reports"]
    assert len({round(report.loss, 4) for report in reports}) == 3
    assert reports[-1].figures["clip_fraction"] > 0
    assert reports[-1].figures["kl"] > 0.01
    assert reports[0].figures["ratio_mean"] == 1.0
    toy = worlds.get("one")["toy"]["reports"]
    assert toy[-1].figures["ratio_mean"] != 1.0
    assert toy[-1].figures["so_far_max"] > 1.0


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, names in PACKED.items() for name in names]
)
def test_sums_scans_means_and_gradients_of_packed_tokens_are_those_of_plain_loops(
    worlds: Worlds, size: str, name: str
) -> None:
    differences = worlds.get(size)[name]
    assert len({seed for seed, _, _ in differences}) == PACKED_EXAMPLES
    worst = max(differences, key=lambda row: row[2])
    assert worst[2] < 1e-5, worst


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("size", "name"),
    [(size, name) for size in ("two", "four") for name in ALGORITHM_LAYOUTS[size]],
)
def test_every_algorithm_has_the_loss_and_gradients_of_one_process_that_cuts_nothing(
    worlds: Worlds, size: str, name: str, variant: str
) -> None:
    whole, cut = worlds.get("one")["algorithms"], worlds.get(size)[name]
    for seed in range(ALGORITHM_EXAMPLES):
        one, many = whole[f"{variant} {seed}"], cut[f"{variant} {seed}"]
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5, abs=1e-6)
        assert many["gradients"] == pytest.approx(one["gradients"], rel=1e-4, abs=1e-6)
        assert any(one["gradients"].values())


@pytest.mark.parametrize("old_logprobs", ["trainer", "engine"])
@pytest.mark.parametrize("updates", [1, 2, 4])
def test_engine_and_trainer_are_compared_before_the_policy_moves(
    worlds: Worlds, old_logprobs: str, updates: int
) -> None:
    assert worlds.get("one")[f"engine differences {old_logprobs} {updates}"] < 1e-5


@pytest.mark.parametrize("name", ROUTED)
def test_replayed_routing_takes_the_given_experts(worlds: Worlds, name: str) -> None:
    scores = worlds.get("one")[f"routing {name}"]
    assert scores["own"] == pytest.approx(scores["free"], abs=2e-6), (
        "the model's own choices, replayed, change nothing"
    )
    moved = max(
        abs(one - other) for one, other in zip(scores["free"], scores["random"], strict=True)
    )
    assert moved > 0.03, "other experts give other log-probs"


@pytest.mark.parametrize("name", CLOSER)
def test_replay_keeps_scores_close_where_weights_differ_by_a_rounding(
    worlds: Worlds, name: str
) -> None:
    scores = worlds.get("one")[f"routing {name}"]

    def gap(moved: str) -> list[float]:
        return [abs(a - b) for a, b in zip(scores["free"], scores[moved], strict=True)]

    free, replayed = gap("moved free"), gap("moved own")
    assert max(replayed) < max(free) / CLOSER[name]
    assert sum(replayed) < sum(free) / 1.2


def test_the_share_of_routes_that_differ_is_told(worlds: Worlds) -> None:
    reports = worlds.get("one")["moe-r3"]["reports"]
    # of random routes: 2 of 4 experts
    assert reports[0].figures["routes_differ"] == pytest.approx(0.5, abs=0.05)
    assert "routes_differ" not in worlds.get("one")["moe"]["reports"][0].figures


def test_a_step_that_is_not_finite_is_refused_by_name_and_changes_nothing(worlds: Worlds) -> None:
    result = worlds.get("two")["spoiled"]
    loss, gradient = result["raised"]
    assert all(part in loss for part in result["place"])
    assert "decoder.final_layernorm.weight" in gradient
    assert "rank 1" in gradient
    assert result["untouched"]
    assert math.isfinite(result["then"]), "the next step is a good one again"
