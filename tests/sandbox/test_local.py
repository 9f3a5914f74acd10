"""Tests of runs: what a program is given and gives back, each limit, and what is left behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from milescli.core.errors import MachineError, SandboxError
from milescli.sandbox.base import Limits
from milescli.sandbox.choose import sees_processes
from milescli.sandbox.local import LocalSandbox
from milescli.sandbox.processes import descendants_of
from tests.sandbox.conftest import LIMITS, Run
from tests.waiting import until, until_async

MIB = 1024**2


def test_a_program_reads_and_prints(run: Run) -> None:
    ran = run("import sys; print(int(input()) * 2); print('e', file=sys.stderr)", stdin="21\n")
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.ended) == ("42\n", "e\n", 0, "exited")


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(7)", 7), ("1/0", 1), ("import os; os._exit(3)", 3)]
)
def test_an_exit_code_comes_back(run: Run, code: str, exit_code: int) -> None:
    assert run(code).exit_code == exit_code


def test_a_program_knows_its_file_and_may_begin_with_a_byte_order_mark(run: Run) -> None:
    code = "\ufeffimport os; print(os.path.dirname(__file__) == os.getcwd(), __name__)"
    assert run(code).stdout == "True __main__\n"


def test_a_traceback_shows_the_programs_own_lines_alone(run: Run) -> None:
    told = run("def f():\n    return 1 / 0\nf()").stderr
    assert told.count("File ") == 2 and "return 1 / 0" in told and "<sandbox>" not in told


def test_text_and_files_come_as_they_are(run: Run) -> None:
    code = "print(open('a/b.bin', 'rb').read()); import mine; print(mine.x, 'ü☃')"
    ran = run(code, files={"a/b.bin": b"\x00\xff", "mine.py": "x = 5"})
    assert ran.stdout == "b'\\x00\\xff'\n5 ü☃\n"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_a_file_outside_of_the_folder_is_refused(run: Run, name: str) -> None:
    with pytest.raises(ValueError, match="this is not a valid file name"):
        run("pass", files={name: "x"})


def test_each_run_begins_with_an_empty_folder(run: Run) -> None:
    assert "left" in run("import os; open('left', 'w'); print(os.listdir())").stdout
    assert run("import os; print(os.listdir())").stdout == "['main.py']\n"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(99)",
        "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)",
        "10 ** 10 ** 9",
    ],
)
def test_what_takes_too_long_is_ended(run: Run, code: str) -> None:
    ran = run(code, wall_s=0.5)
    assert (ran.ended, ran.exit_code, ran.why) == ("timeout", None, "wall time")


def test_the_time_of_several_processes_counts_together(run: Run) -> None:
    ran = run("import os\nfor _ in range(3): os.fork()\nwhile True: pass", cpu_s=0.5)
    assert (ran.ended, ran.why) == ("timeout", "CPU time")


def test_one_process_is_refused_too_much_memory(run: Run) -> None:
    assert "MemoryError" in run("x = bytearray(4 << 30)").stderr


def test_the_memory_of_many_processes_counts_together(run: Run) -> None:
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(100 << 20)
        held[::4096] = b"x" * len(held[::4096])
        time.sleep(60)
time.sleep(60)
"""
    assert run(code).ended == "memory"


@pytest.mark.skipif(
    os.geteuid() == 0 and not sees_processes(),
    reason="without CAP_SYS_PTRACE what other users' processes share is not seen",
)
def test_memory_that_processes_share_counts_once(run: Run) -> None:
    code = """
import os, time
held = bytearray(80 << 20)
held[::4096] = b"x" * len(held[::4096])
for _ in range(6):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
while True:
    try: os.wait()
    except ChildProcessError: break
print("done")
"""
    assert run(code).stdout == "done\n"


def test_endless_output_costs_no_more_than_its_bound(run: Run) -> None:
    ran = run("while True: print('x' * 10_000)", output_bytes=100_000)
    assert ran.ended == "output" and ran.is_truncated and len(ran.stdout) == 100_000


def test_a_fork_bomb_is_held_by_the_number_of_processes(run: Run) -> None:
    code = """
import os, time
for made in range(100):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError:
        break
print(made + 1, flush=True)
"""
    ran = run(code, num_processes=10)
    assert ran.ended in ("exited", "killed") and int(ran.stdout or 0) <= 10


