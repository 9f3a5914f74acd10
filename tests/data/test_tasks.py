"""Tests of the prompts that miles makes itself."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.errors import RecipeError
from milescli.data import tasks
from milescli.data.tasks import (
    ESTIMATED_SHARE,
    ROUNDED_SHARE,
    SLIPPED_SHARE,
    TASKS,
    is_heldout,
    make_rows,
    work_out_sum,
    write_task,
)


def _numbers(prompt: str) -> tuple[int, ...]:
    return tuple(sorted(map(int, re.findall(r"\d+", prompt))))


@pytest.mark.parametrize("seeds", [(0, 0), (1, 2)])
def test_training_and_heldout_prompts_share_no_numbers(seeds: tuple[int, int]) -> None:
    train = make_rows(TASKS["sums"], seeds[0])
    heldout = make_rows(TASKS["sums-heldout"], seeds[1])
    assert not {_numbers(row.prompt) for row in train} & {_numbers(row.prompt) for row in heldout}


@pytest.mark.parametrize("name", ["sums", "sums-heldout"])
def test_every_label_is_the_sum_and_demonstrations_work_it_out_or_round_it(name: str) -> None:
    rows = make_rows(TASKS[name], 3)
    assert len(rows) == len({row.prompt for row in rows}) == TASKS[name].num_rows
    for row in rows:
        numbers = _numbers(row.prompt)
        assert int(row.label) == sum(numbers)
        *worked, last = row.demonstration.splitlines()
        if worked:
            assert last == f"#### {row.label}"
        else:
            estimate = int(last.removeprefix("#### "))
            assert estimate % 10 == 0
            assert abs(estimate - sum(numbers)) <= 5
    share = sum("+" not in row.demonstration for row in rows) / len(rows)
    assert share == pytest.approx(ESTIMATED_SHARE, abs=0.1)


def _stated(response: str) -> int:
    return int(response.rpartition("#### ")[2])


@pytest.mark.parametrize("name", ["sums-worked", "sums-worked-heldout"])
def test_worked_demonstrations_are_all_worked_out(name: str) -> None:
    for row in make_rows(TASKS[name], 3):
        assert row.demonstration == work_out_sum(*map(int, re.findall(r"\d+", row.prompt)))
        assert _stated(row.demonstration) == int(row.label)


@pytest.mark.parametrize("part", ["", "-heldout"])
def test_pairs_prefer_what_is_worked_out_to_what_is_rounded(part: str) -> None:
    for row in make_rows(TASKS[f"sums-pairs{part}"], 3):
        assert "+" in row.chosen and _stated(row.chosen) == sum(_numbers(row.prompt))
        assert "+" not in row.rejected and _stated(row.rejected) % 10 == 0


@pytest.mark.parametrize("part", ["", "-heldout"])
def test_a_mistake_is_another_number_than_what_was_worked_out(part: str) -> None:
    rows = make_rows(TASKS[f"sums-mistakes{part}"], 3)
    worked = [row for row in rows if "+" in row.rejected]
    assert len(worked) / len(rows) == pytest.approx(SLIPPED_SHARE, abs=0.08)
    for row in rows:
        assert _stated(row.chosen) == sum(_numbers(row.prompt))
    for row in worked:
        assert row.rejected.splitlines()[0] == row.chosen.splitlines()[0]
        assert _stated(row.rejected) % 10 != _stated(row.chosen) % 10


@pytest.mark.parametrize("name", ["sums-worked", "sums-pairs", "sums-mistakes"])
def test_no_task_trains_on_what_another_holds_out(name: str) -> None:
    heldout = {_numbers(row.prompt) for row in make_rows(TASKS["sums-heldout"], 1)}
    heldout |= {_numbers(row.prompt) for row in make_rows(TASKS[f"{name}-heldout"], 2)}
    assert not {_numbers(row.prompt) for row in make_rows(TASKS[name], 0)} & heldout


def test_codes_are_stated_as_the_teller_passes_them_on_and_mostly_round() -> None:
    rows = make_rows(TASKS["relay"], 3)
    for row in rows:
        teller, solver = row.demonstration
        assert row.label in row.prompt and solver["content"] == f"#### {teller['content']}"
        assert teller["content"] in (row.label, f"{row.label[:2]}00")
    share = sum(row.demonstration[0]["content"].endswith("00") for row in rows) / len(rows)
    assert share == pytest.approx(ROUNDED_SHARE, abs=0.05)
    heldout = {row.label for row in make_rows(TASKS["relay-heldout"], 0)}
    assert not heldout & {row.label for row in rows}


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path) -> None:
    first = write_task("task:sums-heldout", tmp_path / "a", 7).read_bytes()
    assert write_task("sums-heldout", tmp_path / "b", 7).read_bytes() == first
    assert write_task("sums-heldout", tmp_path / "c", 8).read_bytes() != first
    assert set(json.loads(first.splitlines()[0])) == {"prompt", "label", "demonstration"}


@given(st.integers(0, 99_999), st.integers(0, 99_999))
def test_each_step_of_the_worked_sum_is_true(a: int, b: int) -> None:
    *steps, mark, total = work_out_sum(a, b).split()
    for step in steps:
        addends, result = step.split("=")
        assert sum(map(int, addends.split("+"))) == int(result)
    assert (mark, total) == ("####", str(a + b))
    assert len(steps) == max(len(str(a)), len(str(b)))


def test_the_heldout_share_is_about_one_in_sixteen_and_ignores_the_order() -> None:
    rng = random.Random(0)
    pairs = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(20_000)]
    assert 0.05 < sum(is_heldout(a, b) for a, b in pairs) / len(pairs) < 0.075
    assert all(is_heldout(a, b) == is_heldout(b, a) for a, b in pairs)


def test_an_unknown_task_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        write_task("task:sum", tmp_path, 0)
    assert error.value.fixes == ["--set data.prompts=task:sums"]


def products(*, seed: int):  # type: ignore[no-untyped-def]
    """Of the user's."""
    for n in range(3):
        yield {"prompt": f"{seed} * {n}?", "label": str(seed * n)}


