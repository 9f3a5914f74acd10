"""The reward `format`: does a response look as it should? Whether it is right is another reward's
question."""

from __future__ import annotations

import re

from milescli.recipe.rewards import FormatSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards.boxed import last_boxed
from milescli.rollout.rewards.text_parts import after_thinking

_MARKED = re.compile(r"####[ \t]*\S")


class Format:
    r"""1.0 where the response has the form that `rollout.format` asks for, else 0.0.

    `answer`: an answer that is not empty stands in `\boxed{}` (boxed), behind `####` on its line
    (mark), or in either (any); none: this is not asked. `think_tags`: the response is
    `<think> ... </think>` and then the answer, each tag once (the first may be missing: a chat
    template writes it), neither part empty.
    """

    needs_label = False

    def __init__(self, settings: FormatSettings) -> None:
        self._settings = settings

    def made_for(self, rollout: Rollout) -> Format:
        """See REWARDS."""
        return Format(rollout.format)

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """See the class."""
        answer = after_thinking(response) if self._settings.think_tags else response.strip()
        return float(bool(answer) and self._has_answer(answer))

    def _has_answer(self, text: str) -> bool:
        wanted = self._settings.answer
        is_boxed = wanted in ("any", "boxed") and last_boxed(text) is not None
        is_marked = wanted in ("any", "mark") and _MARKED.search(text) is not None
        return wanted == "none" or is_boxed or is_marked


format = Format(FormatSettings())
"""The built-in reward `format`."""