def test_a_fork_bomb_that_never_stops_is_ended(run: Run) -> None:
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(code, wall_s=1.0).ended in ("timeout", "killed")
    assert run("print(1)").stdout == "1\n"


@pytest.mark.parametrize(
    "code",
    [
        "n = 0\nwhile True:\n    open(f'f{n}', 'wb').write(b'x' * (1 << 20)); n += 1",
        "open('f', 'wb').write(b'x' * (64 << 20))",
        "n = 0\nwhile True:\n    open(f'f{n}', 'w').close(); n += 1",
    ],
    ids=["many", "large", "empty"],
)
def test_a_full_folder_ends_the_program_or_is_refused_to_it(run: Run, code: str) -> None:
    ran = run(code, file_bytes=8 * MIB)
    assert ran.exit_code != 0 and ran.ended in ("killed", "exited")


def test_a_caller_that_is_cancelled_ends_its_run(sandbox: LocalSandbox) -> None:
    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await sandbox.run("import time; time.sleep(99)", limits=Limits(wall_s=99))
        assert (await sandbox.run("print(1)")).stdout == "1\n"

    asyncio.run(cancelled())
    # nobody waits for the end of what was cancelled
    until(lambda: not descendants_of(sandbox.pid or 0))
    _nothing_runs(sandbox)


@pytest.mark.parametrize("code", ["pass", "import os; os.fork(); open('f', 'w')"])
def test_many_runs_leave_no_process_file_or_descriptor(sandbox: LocalSandbox, code: str) -> None:
    async def many(count: int) -> None:
        await asyncio.gather(*(sandbox.run(code, limits=LIMITS) for _ in range(count)))

    def opened() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (sandbox.pid, "self")]

    asyncio.run(many(20))
    before = opened()
    asyncio.run(many(40))
    _nothing_runs(sandbox)
    assert all(now <= then for now, then in zip(opened(), before, strict=True))
    assert not [name for name in os.listdir(sandbox.folder or "/") if name.isdigit()]


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')",
        "import os\nos.mkdir('d'); open('d/f', 'w'); os.mkdir('d/e', 0)",
        "import os; os.symlink('/usr', 'link'); os.symlink('..', 'up')",
    ],
    ids=["deep", "closed", "links"],
)
def test_whatever_was_written_is_removed(sandbox: LocalSandbox, run: Run, code: str) -> None:
    assert run(code).ended == "exited"
    assert not [name for name in os.listdir(sandbox.folder or "/") if name.isdigit()]
    assert Path("/usr/bin").is_dir()


def test_a_run_whose_supervisor_dies_is_begun_once_more_by_another(sandbox: LocalSandbox) -> None:
    async def killed() -> None:
        running = asyncio.create_task(sandbox.run("import time; time.sleep(3600)"))
        await until_async(lambda: sandbox.pid and descendants_of(sandbox.pid))
        first = sandbox.pid
        os.kill(first, 9)
        await until_async(lambda: sandbox.pid not in (None, first) and descendants_of(sandbox.pid))
        os.kill(sandbox.pid, 9)
        with pytest.raises(SandboxError, match="supervisor"):
            await running
        assert (await sandbox.run("print(1)")).stdout == "1\n"

    asyncio.run(killed())


def test_a_folder_of_packages_can_be_imported_and_not_written(
    sandbox: LocalSandbox, tmp_path: Path
) -> None:
    folder = tmp_path / "packages"  # a test's own is closed to others
    folder.mkdir(mode=0o755)
    (folder / "extra.py").write_text("x = 5")
    other = LocalSandbox(sandbox.kind, bwrap=sandbox.bwrap, packages=str(folder))
    code = "import extra; print(extra.x, flush=True); open(extra.__file__, 'w').write('y')"
    try:
        ran = asyncio.run(other.run(code))
    except MachineError as error:
        pytest.skip(str(error))  # no mounts, so that what is below a closed folder is so, too
    finally:
        other.close()
    assert ran.stdout == "5\n" and "Error" in ran.stderr
    assert (folder / "extra.py").read_text() == "x = 5"


def _nothing_runs(sandbox: LocalSandbox) -> None:
    assert sandbox.pid is not None and descendants_of(sandbox.pid) == []
