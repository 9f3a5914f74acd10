"""torch's shm manager dies, or is stopped: the process that needs it ends with the reason."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SHARER = """
import os, sys, time
import torch, torch.multiprocessing as mp
from milescli.backends.sglang import shm_manager
from milescli.backends.sglang.shm_manager import SHM_MANAGER
shm_manager.HELD_S = 0.3
mp.set_sharing_strategy("file_system")
SHM_MANAGER.require()
tensor = torch.zeros(8).share_memory_()
SHM_MANAGER.find()
SHM_MANAGER.require()
pid = next(shm_manager.children(os.getpid()))
os.kill(pid, int(sys.argv[1]))
while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZT":
    time.sleep(0.01)
print("hurt", flush=True)
SHM_MANAGER.require()
print("went on", flush=True)
"""


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_whose_shm_manager_is_gone_ends_with_the_reason(harm: signal.Signals) -> None:
    sharer = subprocess.Popen(
        [sys.executable, "-c", SHARER, str(int(harm))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = sharer.communicate(timeout=400)
    finally:
        for left in Path("/dev/shm").glob(f"torch_{sharer.pid}_*"):  # a watchdog does it in runs
            left.unlink()
    assert out == "hurt\n", err
    assert sharer.returncode == -signal.SIGKILL
    how = "has died" if harm is signal.SIGKILL else "is stopped"
    assert how in err and "no memory can be shared" in err
