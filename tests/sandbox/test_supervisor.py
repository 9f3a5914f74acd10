"""Tests of the end of a driver: whatever it dies of, nothing that it began goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from milescli.sandbox import jail
from milescli.sandbox.jail import reserve_users
from milescli.sandbox.local import ROOT, LocalSandbox
from milescli.sandbox.processes import descendants_of
from tests.waiting import assert_gone

DRIVER = """
import asyncio, sys
from milescli.sandbox.base import Limits
from milescli.sandbox import jail
from milescli.sandbox.jail import reserve_users
from milescli.sandbox.local import LocalSandbox
async def main():
    sandbox = LocalSandbox(sys.argv[1], bwrap=sys.argv[2])
    code = "import os, time\\nos.fork(); os.setsid if os.fork() else 0\\ntime.sleep(300)"
    runs = [asyncio.create_task(sandbox.run(code, limits=Limits(wall_s=300))) for _ in range(2)]
    await sandbox.run("pass")
    await asyncio.sleep(0.5)
    print(sandbox.pid, sandbox.folder, flush=True)
    await asyncio.gather(*runs)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_ends_takes_everything_with_it(
    sandbox: LocalSandbox, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", DRIVER, sandbox.kind, sandbox.bwrap]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as driver:
        assert driver.stdout is not None
        pid, folder = driver.stdout.readline().split()
        below = [int(pid), *descendants_of(int(pid))]
        assert len(below) > 4
        driver.send_signal(number)
        driver.wait(120)
    assert_gone(*below)
    assert not Path(folder).exists()


def test_a_supervisor_that_is_killed_takes_its_runs_with_it(sandbox: LocalSandbox) -> None:
    command = [sys.executable, "-c", DRIVER, sandbox.kind, sandbox.bwrap]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline().split()[0])
        below = descendants_of(pid)
        os.kill(pid, signal.SIGKILL)
        assert_gone(*below)
        driver.kill()  # it has begun the run once more, by another supervisor


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives each run a user of its own")
def test_sandboxes_at_once_never_share_a_user(sandbox: LocalSandbox) -> None:
    """A program that signals all processes of its user reaches none of another driver's."""
    others = [LocalSandbox(sandbox.kind, bwrap=sandbox.bwrap) for _ in range(3)]
    try:

        async def users() -> list[str]:
            runs = [one.run("import os; print(os.getuid())") for one in (sandbox, *others)]
            return [ran.stdout.strip() for ran in await asyncio.gather(*runs)]

        found = asyncio.run(users())
        assert len({*found}) == len(found) or sandbox.kind == "bubblewrap", found
    finally:
        for one in others:
            one.close()


def test_users_that_all_are_taken_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first = 200_000 + 2 * os.getpid()  # another test run on this computer reserves others
    monkeypatch.setattr(jail, "FIRST_UIDS", range(first, first + 2))
    assert [reserve_users(), reserve_users()] == [first, first + 1]
    with pytest.raises(OSError, match="2 other sandboxes"):
        reserve_users()
