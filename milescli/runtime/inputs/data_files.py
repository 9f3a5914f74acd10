"""Prepares the data of a run, before any process starts: finds or downloads files, writes tasks of
other packages' environments as rows (`task:verifiers`, `task:harbor`), checks labels and leaks, and
makes demonstrations. Called by `run_inputs`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from milescli.agents.harbor import tasks as tasks_of_harbor
from milescli.agents.verifiers import tasks as tasks_of_verifiers
from milescli.backends.hub.datasets import fetch_data
from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.console.transfer import Transfer
from milescli.core.errors import DataError, RecipeError
from milescli.core.files import open_regular
from milescli.core.types import Pair, Prompt, Trajectory
from milescli.data.chat_masks import demonstration_trajectories
from milescli.data.example_rows import Kind
from milescli.data.file_prompts import FilePrompts
from milescli.data.file_rows import (
    FileRows,
    describe_row,
    evenly_spread_places,
    group_by_file,
    unusable_prompts_error,
)
from milescli.data.held_out_leaks import NEAR_HELDOUT, NEAR_ROWS, Leak, exact_leaks, near_leaks
from milescli.data.images import DATA_URL
from milescli.data.mixed_prompts import MixedPrompts
from milescli.data.prompt_source import parse_file_name
from milescli.data.tables import LINE_SUFFIXES, Table, check_file
from milescli.data.tasks import TASK_PREFIX, is_builtin_heldout, is_task, write_task
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.agents import Role
from milescli.recipe.data import Data, MixSource
from milescli.recipe.data_files import FIELDS, is_hub, names_in, parse_hub
from milescli.recipe.schema import Recipe, Rollout
from milescli.recipe.train import PAIR_OBJECTIVES, ROW_OBJECTIVES
from milescli.rollout.base import RewardFn
from milescli.rollout.episode.roles import role_demonstrations, roles_of
from milescli.rollout.rewards import label_checks
from milescli.rollout.rewards.label_check import MAX_LABELS, check_labels
from milescli.train.objectives import load_objective

NUM_LEAKS_SHOWN = 5
WITHOUT_EVAL = [
    "--set data.eval=null --set eval.every=0   # no evaluation",
    "--set data.eval=FILE   # with other prompts",
]
SCRATCH_BYTES = 8 * 2**20
SCRATCH_ROWS = 100_000
"""Largest amount of text, and of rows, from which a scratch model's vocabulary is made."""


def require_files(data: Data) -> None:
    """Raise DataError if a local file cannot be opened. `prepare` finds the same errors; this check
    takes no time."""
    for field in FIELDS:
        mixed = [source.path for source in data.mix or [] if field == "prompts"]
        values = (getattr(data, field), *mixed)
        for name in (name for value in values for name in names_in(value)):
            file = parse_file_name(name, key=f"data.{field}")
            if not is_hub(file.name) and not is_task(file.name):
                check_file(Path(file.name).expanduser().absolute(), field=field)


def with_local_files(
    data: Data, run: RunDir, seed: int, *, output: Output | None, folder: str = ""
) -> Data:
    """Return the data with local paths: tasks are written to files of the run, data sets of the hub
    are downloaded; other paths stay as the user gave them. `folder`: subfolder of the run's
    `data/`, for data other than the run's."""
    changes = _with_names(
        data,
        lambda name, field, number: _local(
            name, field, str(Path(folder, str(number or ""))), run=run, seed=seed, output=output
        ),
    )
    if data.mix is not None:
        changes["mix"] = [
            _local_source(source, number, run=run, seed=seed, output=output)
            for number, source in enumerate(data.mix)
        ]
    return data.model_copy(update=changes)


def _with_names(data: Data, change: Callable[[str, str, int], str]) -> dict[str, object]:
    """Return the fields of `data` that name files, each name as `change(name, field, number)`."""
    changes: dict[str, object] = {}
    for field in FIELDS:
        if (named := getattr(data, field)) is not None:
            names = [change(name, field, number) for number, name in enumerate(names_in(named))]
            changes[field] = names[0] if isinstance(named, str) else names
    return changes


def _local_source(
    source: MixSource, number: int, *, run: RunDir, seed: int, output: Output | None
) -> MixSource:
    paths = [
        _local(name, "prompts", f"mix/{number}/{place}", run=run, seed=seed, output=output)
        for place, name in enumerate(names_in(source.path))
    ]
    return source.model_copy(update={"path": paths, "name": source.called})


