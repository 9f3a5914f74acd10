"""The reward `instructions` checks whether a response follows the verifiable instructions of its
prompt. Labels have the form of google/IFEval's data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from milescli.core.errors import RecipeError, nearest
from milescli.core.files import parse_json
from milescli.recipe.rewards import InstructionSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards.extraction import after_thinking
from milescli.rollout.rewards.text.instruction_checks import CHECKS, DETECTING

_IDS, _KWARGS = "instruction_id_list", "kwargs"
_EXAMPLE = f'{{"{_IDS}": ["punctuation:no_comma"], "{_KWARGS}": [{{}}]}}'
_PIP = "pip install 'miles-cli[instructions]'"


class Instructions:
    r"""Checks whether a response follows the verifiable instructions of its prompt (IFEval, arXiv
    2311.07911).

    The label is JSON: `{"instruction_id_list": [...], "kwargs": [{...}, ...]}`, with one entry of
    kwargs for each id; parameters that are null are ignored. With `rollout.instructions.score:
    all`, the reward is 1.0 if every instruction is followed (prompt-level accuracy), else 0.0; with
    `share`, it is the share of instructions that are followed (instruction-level). With
    `rollout.instructions.mode: loose`, an instruction also counts as followed if the response
    follows it without its first line, its last line, both, or without `*`; with `strict`, only the
    response as it is counts. Thinking does not count, and an empty response follows nothing.

    >>> label = '{"instruction_id_list": ["punctuation:no_comma", "startend:end_checker"]'
    >>> label += ', "kwargs": [{}, {"end_phrase": "The end."}]}'
    >>> score(label=label, response="Cats are small. The end.")
    1.0
    >>> score(label=label, response="Cats are small, and soft. The end.")
    0.0
    >>> score(label=label, response="Cats are small.", instructions={"score": "share"})
    0.5
    >>> score(label=label, response="Well,\nso it is. The end.", instructions={"mode": "loose"})
    1.0
    """

    needs_label = True
    examples = (("Hi", "no comma", _EXAMPLE), ("Hi", "a, b", _EXAMPLE), ("Hi", "", _EXAMPLE))

    def __init__(self, settings: InstructionSettings) -> None:
        self._settings = settings

    def with_settings(self, rollout: Rollout) -> Instructions:
        """Return the reward with the recipe's settings. Raises RecipeError if they are invalid."""
        return Instructions(rollout.instructions)

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """Score one response as the class describes. Raises ValueError if the label cannot be
        graded."""
        checks = _checks_of(label)
        text = after_thinking(response)
        texts = _loose_forms(text) if self._settings.mode == "loose" else [text]
        followed = [any(one.strip() and check(one) for one in texts) for check in checks]
        if self._settings.score == "share":
            return sum(followed) / len(followed)
        return float(all(followed))

    def check_label(self, label: str | None) -> str | None:
        """Return why no response can be correct, or None. Raises RecipeError if a language must be
        detected and langdetect is not installed."""
        if label is None:
            return "`instructions` needs a label"
        try:
            checks = _checks_of(label)
            for check in checks:
                check("One. Two!")
        except ModuleNotFoundError:
            raise _without_langdetect(label) from None
        except (AttributeError, TypeError, ValueError) as error:
            return str(error)
        return None


def _checks_of(label: str | None) -> list[Callable[[str], bool]]:
    """Return the checks of a label. Raises ValueError with what is wrong with the label."""
    try:
        asked = parse_json(label or "")
        ids, kwargs = asked[_IDS], asked[_KWARGS]
        assert isinstance(ids, list) and isinstance(kwargs, list) and ids
    except (AssertionError, KeyError, TypeError, ValueError):
        raise ValueError(f"it is not JSON like {_EXAMPLE}") from None
    if len(ids) != len(kwargs):
        raise ValueError(f"it has {len(ids)} instructions and {len(kwargs)} kwargs")
    return [_bound(name, given) for name, given in zip(ids, kwargs, strict=True)]


def _bound(name: object, given: object) -> Callable[[str], bool]:
    if not isinstance(name, str) or name not in CHECKS:
        guess = nearest(str(name), CHECKS)
        hint = f"; nearest is `{guess}`" if guess else ""
        raise ValueError(f"there is no instruction `{name}`{hint}")
    check = CHECKS[name]
    parameters = list(inspect.signature(check, eval_str=True).parameters.values())[1:]
    values = given if isinstance(given, Mapping) else {}
    filled: Mapping[str, Any] = {
        one.name: _of_type(one.annotation, values[one.name], f"`{one.name}` of `{name}`")
        for one in parameters
        if values.get(one.name) is not None
    }
    if missing := [one.name for one in parameters if one.name not in filled]:
        raise ValueError(f"`{name}` lacks {', '.join(missing)}")
    return lambda text: check(text, **filled)


def _of_type(kind: object, value: object, name: str) -> object:
    """Return the value of a parameter; a number that is whole as an int. Raises ValueError if it is
    of another type."""
    if kind is int:
        if isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0:
            return int(value)
        raise ValueError(f"{name} is {value!r:.60}, not a whole number")
    if kind is str:
        if isinstance(value, str):
            return value
        raise ValueError(f"{name} is {value!r:.60}, not a text")
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    raise ValueError(f"{name} is {value!r:.60}, not a list of texts")


def _loose_forms(text: str) -> list[str]:
    """Return the eight forms of IFEval's loose accuracy."""
    lines = text.split("\n")
    cut = [lines, lines[1:], lines[:-1], lines[1:-1]]
    forms = ["\n".join(part).strip() for part in cut]
    return [*forms, *(form.replace("*", "") for form in forms)]


def _without_langdetect(label: str) -> RecipeError:
    names = [name for name in DETECTING if name in label]
    return RecipeError(
        "the reward `instructions` cannot detect languages",
        why=f"a label needs {' and '.join(names)}, but langdetect is not installed",
        fix=_PIP,
    )


instructions = Instructions(InstructionSettings())
"""The built-in reward `instructions`."""
