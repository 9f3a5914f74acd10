"""Defines `sweep.yaml`: the settings of a recipe that `miles sweep` searches, how, and in how many
trials. Strict like recipes. Knows no searcher and no machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from milescli.core.errors import RecipeError, nearest
from milescli.recipe import layers
from milescli.recipe.keys import keys, sections
from milescli.recipe.reader import YamlNode, as_written, read
from milescli.recipe.resolved import node_yaml
from milescli.recipe.section import Positive, Rule, Section, Seed, refuse

Kind = Literal["choice", "grid", "uniform", "loguniform", "randint"]
LISTS: tuple[Kind, ...] = ("choice", "grid")
RANGES: tuple[Kind, ...] = ("uniform", "loguniform", "randint")
OWN_KEYS = ("run.name", "run.dir", "adapters")
"""Keys that a sweep sets itself, or does not support."""
MEASURES = (
    *("eval", "data.eval", "rollout.reward", "rollout.reward_model", "rollout.remote_reward"),
    *("rollout.harbor", "rollout.match", "rollout.format", "rollout.length"),
    *("rollout.instructions", "rollout.judge", "rollout.code"),
)
"""Keys and sections that say how accuracy is measured; they must be equal in all trials."""
DEFAULT_TRIALS = 10
EXAMPLE = "recipe: quickstart\\nsearch: {train.optimizer.lr: {loguniform: [1e-4, 1e-3]}}\\n"
"""Text of a new file for advice, as an argument of `printf`."""


class SweepSettings(Section):
    """Everything in sweep.yaml except `set` and `search`, whose keys are those of the recipe."""

    recipe: str
    """Name of a built-in recipe, or a .yaml file."""
    name: str | None = None
    """Name of the sweep; trials are called NAME-1, NAME-2, ... null: name of the file."""
    searcher: Literal["grid", "random", "optuna"] = "random"
    """How settings are drawn. optuna: by a tree-structured Parzen estimator, from the results so
    far."""
    scheduler: Literal["none", "asha", "pbt"] = "none"
    """asha: stop trials that are worse than others at the same step; pbt: replace the worst by
    copies of the best with changed settings."""
    trials: Positive | None = None
    """Number of trials; null: 10, or the whole grid."""
    at_once: Positive = 1
    """Number of trials that run at the same time."""
    seed: Seed = 0
    """Seed of the draws; the seed of each trial is the recipe's `run.seed`."""
    rung_steps: Positive | None = None
    """asha: step of the first comparison; pbt: steps between two exchanges. null: `eval.every`."""
    reduction: Annotated[int, Field(ge=2)] = 3
    """asha: one of so many trials goes on to the next comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One key of the recipe that the sweep searches."""

    key: str
    """Dotted name, as in `--set`."""
    kind: Kind
    values: tuple[str, ...] = ()
    """Values of a choice or grid, as in `--set`."""
    low: float = 0.0
    """Ends of a range; `randint` excludes `high`, as in Ray Tune."""
    high: float = 0.0

    @property
    def is_range(self) -> bool:
        """Return True if it has a range instead of a list of values."""
        return self.kind in RANGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Holds a sweep.yaml after reading and checking."""

    settings: SweepSettings
    fixed: tuple[str, ...]
    """Values of `set`, each KEY=VALUE as in `--set`."""
    dimensions: tuple[Dimension, ...]
    name: str
    text: str
    """Text of the whole file."""

    @property
    def num_trials(self) -> int:
        """Return how many trials the sweep has."""
        if self.settings.searcher == "grid":
            return math.prod(max(1, len(one.values)) for one in self.dimensions)
        return self.settings.trials or DEFAULT_TRIALS


def read_sweep(path: Path, *, source: str | None = None) -> Sweep:
    """Read a sweep.yaml. `source` is its name in errors. Raises RecipeError with file and line."""
    source = source or str(path)
    if not path.exists():
        raise RecipeError(
            f"there is no sweep file `{source}`",
            why="`miles sweep` reads a .yaml file with the keys `recipe` and `search`",
            fix=f"printf '{EXAMPLE}' > {source}   # an example to start from",
        )
    text = layers.read_text(path, what="sweep file")
    root = read(text, source=source)
    if not isinstance(root.value, dict) or not root.value:
        raise RecipeError(
            f"{source} is not a sweep",
            why="a sweep is a mapping with `recipe` and `search`",
            fix=f"printf '{EXAMPLE}' > {source}   # an example to start from",
        )
    nodes: dict[str, YamlNode] = root.value
    settings = _settings(nodes, source=source)
    dimensions = _dimensions(nodes, source=source)
    sweep = Sweep(
        settings=settings,
        fixed=_fixed(nodes, source=source),
        dimensions=dimensions,
        name=settings.name or path.stem,
        text=text,
    )
    _refuse(sweep, source=source)
    return sweep


def _settings(nodes: dict[str, YamlNode], *, source: str) -> SweepSettings:
    known = [*SweepSettings.model_fields, "set", "search"]
    for name, node in nodes.items():
        if name not in known:
            guess = nearest(name, known)
            raise RecipeError(
                f"there is no key `{name}` in a sweep",
                why=f"{source}:{node.line} sets it"
                + (f"; the nearest key is `{guess}`" if guess else "")
                + f"; the keys are {', '.join(known)}",
                fix=f"write `{guess or 'KEY'}` at {source}:{node.line}",
            )
    values = {name: as_written(nodes[name]) for name in SweepSettings.model_fields if name in nodes}
    try:
        return SweepSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        where = f"{source}:{nodes[name].line}" if name in nodes else source
        shown = f"`{nodes[name].text}`" if name in nodes else "missing"
        raise RecipeError(
            f"`{name}` of the sweep cannot be {shown}",
            why=f"{where}: {str(first['msg'])[:1].lower()}{str(first['msg'])[1:]}",
            fix=f"write a valid `{name}` at {where}",
        ) from None


def _mapping(nodes: dict[str, YamlNode], name: str, *, source: str) -> dict[str, YamlNode]:
    node = nodes.get(name)
    if node is None or node.value is None:
        return {}
    if not isinstance(node.value, dict):
        raise RecipeError(
            f"`{name}` of the sweep is not a mapping",
            why=f"{source}:{node.line} sets it to `{node.text[:60]}`",
            fix=f"write `{name}: {{KEY: ...}}`, with keys as `--set` takes them",
        )
    for key, child in node.value.items():
        where = f"{source}:{child.line}"
        if name == "search" and key in sections():
            raise RecipeError(
                f"the section `{key}` cannot be searched",
                why=f"{where}: a sweep searches single keys",
                fix=f"write one of its keys, such as `{_first_key(key)}`, at {where}",
            )
        if key not in keys() and not (name == "set" and key in sections()):
            raise layers.unknown_key(
                key, where=where, fix=lambda guess, where=where: f"write `{guess}` at {where}"
            )
        if key in OWN_KEYS:
            raise RecipeError(
                f"`{key}` cannot be set in a sweep",
                why=f"{where} sets it, but a sweep names its trials and has one model in each",
                fix=f"remove it from {where}; `name` names the sweep",
            )
        if name == "search" and any(key == one or key.startswith(f"{one}.") for one in MEASURES):
            raise RecipeError(
                f"`{key}` cannot be searched",
                why=f"{where}: it changes how accuracy is measured, so trials with different "
                "values could not be compared",
                fix="write it below `set`   # equal in all trials",
            )
    return node.value


def _first_key(section: str) -> str:
    return next(key for key in keys() if key.startswith(f"{section}."))


def _fixed(nodes: dict[str, YamlNode], *, source: str) -> tuple[str, ...]:
    fixed = _mapping(nodes, "set", source=source)
    searched = _mapping(nodes, "search", source=source)
    for key in fixed:
        if key in searched:
            first, second = fixed[key].line, searched[key].line
            raise RecipeError(
                f"`{key}` is both set and searched",
                why=f"{source}:{first} sets it, {source}:{second} searches it",
                fix=f"remove one of lines {first} and {second} of {source}",
            )
    return tuple(f"{key}={node_yaml(node)}" for key, node in fixed.items())


def _dimensions(nodes: dict[str, YamlNode], *, source: str) -> tuple[Dimension, ...]:
    searched = _mapping(nodes, "search", source=source)
    if not searched:
        raise RecipeError(
            "the sweep searches nothing",
            why=f"{source} has no `search`, or an empty one",
            fix=f"write `search: {{train.optimizer.lr: {{loguniform: [1e-6, 1e-5]}}}}` in {source}",
        )
    return tuple(
        _dimension(key, node, where=f"{source}:{node.line}") for key, node in searched.items()
    )


def _dimension(key: str, node: YamlNode, *, where: str) -> Dimension:
    kinds = (*LISTS, *RANGES)
    children = node.value if isinstance(node.value, dict) else {}
    kind = next(iter(children), "")
    if len(children) != 1 or kind not in kinds:
        guess = nearest(kind, kinds) if kind else None
        raise RecipeError(
            f"`{key}` has no valid search space",
            why=f"{where}: `{node.text[:60]}` must have exactly one of {', '.join(kinds)}"
            + (f"; the nearest is `{guess}`" if guess else ""),
            fix=f"write `{key}: {{{guess or 'choice'}: [...]}}` at {where}",
        )
    items = children[kind].value
    items = items if isinstance(items, list) else []
    values = tuple(map(node_yaml, items))
    ends = [float(one.value) for one in items if _is_number(one.value)]
    if not _is_valid(kind, values, ends):
        raise RecipeError(
            f"the `{kind}` of `{key}` cannot be searched",
            why=f"{where}: it takes {_WANTS[kind][0]}; it has `{children[kind].text[:60]}`",
            fix=f"write `{key}: {{{kind}: {_WANTS[kind][1]}}}` at {where}",
        )
    if kind in LISTS:
        return Dimension(key=key, kind=kind, values=values)
    return Dimension(key=key, kind=kind, low=ends[0], high=ends[1])


_WANTS: Mapping[str, tuple[str, str]] = {
    "choice": ("a list of different values", "[A, B]"),
    "grid": ("a list of different values", "[A, B]"),
    "uniform": ("two numbers, LOW < HIGH", "[0.0, 1.0]"),
    "loguniform": ("two numbers, 0 < LOW < HIGH", "[1e-6, 1e-5]"),
    "randint": ("two whole numbers, LOW < HIGH", "[1, 9]"),
}
"""Kind of dimension -> what it takes, with an example."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_valid(kind: str, values: Sequence[str], ends: Sequence[float]) -> bool:
    if kind in LISTS:
        return 0 < len(values) == len(set(values))
    if len(values) != 2 or len(ends) != 2 or not math.isfinite(ends[1] - ends[0]):
        return False
    is_whole = not any(end % 1 for end in ends)
    return ends[0] < ends[1] and {"loguniform": ends[0] > 0, "randint": is_whole}.get(kind, True)


