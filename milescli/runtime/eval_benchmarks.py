"""A published benchmark as a file of prompts in the run's `data/`: fetched from the hub, or read
from a local copy of its data set. Called by `eval_sets`, before any device is taken."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milescli.backends.hub.datasets import CARD, fetch_data, join_files
from milescli.backends.hub.splits import choose_files
from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import DataError
from milescli.recipe.data_files import parse_hub
from milescli.recipe.layers import from_command_line
from milescli.recipe.schema import Recipe
from milescli.rollout.benchmarks import BENCHMARKS, OF_ALL, Row
from milescli.rollout.tables import check_file, open_table

if TYPE_CHECKING:
    from milescli.console.output import Output

_KEY = "eval"


def with_settings_of(
    recipe: Recipe, name: str, *, sets: Sequence[str], flags: Mapping[str, str]
) -> Recipe:
    """The recipe as the benchmark is asked, but for what the user set: `sets` and `flags` as
    `load` takes them. Raises RecipeError."""
    mine = set(from_command_line(sets, flags))
    wanted = {**OF_ALL, **BENCHMARKS[name].settings, "data.eval": BENCHMARKS[name].hub}
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
    """Its questions as JSONL of prompt, label and domain. `given`: a local copy, a folder with the
    files of the hub's data set, or the one file of its split; None: fetched. Raises DataError where
    rows are not of the published form."""
    benchmark = BENCHMARKS[name]
    folder = run.data_dir / "eval" / name
    file = _file_of(name, benchmark.hub, given, folder / "rows", output=output)
    examples: list[Row] = []
    if benchmark.examples_hub is not None:
        shots = _file_of(name, benchmark.examples_hub, given, folder / "examples", output=output)
        if shots == file:
            raise DataError(
                f"the benchmark `{name}` lacks its worked examples",
                why=f"{file} is one file, and they are in another split of its data set",
                fix=f"--data {name}=FOLDER   # with the files of {benchmark.hub}",
            )
        examples = [row for _, row in _rows(name, shots)]
    lines = []
    for place, row in _rows(name, file):
        try:
            one = benchmark.question(row, place, examples)
        except (KeyError, TypeError, ValueError) as error:
            told = f"row {place + 1}: {type(error).__name__}: {error}"
            raise _not_of_it(name, file, told) from None
        domain = {} if one.domain is None else {"domain": one.domain}
        lines.append(json.dumps({"prompt": one.prompt, "label": one.label, **domain}))
    if len(lines) != benchmark.num_prompts and output is not None:
        output.warn(
            f"{name}: {len(lines):,} questions are there, and {benchmark.num_prompts:,} were "
            "published: figures do not compare"
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
    told = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    try:
        try:
            chosen = choose_files(data, paths, card=told, key=_KEY)
        except DataError:  # a folder of one subset alone
            chosen = choose_files(replace(data, subset=None), paths, card=told, key=_KEY)
    except DataError as error:
        raise DataError(
            f"{here} is no copy of {data.spelled()}",
            why=f"{error.what}; {error.why}",
            fix=[f"--data {name}   # fetched from the hub", f"--data {name}=FILE   # of its split"],
        ) from None
    files = [here / path for path in chosen]
    if len(files) == 1:
        return files[0]
    return join_files(files, into / f"{_KEY}{files[0].suffix}", key=_KEY)


def _rows(name: str, file: Path) -> Iterator[tuple[int, Row]]:
    """(place, row) of each."""
    for line, row in open_table(file).records():
        if not isinstance(row, Mapping):
            raise _not_of_it(name, file, f"row {line}: {row}")
        if missing := [key for key in BENCHMARKS[name].columns if key not in row]:
            lacks = ", ".join(f"`{key}`" for key in missing)
            raise _not_of_it(name, file, f"row {line} lacks {lacks}; it has {', '.join(row)}")
        yield line - 1, row


def _not_of_it(name: str, file: Path, why: str) -> DataError:
    return DataError(
        f"{file} is no copy of the benchmark `{name}`",
        why=why,
        fix=[f"--data my-{name}={file}   # as a set of your own", f"--data {name}   # the hub's"],
    )
