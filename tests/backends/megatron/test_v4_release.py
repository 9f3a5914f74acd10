"""DeepSeek-V4's release in FP8 and FP4 in the trainer: each rank holds its numbers to the bit, in
the precision that the release keeps, and a step in BF16 is near one in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backends.megatron import world
from tests.models.families.v4_release import write_release

LAYOUTS: dict[str, tuple[int, str, dict]] = {
    "fp32": (1, "fp32", {}),
    "bf16": (1, "bf16", {}),
    "bf16 tp2 sp ep2": (2, "bf16", {"tp": 2, "sequence_parallel": True, "ep": 2}),
    "bf16 pp2": (2, "bf16", {"pp": 2}),
}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder, and its plain tensors."""
    folder = tmp_path_factory.mktemp("release") / "v4"
    return folder, write_release(folder)


@pytest.fixture(scope="module")
def ranks(release: tuple, tmp_path_factory: pytest.TempPathFactory) -> dict[int, world.Results]:
    """World size -> what each layout says."""
    root = tmp_path_factory.mktemp("ranks")
    cases = [
        {
            "name": name,
            "call": "published_and_stepped",
            "model": str(release[0]),
            "layout": layout,
            "precision": precision,
        }
        for name, (_, precision, layout) in LAYOUTS.items()
    ]
    return {
        size: world.run_world(
            size, [case for case in cases if LAYOUTS[case["name"]][0] == size], root / str(size)
        )
        for size in (1, 2)
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_hold_the_numbers_of_the_release(release: tuple, ranks: dict, name: str) -> None:
    size, precision, _ = LAYOUTS[name]
    published, plain = ranks[size][name]["published"], release[1]
    trained = {name for name in plain if not name.startswith("mtp.")}
    assert published.keys() == trained
    assert [name for name in trained if not torch.equal(*_wide(published, plain, name))] == []
    if precision == "bf16":
        kept = {name for name, tensor in published.items() if tensor.dtype == torch.float32}
        # what the release keeps in float32 of all that it does not quantise
        assert kept == {
            name
            for name in trained
            if any(part in name for part in ("hc_", "attn_sink", ".ape", "gate.bias"))
        }
        assert published["layers.0.ffn.gate.tid2eid"].dtype == torch.int64


def _wide(one: dict, other: dict, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return one[name].float(), other[name].float()


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "fp32"])
def test_steps_in_bf16_are_near_those_in_float32(ranks: dict, name: str) -> None:
    ours, wide = ranks[LAYOUTS[name][0]][name], ranks[1]["fp32"]
    differences = np.abs(np.concatenate(ours["scores"]) - np.concatenate(wide["scores"]))
    # a token beside the border of two experts may get another one
    assert np.median(differences) < 0.05
    assert ours["reports"][0].grad_norm == pytest.approx(wide["reports"][0].grad_norm, rel=0.02)
    losses = [[report.loss for report in each["reports"]] for each in (ours, wide)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[1][0] - losses[1][-1] > 1, "the steps teach nothing"
