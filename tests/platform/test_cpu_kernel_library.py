"""A library for this processor: made once, refused where others could have written it, and done
without where there is no compiler."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from milescli.platform import cpu_kernel_library

pytestmark = pytest.mark.slow  # compiles


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_kernel_library.tempfile, "tempdir", str(tmp_path))
    cpu_kernel_library.load.cache_clear()
    yield tmp_path / "cache" / "miles" / "kernels"
    cpu_kernel_library.load.cache_clear()


def test_it_is_compiled_once_and_nothing_else_is_left(cache: Path) -> None:
    path = cpu_kernel_library.compiled()
    assert path.parent == cache and [*cache.iterdir()] == [path]
    made = path.stat().st_mtime_ns
    assert cpu_kernel_library.compiled() == path and path.stat().st_mtime_ns == made
    assert cpu_kernel_library.load() is not None


def test_users_whose_files_their_group_may_write_have_them_too(cache: Path) -> None:
    before = os.umask(0o002)
    try:
        assert cpu_kernel_library.compiled().parent == cache
    finally:
        os.umask(before)


def test_a_folder_that_others_can_write_to_is_not_used(cache: Path, tmp_path: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert cpu_kernel_library.compiled().parent == tmp_path / f"miles-{os.getuid()}" / "kernels"


def test_a_cache_that_cannot_be_made_gives_way_to_temporary_files(
    cache: Path, tmp_path: Path
) -> None:
    cache.parent.parent.write_text("a file in its place")
    assert cpu_kernel_library.compiled().parent == tmp_path / f"miles-{os.getuid()}" / "kernels"


def test_without_a_compiler_there_are_none_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cpu_kernel_library.load() is None
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_named_with_its_words(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "brokencc"
    broken.write_text("#!/bin/sh\necho 'cannot do that' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert cpu_kernel_library.load() is None
    assert "brokencc failed: cannot do that" in caplog.text and not [*cache.iterdir()]


def test_a_compiler_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "nothing").write_text("no program")
    (tmp_path / "nothing").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    assert cpu_kernel_library.load() is None
    assert "Exec format error" in caplog.text


def test_another_compiler_has_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cpu_kernel_library.compiled()
    monkeypatch.setattr(cpu_kernel_library, "FLAGS", (*cpu_kernel_library.FLAGS, "-g"))
    assert cpu_kernel_library.compiled() != first


def test_a_library_that_cannot_be_loaded_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    cpu_kernel_library.compiled().write_bytes(b"cut short")
    assert cpu_kernel_library.load() is None
    assert "cannot be loaded" in caplog.text
