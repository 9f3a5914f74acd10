"""How far a run came, read off its directory without loading anything heavy. Never locks, never
writes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from milescli.checkpoint.run_dir import STEP_EVENTS, RunDir
from milescli.console.columns import percent


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """One line of `miles runs`."""

    name: str
    state: str
    """running, or how the last attempt ended: done, stopped, failed, killed."""
    step: int
    num_steps: int | None
    reward: float | None
    """Mean of the last step."""
    accuracy: float | None
    """Of the last evaluation."""
    changed: str
    """Local time, ISO 8601."""

    def row(self) -> list[object]:
        """For the table."""
        step = f"{self.step}/{self.num_steps}" if self.num_steps else str(self.step)
        reward = None if self.reward is None else f"{self.reward:.3f}"
        accuracy = None if self.accuracy is None else percent(self.accuracy)
        return [self.name, self.state, step, reward, accuracy, self.changed.replace("T", " ")[:16]]


def read_state(run: RunDir) -> RunState:
    """The state of a run directory."""
    step, num_steps, reward, accuracy = 0, None, None, None
    for record in run.events():
        if record.get("event") in STEP_EVENTS:
            step, num_steps = int(record["step"]), int(record["num_steps"])
            reward = record.get("rollout", {}).get("reward_mean")
        elif record.get("event") == "EvalDone":
            accuracy = record.get("accuracy")
    latest = run.events_file if run.events_file.exists() else run.path
    changed = datetime.fromtimestamp(latest.stat().st_mtime).isoformat(timespec="seconds")
    return RunState(
        name=run.name,
        state=_outcome(run),
        step=step,
        num_steps=num_steps,
        reward=reward,
        accuracy=accuracy,
        changed=changed,
    )


def _outcome(run: RunDir) -> str:
    if not run.attempts():
        return "not started"
    verdict = run.verdict()
    return str(verdict.get("outcome", "ended")) if verdict else "running"