def _refuse(sweep: Sweep, *, source: str) -> None:
    """Raise RecipeError for a combination that cannot be searched."""
    settings, num = sweep.settings, sweep.num_trials
    ranged = next((one.key for one in sweep.dimensions if one.is_range), "")
    is_grid, is_population = settings.searcher == "grid", settings.scheduler == "pbt"
    refuse(
        [
            Rule(
                is_grid and ranged,
                f"a grid cannot search the range of `{ranged}`",
                why=f"{source}: `searcher: grid` runs every combination of listed values",
                fix=[f"write `{ranged}: {{grid: [A, B, C]}}`", "write `searcher: random`"],
            ),
            Rule(
                is_grid and settings.trials not in (None, num),
                f"the grid has {num} trials, not {settings.trials}",
                why=f"{source}: `searcher: grid` runs every combination once",
                fix=["remove `trials`", "write `searcher: random`   # draws so many of them"],
            ),
            Rule(
                is_population and settings.searcher == "optuna",
                "`scheduler: pbt` cannot be combined with `searcher: optuna`",
                why=f"{source}: population-based training changes the settings of running "
                "trials, so no result belongs to the settings that a searcher drew",
                fix="write `searcher: random`",
            ),
            Rule(
                is_population and num < 2,
                "a population needs at least two trials",
                why=f"{source}: `scheduler: pbt` with {num} trial",
                fix="write `trials: 4`",
            ),
        ]
    )
