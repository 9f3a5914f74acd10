"""Names become things, lazily; what cannot be found or used is refused with the way out."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from milescli.core.errors import RecipeError, nearest
from milescli.core.registry import PlugPoint

REWARDS = PlugPoint(
    kind="reward",
    key="rollout.reward",
    builtin={"basename": "os.path:basename", "lazy": "module_that_is_not_there:f"},
    signature="(prompt, response, label) -> float",
)
PLAIN = PlugPoint(kind="thing", key="x.y", builtin={"basename": "os.path:basename"})


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(
        "def strict(*, prompt, response, label): return 1.0\n"
        "def takes_any(**fields): return 0.0\n"
        "def lacks_label(prompt, response): return 0.0\n"
        "class Judge:\n    def __init__(self, prompt, response, label): ...\n"
        "number = 3\n"
    )
    (tmp_path / "my_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_rewards", "my_broken"):
        sys.modules.pop(name, None)
    return "my_rewards"


def test_a_built_in_name_is_found() -> None:
    import os.path

    assert PLAIN.resolve("basename") is os.path.basename


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    assert "lazy" in REWARDS.names()


@pytest.mark.parametrize("name", ["strict", "takes_any", "Judge"])
def test_an_import_path_with_the_right_signature_is_taken(plugin: str, name: str) -> None:
    assert REWARDS.resolve(f"{plugin}:{name}").__name__ == name


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("basenam", "no reward `basenam`", "--set rollout.reward=basename"),
        (
            "my_rewards:lacks_label",
            "cannot be a reward",
            "def lacks_label(prompt, response, label): ...",
        ),
        ("my_rewards:number", "is not callable", "point rollout.reward at a function or class"),
        ("my_rewards:strct", "has no `strct`", "--set rollout.reward=my_rewards:strict"),
        ("my_broken:f", "cannot import", " -c 'import my_broken'"),
        ("no_such_module:f", "cannot import", " -c 'import no_such_module'"),
        ("lazy", "cannot import", " -c 'import module_that_is_not_there'"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_way_out(
    plugin: str, name: str, what: str, fix: str
) -> None:
    with pytest.raises(RecipeError) as refusal:
        REWARDS.resolve(name)
    assert what in refusal.value.what
    assert fix in refusal.value.fixes[0]
    assert refusal.value.why


@pytest.mark.parametrize(
    ("point", "fix"),
    [
        (replace(PLAIN, in_list=True), "--set 'x.y=[my_rewards:strict]'"),
        (replace(PLAIN, prefix="task:"), "--set x.y=task:my_rewards:strict"),
        (PLAIN, "--set x.y=my_rewards:strict"),
    ],
)
@pytest.mark.parametrize("name", ["my_rewards:strickt", "my_rewards.strict"])
def test_the_fix_has_the_form_that_the_key_takes(
    plugin: str, point: PlugPoint, fix: str, name: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        point.resolve(name)
    assert refused.value.fixes == [fix]


def test_a_broken_module_is_told_with_its_own_error(plugin: str) -> None:
    with pytest.raises(RecipeError, match="ZeroDivisionError"):
        REWARDS.resolve("my_broken:f")


def test_a_module_beside_the_user_is_found_after_the_printed_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_beside.py").write_text("import package_of_nobody\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as refusal:
        REWARDS.resolve("my_beside:f")
    assert refusal.value.fixes[0].startswith('export PYTHONPATH="$PWD')
    monkeypatch.syspath_prepend(tmp_path)  # what the command does
    with pytest.raises(RecipeError, match=r"my_beside\.py:1") as refusal:
        REWARDS.resolve("my_beside:f")
    assert "pip install package_of_nobody" in refusal.value.fixes[0]


def test_nearest_is_none_where_nothing_is_near() -> None:
    assert nearest("train.steps", ["rollout"]) is None
    assert nearest("stps", ["steps", "stop"]) == "steps"