def _local(
    text: str, field: str, folder: str, *, run: RunDir, seed: int, output: Output | None
) -> str:
    file = parse_file_name(text, key=f"data.{field}")
    if is_hub(file.name):
        path = fetch_data(
            parse_hub(file.name, key=f"data.{field}"),
            key=field,
            into=run.data_dir / folder,
            output=output,
        )
    elif is_task(file.name):
        path = write_task(file.name, run.data_dir, seed)
    else:
        path = Path(file.name).expanduser().absolute()
    return replace(file, name=str(path)).spelled()


def rollout_of_source(recipe: Recipe, source: MixSource) -> Rollout:
    """Return the recipe's `rollout`, with the source's own reward if it has one."""
    reward = source.reward or recipe.rollout.reward
    return recipe.rollout.model_copy(update={"reward": reward})


def rollouts_of(recipe: Recipe) -> list[Rollout]:
    """Return the recipe's `rollout`, then one for each source of its mix, with the source's own
    reward if it has one."""
    return [
        recipe.rollout,
        *(rollout_of_source(recipe, source) for source in recipe.data.mix or []),
    ]


def sources_of(
    recipe: Recipe, prompts: FilePrompts | MixedPrompts
) -> list[tuple[FilePrompts, Rollout]]:
    """Return the training rows, source by source, each with its scorer."""
    if isinstance(prompts, MixedPrompts):
        return list(zip(prompts.parts, rollouts_of(recipe)[1:], strict=True))
    return [(prompts, recipe.rollout)]


def check_labels_of(
    rollout: Rollout, source: FilePrompts, graded: list[Prompt] | None, *, output: Output | None
) -> None:
    """Check labels with the reward. `graded`: the prompts whose labels are checked; None: all, or a
    part of them for large files."""
    say = output.note if output else None
    _refuse_letters(rollout, source)
    for name, reward in label_checks(rollout).items():
        _check_labels(name, reward, source, graded, say=say)


_NOT_FOR_LETTERS = frozenset(("gsm8k", "math", "code", "instructions", "reasoning_gym"))
"""Built-in rewards that do not compare the letter of an option."""


def _refuse_letters(rollout: Rollout, source: FilePrompts) -> None:
    """Raise DataError if rows have options, so that their labels are letters, but a reward does not
    compare letters."""
    misfits = sorted(_NOT_FOR_LETTERS.intersection(rollout.reward_names))
    for file in source.files if misfits else ():
        if file.columns is not None and file.columns.choices:
            column = file.columns.choices[0]
            raise DataError(
                f"the reward `{misfits[0]}` does not fit the rows of {file.path}",
                why=f"the rows have options in `{column}`, and their labels are letters",
                fix="--set rollout.reward=multiple_choice",
            )


def _check_labels(
    name: str,
    reward: RewardFn,
    source: FilePrompts,
    graded: list[Prompt] | None,
    *,
    say: Callable[[str], None] | None,
) -> None:
    if graded is None and source.is_large:
        for file in source.files:
            rows, num_labels = file.distinct_labels(MAX_LABELS)
            check_labels(reward, rows, name=name, path=file.path, say=say, num_labels=num_labels)
        return
    for file, prompts in group_by_file(source.prompts if graded is None else graded, source.files):
        check_labels(reward, prompts, name=name, path=file.path, say=say)


def refuse_leak(
    heldout: FilePrompts, trained: Sequence[FilePrompts], *, num_heldout: int | None
) -> None:
    """Raise DataError if a held-out prompt is also a training prompt."""
    for prompts in trained:
        leaks = exact_leaks(heldout, prompts, num_heldout=num_heldout)
        if not leaks:
            continue
        raise DataError(
            f"{len(leaks)} held-out prompts are also training prompts",
            why=f"{_pairs(leaks, heldout, prompts, joined=' is ')}: the evaluation would measure "
            "memorisation",
            fix=WITHOUT_EVAL,
        )


def _pairs(
    leaks: Sequence[Leak], heldout: FilePrompts, prompts: FilePrompts, *, joined: str
) -> str:
    """Return a text that lists the rows of the first leaks."""
    pairs = [
        f"{describe_row(leak.heldout, heldout.files)}{joined}"
        f"{describe_row(leak.prompts, prompts.files)}"
        for leak in leaks[:NUM_LEAKS_SHOWN]
    ]
    num_more = len(leaks) - len(pairs)
    return "; ".join(pairs) + (f"; and {num_more} more" if num_more else "")


