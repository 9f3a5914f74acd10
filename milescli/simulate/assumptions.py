"""Defines the assumptions of a simulation: numbers with their sources, which `--assume KEY=VALUE`
sets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from milescli.core.errors import RecipeError, nearest
from milescli.plan.time import MEAN_SHARE
from milescli.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Holds numbers that neither recipe nor machine determine. The metadata of a field holds the
    source of its default, and its lowest and highest value."""

    response_tokens: float = field(
        default=0.0, metadata={"from": f"{MEAN_SHARE:.0%} of the longest response", "least": 1}
    )
    """Mean tokens of a response."""
    response_sigma: float = field(default=1.0, metadata={"from": "a guess: a long tail", "most": 4})
    """Standard deviation of the logarithm of a response's tokens; 0: all are equal."""
    prompt_tokens: float = field(
        default=0.0, metadata={"from": f"{MEAN_SHARE:.0%} of the longest prompt", "least": 1}
    )
    """Mean tokens of a prompt."""
    kept_share: float = field(
        default=1.0, metadata={"from": "no group is refused", "least": 0.01, "most": 1}
    )
    """Share of the groups that `rollout.filter` keeps."""
    turns: float = field(default=1, metadata={"from": "one answer", "least": 1, "most": 1000})
    """Turns of an episode, which share its tokens evenly."""
    tool_s: float = field(default=0.0, metadata={"from": "no tools"})
    """Mean seconds of a tool or an environment between two turns."""
    tool_sigma_s: float = field(default=0.0, metadata={"from": "no tools"})
    """Standard deviation of those seconds, which are normal and at least 0."""
    decode_factor: float = field(default=1.0, metadata={"from": "rooflines", "least": 1e-3})
    """Factor on the predicted seconds of decoding and prefill."""
    train_factor: float = field(default=1.0, metadata={"from": "rooflines", "least": 1e-3})
    """Factor on the predicted seconds of training."""
    publish_factor: float = field(default=1.0, metadata={"from": "rooflines", "least": 1e-3})
    """Factor on the predicted seconds of a publication."""
    mtbf_hours: float = field(
        default=50_000,
        metadata={
            "from": "arXiv 2407.21783, section 3.3.4: 419 failures in 54 days of 16,384 GPUs"
        },
    )
    """Mean hours between failures of one device; 0: none fails."""
    restart_s: float = field(default=120.0, metadata={"from": "a guess"})
    """Seconds until an engine or the trainer's ranks are replaced."""
    straggler_share: float = field(default=0.0, metadata={"from": "none is slow", "most": 1})
    """Share of the engines that are slow."""
    straggler_factor: float = field(default=1.5, metadata={"from": "a guess", "least": 1})
    """Factor on their seconds."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Name -> source of a value other than the default."""

    def rows(self) -> list[tuple[str, float, str]]:
        """Return (name, value, source) of each number."""
        return [
            (name, getattr(self, name), self.origins.get(name, str(one.metadata["from"])))
            for name, one in KEYS.items()
        ]

    def with_values(self, origin: str, **values: float) -> Assumptions:
        """Return a copy with other values, whose source is `origin`; values that were set before
        stay."""
        fresh = {name: value for name, value in values.items() if name not in self.origins}
        return replace(self, **fresh, origins={**dict.fromkeys(fresh, origin), **self.origins})


KEYS = {one.name: one for one in fields(Assumptions) if one.name != "origins"}
"""Name -> field of each figure."""


def assumptions(recipe: Recipe, texts: Iterable[str]) -> Assumptions:
    """Return the assumptions for a recipe, with those of `--assume`. Raises RecipeError."""
    given = dict(_parse_assumption(text) for text in texts)
    longest = recipe.rollout.max_response_tokens
    if given.get("response_tokens", 0) > longest:
        raise RecipeError(
            f"`--assume response_tokens={given['response_tokens']:g}` cannot be the mean",
            why=f"rollout.max_response_tokens cuts responses at {longest} tokens",
            fix=f"--assume response_tokens={longest * MEAN_SHARE:g}",
        )
    defaults = Assumptions(
        response_tokens=max(1.0, longest * MEAN_SHARE),
        prompt_tokens=max(1.0, (recipe.longest_sequence - longest) * MEAN_SHARE),
    )
    return defaults.with_values("--assume", **given)


def find_warnings(recipe: Recipe, assume: Assumptions) -> list[str]:
    """Return warnings about defaults that probably do not fit the recipe."""
    rollout, warnings = recipe.rollout, []
    if rollout.agent != "single_turn" and "turns" not in assume.origins:
        warnings.append(
            f"agent `{rollout.agent}` is simulated as one turn without tools: set "
            "`--assume turns=` and `--assume tool_s=`"
        )
    if rollout.filter != "none" and "kept_share" not in assume.origins:
        warnings.append(
            f"filter `{rollout.filter}` is simulated as if it kept every group: set "
            "`--assume kept_share=`"
        )
    if rollout.over_sampling > 1 and rollout.selection != "first":
        warnings.append(f"selection `{rollout.selection}` is simulated as `first`")
    return warnings


_ENDS = {"least": 0.0, "most": 1e9}


def _parse_assumption(text: str) -> tuple[str, float]:
    name, equals, number = text.partition("=")
    if name not in KEYS or not equals:
        guess = nearest(name, KEYS) or "response_tokens"
        shown = number if _possible_value(guess, number) is not None else _example(guess)
        raise RecipeError(
            f"`--assume {text}` is not an assumption",
            why=f"it has the form KEY=VALUE, and the keys are {', '.join(KEYS)}",
            fix=f"--assume {guess}={shown}",
        )
    value = _possible_value(name, number)
    if value is None:
        least, most = _bounds(name)
        raise RecipeError(
            f"`--assume {text}` has an impossible value",
            why=f"{name} must be a number from {least:g} to {most:g}",
            fix=f"--assume {name}={_example(name)}",
        )
    return name, value


def _bounds(name: str) -> tuple[float, float]:
    least, most = (KEYS[name].metadata.get(end, value) for end, value in _ENDS.items())
    return least, most


def _possible_value(name: str, number: str) -> float | None:
    """Return the number, or None if it is none within the bounds."""
    least, most = _bounds(name)
    try:
        value = float(number)
    except ValueError:
        return None
    return value if least <= value <= most else None


def _example(name: str) -> str:
    least, most = _bounds(name)
    return f"{KEYS[name].default or least or min(1.0, most):g}"
