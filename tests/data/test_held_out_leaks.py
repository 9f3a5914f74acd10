"""Tests of prompts that are there twice: equal ones within a file, and nearly equal ones in the
training and the held-out file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from milescli.core.types import Prompt
from milescli.data import prompt_source
from milescli.data.file_prompts import FilePrompts
from milescli.data.held_out_leaks import near_leaks
from milescli.data.prompt_source import SourceReport, load_source
from milescli.data.tasks import TASKS, make_rows
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.data import Data

STORY = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did Natalia sell altogether in April and May?"
)


def _prompts(*texts: str) -> list[Prompt]:
    return [Prompt(index=n, token_ids=[n], text=text) for n, text in enumerate(texts)]


def _leaks(heldout: str, trained: str, **options: int) -> list[tuple[int, int]]:
    source = FilePrompts(_prompts("unrelated", trained), seed=0, shuffle=False)
    return [(k.heldout, k.prompts) for k in near_leaks(_prompts("?", heldout), source, **options)]


@pytest.mark.parametrize(
    "trained",
    [
        STORY,
        STORY.upper(),
        STORY.replace(",", " -"),
        f"  {STORY}\n",
        f"{STORY} Think step by step.",
    ],
)
def test_a_prompt_that_was_changed_a_little_is_found_with_both_rows(trained: str) -> None:
    assert _leaks(STORY, trained) == [(1, 1)]


@pytest.mark.parametrize(
    "trained",
    [
        STORY.replace("48", "49"),
        "Ken sold 48 pens to his friends in June, and half as many in July. How many in all?",
        STORY.replace("clips", "pencils"),
        "",
    ],
)
def test_another_question_is_none(trained: str) -> None:
    assert _leaks(STORY, trained) == []


def test_short_prompts_are_not_compared() -> None:
    assert _leaks("What is 2 + 2?", "what is 2 + 2") == []


def test_rows_beyond_the_bound_are_not_compared() -> None:
    assert _leaks(STORY, STORY, most=1) == []


def test_the_quickstarts_tasks_have_no_near_leak() -> None:
    heldout = [row.prompt for row in make_rows(TASKS["sums-heldout"], 0)]
    trained = [row.prompt for row in make_rows(TASKS["sums"], 0)]
    source = FilePrompts(_prompts(*trained), seed=0, shuffle=False)
    assert near_leaks(_prompts(*heldout), source) == []


@pytest.mark.parametrize("most", [100, 3], ids=["small", "large"])
def test_of_equal_prompts_the_first_is_kept_where_the_recipe_says_so(
    jsonl: Callable[..., Path],
    tokenizer: ChatTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    monkeypatch.setattr(prompt_source, "LARGE_ROWS", most)
    words = ["a", "b", "a", "c", "b", "a"]
    rows = [{"prompt": word, "label": str(n)} for n, word in enumerate(words)]
    message = {"messages": [{"role": "user", "content": "c"}], "label": "9"}
    names = [str(jsonl(*rows)), str(jsonl(message, {**message, "label": "10"}, name="b.jsonl"))]

    def load(**data: object) -> tuple[FilePrompts, SourceReport]:
        settings = Data(prompts=names, **data)  # type: ignore[arg-type]
        loaded = load_source(settings, "prompts", tokenizer=tokenizer, seed=0, base_dir=tmp_path)
        return loaded.source, loaded.report

    loaded, report = load(dedup="exact")
    assert loaded.is_large is (most == 3)
    assert [(prompt.text, prompt.label) for prompt in loaded.prompts] == [
        ("a", "0"),
        ("b", "1"),
        ("c", "3"),
    ]
    assert (report.num_rows, report.num_duplicates, len(loaded)) == (8, 5, 3)
    assert {prompt.index for _, prompt in loaded.take(3)} == {0, 1, 3}
    everything, report = load()
    assert (report.num_duplicates, len(everything)) == (0, 8)
