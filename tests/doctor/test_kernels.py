"""Of the kernels that a CUDA device needs, and of ours for a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.backends.sglang.launch.kernels import Kernels
from milescli.doctor.finding import Status
from milescli.doctor.kernels import check_kernels
from milescli.platform.machine import parse_machine

H100 = parse_machine("H100")


@pytest.mark.parametrize(
    ("installed", "tested", "status", "fix"),
    [
        ("0.4.5", "0.4.5", Status.OK, ""),
        ("0.4.7", "0.4.5", Status.FAIL, "--no-deps sglang-kernel==0.4.5"),
        (None, "0.4.5", Status.FAIL, "--no-deps sglang-kernel==0.4.5"),
        ("0.4.6", None, Status.WARN, "miles doctor"),
    ],
)
def test_kernels_of_another_torch_are_named_with_those_that_fit(
    installed: str | None, tested: str | None, status: Status, fix: str
) -> None:
    there = Kernels(torch="2.11.0", installed=installed, tested=tested)
    finding, layers = check_kernels(H100, there=there, has_engine=False)
    assert finding.status is status and fix in "".join(finding.fix)
    assert layers.status is Status.OK and "no TransformerEngine" in layers.what


def test_rocm_is_not_asked_for_them() -> None:
    (finding,) = check_kernels(parse_machine("MI300X"))
    assert finding.status is Status.SKIP


@pytest.mark.slow
def test_those_of_a_cpu_are_compiled_and_a_missing_compiler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (finding,) = check_kernels(parse_machine("cpu"))
    assert finding.status is Status.OK and str(tmp_path) in finding.what
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (finding,) = check_kernels(parse_machine("cpu"))
    assert finding.status is Status.WARN and "no C compiler" in finding.why
    assert "install gcc" in finding.fix[0]
