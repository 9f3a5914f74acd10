"""Runs whose engines are updated some after the others: what is sampled and learned is what it is
without waves, also where changes alone are sent, and where an engine dies between two waves."""

from __future__ import annotations

import signal
import subprocess

from tests.chaos.oracle import OF_ENGINES
from tests.end_to_end.runs import Workplace, actor_of, learned, step_done

APART = ("engines.num=3", "engines.placement=split", "weights.channel=distributed")
APART += ("weights.verify=true", "eval.num_prompts=2")
SETS = (*APART, "rollout.reward=tests.end_to_end.rewards:variety", "train.optimizer.lr=1e-3")
WAVES = ("weights.wave_share=0.4", "weights.full_every=3")


def _command(name: str, *sets: str, steps: int = 500) -> list[str]:
    words = [word for setting in (*SETS, *sets) for word in ("--set", setting)]
    return ["launch", "--recipe", "tiny.yaml", "--name", name, "--steps", str(steps), *words]


def _reports(workplace: Workplace, name: str, *, steps: int) -> dict[int, tuple[dict, dict]]:
    told = {step["step"]: learned(step) for step in workplace.steps(name)}
    return {
        step: ({key: value for key, value in report.items() if key not in OF_ENGINES}, rollout)
        for step, (report, rollout) in told.items()
        if step <= steps
    }


def _stop(workplace: Workplace, process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    finished = workplace.finish(process)
    assert finished.code == 75, finished


def test_three_waves_hand_over_the_same_weights_also_when_an_engine_dies(
    workplace: Workplace,
) -> None:
    process = workplace.start(*_command("waves", *WAVES))
    workplace.wait_for("waves", step_done(4), process)
    engine = actor_of(process.pid, "engine-1-server.log", mark="sglang::scheduler")
    engine.send_signal(signal.SIGKILL)
    workplace.wait_for("waves", lambda event: event["event"] == "WorkerReplaced", process)
    past = max(step["step"] for step in workplace.steps("waves")) + 4  # all are updated again
    workplace.wait_for("waves", step_done(past), process)
    _stop(workplace, process)
    process = workplace.start(*_command("at-once"))
    workplace.wait_for("at-once", step_done(past), process)
    _stop(workplace, process)
    ours, theirs = (_reports(workplace, name, steps=past) for name in ("waves", "at-once"))
    assert len(ours) == past and ours == theirs
    replaced = [e["worker"] for e in workplace.events("waves") if "Replaced" in e["event"]]
    assert replaced == ["engine 1"]


def test_others_sample_while_a_wave_is_updated(workplace: Workplace) -> None:
    """And each token has the version of the engine that sampled it: a batch is never too old."""
    ahead = ("rollout.max_staleness=1", "rollout.max_response_tokens=64")
    finished = workplace.miles(*_command("ahead", *WAVES, *ahead, steps=4))
    assert finished.code == 0, finished
    done = workplace.steps("ahead")
    assert all(step["report"]["logprob_diff_max"] < 1e-3 for step in done[:1])
    assert {step["version"] for step in done} == {2, 3, 4, 5}
    assert max(step["rollout"]["staleness_max"] for step in done) <= 1
