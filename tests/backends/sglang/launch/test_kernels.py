"""Which kernels belong to which torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from milescli.backends.sglang.launch import kernels as module
from milescli.backends.sglang.launch.kernels import SKIP_CHECK, kernel_environment, kernels
from milescli.core.pins import pin


def planted(**versions: str):
    def version_of(package: str) -> str:
        if package.replace("-", "_") not in versions:
            raise PackageNotFoundError(package)
        return versions[package.replace("-", "_")]

    return version_of


@pytest.mark.parametrize("torch", [pin("torch"), pin("torch_oldest")])
def test_each_tested_torch_has_kernels_that_fit_it(torch: str) -> None:
    tested = pin(f"sglang_kernel_torch_{'_'.join(torch.split('.')[:2])}")
    there = kernels(planted(torch=f"{torch}+cu130", sglang_kernel=tested))
    assert there.fit and there.tested == tested
    assert not kernels(planted(torch=torch, sglang_kernel="0.1.0")).fit
    assert not kernels(planted(torch=torch)).fit


def test_a_torch_that_was_not_tested_has_none() -> None:
    there = kernels(planted(torch="2.12.1", sglang_kernel="0.4.6"))
    assert there.tested is None and not there.fit


def test_sglang_is_kept_from_refusing_what_was_tested_and_only_that(monkeypatch) -> None:
    older = planted(torch="2.11.0", sglang_kernel=pin("sglang_kernel_torch_2_11"))
    monkeypatch.setattr(module, "kernels", lambda: kernels(older))
    assert kernel_environment() == {SKIP_CHECK: "1"}
    monkeypatch.setattr(module, "kernels", lambda: kernels(planted(torch="2.11.0")))
    assert kernel_environment() == {}
