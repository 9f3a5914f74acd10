"""Defines the sets of prompts that `miles eval` measures: the run's own held-out prompts, files of
the user, and published benchmarks, which are downloaded from the hub or read from a local copy.
They are prepared before any device is taken."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from milescli.backends.hub.datasets import CARD, choose_files, fetch_data, join_files
from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import DataError, RecipeError, nearest
from milescli.core.files import read_regular_text
from milescli.core.types import Prompt
from milescli.data.file_prompts import FilePrompts
from milescli.data.mixed_prompts import MixedPrompts
from milescli.data.prompt_encoder import PromptEncoder
from milescli.data.prompt_source import SourceReport
from milescli.data.tables import Table, check_file
from milescli.recipe.data_files import parse_data_file, parse_hub
from milescli.recipe.layers import from_command_line
from milescli.recipe.schema import Recipe
from milescli.rollout.evaluation.benchmarks import BENCHMARKS, COMMON_SETTINGS, Row
from milescli.rollout.evaluation.statistics import powers_of_two
from milescli.runtime.evaluation.results import (
    HELDOUT,
    SetResult,
    folder_of,
    require_same_prompts,
    settings_of,
    sha256_of_prompts,
)
from milescli.runtime.inputs.data_files import require_files, with_foreign_tasks, with_local_files
from milescli.runtime.inputs.run_inputs import load_heldout

if TYPE_CHECKING:
    from milescli.recipe.load import LoadedRecipe


DOMAIN = "domain"
"""Column that is used by default."""
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)=(?P<file>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Holds the user's options of an evaluation, besides the model."""

    data: Sequence[str] = ()
    """NAME=FILE or FILE; empty: the recipe's own held-out prompts."""
    ks: Sequence[int] = ()
    """The k of pass@k and maj@k; empty: 1, 2, 4, ... up to the samples of a prompt."""
    domain: str | None = None
    """Column; None: `domain`, if the file has one."""
    sets: Sequence[str] = ()
    """Texts of --set."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Options that are short forms of a --set."""
    against: Sequence[SetResult] = ()
    """Results of another model, which must have been evaluated on the same prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """Describes a set of prompts, and how they are sampled and scored."""

    name: str
    recipe: Recipe
    """Recipe of the model, with the set's `data.eval`, `eval` and reward."""
    ks: Sequence[int]
    domain: str | None
    copy: str | None = None
    """Local copy of a benchmark; None: the hub's."""
    against: SetResult | None = None
    """Results of another model."""

    @property
    def folder(self) -> str:
        """Return the name of the set's folder in `eval/`."""
        return folder_of(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSet:
    """Holds a set with its prompts loaded."""

    set: EvalSet
    prompts: list[Prompt]
    domains: Mapping[int, str]
    """Domains by the index of a prompt; empty without a column."""


def set_names(eval_options: EvalOptions) -> list[str]:
    """Return the names of all sets that the options name."""
    return [name for name, _ in map(_named, eval_options.data)] or [HELDOUT]


def sets_of(recipe: Recipe, eval_options: EvalOptions) -> list[EvalSet]:
    """Return the sets that the options name, without opening a file. Raises DataError or
    RecipeError if two have the same name, a file has the name of the recipe's own prompts, a file
    does not exist, or a k is larger than the number of samples."""
    named = [_named(text) for text in eval_options.data]
    if not named:
        named = [(HELDOUT, None)]
    names = [name for name, _ in named]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(
            f"two sets have the name `{twice}`",
            why="miles stores the results of each set under its name",
            fix=[
                f"--data {shlex.quote(f'{twice}-{at}={file}')}"
                for at, (name, file) in enumerate(named, 1)
                if name == twice
            ],
        )
    if own := next((file for name, file in named if name == HELDOUT and file is not None), None):
        raise DataError(
            f"a set from a file cannot have the name `{HELDOUT}`",
            why=f"`{HELDOUT}` is the recipe's own `data.eval`, whose results would be overwritten",
            fix=f"--data {shlex.quote(f'mine={own}')}",
        )
    return [_set_of(recipe, name, file, eval_options) for name, file in named]


def sets_of_model(
    model: str, eval_options: EvalOptions, *, environ: Mapping[str, str]
) -> tuple[LoadedRecipe, list[EvalSet]]:
    """Return the recipe of a model that no run made, and the sets to evaluate. Raises
    MilesError."""
    from milescli.recipe.load import load_model

    loaded = load_model(
        model,
        prompts=", ".join(eval_options.data) or HELDOUT,
        sets=eval_options.sets,
        flags=eval_options.flags,
        environ=environ,
        cwd=Path.cwd(),
        home=Path.home(),
    )
    return loaded, sets_of(loaded.recipe, eval_options)


def _named(text: str) -> tuple[str, str | None]:
    """Return (name, file) of NAME=FILE; (name, None) of the name of a benchmark; (stem, file) of
    FILE."""
    if text in BENCHMARKS and not Path(text).is_file():
        return text, None
    match = _NAMED.fullmatch(text)
    if match is not None and not Path(text).expanduser().exists():
        return match["name"], match["file"]
    last = re.split(r"[/:]", parse_data_file(text, key="data.eval").name.rstrip("/"))[-1]
    return Path(last).stem or HELDOUT, text


def _set_of(recipe: Recipe, name: str, file: str | None, eval_options: EvalOptions) -> EvalSet:
    if name in BENCHMARKS:
        recipe = with_benchmark_settings(
            recipe, name, sets=eval_options.sets, flags=eval_options.flags
        )
        if file is not None and not Path(file).expanduser().exists():
            raise DataError(
                f"there is no copy of `{name}` at {file}",
                why="there is no such file or folder",
                fix=f"--data {name}   # downloads it from the hub",
            )
    elif file is not None:
        recipe = recipe.model_copy(
            update={"data": recipe.data.model_copy(update={"eval": _absolute(file)})}
        )
    if recipe.data.eval is None:
        raise DataError(
            "there are no prompts to evaluate on",
            why="the recipe does not set `data.eval`",
            fix="--data NAME=FILE.jsonl",
        )
    require_files(recipe.data.model_copy(update=_ONLY_EVAL))
    count = recipe.eval.samples_per_prompt
    if count > 1 and not recipe.eval.temperature:
        raise RecipeError(
            f"{count} samples of each prompt would be identical",
            why="`eval.temperature` is 0, so each token is the likeliest one",
            fix=["--temperature 0.7", "--samples 1"],
        )
    if eval_options.ks and max(eval_options.ks) > count:
        raise RecipeError(
            f"pass@{max(eval_options.ks)} cannot be computed",
            why=f"{count} sample{'s'[: count > 1]} of each prompt will be taken",
            fix=[f"--samples {max(eval_options.ks)} --temperature 0.7", f"-k {count}"],
        )
    ks = sorted(set(eval_options.ks)) or powers_of_two(count)
    other = next((result for result in eval_options.against if result.set == name), None)
    if eval_options.against and other is None:
        raise DataError(
            f"`{eval_options.against[0].model}` was not evaluated on the set `{name}`",
            why=f"it has results for {', '.join(result.set for result in eval_options.against)}",
            fix=f"--data {eval_options.against[0].set}=FILE",
        )
    return EvalSet(
        name=name, recipe=recipe, ks=ks, domain=eval_options.domain, copy=file, against=other
    )


_ONLY_EVAL = dict.fromkeys(("prompts", "mix", "demonstrations", "train", "validation"))
"""Fields of `data` that an evaluation alone does not read."""


def _absolute(file: str) -> str:
    """Return a path as an absolute path; return any other text unchanged."""
    if file.startswith(("hf:", "task:")):
        return file
    return str(Path(file).expanduser().absolute())


def reward_model_recipe(sets: Sequence[EvalSet]) -> Recipe:
    """Return the recipe of the first set that a reward model scores; if there is none, that of the
    first set."""
    asking = (one.recipe for one in sets if one.recipe.uses_reward_model)
    return next(asking, sets[0].recipe)


class SetInputs(Protocol):
    """Lists the parts of RunInputs with which a set is read."""

    @property
    def tokenizer(self) -> PromptEncoder:
        """Return the tokenizer of the evaluated model."""

    @property
    def prompts(self) -> FilePrompts | MixedPrompts | None:
        """Return the prompts that were trained on."""


def load_set(one: EvalSet, run: RunDir, inputs: SetInputs, *, output: Output) -> LoadedSet:
    """Load a set's prompts, tokenised for the model of `inputs`. Raises DataError for a file, a
    column, a label, or a prompt that was trained on."""
    recipe, tokenizer, prompts = one.recipe, inputs.tokenizer, inputs.prompts
    trained = [prompts] if isinstance(prompts, FilePrompts) else prompts.parts if prompts else []
    data = recipe.data.model_copy(update=_ONLY_EVAL)
    if one.name in BENCHMARKS:
        path = write_benchmark(one.name, one.copy, run, output=output)
        data = data.model_copy(update={"eval": str(path)})
    data = with_foreign_tasks(data, recipe.rollout, run)
    data = with_local_files(
        data,
        run,
        recipe.run.seed,
        output=output,
        folder=str(Path("eval", one.folder)) if one.folder else "",
    )
    source, report = load_heldout(
        recipe, data, tokenizer, trained=trained, base_dir=run.path, output=output
    )
    _warn_of_dropped(one, report, output)
    prompts_asked = source.first(recipe.eval.num_prompts)
    if one.against is not None:
        data_sha256 = sha256_of_prompts(prompts_asked)
        require_same_prompts(one.against, one.name, data_sha256, settings_of(recipe))
    return LoadedSet(
        set=one,
        prompts=prompts_asked,
        domains=_domains_of(source, one.domain),
    )


def _warn_of_dropped(one: EvalSet, report: SourceReport, output: Output) -> None:
    if report.num_dropped:
        output.warn(
            f"{one.name}: {report.num_dropped} of {report.num_measured} prompts are longer than "
            f"{one.recipe.data.max_prompt_tokens} tokens and are skipped; --set "
            f"data.max_prompt_tokens={report.prompt_tokens_max} includes them"
        )


def _domains_of(source: FilePrompts, column: str | None) -> dict[int, str]:
    """Return the domains by the index of a prompt. Raises DataError if the named column does not
    exist."""
    domains: dict[int, str] = {}
    for file in source.files:
        columns: list[str] = []
        for line, row in file.table.records():
            if not isinstance(row, dict):
                continue
            columns = columns or list(row)
            if (value := row.get(column or DOMAIN)) is not None:
                domains[file.first_index + line - 1] = str(value)
        if column is not None and column not in columns:
            raise DataError(
                f"{file.path} has no column `{column}`",
                why=f"its columns are {', '.join(columns)}",
                fix=f"--domain {nearest(column, columns) or columns[-1]}",
            )
    return domains


_KEY = "eval"


def with_benchmark_settings(
    recipe: Recipe, name: str, *, sets: Sequence[str], flags: Mapping[str, str]
) -> Recipe:
    """Return the recipe with the benchmark's settings, except those that the user set: `sets` and
    `flags` as `load` takes them. Raises RecipeError."""
    mine = set(from_command_line(sets, flags))
    wanted = {**COMMON_SETTINGS, **BENCHMARKS[name].settings, "data.eval": BENCHMARKS[name].hub}
    values = recipe.model_dump()
    for key, value in wanted.items():
        if any(key == one or key.startswith(f"{one}.") for one in mine):
            continue
        *parents, last = key.split(".")
        place: Any = values
        for parent in parents:
            place = place[parent]
        place[last] = value
    return Recipe.model_validate(values)


def write_benchmark(name: str, given: str | None, run: RunDir, *, output: Output | None) -> Path:
    """Write a benchmark's questions as JSONL of prompt, label and domain. `given`: a local copy,
    either a folder with the files of the hub's data set or the one file of its split; None:
    download it. Raises DataError if rows do not have the published form."""
    benchmark = BENCHMARKS[name]
    folder = run.data_dir / "eval" / name
    file = _file_of(name, benchmark.hub, given, folder / "rows", output=output)
    examples: list[Row] = []
    if benchmark.examples_hub is not None:
        shots = _file_of(name, benchmark.examples_hub, given, folder / "examples", output=output)
        if shots == file:
            raise DataError(
                f"the worked examples of the benchmark `{name}` are missing",
                why=f"{file} is a single file, and the examples are in another split of the data "
                "set",
                fix=f"--data {name}=FOLDER   # with the files of {benchmark.hub}",
            )
        examples = [row for _, row in _rows(name, shots)]
    lines = []
    for place, row in _rows(name, file):
        try:
            one = benchmark.question(row, place, examples)
        except (KeyError, TypeError, ValueError) as error:
            problem = f"row {place + 1}: {type(error).__name__}: {error}"
            raise _wrong_form_error(name, file, problem) from None
        domain = {} if one.domain is None else {"domain": one.domain}
        lines.append(json.dumps({"prompt": one.prompt, "label": one.label, **domain}))
    if len(lines) != benchmark.num_prompts and output is not None:
        output.warn(
            f"{name}: {len(lines):,} questions are available, but {benchmark.num_prompts:,} were "
            "published, so results are not comparable"
        )
    path = folder / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _file_of(name: str, hub: str, given: str | None, into: Path, *, output: Output | None) -> Path:
    data = parse_hub(hub, key=f"data.{_KEY}")
    if given is None:
        return fetch_data(data, key=_KEY, into=into, output=output)
    here = Path(given).expanduser().absolute()
    if not here.is_dir():
        check_file(here, field=_KEY)
        return here
    paths = [str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()]
    card = here / CARD
    card_text = read_regular_text(card, errors="replace") if card.is_file() else ""
    try:
        try:
            chosen = choose_files(data, paths, card=card_text, key=_KEY)
        except DataError:  # a folder of one subset alone
            chosen = choose_files(replace(data, subset=None), paths, card=card_text, key=_KEY)
    except DataError as error:
        takes_file = BENCHMARKS[name].examples_hub is None
        raise DataError(
            f"{here} is not a copy of {data.spelled()}",
            why=f"{error.what}; {error.why}",
            fix=[
                f"--data {name}   # downloads it from the hub",
                *([f"--data {name}=FILE   # a file of its split"] * takes_file),
            ],
        ) from None
    files = [here / path for path in chosen]
    if len(files) == 1:
        return files[0]
    return join_files(files, into / f"{_KEY}{files[0].suffix}", key=_KEY)


def _rows(name: str, file: Path) -> Iterator[tuple[int, Row]]:
    """Yield (place, row) of a benchmark's file."""
    for line, row in Table(file).records():
        if not isinstance(row, Mapping):
            raise _wrong_form_error(name, file, f"row {line}: {row}")
        if missing := [key for key in BENCHMARKS[name].columns if key not in row]:
            lacks = ", ".join(f"`{key}`" for key in missing)
            raise _wrong_form_error(
                name, file, f"row {line} lacks {lacks}; it has {', '.join(row)}"
            )
        yield line - 1, row


def _wrong_form_error(name: str, file: Path, why: str) -> DataError:
    return DataError(
        f"{file} is not a copy of the benchmark `{name}`",
        why=why,
        fix=[
            f"--data {shlex.quote(f'my-{name}={file}')}   # use it as your own set",
            f"--data {name}   # use the hub's copy",
        ],
    )
