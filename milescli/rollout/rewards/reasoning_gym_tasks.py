"""The reward `reasoning_gym`: answers to tasks of the reasoning-gym library, scored by its own
scorers. Called in the reward's worker processes: some scorers run programs that a response
contains, or search."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from milescli.core.errors import RecipeError, nearest
from milescli.core.files import parse_json
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards.extraction import (
    after_thinking,
    last_boxed,
    marked_answers,
    tagged_answer,
)

_EXAMPLE = '{"dataset": "leg_counting", "entry": {"answer": "4", "metadata": {}}}'
_FORM = '{"dataset": "leg_counting", "entry": {"question": ..., "answer": ..., "metadata": ...}}'


class ReasoningGym:
    r"""Returns the score that reasoning-gym's scorer of the task gives, from 0.0 to 1.0.

    The label is JSON: `{"dataset": NAME, "entry": {...}}`, with the entry as
    `reasoning_gym.create_dataset` yields it. The answer is the content of the last
    `<answer>...</answer>`, else of the last `\boxed{}`, else the text after the last `####`, else
    the whole response. Text before `</think>` does not count."""

    needs_label = True
    examples = (("Legs?", "<answer>4</answer>", _EXAMPLE), ("Legs?", "", _EXAMPLE))
    runs_apart = True

    def with_settings(self, rollout: Rollout) -> ReasoningGym:
        """Return the reward with the recipe's settings. Raises RecipeError if they are invalid, or
        if the library is not installed."""
        if find_spec("reasoning_gym") is None:
            raise RecipeError(
                "the reward `reasoning_gym` is not available",
                why="the library reasoning-gym, which computes the score, is not installed",
                fix="pip install 'miles-cli[reasoning-gym]'",
            )
        return self

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """Score one response as the class describes."""
        if label is None:
            raise ValueError("`reasoning_gym` needs a label")
        name, entry = _task(label)
        return float(_scorer(name)(answer=_answer(response), entry=entry))

    def check_label(self, label: str | None) -> str | None:
        """Return why no response can be correct (the entry's own answer scores nothing), or
        None."""
        if label is None:
            return "`reasoning_gym` needs a label"
        try:
            name, entry = _task(label)
        except ValueError as error:
            return str(error)
        answer = entry["answer"]
        if answer is not None and _scorer(name)(answer=answer, entry=entry) <= 0:
            return f"the scorer of `{name}` gives its own answer nothing"
        return None


def _answer(response: str) -> str:
    text = after_thinking(response).strip()
    for found in (tagged_answer(text), last_boxed(text), next(marked_answers(text), None)):
        if found is not None:
            return found
    return text


@lru_cache(maxsize=1024)
def _task(label: str) -> tuple[str, dict[str, Any]]:
    """Return the data set's name and the entry of a label. Raises ValueError with what is wrong
    with the label."""
    from reasoning_gym.factory import DATASETS

    try:
        asked = parse_json(label)
        name, entry = str(asked["dataset"]), dict(asked["entry"])
        entry["answer"], entry["metadata"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"it is not JSON like {_FORM}") from None
    if name not in DATASETS:
        guess = nearest(name, DATASETS)
        hint = f"; nearest is `{guess}`" if guess else ""
        raise ValueError(f"reasoning-gym has no data set `{name}`{hint}")
    return name, _with_tuples(name, entry)


def _with_tuples(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry in the form in which its own answer scores more: JSON has no tuples, and
    some scorers compare with tuples."""
    scorer, with_tuples = _scorer(name), {**entry, "metadata": _tupled(entry["metadata"])}
    try:
        scores = [scorer(answer=entry["answer"], entry=one) for one in (entry, with_tuples)]
    except Exception:  # a scorer that cannot do with tuples
        return entry
    return with_tuples if scores[1] > scores[0] else entry


def _tupled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tupled(inner) for key, inner in value.items()}
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


@lru_cache(maxsize=128)
def _scorer(name: str) -> Any:
    """Return the scorer of a data set. Raises ValueError if it has none of its own."""
    from reasoning_gym import get_score_answer_fn

    try:
        return get_score_answer_fn(name)
    except AssertionError as error:
        raise ValueError(f"the data set `{name}` cannot be scored separately: {error}") from None


reasoning_gym = ReasoningGym()
"""The built-in reward `reasoning_gym`."""
