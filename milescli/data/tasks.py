"""Generates prompts and pairs instead of reading them (`task:NAME`): word problems with worked
responses, rows of plain numbers for environments, or whatever a function of the user's yields
(`task:mypkg.tasks:rows`). Pure and seeded; nothing is downloaded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from milescli.core.errors import RecipeError, nearest
from milescli.core.plug_points import ROWS
from milescli.core.user_code import plugin_fix
from milescli.data.shape_images import ShapesRow, shape_rows
from milescli.recipe.data_files import TASK_PREFIX
from milescli.workers.isolated import MAX_YIELDED, resolve_isolated

Item = TypeVar("Item")
MAX_ROWS = MAX_YIELDED - 1
"""Most rows that one function may yield."""
HELDOUT_MODULUS = 16
"""One sum in sixteen is held out, whatever the seed: training and held-out prompts are disjoint by
their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """Holds one line of a task's file."""

    prompt: str
    label: str
    """The final result."""
    demonstration: str | list[dict[str, Any]]
    """A worked response that ends in `#### ` and a number, which need not be right; or the turns of
    one that calls a tool, or of several roles, each with its `name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """Holds one line of the file of a preference task."""

    prompt: str
    chosen: str
    """A worked response."""
    rejected: str


AnyRow = TaskRow | PairRow | ShapesRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Describes one kind of rows."""

    rows: Callable[[random.Random], Iterator[AnyRow]]
    """Yields rows without end from a source of random numbers."""
    num_rows: int
    """Rows of its file; no prompt occurs twice with the same image."""


_SENTENCES = (
    "What is {a} + {b}?",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
)
_OF_PRODUCTS = ("What is {a} * {b}?", "Multiply {a} by {b}.", "What is {a} times {b}?")
_OF_CODES = ("The code is {a}{b}.", "What is the code {a}{b}?", "Pass on {a}{b}.")
OF_FOUR_DIGITS = 32
"""The product of two such numbers of two digits has four."""
RowOf = Callable[[random.Random, str, int, int], TaskRow | PairRow]
"""Makes the row of a prompt about two numbers."""
ESTIMATED_SHARE = 0.65
"""Share of demonstrations that round the sum to tens, as people in a hurry do; the others work it
out. A model that imitates them picks up both habits, and the more frequent one is right once in
ten. Reinforcement learning finds out which habit pays."""
GUESSED_SHARE = 0.7
"""Share of demonstrations of products that guess a round number; the others call the calculator."""
ROUNDED_SHARE = 0.7
"""Share of demonstrations of `relay` in which the teller rounds the code down to hundreds, and the
solver, who sees nothing else, states that."""
SLIPPED_SHARE = 0.7
"""Share of rejected responses of `sums-mistakes` that work the sum out but state another number."""


def is_task(value: str) -> bool:
    """Return True if a `data.*` value names a task instead of a file."""
    return value.startswith(TASK_PREFIX)


def is_builtin_heldout(value: str) -> bool:
    """Return True if a `data.*` value names held-out rows that miles itself separates from training
    rows."""
    short = value.removeprefix(TASK_PREFIX)
    return is_task(value) and (short in TASKS or short in ROWS.builtin)


def write_task(name: str, folder: str | Path, seed: int) -> Path:
    """Write the prompts of `task:NAME` (prefix optional) to `folder/NAME.jsonl`; equal name and
    seed give equal bytes. Raises RecipeError if there is no such task, or if it makes no rows."""
    short = name.removeprefix(TASK_PREFIX)
    if ":" in short or short in ROWS.builtin:
        rows: Iterable[Mapping[str, object]] = rows_of(short, seed)
    elif short in TASKS:
        made = make_rows(TASKS[short], seed)
        # `asdict` copies each text, which takes as long as all the rest
        rows = ({name: getattr(row, name) for name in row.__dataclass_fields__} for row in made)
    else:
        names = [*TASKS, *ROWS.builtin]
        known = ", ".join(TASK_PREFIX + task for task in names)
        raise RecipeError(
            f"there is no task `{short}`",
            why=f"the built-in tasks are {known}; your own has an import path, "
            "task:mypkg.tasks:rows",
            fix=f"--set data.prompts={TASK_PREFIX}{nearest(short, names) or names[0]}",
        )
    path = Path(folder) / f"{short.replace(':', '.')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [_line_of(row, number, name) for number, row in enumerate(rows, start=1)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _line_of(row: Mapping[str, object], number: int, name: str) -> str:
    """Return a row as a line of JSON. Raises RecipeError with the row and the column that JSON
    cannot hold."""
    try:
        return json.dumps(dict(row), default=_number_of)
    except (TypeError, ValueError, RecursionError):
        for column, value in row.items():
            try:
                json.dumps({column: value}, default=_number_of)
            except (TypeError, ValueError, RecursionError) as error:
                why = (
                    f"`{column}` of row {number} is {value!r:.200}, which JSON cannot hold: {error}"
                )
                raise _bad_rows(name.removeprefix(TASK_PREFIX), why) from None
        raise


