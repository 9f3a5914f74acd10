"""The table: what is hurt, when, and what must come of it. Pure; `trial` does it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Moment(StrEnum):
    """Of a run: the victim is hurt at a random instant within it."""

    START = "start"
    WARMUP = "warmup"
    CHECK = "check"
    """The first publish, the first checkpoint, and engine against trainer."""
    EVAL = "eval"
    ROLLOUT = "rollout"
    TRAIN = "train"
    PUBLISH = "publish"
    SAVE = "save"
    """From the step that a checkpoint is due after until it is complete."""


class Ending(StrEnum):
    """What may come of it. In each case the weights, losses and samples in the end are those of the
    run that was left alone, bit for bit."""

    HEALED = "healed"
    """The run goes on, and each loss has its replacement."""
    UNHURT = "unhurt"
    """The run goes on, and no worker was lost."""
    RESTARTED = "restarted"
    """`--supervised` starts the driver again."""
    NAMED = "named"
    """The run ends with an error of three parts that names the victim; `miles resume` does the
    rest."""
    STOPPED = "stopped"
    """It was ended by a signal; the same."""


IN_STEPS = (Moment.ROLLOUT, Moment.TRAIN, Moment.PUBLISH, Moment.SAVE)
AFTER_START = (Moment.WARMUP, Moment.CHECK, Moment.EVAL, *IN_STEPS)
ALWAYS = (Moment.START, *AFTER_START)
ON_THE_WAY = (Moment.ROLLOUT, Moment.SAVE)
"""For faults that leave the run's own processes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row."""

    name: str
    group: str
    """What `FAULTS=` chooses by, beside the name."""
    harm: str
    """SIGKILL or SIGSTOP of `victim`, or the name of another harm that `harms` knows."""
    victim: str = ""
    """A role that `victims` knows."""
    said: str = ""
    """What an error that ends the run, or the loss of the worker, must contain."""
    moments: tuple[Moment, ...] = ALWAYS
    endings: tuple[Ending, ...] = (Ending.HEALED,)
    at_start: tuple[Ending, ...] | None = None
    """Instead of `endings`, before all is there that the run starts."""
    within_s: float = 60.0
    """From the harm to the next step, or to the replacement; of NAMED and STOPPED: to the end."""
    sets: tuple[str, ...] = ()
    """Of the recipe, and so of the run that it is compared with."""
    options: tuple[str, ...] = ()
    """Of `miles launch`."""
    times: int = 1
    """How often, one after the other, of random roles of `VICTIMS_OF_MANY`."""

    def endings_at(self, moment: Moment) -> tuple[Ending, ...]:
        """What may come of it then."""
        is_start = moment is Moment.START
        return self.at_start if self.at_start is not None and is_start else self.endings


def _both(name: str, *, stop_within_s: float, **fields: object) -> list[Fault]:
    """Killed and stopped. A stopped one has `machine.silence_s`, and what was usual, more."""
    victim = str(fields.pop("victim", name))
    kill = Fault(name=f"{name}-kill", harm="SIGKILL", victim=victim, **fields)  # type: ignore[arg-type]
    stop = {**fields, "within_s": stop_within_s}
    return [kill, Fault(name=f"{name}-stop", harm="SIGSTOP", victim=victim, **stop)]  # type: ignore[arg-type]


