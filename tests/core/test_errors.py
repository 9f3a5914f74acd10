"""Errors cross process borders whole, and every exit code has its meaning."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from milescli.core import errors
from milescli.core.errors import (
    EXIT_CODE_MEANINGS,
    ExitCode,
    MilesError,
    RecipeError,
    Stopped,
    printable,
    unreadable_folder,
)

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MilesError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_with_all_three_parts(kind: type[MilesError]) -> None:
    error = kind("what failed", why="12 > 8", fix=["do this", "or that"])
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert again.as_dict() == error.as_dict()
    assert str(again) == str(error) == "what failed (why: 12 > 8; fix: do this or or that)"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_ends_the_process_with_a_code_that_is_told(kind: type[MilesError]) -> None:
    assert EXIT_CODE_MEANINGS[kind.exit_code]
    assert kind.exit_code is not ExitCode.DONE


def test_every_exit_code_has_a_meaning() -> None:
    assert set(EXIT_CODE_MEANINGS) == set(ExitCode)


def test_exit_codes_are_the_promised_ones() -> None:
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 4, 5, 6, 70, 75, 130, 143]
    assert RecipeError.exit_code == 3
    assert Stopped.exit_code == 75


def test_an_error_is_also_the_stdlib_error_it_replaces() -> None:
    assert issubclass(RecipeError, ValueError)
    assert issubclass(errors.WaitTimeout, TimeoutError)
    assert issubclass(errors.CheckpointError, OSError)


def test_the_fix_for_a_folder_with_a_blank_can_be_pasted() -> None:
    folder = Path("/my runs/a")
    error = unreadable_folder(folder, PermissionError(13, "Permission denied", str(folder)))
    assert error.fixes[0].startswith("chmod -R a+rX '/my runs/a'   #")


def test_one_fix_becomes_a_list() -> None:
    assert RecipeError("a", why="b", fix="c").fixes == ["c"]


def test_text_of_others_is_shown_without_controls_and_not_without_end() -> None:
    error = MilesError(
        "\x1b[31mred", why="a\r\n\x00\ud800" + "b" * 10_000_000 + "end", fix=["c\x07"]
    )
    assert error.what == str(error.args[0]) == "\\x1b[31mred" and error.fixes == ["c\\x07"]
    assert error.why.startswith("a\n\\x00\\ud800bbb") and error.why.endswith("bbend")
    assert len(error.why) < 17_000 and "characters left out" in error.why
    error.why.encode()
    again = pickle.loads(pickle.dumps(error))
    assert again.as_dict() == error.as_dict() and again.args == error.args
    assert printable("naïve, “ok”, 日本, 😀\t\n") == "naïve, “ok”, 日本, 😀\t\n"
