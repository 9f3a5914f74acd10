"""Runs whose engines are updated some after the others: what is sampled and learned is what it is
without waves, also where changes alone are sent, and where an engine dies between two waves."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.chaos.oracle import OF_ENGINES
from tests.end_to_end.runs import Workplace, actor_of, learned, step_done

APART = ("engines.num=3", "engines.placement=split", "weights.channel=distributed")
APART += ("weights.verify=true", "checkpoint.every=2", "eval.num_prompts=2")
SETS = (*APART, "rollout.reward=tests.end_to_end.rewards:variety", "train.optimizer.lr=1e-3")
WAVES = ("weights.wave_share=0.4", "weights.full_every=3")


def _command(name: str, *sets: str, steps: int) -> list[str]:
    words = [word for setting in (*SETS, *sets) for word in ("--set", setting)]
    return ["launch", "--recipe", "tiny.yaml", "--name", name, "--steps", str(steps), *words]


def _reports(workplace: Workplace, name: str) -> dict[int, tuple[dict, dict]]:
    told = {step["step"]: learned(step) for step in workplace.steps(name)}
    return {
        step: ({key: value for key, value in report.items() if key not in OF_ENGINES}, rollout)
        for step, (report, rollout) in told.items()
    }


def _weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_three_waves_hand_over_the_same_weights_also_when_an_engine_dies(
    workplace: Workplace,
) -> None:
    finished = workplace.miles(*_command("at-once", steps=5))
    assert finished.code == 0, finished
    process = workplace.start(*_command("waves", *WAVES, steps=5))
    workplace.wait_for("waves", step_done(2), process)
    actor_of(process.pid, "engine-1.log").send_signal(signal.SIGKILL)
    finished = workplace.finish(process)
    assert finished.code == 0, finished
    assert _reports(workplace, "waves") == _reports(workplace, "at-once")
    weights = _weights(workplace.export("waves", step=5))
    assert weights and weights == _weights(workplace.export("at-once", step=5))
    replaced = [e["worker"] for e in workplace.events("waves") if "Replaced" in e["event"]]
    assert replaced == ["engine 1"]


def test_others_sample_while_a_wave_is_updated(workplace: Workplace) -> None:
    """And each token has the version of the engine that sampled it: a batch is never too old."""
    ahead = ("rollout.max_staleness=1", "rollout.max_response_tokens=64")
    finished = workplace.miles(*_command("ahead", *WAVES, *ahead, steps=4))
    assert finished.code == 0, finished
    done = workplace.steps("ahead")
    assert all(step["report"]["logprob_diff_max"] < 1e-3 for step in done[:1])
    assert {step["version"] for step in done} == {1, 2, 3, 4}
    assert max(step["rollout"]["staleness_max"] for step in done) <= 1
