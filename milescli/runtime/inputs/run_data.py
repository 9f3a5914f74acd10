"""Reads all data of a run, whose files are local: prompts, rows, demonstrations, held-out prompts.
Refuses bad rows; `checks` makes the comparisons. Called by `run_inputs` and by
`input_check_process`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import DataError
from milescli.core.types import Trajectory
from milescli.core.units import MIB, format_bytes
from milescli.data.example_rows import Kind, RowField
from milescli.data.examples import ExampleReport, Examples, load_examples, read_examples
from milescli.data.file_prompts import FilePrompts
from milescli.data.images import PromptImages
from milescli.data.mixed_prompts import MixedPrompts, load_mix
from milescli.data.prompt_encoder import PromptEncoder
from milescli.data.prompt_source import SourceReport, load_source, parse_file_name
from milescli.data.tasks import TASK_PREFIX
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.data import Data
from milescli.recipe.data_files import FIELDS, is_hub, names_in
from milescli.recipe.distill import hints_at
from milescli.recipe.schema import Recipe, Rollout
from milescli.rollout.rewards import needs_label
from milescli.runtime.inputs.data_files import (
    TASKS,
    demonstrations_of,
    kind_of_rows,
    rollout_of_source,
    sources_of,
)

Reports = dict[str, SourceReport | ExampleReport]


@dataclass(slots=True, kw_only=True)
class RunData:
    """Holds the data of a run, checked and tokenised."""

    prompts: FilePrompts | MixedPrompts | None = None
    """None if the run learns from rows."""
    trained: list[tuple[FilePrompts, Rollout]] = field(default_factory=list)
    """Its parts, each with how it is scored."""
    heldout: FilePrompts | None = None
    """None without `data.eval`."""
    demonstrations: list[Trajectory] = field(default_factory=list)
    """For the warm-up, the worked responses on their loss masks; empty without one."""
    rows: Examples[Any] | None = None
    """Trajectories or pairs of `data.train`; None if the run learns from samples."""
    validation: list[Any] = field(default_factory=list)
    """Held-out rows; empty without `data.validation`."""
    reports: Reports = field(default_factory=dict)
    """Reports by data field."""


def load_data(
    recipe: Recipe,
    data: Data,
    run: RunDir,
    tokenizer: PromptEncoder,
    *,
    output: Output | None,
    large_rows: int | None = None,
) -> RunData:
    """Read everything that `data` names: the recipe's, with local paths. Without a ChatTokenizer no
    loss masks are made: rows are only read, and demonstrations are left out. `large_rows`: files
    with more rows are tokenised on demand. Raises DataError, RecipeError."""
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
            report_progress=say,
            large_rows=large_rows,
        )
        loaded.reports[name] = source.report
        return source.source

    if data.train is not None and isinstance(tokenizer, ChatTokenizer):
        _load_rows(recipe, data, run, tokenizer, loaded, output=output)
    elif data.train is not None:
        _read_rows(recipe, data, run, images=tokenizer.images)
    if data.mix:
        loaded.prompts, loaded.reports["prompts"] = load_mix(
            data,
            tokenizer=tokenizer,
            seed=recipe.run.seed,
            base_dir=run.path,
            needs_label=lambda source: prompts_need_label(
                recipe, rollout_of_source(recipe, source), source=source.called
            ),
            report_progress=say,
        )
    elif data.train is None:
        wants_label = prompts_need_label(recipe, recipe.rollout)
        loaded.prompts = load("prompts", wants_label=wants_label)
        require_hinted(recipe, loaded.reports["prompts"])
    if loaded.prompts is not None:
        loaded.trained = sources_of(recipe, loaded.prompts)
    if recipe.warmup.steps and isinstance(tokenizer, ChatTokenizer):
        source = load("demonstrations", wants_label=False)
        loaded.demonstrations = demonstrations_of(recipe, source, tokenizer)
    if data.eval:
        loaded.heldout = load("eval", wants_label=needs_label(recipe.rollout))
    return loaded


def prompts_need_label(recipe: Recipe, rollout: Rollout, *, source: str | None = None) -> bool:
    """Return True if the reward, or a teacher's hint, uses the labels of the prompts that are
    trained on. `source`: their name in the mix."""
    return hints_at(recipe, "label", source=source) or needs_label(rollout)


def require_hinted(recipe: Recipe, report: SourceReport) -> None:
    """Raise DataError if a teacher's hint contains the prompts' worked responses, and none has
    one."""
    if hints_at(recipe, "demonstration") and not report.num_demonstrations:
        raise DataError(
            "no prompt has a demonstration for the teacher's hint",
            why=f"`hint` in train.distill.teachers names {{demonstration}}, and no row of "
            f"{recipe.data.prompts} has a worked response",
            fix="miles data check FILE   # shows what each row has; {label} is the other field",
        )


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
                folder=run.path,
            )
            if recipe.joins_rows and len(rows[key]) == 1:
                raise DataError(
                    f"`train.preference.loss=kto` needs several rows in `data.{key}`",
                    why=f"one row of {report.path} can be learned from, and the KL from the "
                    "reference is estimated on the prompt of one row and the response of another",
                    fix=f"--set data.{key}=FILE.jsonl   # with more rows",
                )
            loaded.reports[key] = report
            if report.note and output is not None:
                output.warn(report.note)
    loaded.rows = Examples(rows["train"], seed=recipe.run.seed, shuffle=data.shuffle)
    loaded.validation = rows["validation"][: recipe.eval.num_prompts]


def _read_rows(recipe: Recipe, data: Data, run: RunDir, *, images: PromptImages | None) -> None:
    """Read the rows of `data.train` and `data.validation` without tokens. `images`: how the model
    sees them. Raises DataError."""
    keys: tuple[RowField, ...] = ("train", "validation")
    for key in keys:
        for name in names_in(getattr(data, key)):
            file, kind = parse_file_name(name, key=f"data.{key}"), kind_of_rows(recipe)
            read_examples(
                file, data=data, key=key, kind=kind, folder=run.path, images=images
            ).require_good()


MAX_BYTES = 64 * MIB
"""If the files together are larger, the dry run leaves them to `miles data check` and to the
launch."""


def why_unread(data: Data) -> str:
    """Return why data cannot be read within seconds and without the hub; empty if it can."""
    values = [getattr(data, field) for field in FIELDS]
    named = [name for value in values for name in names_in(value)]
    named += [name for source in data.mix or [] for name in names_in(source.path)]
    size_bytes = 0
    for text in named:
        name = parse_file_name(text, key="data").name
        if is_hub(name):
            return f"{name} is on the hub; `miles data check` downloads and reads it"
        if name.removeprefix(TASK_PREFIX).removesuffix("-heldout") in TASKS:
            return f"{name} is generated by another package, which the launch calls"
        path = Path(name).expanduser()
        size_bytes += path.stat().st_size if path.is_file() else 0
    if size_bytes > MAX_BYTES:
        return f"{format_bytes(size_bytes)} take long to read; use `miles data check`"
    return ""
