"""What stacks of a scheduler say."""

from __future__ import annotations

import pytest

from milescli.profiling.summary import FORWARD, IDLE, RESULTS, SAMPLING, SCHEDULER, split

LOOP = "run_scheduler_process (scheduler.py);Scheduler.event_loop_normal (scheduler.py)"
STACKS = f"""\
{LOOP};Scheduler.on_idle (scheduler.py);Poller.poll (zmq/sugar/poll.py) 50
{LOOP};Scheduler.run_batch (scheduler.py);TpModelWorker.forward_batch_generation (tp_worker.py) 20
{LOOP};Scheduler.run_batch (scheduler.py);ModelRunner.sample (model_runner.py) 10
{LOOP};Scheduler.process_batch_result (scheduler.py);compute_logprobs (x.py) 10
{LOOP};Scheduler.get_next_batch_to_run (scheduler.py) 6
{LOOP} 4
_bootstrap (threading.py);wait (threading.py) 900
torn line without a count
"""


def test_only_the_loop_of_a_scheduler_counts() -> None:
    seen = split(STACKS)
    assert seen.num_samples == 100
    assert seen.shares == pytest.approx(
        {IDLE: 0.5, FORWARD: 0.2, SAMPLING: 0.1, RESULTS: 0.1, SCHEDULER: 0.1}
    )
    assert seen.functions[IDLE] == "Poller.poll (zmq/sugar/poll.py)"


def test_of_a_process_without_a_scheduler_nothing_is_told() -> None:
    assert split("_bootstrap (threading.py);wait (threading.py) 900").shares == {}
    assert split("").num_samples == 0
