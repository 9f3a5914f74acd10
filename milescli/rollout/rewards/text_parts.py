"""Parts of a response that rewards look at: what its tags enclose, its thinking, its answer. Pure
text; used by the rewards that compare text."""

from __future__ import annotations

import json

from milescli.rollout.rewards.boxed import last_boxed

OPENS_THINKING, ENDS_THINKING = "<think>", "</think>"
_OPENS_ANSWER, _ENDS_ANSWER = "<answer>", "</answer>"


def part_of(response: str, where: str) -> str | None:
    r"""The part that is compared; None where it is not there. `where`: whole, tags (the last
    `<answer>...</answer>`), boxed (the last `\boxed{}`) or last_line (the last with a word)."""
    if where == "tags":
        before, closes, _ = response.rpartition(_ENDS_ANSWER)
        _, opens, inner = before.rpartition(_OPENS_ANSWER)
        return inner.strip() if closes and opens else None
    if where == "boxed":
        return last_boxed(response)
    if where == "last_line":
        return response.strip().rpartition("\n")[2].strip()
    return response.strip()


def after_thinking(response: str) -> str | None:
    """What follows the one `</think>`; None where thinking is not closed once, is opened elsewhere
    than at the start, or is empty."""
    text = response.strip()
    thought, closes, rest = text.partition(ENDS_THINKING)
    thought = thought.removeprefix(OPENS_THINKING)
    is_once = ENDS_THINKING not in rest and OPENS_THINKING not in thought + rest
    return rest.strip() if closes and is_once and thought.strip() else None


def texts_of(label: str) -> list[str]:
    """The texts that are right: those of a JSON list of texts, or the label itself."""
    if label.lstrip().startswith("["):
        try:
            listed = json.loads(label)
        except ValueError:
            return [label]
        if listed and all(isinstance(text, str) for text in listed):
            return listed
    return [label]
