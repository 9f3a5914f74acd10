"""Logits decide whether a conversion is complete."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from milescli.conversion import verify as verifying
from milescli.conversion.verify import Verify
from milescli.core.errors import MismatchError
from tests.conversion.making import (
    make,
    nothing_but,
    to_megatron,
)


def test_logits_that_differ_leave_no_target_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(module: str, job: dict, scratch: Path) -> Path:
        out = scratch.with_suffix(".safetensors")
        wrong = 0.01 if "megatron" in module else 0.0
        save_file({"0": torch.ones(3, 5) + wrong}, out)
        return out

    monkeypatch.setattr(verifying, "_run", compute)
    with pytest.raises(MismatchError, match="computes something else"):
        to_megatron(make(tmp_path / "hf"), tmp_path / "megatron", verify=Verify.LOGITS)
    nothing_but(tmp_path, "hf")
