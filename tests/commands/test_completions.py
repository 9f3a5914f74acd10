"""What TAB offers, and the scripts that ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.commands import suggest
from milescli.commands.completions import FILES, script

COMPLETIONS = Path(__file__).resolve().parents[2] / "completions"


@pytest.mark.parametrize("shell", FILES)
def test_the_script_that_ships_is_what_the_program_prints(shell: str) -> None:
    """Mend by: python -m milescli.commands.completions --write"""
    assert (COMPLETIONS / FILES[shell]).read_text() == script(shell)


def test_keys_are_offered_with_what_they_want() -> None:
    assert dict(suggest.overrides("train.st")) == {
        "train.steps=": "a whole number >= 1 and <= 1000000000"
    }
    assert len(suggest.overrides("")) > 80


def test_after_the_equals_sign_the_choices_are_offered() -> None:
    assert [value for value, _ in suggest.overrides("train.optimizer.schedule=c")] == [
        "train.optimizer.schedule=constant",
        "train.optimizer.schedule=cosine",
    ]
    assert [value for value, _ in suggest.overrides("weights.verify=")] == [
        "weights.verify=true",
        "weights.verify=false",
    ]
    assert suggest.overrides("train.steps=") == []


def test_runs_and_recipes_are_offered_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs" / "quick-1").mkdir(parents=True)
    (tmp_path / "runs" / "quick-1" / "recipe.yaml").write_text("")
    (tmp_path / "runs" / "not-a-run").mkdir()
    assert suggest.runs("q") == ["quick-1"] and suggest.runs("x") == []
    assert "quickstart" in suggest.recipes("quick")


def test_a_broken_user_file_does_not_break_tab(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "miles.yaml").write_text("run: [")
    assert suggest.runs("") == []
