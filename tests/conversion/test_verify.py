"""Logits decide whether a conversion is complete."""

from __future__ import annotations

import subprocess
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


def test_a_lack_of_memory_leaves_the_conversion_and_says_that_nothing_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "available_memory", lambda: 1000)
    done = to_megatron(make(tmp_path / "hf"), tmp_path / "planned", verify=None)
    assert "do not fit into" in done.proof.logits and (tmp_path / "planned").is_dir()
    monkeypatch.undo()

    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        last = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=last)

    monkeypatch.setattr(verifying.subprocess, "run", fail)
    done = to_megatron(make(tmp_path / "other"), tmp_path / "tried", verify=None)
    assert "can't allocate memory" in done.proof.logits and (tmp_path / "tried").is_dir()
