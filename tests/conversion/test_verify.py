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
        theirs, ours = torch.ones(3, 5), torch.ones(3, 5) + 0.01
        is_ours = "megatron" in module
        save_file({"0": ours, "0.rounded": ours + 1e-7} if is_ours else {"0": theirs}, out)
        return out

    monkeypatch.setattr(verifying, "_run", compute)
    with pytest.raises(MismatchError, match="computes something different"):
        to_megatron(make(tmp_path / "hf"), tmp_path / "megatron", verify=Verify.LOGITS)
    nothing_but(tmp_path, "hf")