def kind_of_rows(recipe: Recipe) -> Kind:
    """Return which kind of rows the recipe's objective takes. Raises RecipeError if it takes
    groups."""
    name = recipe.train.objective
    if name in ROW_OBJECTIVES:
        return "pairs" if name in PAIR_OBJECTIVES else "chats"
    takes = getattr(load_objective(name, recipe), "takes", "groups")
    if takes not in ("chats", "pairs"):
        raise RecipeError(
            f"the objective `{name}` cannot learn from rows",
            why=f"its `takes` is {takes!r}, but `data.train` is {recipe.data.train}",
            fix='set `takes = "chats"` or `takes = "pairs"` on it',
        )
    return takes


def refuse_trained_prompts(heldout: Sequence[Prompt], rows: Sequence[Trajectory | Pair]) -> None:
    """Raise DataError if a held-out prompt is that of a training row: the tokens of a chat before
    its first answer."""
    by_identity = {prompt.identity: prompt for prompt in heldout}
    sides = (
        (place, side)
        for place, row in enumerate(rows)
        for side in ((row.chosen, row.rejected) if isinstance(row, Pair) else (row,))
    )
    leaks = {}
    for place, side in sides:
        if side is not None:
            start = max(side.loss_mask.find(1), 0)
            shown = tuple(span.sha256 for span in side.image_spans if span.start < start)
            if prompt := by_identity.get((tuple(side.token_ids[:start]), shown)):
                leaks.setdefault(prompt.index, (prompt, place))
    if leaks:
        prompt, place = next(iter(leaks.values()))
        raise DataError(
            f"{len(leaks)} held-out prompts are also in the training rows",
            why=f"{prompt.text!r:.80}, prompt {prompt.index + 1} of `data.eval`, is also in usable "
            f"row {place + 1} of `data.train`: the evaluation would measure memorisation",
            fix=WITHOUT_EVAL,
        )


def near_leak_warning(
    heldout: FilePrompts,
    graded: list[Prompt],
    prompts: FilePrompts,
    *,
    named: str | list[str] | None,
    output: Output,
) -> str | None:
    """Return a warning that names held-out prompts, among those in `graded`, that nearly equal
    training prompts; None if there are none, and if the held-out prompts (`named`, as `data.eval`)
    belong to a built-in task, whose rows may differ only in the part that matters."""
    if (names := names_in(named)) and all(map(is_builtin_heldout, names)):
        return None
    compared = [graded[place] for place in evenly_spread_places(len(graded), NEAR_HELDOUT)]
    label, total = "comparing with the held-out prompts", min(NEAR_ROWS, len(prompts))
    with Transfer(output, label=label, total=total, unit="prompts", tells_quick=False) as progress:
        leaks = near_leaks(compared, prompts, tick=progress.reached)
    if len(graded) > NEAR_HELDOUT or len(prompts) > NEAR_ROWS:
        output.note(
            f"{len(compared):,} of {len(graded):,} held-out prompts were compared with "
            f"{min(NEAR_ROWS, len(prompts)):,} of {len(prompts):,} training prompts, evenly "
            "spread, for near duplicates; all were compared for exact duplicates"
        )
    if not leaks:
        return None
    shown = _pairs(leaks, heldout, prompts, joined=" and ")
    return f"{len(leaks)} held-out prompts are near duplicates of training prompts: {shown}"


def demonstrations_of(
    recipe: Recipe, source: FilePrompts, tokenizer: ChatTokenizer
) -> list[Trajectory]:
    """Return the worked responses with their loss masks; of large files only as many as the warm-up
    takes."""
    most = recipe.warmup.steps * recipe.warmup.batch_size
    lines = worked_trajectories(
        source.evenly_spread(most), tokenizer, roles=roles_of(recipe.rollout), files=source.files
    )
    trajectories = [line for shown in lines.values() for line in shown.values()]
    if not trajectories:
        raise DataError(
            f"`{recipe.data.demonstrations}` has no worked responses",
            why="the warm-up imitates such responses: the file needs a column `demonstration`, "
            "or responses that end in `#### label`",
            fix=["--set data.demonstrations=FILE", "--set warmup.steps=0"],
        )
    longest = max(trajectory.num_tokens for trajectory in trajectories)
    if longest > recipe.warmup.max_loss_tokens:
        raise DataError(
            f"a demonstration has {longest} tokens",
            why=f"`warmup.max_loss_tokens` is {recipe.warmup.max_loss_tokens}",
            fix=f"--set warmup.max_loss_tokens={longest}",
        )
    return trajectories


