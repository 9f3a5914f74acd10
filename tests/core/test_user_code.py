"""What a plug-in raises is shown from its first line on, and by its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from traceback import FrameSummary
from unittest.mock import patch

import pytest

from milescli.core import user_code
from milescli.core.errors import DataError, RecipeError
from milescli.core.registry import PlugPoint
from milescli.workers.isolated import resolve_isolated

HERE = "tests.core.test_user_code"
ON_RANKS = PlugPoint(
    kind="piece",
    key="train.piece",
    builtin={"ours": f"{HERE}:breaks"},
    signature="(*, number) -> int",
    runs_in="rank",
)
IN_DRIVER = PlugPoint(kind="piece", key="train.piece")


def breaks(*, number: int) -> int:
    """Its author's mistake."""
    return number // 0


def doubles(*, number: int) -> int:
    """Does what it should."""
    if number < 0:
        raise DataError("too small", why="it is below 0", fix="another")
    return 2 * number


def test_a_function_of_the_users_that_raises_is_named_from_its_first_line_on() -> None:
    piece = ON_RANKS.load(f"{HERE}:breaks")
    with pytest.raises(RecipeError, match=f"the piece `{HERE}:breaks` failed") as failed:
        piece(number=1)
    assert "return number // 0" in failed.value.why and "ZeroDivisionError" in failed.value.why
    assert "milescli" not in failed.value.why
    assert piece.__name__ == "breaks"


def test_what_a_built_in_one_raises_is_our_fault() -> None:
    with pytest.raises(ZeroDivisionError):
        ON_RANKS.load("ours")(number=1)


def test_values_and_explained_errors_pass() -> None:
    piece = ON_RANKS.load(f"{HERE}:doubles")
    assert piece(number=2) == 4
    with pytest.raises(DataError):
        piece(number=-1)


def test_a_package_of_the_users_whose_name_begins_as_ours_does_is_the_users() -> None:
    package = Path(user_code.__file__).parents[1]
    frames = [
        FrameSummary(str(package / "train" / "packing.py"), 1, "pack", line="theirs()"),
        FrameSummary(f"{package}_rewards/strict.py", 7, "strict", line="1 // 0"),
    ]
    error = ZeroDivisionError("division by zero")
    with patch("traceback.extract_tb", return_value=frames):
        shown = user_code.user_traceback(error)
    assert "strict.py" in shown and "packing.py" not in shown


def _bounded(call: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which it may end."""
    program = (
        "import itertools, re, time\n"
        "from milescli.core import user_code\n"
        "user_code.BOUND_S, user_code.GRACE_S = 0.5, 0.5\n"
        "with user_code.bounded('it'), user_code.bounded('it'):\n"
        f"    {call}\n"
        "time.sleep(1)\n"
        "print('went on')\n"
    )
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    "call", ["time.sleep(60)", "re.fullmatch('(a+)+b', 'a' * 60)", "sum(itertools.repeat(1))"]
)
def test_a_process_that_must_not_hang_says_where_it_does_and_ends(call: str) -> None:
    ended = _bounded(call)
    assert ended.returncode == 1 and ended.stdout == ""
    said = "Timeout" if "itertools" in call or "re." in call else "it did not return within 0.5 s"
    assert said in ended.stderr and 'File "<string>", line 5' in ended.stderr


def test_a_process_that_the_users_code_ends_says_so() -> None:
    ended = _bounded("import os; os._exit(7)")
    assert ended.returncode == 7
    assert "it ended this process: os._exit(7)" in ended.stderr
    assert 'File "<string>", line 5' in ended.stderr


def test_what_returns_in_time_is_left_alone() -> None:
    ended = _bounded("pass")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "went on\n", "")


class Piece:
    """An object that can be called."""

    def __call__(self, *, number: int) -> int:
        return number


@pytest.mark.parametrize(
    ("plugin", "name", "line"),
    [
        (f"{HERE}:breaks", f"{HERE}:breaks", "def breaks"),
        (doubles, "doubles", "def doubles"),
        (Piece(), "Piece", "class Piece"),
        (ON_RANKS.load(f"{HERE}:doubles"), "doubles", "def dou"),
        (resolve_isolated(IN_DRIVER, f"{HERE}:doubles"), "doubles", "def dou"),
        ("no_such_module:fn", "no_such_module:fn", ""),
        ("none", "none", ""),
    ],
)
def test_what_is_to_be_mended_is_said_with_its_place(plugin: object, name: str, line: str) -> None:
    source = Path(__file__).read_text().splitlines()
    number = next((n for n, text in enumerate(source, 1) if line and text.startswith(line)), 0)
    place = f" ({__file__}:{number})" if line else ""
    assert user_code.plugin_fix(plugin, "it gives one") == f"fix `{name}`{place}: it gives one"