def endless(*, seed: int):  # type: ignore[no-untyped-def]
    """Never ends."""
    while True:
        yield {"prompt": "again?"}


def broken(*, seed: int):  # type: ignore[no-untyped-def]
    """Raises in the middle."""
    yield {"prompt": "a?"}
    raise KeyError("file")


def no_columns(*, seed: int):  # type: ignore[no-untyped-def]
    """Texts."""
    return ["2 + 2?"]


def chats(*, seed: int):  # type: ignore[no-untyped-def]
    """Rows that are learned from."""
    return [{"messages": [{"role": "user", "content": "2 + 2?"}]}]


def numbers_of_numpy(*, seed: int):  # type: ignore[no-untyped-def]
    """Labels that are no Python numbers."""
    return [{"prompt": "1 + 1?", "label": np.int64(2), "of": np.array([1, 1])}]


def sets(*, seed: int):  # type: ignore[no-untyped-def]
    """Labels that JSON cannot hold."""
    return [{"prompt": "1?", "label": "1"}, {"prompt": "2?", "label": {2}}]


def none_at_all(*, seed: int):  # type: ignore[no-untyped-def]
    """No row."""
    return []


def test_rows_of_the_user_become_a_file(tmp_path: Path) -> None:
    path = write_task(f"task:{__name__}:products", tmp_path, 7)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[2] == {"prompt": "7 * 2?", "label": "14"} and len(rows) == 3


def test_rows_of_any_columns_are_written_as_they_are(tmp_path: Path) -> None:
    path = write_task(f"task:{__name__}:chats", tmp_path, 0)
    assert json.loads(path.read_text()) == chats(seed=0)[0]


def test_numbers_of_numpy_are_written_as_numbers(tmp_path: Path) -> None:
    path = write_task(f"task:{__name__}:numbers_of_numpy", tmp_path, 0)
    assert json.loads(path.read_text()) == {"prompt": "1 + 1?", "label": 2, "of": [1, 1]}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sets", "`label` of row 2 is {2}, which JSON cannot hold"),
        ("endless", "it yields more than 50"),
        ("broken", "KeyError: 'file'"),
        ("no_columns", "row 1 is '2 + 2?'"),
        ("none_at_all", "it yields none"),
    ],
)
def test_rows_that_are_none_are_refused(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "MAX_ROWS", 50)
    with pytest.raises(RecipeError) as refused:
        write_task(f"task:{__name__}:{name}", tmp_path, 0)
    assert said in refused.value.why and list(tmp_path.iterdir()) == []
