"""Two models on the same prompts: what must be alike, and what the paired test says. Called by
`miles eval --against`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from milescli.core.errors import DataError
from milescli.rollout.chance import Difference, compared, in_words
from milescli.runtime.eval_records import SetResult, folder_of, results_of

REWARD = "rollout.reward"
Settings = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of one set."""

    set: str
    a: str
    b: str
    """As the user named them, with their steps where they are checkpoints of runs."""
    a_accuracy: float
    b_accuracy: float
    difference: Difference
    sentence: str
    other_settings: Sequence[str]
    """Recipe keys in which the two were asked otherwise."""


def comparisons(ones: Sequence[SetResult], others: Sequence[SetResult]) -> list[Comparison]:
    """Each of `ones` with the one of `others` that is of the same set; both of the same prompts."""
    by_set = {other.set: other for other in others}
    return [_compared(one, by_set[one.set]) for one in ones]


def _compared(one: SetResult, other: SetResult) -> Comparison:
    assert one.data_sha256 == other.data_sha256, (one.set, "other prompts")
    difference = compared(one.rewards, other.rewards)
    steps = one.model == other.model or one.step or other.step
    a, b = (f"{x.model} at step {x.step}" if steps else x.model for x in (one, other))
    keys = sorted({*one.settings, *other.settings})
    return Comparison(
        set=one.set,
        a=a,
        b=b,
        a_accuracy=one.accuracy,
        b_accuracy=other.accuracy,
        difference=difference,
        sentence=in_words(difference, a=a, b=b),
        other_settings=[key for key in keys if one.settings.get(key) != other.settings.get(key)],
    )


def require_same(other: SetResult, name: str, data_sha256: str, settings: Settings) -> None:
    """Raises DataError where the other model was asked something else, or scored otherwise."""
    if other.data_sha256 != data_sha256:
        raise DataError(
            f"`{other.model}` was asked other prompts than are in `{name}`",
            why="a paired test compares prompt by prompt, and texts, labels, order or number "
            f"differ from those of {other.path}",
            fix=[
                f"--data {name}=FILE   # the prompts that it was asked",
                f"--num-prompts {other.num_prompts}",
            ],
        )
    theirs, mine = other.settings.get(REWARD), settings.get(REWARD)
    if theirs != mine:
        raise DataError(
            f"`{other.model}` was scored by another reward on `{name}`",
            why=f"`{REWARD}` was {theirs} and is {mine}",
            fix=f"--set {REWARD}={theirs}",
        )


def kept_result(folder: Path, name: str, *, step: int | None) -> SetResult | None:
    """What `miles eval` kept below `folder` of the set `name`, of one step or the newest; None
    where there is nothing."""
    kept = results_of(folder / "eval", folder_of(name))
    found = [result for result in kept if step is None or result.step == step]
    return found[-1] if found else None
