"""Makes those checks of `checks` that take no time: they read the recipe, names and headers, and
import nothing heavy. `launch` makes them before it starts any process, the dry run before it
plans."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from milescli.checkpoint.run_dir import refuse_existing
from milescli.core.errors import RecipeError, nearest
from milescli.data.chat_template import AUTO, configured_template
from milescli.models import ModelFacts
from milescli.plan.collectors import refuse_pinned
from milescli.recipe.alerts import KEY_ON, MOMENTS
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.machine import RunSettings
from milescli.runtime.inputs.auxiliary_models import is_checkpoint
from milescli.runtime.inputs.checks import Check, CheckSubject, Outcome, run_checks
from milescli.runtime.inputs.data_files import require_files
from milescli.runtime.inputs.model_facts import refuse_settings_of_scratch, require_model
from milescli.runtime.inputs.plugins import check_plugins_quickly
from milescli.runtime.inputs.token_checks import require_template
from milescli.runtime.recording.tracking import require_tracking
from milescli.trackers.alerts import require_target

STALLED = "stalled"
"""The diagnosis that `stall` of `run.alerts_on` stands for."""


def run_quick_checks(
    loaded: LoadedRecipe, each: Mapping[str, LoadedRecipe], *, facts: ModelFacts
) -> Iterator[Outcome]:
    """Make the quick checks of a run, or of each of its adapters, and yield the outcomes. `facts`:
    of its model."""
    for one in each.values() or [loaded]:
        yield from run_checks(RECIPE_CHECKS, CheckSubject(recipe=one.recipe))
    yield from run_checks(
        RUN_CHECKS, CheckSubject(recipe=loaded.recipe, loaded=loaded, facts=facts)
    )


def _files(subject: CheckSubject) -> None:
    require_files(subject.recipe.data)


def _plugins(subject: CheckSubject) -> None:
    check_plugins_quickly(subject.recipe)


def _collectors(subject: CheckSubject) -> None:
    refuse_pinned(subject.recipe)


def _template(subject: CheckSubject) -> None:
    configured_template(subject.recipe.data.chat_template)
    path = subject.recipe.model.path
    folder = Path(path).expanduser() if path is not None else None
    is_here = folder is not None and folder.is_dir() and not is_checkpoint(folder)
    if is_here and subject.recipe.data.chat_template == AUTO:
        require_template(folder)


def _weights(subject: CheckSubject) -> None:
    require_model(subject.recipe.model)


def _settings(subject: CheckSubject) -> None:
    assert subject.loaded is not None, "the check needs the origins"
    assert subject.facts is not None, "the check needs the facts"
    refuse_settings_of_scratch(subject.loaded, subject.facts)


def _trackers(subject: CheckSubject) -> None:
    require_tracking(subject.recipe.run)


def _alerts(subject: CheckSubject) -> Iterator[str]:
    yield from require_alerts(subject.recipe.run)


def _name(subject: CheckSubject) -> None:
    run = subject.recipe.run
    if run.name is not None:
        refuse_existing(Path(run.dir).expanduser().absolute(), run.name)


def require_alerts(settings: RunSettings) -> Iterator[str]:
    """Check before anything starts that alerts can be sent. Yields doubts. Raises RecipeError."""
    if unknown := [name for name in settings.alerts_on if name not in MOMENTS]:
        _require_diagnoses(unknown)
    for entry in dict.fromkeys(settings.alerts):
        yield from require_target(entry, os.environ)


def _require_diagnoses(names: list[str]) -> None:
    from milescli.insight.diagnoses import HINTS, NAMES  # which import numpy

    known = [*MOMENTS, *(name for name in NAMES if name not in (*HINTS, STALLED))]
    for name in names:
        if name in known:
            continue
        guess = "stall" if name == STALLED else nearest(name, known) or "failure"
        raise RecipeError(
            f"`{KEY_ON}` cannot be `{name}`",
            why="that diagnosis is a hint, and no event tells of it"
            if name in HINTS
            else f"it lists {', '.join(MOMENTS)}, and diagnoses of docs/verdict.md",
            fix=f"--set {KEY_ON}=[{guess}]",
        )


RECIPE_CHECKS = (
    Check(
        name="files",
        compares="the data files that the recipe names with those that are here",
        run=_files,
    ),
    Check(
        name="plug-ins",
        compares="names and parameters of plug-ins with those that a run calls",
        run=_plugins,
    ),
    Check(
        name="collectors",
        compares="`machine.collectors` with what is given the tokens of samples",
        run=_collectors,
    ),
    Check(
        name="chat template",
        compares="the files of the tokenizer with `data.chat_template`",
        run=_template,
    ),
)
"""Quick checks that are made for each adapter of a run."""
RUN_CHECKS = (
    Check(
        name="weights",
        compares="the files of the model with what their headers say",
        run=_weights,
    ),
    Check(
        name="settings",
        compares="the learning rate of the recipe with the model that it was made for",
        run=_settings,
        needs=("facts", "loaded"),
    ),
    Check(
        name="trackers",
        compares="trackers with the packages, keys and ports that they need",
        run=_trackers,
    ),
    Check(
        name="alerts",
        compares="`run.alerts` with the variables and commands that it names",
        run=_alerts,
    ),
    Check(
        name="name",
        compares="the name of the run with those that are taken",
        run=_name,
    ),
)
"""Quick checks that are made once for a run."""
