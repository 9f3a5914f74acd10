"""Training on what is done first, killed and resumed, with evaluations beside it on engines of
their own."""

from __future__ import annotations

import json
import signal

from tests.end_to_end.runs import (
    Workplace,
    learned,
    processes_of_run,
    step_done,
    wait_until_gone,
)

SETS = (
    "rollout.order=done",
    "rollout.max_staleness=2",
    "rollout.on_update=abort",
    "engines.placement=split",
    "eval.engines=own",
    "eval.every=3",
    "train.steps=20",
    "checkpoint.every=99",
)


def test_a_run_that_takes_what_is_done_first_is_killed_and_takes_no_sample_twice(
    workplace: Workplace,
) -> None:
    sets = [word for pair in SETS for word in ("--set", pair)]
    process = workplace.start("launch", "--recipe", "tiny.yaml", "--name", "flight", *sets)
    workplace.wait_for("flight", step_done(5), process)
    ours = processes_of_run(process.pid)
    process.send_signal(signal.SIGKILL)
    workplace.finish(process)
    assert not wait_until_gone(ours)
    killed = workplace.steps("flight")
    assert {event["flow"]["waiting_groups"] >= 0 for event in killed} == {True}
    assert {event["publish"]["num_running"] >= 0 for event in killed} == {True}

    resumed = workplace.miles("resume", "flight")
    assert resumed.code == 0, resumed
    assert "used: they are not sampled again" in resumed.err
    after = {event["step"]: event for event in workplace.steps("flight")[len(killed) :]}
    assert sorted(after) == list(range(1, 21))
    for event in killed[:-1]:  # what the last one took may not have been written
        assert learned(after[event["step"]]) == learned(event), f"step {event['step']}"
    final = {event["step"]: event for event in killed} | after
    assert max(event["rollout"]["staleness_max"] for event in final.values()) <= 2
    seeds = [
        json.loads(line)["seed"]
        for step in after
        for line in (workplace.run("flight") / "rollouts" / f"step_{step}.jsonl").open()
    ]
    assert len(seeds) == len(set(seeds)) == 20 * 16, "a sample was trained on twice"
    evaluated = [e["step"] for e in workplace.events("flight") if e["event"] == "EvalDone"]
    assert {0, 3, 18, 20} <= set(evaluated)
