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
KILL, STOP = "SIGKILL", "SIGSTOP"
ON_THE_WAY = (Moment.ROLLOUT, Moment.SAVE)
"""For faults that leave the run's own processes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """Another harm, while the first is dealt with."""

    harm: str
    victim: str
    after_s: tuple[float, float] = (0.0, 1.0)
    """From the first harm, between these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row."""

    name: str
    group: str
    """What `FAULTS=` chooses by, beside the name."""
    harm: str
    """A signal to `victim`, the wish of a reward, a harm of checkpoints, or the name of
    one that `machine` knows."""
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
    second: Second | None = None
    nodes: int = 1
    """On which the run is: two are a cluster in small, of its own."""
    compared: str = "all"
    """`all`: weights, figures and samples are those of the calm run, bit for bit; `told`: what was
    told is, and the weights, as the disk did not take the rest; `close`: the layout is another
    since, so that figures are near it alone."""
    times: int = 1
    """How often, one after the other, of random roles of `VICTIMS_OF_MANY`."""

    def endings_at(self, moment: Moment) -> tuple[Ending, ...]:
        """What may come of it then."""
        is_start = moment is Moment.START
        return self.at_start if self.at_start is not None and is_start else self.endings


def _both(name: str, *, stop_within_s: float, **fields: object) -> list[Fault]:
    """Killed and stopped. A stopped one has `machine.silence_s`, and what was usual, more."""
    victim = str(fields.pop("victim", name))
    stop_sets = fields.pop("stop_sets", ())
    kill = Fault(name=f"{name}-kill", harm="SIGKILL", victim=victim, **fields)  # type: ignore[arg-type]
    stop = {**fields, "within_s": stop_within_s}
    if stop_sets:
        stop["sets"] = stop_sets
    return [kill, Fault(name=f"{name}-stop", harm="SIGSTOP", victim=victim, **stop)]  # type: ignore[arg-type]


def _twice(
    name: str,
    first: tuple[str, str],
    second: tuple[str, str],
    after_s: tuple[float, float],
    **fields: object,
) -> Fault:
    """Two harms, (signal, victim) each: the second so many seconds after the first."""
    return Fault(
        name=name,
        group="two",
        harm=first[0],
        victim=first[1],
        second=Second(harm=second[0], victim=second[1], after_s=after_s),
        moments=(Moment.CHECK, Moment.EVAL, *IN_STEPS),
        within_s=120.0,
        **fields,  # type: ignore[arg-type]
    )


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
_OTHERWISE = {
    "group": "signals",
    "moments": IN_STEPS,
    "endings": (Ending.HEALED, Ending.UNHURT),
}
"""An engine that is asked to end does what it was asked before: a short run is over first."""
_BESIDE = {
    "group": "beside",
    "moments": (Moment.CHECK, Moment.ROLLOUT, Moment.PUBLISH),
    "endings": (Ending.UNHURT,),
    "stop_within_s": 60.0,
}
_OF_RAYLET = {**_BESIDE, "endings": (Ending.UNHURT, Ending.NAMED), "said": "Ray"}
"""Without them Ray's raylet ends itself."""
_ENVIRONMENT = {
    "group": "environment",
    "moments": (Moment.EVAL, *ON_THE_WAY),
    "endings": (Ending.UNHURT,),
    "sets": (
        "rollout.agent=environment",
        "rollout.environment.name=tests.chaos.environments:Paced",
        "rollout.environment.processes=2",
        "rollout.environment.step_timeout_s=4",
        "rollout.max_turn_tokens=4",
    ),
    "stop_within_s": 45.0,
}
_DISK = {
    "group": "disk",
    "said": "No space left",
    "moments": AFTER_START,
    "compared": "told",
}
_OOM = {"group": "memory", "harm": "oom", "moments": IN_STEPS}
_CLOCK = {"group": "clock", "endings": (Ending.UNHURT,)}
_NODES = {
    "group": "nodes",
    "nodes": 2,
    "moments": IN_STEPS,
    "sets": ("parallel.dp=2", "engines.num=2", "machine.silence_s=30"),
}
_NODE_LOST = {
    "within_s": 240.0,
    "said": "node 10.77.0.2",
    "endings": (Ending.RESTARTED,),
    "compared": "close",
}
_DRIVER_TOO = {"endings": (Ending.NAMED,), "said": "driver"}
_CHECKPOINT = {"group": "checkpoint", "moments": (Moment.ROLLOUT,), "endings": (Ending.STOPPED,)}
_LONGER = ("train.steps=24", "rollout.reward=chaos_rewards:paced")
"""Steps go on without it: there must be some until it is missed."""
_MANY = {
    "group": "many",
    "moments": (Moment.ROLLOUT,),
    "sets": ("train.steps=60", "fault.max_restarts=200", "rollout.reward=chaos_rewards:paced"),
    "within_s": 90.0,
}
VICTIMS_OF_MANY = ("scheduler", "detokenizer", "server", "engine-actor", "rank")
FAULTS: tuple[Fault, ...] = (
    *_both("scheduler", **_ENGINE),
    *_both("detokenizer", **_ENGINE, stop_sets=_LONGER),
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
    *_both("environment", **_ENVIRONMENT),
    Fault(name="server-term", harm="SIGTERM", victim="server", **_OTHERWISE, said="engine 0"),
    Fault(name="scheduler-int", harm="SIGINT", victim="scheduler", **_OTHERWISE, said="engine 0"),
    Fault(name="rank-segv", harm="SIGSEGV", victim="rank", **_OTHERWISE, said="trainer"),
    Fault(name="rank-term", harm="SIGTERM", victim="rank", **_OTHERWISE, said="trainer"),
    *_both("watchdog", **_BESIDE),
    *_both("warm-process", **_BESIDE),
    *_both("ray-agent", **_OF_RAYLET),
    *_both("ray-environments", **_OF_RAYLET),
    _twice("engine-and-rank", (KILL, "scheduler"), (KILL, "rank"), (0.0, 1.0)),
    _twice("rank-in-healing", (KILL, "detokenizer"), (KILL, "rank"), (1.0, 5.0)),
    _twice("engine-in-healing", (KILL, "rank"), (KILL, "scheduler"), (0.5, 6.0)),
    _twice("engine-held-rank-killed", (STOP, "scheduler"), (KILL, "rank"), (0.5, 6.0)),
    _twice("rank-held-engine-killed", (STOP, "rank"), (KILL, "server"), (0.5, 6.0)),
    _twice("engine-warm-gone", (KILL, "warm-process"), (KILL, "scheduler"), (0.2, 2.0)),
    _twice("engine-warm-held", (STOP, "warm-process"), (KILL, "scheduler"), (0.2, 2.0)),
    _twice("driver-in-healing", (KILL, "scheduler"), (KILL, "driver"), (0.3, 5.0), **_DRIVER_TOO),
    _twice("driver-in-rank-healing", (KILL, "rank"), (KILL, "driver"), (0.3, 8.0), **_DRIVER_TOO),
    _twice("driver-and-watchdog", (KILL, "watchdog"), (KILL, "driver"), (0.0, 4.0), **_DRIVER_TOO),
    Fault(
        name="disk-full-awhile",
        harm="fill-awhile",
        endings=(Ending.UNHURT, Ending.NAMED),  # named where it is full at the last save
        **_DISK,
    ),
    Fault(name="disk-full", harm="fill", endings=(Ending.NAMED,), **_DISK),
    Fault(
        name="shm-full-awhile",
        harm="fill-shm",
        group="shm",
        moments=IN_STEPS,
        endings=(Ending.UNHURT, Ending.HEALED),
    ),
    Fault(name="oom-rank", victim="rank", said="trainer", **_OOM),
    Fault(name="oom-engine", victim="scheduler", said="engine 0", **_OOM),
    Fault(name="clock-forward", harm="clock-forward", **_CLOCK),
    Fault(name="clock-back", harm="clock-back", **_CLOCK),
    Fault(name="node-ends", harm="end-node", **_NODE_LOST, **_NODES),
    Fault(name="network-cut", harm="cut", **_NODE_LOST, **_NODES),
    Fault(
        name="network-cut-awhile",
        harm="cut-awhile",
        endings=(Ending.UNHURT, Ending.HEALED),
        **_NODES,
    ),
    Fault(name="network-slow", harm="slow", endings=(Ending.UNHURT,), **_NODES),
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
