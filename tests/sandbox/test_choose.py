"""Tests of which sandbox is taken, and of what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import MachineError
from milescli.sandbox import choose as module
from milescli.sandbox import landlock
from milescli.sandbox.choose import choose, fault_of, kinds


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_chosen", {})


def test_the_first_kind_that_works_is_taken_with_its_reason() -> None:
    works = [kind for kind in kinds() if fault_of(kind) is None]
    if not works:
        pytest.skip("no kind works on this machine")
    choice = choose()
    try:
        assert choice.sandbox.kind == works[0] and f"{works[0]} works" in choice.reason
        assert choose() is choice
    finally:
        choice.sandbox.close()


def test_without_bubblewrap_landlock_is_taken_and_says_what_would_be_better(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if fault := fault_of("landlock"):
        pytest.skip(str(fault))
    monkeypatch.setenv("PATH", str(tmp_path))
    choice = choose()
    choice.sandbox.close()
    assert choice.sandbox.kind == "landlock" and "bubblewrap is not installed" in choice.reason
    assert "apt-get install -y bubblewrap" in choice.fixes[0]


def test_a_bubblewrap_that_fails_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho --disable-userns: no permission >&2; exit 1\n")
    bwrap.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fault = fault_of("bubblewrap")
    assert fault is not None and any("docker run" in fix for fix in fault.fixes)


def test_where_none_works_it_is_refused_with_what_mends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(landlock, "version", lambda: 0)
    with pytest.raises(MachineError, match="cannot isolate") as error:
        choose()
    assert "bubblewrap" in error.value.fixes[0] and "no Landlock" in error.value.why
    assert any("rollout.code.url" in fix for fix in error.value.fixes)


def test_an_old_bubblewrap_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho usage\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fault = fault_of("bubblewrap")
    assert fault is not None and "too old" in fault.what


def test_packages_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="packages"):
        choose(packages=str(tmp_path / "none"))
