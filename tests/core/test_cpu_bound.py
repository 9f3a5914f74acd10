"""Foreign code that does not end is stopped by its CPU time, wherever it runs."""

from __future__ import annotations

import os
import threading
import time

import pytest

from milescli.core.cpu_bound import TooSlow, cpu_bound


def endless() -> None:
    while True:
        sum(range(100))


def busy(seconds: float) -> None:
    """Use so much CPU time of this thread."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


@pytest.mark.parametrize("catches", [False, True])
def test_what_does_not_end_is_stopped_even_where_it_catches_errors(catches: bool) -> None:
    with pytest.raises(TooSlow), cpu_bound(0.2):
        try:
            endless()
        except ValueError:
            if not catches:
                raise


def test_another_thread_is_stopped_and_this_one_goes_on() -> None:
    ended = list[str]()

    def work() -> None:
        try:
            with cpu_bound(0.2):
                endless()
        except TooSlow:
            ended.append("too slow")

    thread = threading.Thread(target=work)
    thread.start()
    with cpu_bound(1000):
        thread.join()
    assert ended == ["too slow"]


def test_waiting_is_no_work_and_what_ends_in_time_is_left_alone() -> None:
    other = threading.Thread(target=busy, args=[1.0])
    with cpu_bound(0.3):
        other.start()
        other.join()
    busy(0.8)  # beyond the bound, but behind the block


def test_a_fork_bounds_its_own_work() -> None:
    """It has none of the threads, and what its parent was running is none of its own."""
    with cpu_bound(1000):
        if (pid := os.fork()) == 0:
            try:
                with cpu_bound(0.2):
                    endless()
            except TooSlow:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
