"""Prompts that miles makes itself (`task:NAME`): word problems with worked answers. Pure and seeded, nothing downloaded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from milescli.core.errors import RecipeError
from milescli.core.registry import nearest

TASK_PREFIX = "task:"
HELDOUT_MODULUS = 16
"""One sum in sixteen is held out, whatever the seed: training and held-out prompts are disjoint by their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One line of a task's file."""

    prompt: str
    label: str
    """The final answer alone."""
    demonstration: str
    """A worked answer that ends in `#### label`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One kind of prompts."""

    rows: Callable[[random.Random], Iterator[TaskRow]]
    """Endless rows from a source of random numbers."""
    num_rows: int
    """Rows of its file; no prompt occurs twice."""


_SENTENCES = (
    "{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?",
    "{name} had {a} {thing}. A friend gave {name} {b} more. How many {thing} does {name} have now?",
    "There are {a} {thing} in one box and {b} {thing} in another. How many {thing} are there?",
    "{name} picked {a} {thing} on Monday and {b} on Tuesday. How many {thing} did {name} pick?",
    "A shop sold {a} {thing} in the morning and {b} in the evening. How many {thing} did it sell?",
)
_NAMES = ("Tom", "Ana", "Ben", "Mia", "Sam", "Eva", "Leo", "Zoe")
_THINGS = ("apples", "books", "coins", "pens", "cards", "shells", "stamps", "eggs")


def is_task(value: str) -> bool:
    """Whether a `data.*` value names a task instead of a file."""
    return value.startswith(TASK_PREFIX)


def write_task(name: str, folder: str | Path, seed: int) -> Path:
    """Write the prompts of `task:NAME` (prefix optional) to `folder/NAME.jsonl`; equal name and seed give equal bytes.

    Raises RecipeError where there is no such task.
    """
    short = name.removeprefix(TASK_PREFIX)
    if short not in TASKS:
        known = ", ".join(TASK_PREFIX + each for each in TASKS)
        raise RecipeError(
            f"no task is called `{short}`",
            why=f"miles makes {known}",
            fix=f"--set data.prompts={TASK_PREFIX}{nearest(short, TASKS) or next(iter(TASKS))}",
        )
    path = Path(folder) / f"{short}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"prompt": row.prompt, "label": row.label, "demonstration": row.demonstration})
        for row in make_rows(TASKS[short], seed)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_rows(task: Task, seed: int) -> list[TaskRow]:
    """`task.num_rows` rows without a repeated prompt."""
    rows: dict[str, TaskRow] = {}
    for row in task.rows(random.Random(seed)):
        rows.setdefault(row.prompt, row)
        if len(rows) == task.num_rows:
            break
    return list(rows.values())


def work_out_sum(a: int, b: int) -> str:
    """The sum digit by digit from the right with carries: `8 + 5 = 13, carry 1`, ..., `#### 623`."""
    width = max(len(str(a)), len(str(b)))
    lines, carry = [], 0
    for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True):
        total = int(x) + int(y) + carry
        addends = f"{x} + {y} + {carry}" if carry else f"{x} + {y}"
        carry = total // 10
        lines.append(f"{addends} = {total}" + (f", write {total % 10}, carry 1" if carry else ""))
    return "\n".join(lines) + f"\n#### {a + b}"


def is_heldout(a: int, b: int) -> bool:
    """Whether the sum of `a` and `b`, in either order, belongs to the held-out set."""
    low, high = min(a, b), max(a, b)
    return (low * 2_654_435_761 + high * 40_503) % 2**32 >> 8 & (HELDOUT_MODULUS - 1) == 0


def _sums(rng: random.Random, *, digits: int, heldout: bool) -> Iterator[TaskRow]:
    low, high = 10 ** (digits - 1), 10**digits - 1
    while True:
        a, b = _between(rng, low, high), _between(rng, low, high)
        if is_heldout(a, b) is not heldout:
            continue
        sentence, name, thing = _pick(rng, _SENTENCES), _pick(rng, _NAMES), _pick(rng, _THINGS)
        prompt = sentence.format(name=name, thing=thing, a=a, b=b)
        yield TaskRow(prompt=prompt, label=str(a + b), demonstration=work_out_sum(a, b))


def _between(rng: random.Random, low: int, high: int) -> int:
    return low + int(rng.random() * (high - low + 1))  # only random() is the same in every Python version


def _pick(rng: random.Random, items: tuple[str, ...]) -> str:
    return items[int(rng.random() * len(items))]


TASKS: dict[str, Task] = {
    "sums": Task(rows=lambda rng: _sums(rng, digits=3, heldout=False), num_rows=8192),
    "sums-heldout": Task(rows=lambda rng: _sums(rng, digits=3, heldout=True), num_rows=256),
}
"""What `task:NAME` can be."""
