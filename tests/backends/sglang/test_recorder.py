"""py-spy looks at a process of Python, as at the scheduler of an engine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from milescli.backends.sglang.server import PER_SECOND, Recorder
from milescli.profiling.samples import LOOP, read_stacks, split

PROGRAM = f"""
import time
def {LOOP}_of_a_test():
    print("begun", flush=True)
    on_idle()
def on_idle():
    time.sleep(60)
{LOOP}_of_a_test()
"""
RECORD_S = 4.0


@pytest.mark.timeout(240)
def test_a_record_has_the_stacks_of_a_process_and_is_the_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "engine_0.stacks.txt"
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as looked_at:
        try:
            assert looked_at.stdout is not None and looked_at.stdout.readline() == b"begun\n"
            recorder = Recorder(looked_at.pid, file)
            time.sleep(RECORD_S)
            error = recorder.stop()
            assert looked_at.poll() is None, "it is looked at from outside"
        finally:
            looked_at.kill()
    if error is not None and "ermission" in error:
        pytest.skip(f"this system does not let py-spy look: {error}")
    assert error is None
    assert file.stat().st_mode & 0o077 == 0
    assert 0 < sum(count for _, count in read_stacks(file.read_text())) <= 30 * PER_SECOND
    assert split(file.read_text()).shares == {"idle": 1.0}


@pytest.mark.timeout(240)
def test_of_a_process_that_is_gone_the_error_is_told(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(timeout=120)
    recorder = Recorder(gone.pid, tmp_path / "engine_0.stacks.txt")
    time.sleep(RECORD_S)
    said = recorder.stop()
    assert said is not None and said.startswith("py-spy: ")
