"""Reads all data of a run, whose files are here: prompts, rows, demonstrations, held-out prompts.
Bad rows are refused here; what is compared with what stands in `checks`. Called by `run_inputs` and
by the look of a dry run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.types import Trajectory
from milescli.data.example_rows import Kind, RowField
from milescli.data.examples import ExampleReport, Examples, load_examples
from milescli.data.file_prompts import FilePrompts
from milescli.data.mixed_prompts import MixedPrompts, load_mix
from milescli.data.prompt_source import LARGE_ROWS, SourceReport, load_source
from milescli.data.tokenizer import ChatTokenizer, PromptEncoder
from milescli.recipe.data import Data
from milescli.recipe.schema import Recipe, Rollout
from milescli.rollout.rewards import needs_label
from milescli.runtime.inputs.data_files import demonstrations_of, kind_of_rows, sources_of
from milescli.runtime.inputs.episode_parts import rollout_of_source

Reports = dict[str, SourceReport | ExampleReport]


@dataclass(slots=True, kw_only=True)
class RunData:
    """The data of a run, checked and tokenised."""

    prompts: FilePrompts | MixedPrompts | None = None
    """None where the run learns from rows."""
    trained: list[tuple[FilePrompts, Rollout]] = field(default_factory=list)
    """Its parts, each with how it is scored."""
    heldout: FilePrompts | None = None
    """None without `data.eval`."""
    demonstrations: list[Trajectory] = field(default_factory=list)
    """For the warm-up, the worked responses on their loss masks; empty without one."""
    rows: Examples[Any] | None = None
    """Trajectories or pairs of `data.train`; None where the run learns from what is sampled."""
    validation: list[Any] = field(default_factory=list)
    """Held-out ones; empty without `data.validation`."""
    reports: Reports = field(default_factory=dict)
    """By data field."""


def load_data(
    recipe: Recipe,
    data: Data,
    run: RunDir,
    tokenizer: PromptEncoder,
    *,
    output: Output | None,
    large_rows: int = LARGE_ROWS,
) -> RunData:
    """Read everything that `data` names: the recipe's, with local paths. Without a ChatTokenizer,
    rows and demonstrations, which have loss masks, are left out. `large_rows`: files with more are
    tokenised on demand. Raises DataError, RecipeError."""
    say = output.note if output else None
    loaded = RunData()

    def load(name: str, *, wants_label: bool | None) -> FilePrompts:
        source = load_source(
            data,
            name,  # type: ignore[arg-type]
            tokenizer=tokenizer,
            seed=recipe.run.seed,
            base_dir=run.path,
            needs_label=wants_label,
            say=say,
            large_rows=large_rows,
        )
        loaded.reports[name] = source.report
        return source.source

    if data.train is not None and isinstance(tokenizer, ChatTokenizer):
        _load_rows(recipe, data, run, tokenizer, loaded, output=output)
    if data.mix:
        loaded.prompts, loaded.reports["prompts"] = load_mix(
            data,
            tokenizer=tokenizer,
            seed=recipe.run.seed,
            base_dir=run.path,
            needs_label=lambda source: needs_label(rollout_of_source(recipe, source)),
            say=say,
        )
    elif data.train is None:
        loaded.prompts = load("prompts", wants_label=needs_label(recipe.rollout))
    if loaded.prompts is not None:
        loaded.trained = sources_of(recipe, loaded.prompts)
    if recipe.warmup.steps and isinstance(tokenizer, ChatTokenizer):
        source = load("demonstrations", wants_label=False)
        loaded.demonstrations = demonstrations_of(recipe, source, tokenizer)
    if data.eval:
        loaded.heldout = load("eval", wants_label=needs_label(recipe.rollout))
    return loaded


def _load_rows(
    recipe: Recipe,
    data: Data,
    run: RunDir,
    tokenizer: ChatTokenizer,
    loaded: RunData,
    *,
    output: Output | None,
) -> None:
    """Read the rows of `data.train` and `data.validation`."""
    kind: Kind = kind_of_rows(recipe)
    rows: dict[RowField, list[Any]] = {"train": [], "validation": []}
    for key in rows:
        if getattr(data, key) is not None:
            rows[key], report = load_examples(
                data,
                key,
                kind=kind,
                tokenizer=tokenizer,
                ends_at_turn=recipe.trains_scores,
                folder=run.path,
            )
            loaded.reports[key] = report
            if report.note and output is not None:
                output.warn(report.note)
    loaded.rows = Examples(rows["train"], seed=recipe.run.seed, shuffle=data.shuffle)
    loaded.validation = rows["validation"][: recipe.eval.num_prompts]
