"""Runs `miles WORDS` by `python -m milescli.sweep.trial_main PID WORDS`; its run is saved and
stopped when process PID, the sweep, ends. A program of its own, because a process that has threads
may not run Python between fork and exec."""

import runpy
import signal
import sys

from milescli.workers.guard import end_with_parent

if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), by=signal.SIGTERM)
    sys.argv = ["miles", *sys.argv[2:]]
    runpy.run_module("milescli", run_name="__main__")