_AT_START = (Ending.HEALED, Ending.NAMED)
_ENGINE = {
    "group": "engine",
    "said": "engine 0",
    "at_start": _AT_START,
    "within_s": 30.0,
    "stop_within_s": 75.0,
}
_RANK = {"group": "rank", "said": "trainer", "at_start": _AT_START, "stop_within_s": 90.0}
_RAY = {
    "group": "session",
    "said": "Ray",
    "options": ("--supervised",),
    "endings": (Ending.RESTARTED,),
    "at_start": (Ending.RESTARTED, Ending.NAMED),
    "within_s": 75.0,
    "stop_within_s": 90.0,
}
_REWARD = {"group": "reward", "moments": ON_THE_WAY, "within_s": 45.0}
_CHECKPOINT = {"group": "checkpoint", "moments": (Moment.ROLLOUT,), "endings": (Ending.STOPPED,)}
_MANY = {
    "group": "many",
    "moments": (Moment.ROLLOUT,),
    "sets": ("train.steps=60", "fault.max_restarts=200", "rollout.reward=chaos_rewards:paced"),
    "within_s": 90.0,
}
VICTIMS_OF_MANY = ("scheduler", "detokenizer", "server", "engine-actor", "rank")
FAULTS: tuple[Fault, ...] = (
    *_both("scheduler", **_ENGINE),
    *_both("detokenizer", **_ENGINE),
    *_both("server", **_ENGINE),
    *_both("engine-actor", **_ENGINE),
    *_both("one-of-two", victim="scheduler", sets=("engines.num=2",), **_ENGINE),
    *_both("rank", **_RANK),
    *_both("rank-copied", victim="rank", sets=("fault.copy_every=2",), **_RANK),
    *_both("rank-of-two", victim="rank", sets=("parallel.dp=2",), **_RANK),
    *_both("raylet", **_RAY),
    *_both("gcs", **_RAY),
    Fault(
        name="driver-kill",
        harm="SIGKILL",
        victim="driver",
        group="session",
        said="driver",
        options=("--supervised",),
        endings=(Ending.RESTARTED,),
        at_start=(Ending.RESTARTED, Ending.NAMED),
        within_s=75.0,
    ),
    Fault(
        name="driver-alone",
        harm="SIGKILL",
        victim="driver",
        group="session",
        said="driver",
        endings=(Ending.NAMED,),
    ),
    Fault(
        name="parent-kill",
        harm="SIGKILL",
        victim="parent",
        group="session",
        moments=AFTER_START,
        endings=(Ending.STOPPED,),
    ),
    Fault(
        name="reward-kill",
        harm="SIGKILL",
        victim="reward",
        said="reward",
        endings=(Ending.UNHURT, Ending.NAMED),
        **_REWARD,
    ),
    Fault(name="reward-raises", harm="raise", said="chaos", endings=(Ending.NAMED,), **_REWARD),
    Fault(name="reward-nan", harm="nan", said="nan", endings=(Ending.NAMED,), **_REWARD),
    Fault(
        name="reward-hangs",
        harm="hang",
        said="rewards:variety",
        sets=("rollout.reward_timeout_s=4",),
        endings=(Ending.NAMED,),
        **_REWARD,
    ),
    Fault(
        name="reward-hangs-once",
        harm="hang",
        sets=("rollout.reward_timeout_s=4", "rollout.reward_retries=1"),
        endings=(Ending.UNHURT,),
        **_REWARD,
    ),
    Fault(name="checkpoint-flip", harm="flip", said="is damaged", **_CHECKPOINT),
    Fault(name="checkpoint-torn", harm="tear", said="is damaged", **_CHECKPOINT),
    Fault(name="checkpoint-file-gone", harm="unlink", said="is damaged", **_CHECKPOINT),
    Fault(name="checkpoint-gone", harm="remove", **_CHECKPOINT),
    Fault(name="fifty-kills", harm="SIGKILL", times=50, **_MANY),
    Fault(name="ten-stops", harm="SIGSTOP", times=10, **_MANY),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A fault at a moment; equal seeds give equal trials."""

    fault: Fault
    moment: Moment
    seed: int

    def chance(self) -> random.Random:
        """For the instant, the step and the victim."""
        return random.Random(f"chaos {self.seed}")


def chosen(names: Sequence[str]) -> list[Fault]:
    """The rows of these groups or names; all, where there are none. Raises ValueError."""
    known = {fault.name for fault in FAULTS} | {fault.group for fault in FAULTS}
    if unknown := sorted(set(names) - known):
        raise ValueError(f"no fault is called {', '.join(unknown)}; there are {sorted(known)}")
    return [f for f in FAULTS if not names or f.name in names or f.group in names]


def trial(faults: Sequence[Fault], seed: int) -> Trial:
    """Seeds one after the other go through all pairs of these faults and their moments, in a random
    order that is always the same."""
    cells = [(fault, moment) for fault in faults for moment in fault.moments]
    random.Random("chaos").shuffle(cells)
    fault, moment = cells[seed % len(cells)]
    return Trial(fault=fault, moment=moment, seed=seed)
