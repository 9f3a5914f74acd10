"""Tests of the dry run: it refuses what a launch would refuse, says what it did not check, and for
another machine only warns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest

from milescli.core.errors import DataError, MilesError, RecipeError, RewardError
from milescli.platform.machine import Machine, parse_machine
from milescli.recipe.load import load
from milescli.runtime.dry_run import dry_run
from milescli.runtime.inputs import run_data

pytestmark = pytest.mark.slow

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(6)]
REWARDS = """
def none(*, prompt, response, label): return None
def service(*, prompt, response, label): raise ConnectionError("nobody answers")
def trl(completions, **kwargs): return [1.0 for _ in completions]
def needy(*, prompt, response, label, tokenizer): return 1.0
"""
OWN = ("data.prompts=sums.jsonl", "data.eval=null", "eval.every=0", "rollout.reward=gsm8k")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data and rewards in the working directory."""
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    others = [{**row, "question": row["question"].replace("+", "-")} for row in ROWS]
    (tmp_path / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "words.jsonl").write_text('{"question": "Who?", "answer": "nobody"}\n')
    (tmp_path / "options.jsonl").write_text(
        '{"question": "Who?", "choices": ["he", "she"], "answer": 1}\n'
    )
    (tmp_path / "dry_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def _dry(
    *sets: str, recipe: str = "quickstart", machine: Machine | None = None
) -> Mapping[str, list[str]]:
    """Return what was told: notes and warnings."""
    output, here = Mock(), Path.cwd()
    loaded = load(recipe, sets=sets, flags={}, environ={}, cwd=here, home=here)
    dry_run(loaded, machine, output=output)
    return {
        name: [call.args[0] for call in getattr(output, name).call_args_list]
        for name in ("note", "warn")
    }


@pytest.mark.parametrize(
    ("sets", "kind", "says"),
    [
        (["data.prompts=none.jsonl"], DataError, "there is no file"),
        (["data.prompts=empty.jsonl"], DataError, "empty.jsonl"),
        (["data.label_key=anser"], DataError, "no column `anser`"),
        (["data.prompts=words.jsonl"], DataError, "label that `gsm8k` refuses"),
        (["data.eval=sums.jsonl", "eval.every=1"], DataError, "are also training prompts"),
        (["data.prompts=options.jsonl"], DataError, "`gsm8k` does not fit the rows"),
        (["rollout.reward=dry_rewards:none"], RewardError, "failed before the run"),
        (["rollout.reward=dry_rewards:trl"], RecipeError, "miles does not pass `completions`"),
        (["rollout.reward=dry_rewards:needy"], RecipeError, "miles does not pass `tokenizer`"),
        (["run.trackers=[nobodys:Tracker]"], RecipeError, "nobodys"),
    ],
)
def test_it_refuses_what_a_launch_would(sets: list[str], kind: type[MilesError], says: str) -> None:
    keys = {text.partition("=")[0] for text in sets}
    with pytest.raises(kind, match=says):
        _dry(*(text for text in OWN if text.partition("=")[0] not in keys), *sets)


def test_other_held_out_prompts_are_no_leak_before_there_is_a_tokenizer() -> None:
    own = [text for text in OWN if not text.startswith("data.eval")]
    assert _dry(*own, "data.eval=others.jsonl")["note"]


def test_it_says_what_was_checked_and_what_was_not() -> None:
    checked, *unmade = _dry(*OWN)["note"]
    assert checked.startswith("checked: files, ") and "labels" in checked and "reward" in checked
    (scratch,) = (text for text in unmade if "generated from the data" in text)
    assert scratch.startswith("not checked: tokenizer, ")


def test_what_is_on_the_hub_is_not_fetched() -> None:
    # not this machine's free memory, which other tests take
    told = _dry(recipe="qwen3-0.6b", machine=parse_machine("1xH100"))["note"]
    assert any("Qwen/Qwen3-0.6B is on the hub" in text for text in told)
    assert any(
        "rows" in text and "labels" in text and "`miles data check`" in text for text in told
    )


def test_large_files_are_left_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_data, "MAX_BYTES", 10)
    data = load(
        "quickstart", sets=OWN, flags={}, environ={}, cwd=Path.cwd(), home=Path.cwd()
    ).recipe.data
    assert "take long to read" in run_data.why_unread(data)


def test_a_service_that_is_not_up_is_a_warning() -> None:
    (said,) = _dry(*OWN[:3], "rollout.reward=dry_rewards:service")["warn"]
    assert "could not be tried" in said and "nobody answers" in said


def test_another_machine_may_have_what_is_missing_here() -> None:
    told = _dry("data.prompts=none.jsonl", *OWN[1:], machine=parse_machine("8xH200"))
    assert any("on this computer it would fail: there is no file" in text for text in told["warn"])


def test_the_signature_of_trl_is_answered_with_ours() -> None:
    with pytest.raises(RecipeError) as refusal:
        _dry(*OWN[:3], "rollout.reward=dry_rewards:trl")
    assert refusal.value.fixes == ["def trl(prompt, responses, label): ..."]