def worked_trajectories(
    prompts: Iterable[Prompt],
    tokenizer: ChatTokenizer,
    *,
    roles: Mapping[str, Role],
    files: Sequence[FileRows],
) -> dict[int, dict[str, Trajectory]]:
    """Return, by index of the prompts that have a worked response, the trajectories to learn from:
    by role in an episode of several `roles`, else by `part 1`, `part 2`, or by an empty name if
    there is one. Raises DataError, with their rows, if some cannot be learned from."""
    made, bad = dict[int, dict[str, Trajectory]](), list[tuple[int, str]]()
    for prompt in prompts:
        if prompt.demonstration is None:
            continue
        try:
            if roles and prompt.worked_images:
                raise ValueError("its response shows images, which only a single agent learns")
            if roles:
                made[prompt.index] = role_demonstrations(prompt, tokenizer, roles=roles)
                continue
            several = demonstration_trajectories(prompt, tokenizer)
        except ValueError as error:
            bad.append((prompt.index, str(error)))
            continue
        parts = enumerate(several, 1)
        made[prompt.index] = {f"part {at}" if several[1:] else "": line for at, line in parts}
    if bad:
        raise unusable_prompts_error(bad, files, what="demonstrations")
    return made


def texts_for_vocabulary(recipe: Recipe, data: Data, run: RunDir) -> list[str]:
    """Return the texts from which a scratch model's vocabulary is made: the lines of
    `model.scratch.vocabulary`, else of the first file of `data`, up to SCRATCH_BYTES of a large
    file; of a file that is not text, its rows."""
    mixed = data.mix[0].path if data.mix else None
    scratch, own = recipe.model.scratch, None
    if scratch is not None and scratch.vocabulary is not None:
        own = _local(
            scratch.vocabulary, "vocabulary", "", run=run, seed=recipe.run.seed, output=None
        )
    named = (own, data.demonstrations, data.prompts, data.train, mixed)
    first = next(name for value in named for name in names_in(value))
    path = Path(parse_file_name(first, key="data.prompts").name)
    if path.suffix in LINE_SUFFIXES:
        with open_regular(path) as file:
            text = file.read(SCRATCH_BYTES).decode("utf-8", errors="replace")
        return DATA_URL.sub("", text).splitlines()
    rows = islice(Table(path).records(), SCRATCH_ROWS)
    return [json.dumps(row, ensure_ascii=False, default=str) for _, row in rows]


HELDOUT = "-heldout"
HELDOUT_EVERY = 16
"""One prompt in this number is held out, whatever the seed."""
TASKS: Mapping[str, Callable[[Rollout], list[dict[str, Any]]]] = {
    "verifiers": tasks_of_verifiers,
    "harbor": tasks_of_harbor,
}
"""Agent -> function that lists the tasks that it plays."""


def with_foreign_tasks(data: Data, rollout: Rollout, run: RunDir) -> Data:
    """Return the same data, with tasks of other packages written as files of the run. The recipe's
    `rollout` determines these tasks, so they are written before other tasks. Raises RecipeError or
    MachineError if the package does not return them."""
    made: dict[str, str] = {}
    return data.model_copy(
        update=_with_names(
            data, lambda name, field, _: _local_task_file(name, field, rollout, run, made)
        )
    )


def _local_task_file(
    name: str, field: str, rollout: Rollout, run: RunDir, made: dict[str, str]
) -> str:
    file = parse_file_name(name, key=f"data.{field}")
    short = file.name.removeprefix(TASK_PREFIX)
    package = short.removesuffix(HELDOUT)
    if file.name == short or package not in TASKS:
        return name
    if package != rollout.agent:
        raise RecipeError(
            f"`{file.name}` needs another agent",
            why=f"`rollout.agent` is {rollout.agent}, but the labels of these rows are tasks of "
            f"{package}",
            fix=f"--set rollout.agent={package}",
        )
    if short not in made:
        made |= _write_tasks(package, TASKS[package](rollout), run)
    return replace(file, name=made[short]).spelled()


def _write_tasks(package: str, rows: list[dict[str, Any]], run: RunDir) -> dict[str, str]:
    """Write both files, and return their paths by the names of their tasks."""
    run.data_dir.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[dict[str, Any]]] = {package: [], package + HELDOUT: []}
    places: dict[str, int] = {}
    for row in rows:  # rows of one prompt are on one side
        place = places.setdefault(json.dumps(row["prompt"]), len(places))
        parts[package + HELDOUT * (place % HELDOUT_EVERY == HELDOUT_EVERY - 1)].append(row)
    made = {}
    for name, part in parts.items():
        path = run.data_dir / f"{name}.jsonl"
        path.write_text(_lines(part), encoding="utf-8")
        made[name] = str(path)
    return made


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