def _number_of(value: object) -> object:
    """Return the plain value of a number or an array of NumPy or torch. Raises TypeError for other
    objects."""
    to_plain = getattr(value, "tolist", None)
    if not callable(to_plain):
        raise TypeError(f"{type(value).__name__} is not a text, number, list or mapping")
    return to_plain()


def rows_of(path: str, seed: int) -> list[Mapping[str, object]]:
    """Return the rows that the function called `path`, a built-in one or the user's, yields for
    `seed`. Raises RecipeError if it cannot be loaded, raises, does not end, or yields anything but
    prompts."""
    rows = resolve_isolated(ROWS, path)(seed=seed)
    return require_rows(list(rows) if isinstance(rows, Iterator) else rows, path)


def require_rows(rows: object, path: str) -> list[Mapping[str, object]]:
    """Return the rows of the task `path` unchanged; their columns are checked when the file is
    read. Raises RecipeError if they are not rows."""
    if not isinstance(rows, Sequence):
        raise _bad_rows(path, f"it returned {rows!r:.200}")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or not row:
            why = f"row {number + 1} is {row!r:.200}; it is a mapping, as a line of a data file is"
            raise _bad_rows(path, why)
    if not rows or len(rows) > MAX_ROWS:
        raise _bad_rows(path, "it yields none" if not rows else f"it yields more than {MAX_ROWS:,}")
    return list(rows)


def _bad_rows(path: str, why: str) -> RecipeError:
    return RecipeError(
        f"the task `{path}` does not make rows",
        why=why,
        fix=plugin_fix(path, "it yields rows such as {'prompt': '2 + 2?', 'label': '4'}"),
    )


def make_rows(task: Task, seed: int) -> list[AnyRow]:
    """Return `task.num_rows` rows, none with the prompt and image of another."""
    rows: dict[object, AnyRow] = {}
    for row in task.rows(random.Random(seed)):
        rows.setdefault(row.images if isinstance(row, ShapesRow) else row.prompt, row)
        if len(rows) == task.num_rows:
            break
    return list(rows.values())


def work_out_sum(a: int, b: int) -> str:
    """Return the sum worked out digit by digit from the right, with carries: for 47 + 38, `7+8=15
    4+3+1=8`, then `#### 85` on a line of its own."""
    width = max(len(str(a)), len(str(b)))
    steps, carry = [], 0
    for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}+1={total}" if carry else f"{x}+{y}={total}")
        carry = total // 10
    return " ".join(steps) + f"\n#### {a + b}"


def is_heldout(a: int, b: int) -> bool:
    """Return True if the sum of `a` and `b`, in either order, belongs to the held-out set."""
    low, high = min(a, b), max(a, b)
    return (low * 2_654_435_761 + high * 40_503) % 2**32 >> 8 & (HELDOUT_MODULUS - 1) == 0


def _pairs(
    rng: random.Random,
    *,
    low: int,
    heldout: bool,
    row_of: RowOf,
    sentences: Sequence[str],
) -> Iterator[TaskRow | PairRow]:
    while True:
        a, b = _between(rng, low, 99), _between(rng, low, 99)
        if is_heldout(a, b) is not heldout:
            continue
        yield row_of(rng, _pick(rng, sentences).format(a=a, b=b), a, b)


def _worked_or_estimated(rng: random.Random, prompt: str, a: int, b: int) -> TaskRow:
    in_a_hurry = rng.random() < ESTIMATED_SHARE
    demonstration = _estimate(a + b) if in_a_hurry else work_out_sum(a, b)
    return TaskRow(prompt=prompt, label=str(a + b), demonstration=demonstration)


def _worked(_: random.Random, prompt: str, a: int, b: int) -> TaskRow:
    return TaskRow(prompt=prompt, label=str(a + b), demonstration=work_out_sum(a, b))


