"""A child process of ours, with plain Python in place of an engine: how it is asked to end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from milescli.backends.sglang.launch.process import ManagedProcess
from milescli.core.errors import WorkerDied, WorkerKilled
from tests.waiting import until

CHILD = """\
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
print("ready", flush=True)
time.sleep(60)
"""
"""Installs its handler, as an engine's server does: what starts `make test` may ignore SIGINT, and
children inherit that."""


@pytest.fixture
def sigint_blocked() -> Iterator[None]:
    """As in every actor of Ray's."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Interruptible(ManagedProcess):
    """Ends in good order on SIGINT, as an engine does."""

    stop_signal = signal.SIGINT


def test_what_asks_it_to_end_reaches_it_although_it_is_blocked_here(
    tmp_path: Path, sigint_blocked: None
) -> None:
    log = tmp_path / "child.log"
    child = Interruptible(
        name="child",
        command=[sys.executable, "-c", CHILD],
        env=dict(os.environ),
        log_path=log,
        url="",
    )
    child.start()
    assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        until(lambda: "ready" in log.read_text() or child.poll() is not None)
        assert child.poll() is None, log.read_text()
    finally:
        child.stop(timeout_s=120)
    assert child.poll() == -signal.SIGINT and "KeyboardInterrupt" in log.read_text()


class _Starting(ManagedProcess):
    """Never ready."""

    def _answers(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("ends", "kind"),
    [("os.kill(os.getpid(), 9)", WorkerKilled), ("raise SystemExit(3)", WorkerDied)],
)
def test_a_start_that_was_cut_off_is_told_from_one_that_failed(
    tmp_path: Path, ends: str, kind: type[WorkerDied]
) -> None:
    log = tmp_path / "child.log"
    log.write_text("what another wrote here\n")
    child = _Starting(
        name="child",
        command=[sys.executable, "-c", f"import os; print('begun', flush=True); {ends}"],
        env=dict(os.environ),
        log_path=log,
        url="",
    )
    child.start()
    try:
        with pytest.raises(WorkerDied) as raised:
            child.wait_ready(30)
    finally:
        child.stop(timeout_s=120)
    assert type(raised.value) is kind
    assert "begun" in raised.value.why and "another" not in raised.value.why
