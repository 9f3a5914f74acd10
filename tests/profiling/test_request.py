"""A request for a profile: left by one process, taken by another, and taken back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import MilesError
from milescli.profiling import request as files
from milescli.profiling.request import Progress, Request, State


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run's directory."""
    return RunDir(tmp_path)


def _ask(run: RunDir, **wanted: object) -> Request:
    made = Request(number=files.next_number(run), **{"steps": 2, **wanted})  # type: ignore[arg-type]
    files.write_request(run, made)
    return made


def test_what_is_asked_is_what_is_taken_and_only_once(run: RunDir) -> None:
    assert not files.is_pending(run) and files.take_request(run) is None
    made = _ask(run, ranks=[0, 3], engines=[1], memory=True)
    assert files.is_pending(run)
    assert run.profiles_dir.stat().st_mode & 0o077 == 0
    assert files.request_file(run).stat().st_mode & 0o077 == 0
    assert files.take_request(run) == made
    assert not files.is_pending(run) and files.take_request(run) is None
    assert files.next_number(run) == made.number + 1


def test_two_requests_do_not_wait_at_once(run: RunDir) -> None:
    first = _ask(run)
    with pytest.raises(MilesError, match="another profile") as refused:
        _ask(run)
    assert str(files.request_file(run)) in refused.value.fixes[1]
    assert files.next_number(run) == first.number + 1, "no folder of the refused one is left"
    assert files.take_request(run) == first


def test_a_file_system_without_hard_links_does(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "no hard links")

    monkeypatch.setattr(os, "link", refused)
    made = _ask(run)
    with pytest.raises(MilesError, match="another profile"):
        _ask(run)
    assert files.take_request(run) == made


def test_one_that_was_taken_back_is_not_begun_and_no_other_is_harmed(run: RunDir) -> None:
    first = _ask(run)
    files.cancel_request(run, first.number)
    assert not files.is_pending(run) and files.is_cancelled(run, first.number)
    second = _ask(run)
    files.cancel_request(run, first.number)
    assert files.take_request(run) == second
    files.cancel_request(run, second.number)
    assert files.is_cancelled(run, second.number), "the driver looks at it between two steps"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"number": 1, "steps": 0}',
        '{"number": 1, "steps": 100000}',
        '{"number": 9, "steps": 2}',
        '{"number": 1, "steps": 2, "command": "rm"}',
        '{"number": "../..", "steps": 2}',
        '{"number": 1, "steps": "two"}',
        '{"number": 1, "steps": 2, "ranks": ["0"]}',
        '{"number": 1, "steps": 2, "ranks": 0}',
    ],
)
def test_what_is_no_request_is_thrown_away(run: RunDir, text: str) -> None:
    files.folder_of(run, 1).mkdir(parents=True)
    files.request_file(run).write_text(text)
    assert files.take_request(run) is None and not files.is_pending(run)


def test_a_link_is_never_followed(run: RunDir, tmp_path: Path) -> None:
    made = _ask(run)
    elsewhere = tmp_path / "elsewhere"
    files.request_file(run).rename(elsewhere)
    files.request_file(run).symlink_to(elsewhere)
    assert files.take_request(run) is None and not files.is_pending(run)
    assert elsewhere.exists() and made.number == 1


def test_a_state_is_read_as_it_was_written(run: RunDir) -> None:
    made = _ask(run)
    assert files.read_state(run, made.number) is None
    state = State(
        progress=Progress.DONE,
        first_step=3,
        last_step=4,
        seconds=1.5,
        ranks={"0": {"file": "rank_0.json.gz", "seconds": 1.5}},
        engines={"0": {"error": "py-spy: Permission denied"}},
    )
    files.write_state(run, made.number, state)
    assert files.read_state(run, made.number) == state