def _worked_over_estimated(_: random.Random, prompt: str, a: int, b: int) -> PairRow:
    return PairRow(prompt=prompt, chosen=work_out_sum(a, b), rejected=_estimate(a + b))


def _worked_over_mistaken(rng: random.Random, prompt: str, a: int, b: int) -> PairRow:
    """Make a pair. Most rejected responses work the sum out, but state a number with another last
    digit; the others are estimates."""
    chosen, rejected = work_out_sum(a, b), _estimate(a + b)
    if rng.random() < SLIPPED_SHARE:
        stated = _between(rng, 20, 198)
        stated += stated % 10 == (a + b) % 10
        rejected = f"{chosen.rpartition(' ')[0]} {stated}"
    return PairRow(prompt=prompt, chosen=chosen, rejected=rejected)


def _calculated_or_guessed(rng: random.Random, prompt: str, a: int, b: int) -> TaskRow:
    label = str(a * b)
    if rng.random() < GUESSED_SHARE:
        guess = f"{a}*{b} is about\n#### {(a * b + 50) // 100 * 100}"
        return TaskRow(prompt=prompt, label=label, demonstration=guess)
    function = {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}}
    turns = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "name": "calculator", "content": label},
        {"role": "assistant", "content": f"#### {label}"},
    ]
    return TaskRow(prompt=prompt, label=label, demonstration=turns)


def _relayed_code(rng: random.Random, prompt: str, a: int, b: int) -> TaskRow:
    passed_code = f"{a}00" if rng.random() < ROUNDED_SHARE else f"{a}{b}"
    turns = [
        {"role": "assistant", "name": "teller", "content": passed_code},
        {"role": "assistant", "name": "solver", "content": f"#### {passed_code}"},
    ]
    return TaskRow(prompt=prompt, label=f"{a}{b}", demonstration=turns)


def _estimate(total: int) -> str:
    return f"#### {(total + 5) // 10 * 10}"


def _between(rng: random.Random, low: int, high: int) -> int:
    # only random() is the same in every Python version
    return low + int(rng.random() * (high - low + 1))


def _pick(rng: random.Random, items: Sequence[Item]) -> Item:
    return items[int(rng.random() * len(items))]


def _training_and_heldout(
    name: str, row_of: RowOf, sentences: Sequence[str] = _SENTENCES, *, low: int = 10
) -> dict[str, Task]:
    """Return a task with numbers of two digits from `low` on to train on, and one with held-out
    numbers."""

    def rows(heldout: bool) -> Callable[[random.Random], Iterator[AnyRow]]:
        return lambda rng: _pairs(rng, low=low, heldout=heldout, row_of=row_of, sentences=sentences)

    return {
        name: Task(rows=rows(False), num_rows=8192),
        f"{name}-heldout": Task(rows=rows(True), num_rows=256),
    }


TASKS: dict[str, Task] = {
    **_training_and_heldout("sums", _worked_or_estimated),
    **_training_and_heldout("sums-worked", _worked),
    **_training_and_heldout("sums-pairs", _worked_over_estimated),
    **_training_and_heldout("sums-mistakes", _worked_over_mistaken),
    **_training_and_heldout("relay", _relayed_code, _OF_CODES),
    **_training_and_heldout("products", _calculated_or_guessed, _OF_PRODUCTS, low=OF_FOUR_DIGITS),
    "shapes": Task(rows=partial(shape_rows, heldout=False), num_rows=1024),
    "shapes-heldout": Task(rows=partial(shape_rows, heldout=True), num_rows=256),
}
"""The tasks that `task:NAME` may name."""


NUM_SEEDS, NUM_HELDOUT_SEEDS = 8192, 256


def seed_rows(*, seed: int) -> Iterator[Mapping[str, str]]:
    """Yield rows of `task:seeds`: each is only a number (its label), for environments that draw
    their own start states; the policy sees what the environment shows at its reset. Other seeds of
    the run give other numbers."""
    first = NUM_HELDOUT_SEEDS + seed * NUM_SEEDS
    return map(_seed_row, range(first, first + NUM_SEEDS))


def heldout_seed_rows(*, seed: int) -> Iterator[Mapping[str, str]]:
    """Yield rows of `task:seeds-heldout`: numbers that no run trains on, the same for every run."""
    return map(_seed_row, range(NUM_HELDOUT_SEEDS))


def _seed_row(number: int) -> Mapping[str, str]:
    return {"prompt": f"Episode {number}.", "label": str(number)}
