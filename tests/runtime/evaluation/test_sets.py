"""What `miles eval` asks is read and checked before any process starts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import DataError, MilesError
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tokenizer import load_tokenizer
from milescli.recipe.schema import Recipe
from milescli.runtime.evaluation.sets import EvalOptions, load_set, reward_model_recipe, sets_of


def _recipe(**evaluation: object) -> Recipe:
    return Recipe.model_validate({"rollout": {"reward": "gsm8k"}, "eval": evaluation})


def _file(folder: Path, name: str = "few.jsonl", **more: object) -> Path:
    rows = [{"prompt": f"{at}?", "label": str(at), **more} for at in range(4)]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


@pytest.fixture
def inputs(tmp_path: Path) -> Any:
    """A tokenizer, and nothing that was trained on."""
    make_scratch_tokenizer(["few words"], 300, tmp_path / "model")
    return SimpleNamespace(tokenizer=load_tokenizer(tmp_path / "model"), prompts=None)


def test_sets_have_the_name_of_their_file_or_the_one_that_is_given(tmp_path: Path) -> None:
    file = _file(tmp_path)
    sets = sets_of(_recipe(), EvalOptions(data=[f"{file}", f"hard={file}", f"some={file}[0:2]"]))
    assert [(one.name, one.folder) for one in sets] == [(n, n) for n in ("few", "hard", "some")]
    assert [one.recipe.data.eval for one in sets] == [f"{file}", f"{file}", f"{file}[0:2]"]
    odd = _file(tmp_path, "a=b.jsonl")
    assert sets_of(_recipe(), EvalOptions(data=[f"{odd}"]))[0].recipe.data.eval == str(odd)


def test_without_data_the_recipes_own_prompts_are_asked(tmp_path: Path) -> None:
    file = _file(tmp_path)
    recipe = Recipe.model_validate({"data": {"eval": str(file)}})
    (one,) = sets_of(recipe, EvalOptions())
    assert (one.name, one.folder, one.recipe) == ("heldout", "", recipe)


def test_a_set_that_a_reward_model_scores_is_found_among_others(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {"rollout": {"reward": "reward_model", "reward_model": {"path": "runs/judge"}}}
    )
    sets = sets_of(recipe, EvalOptions(data=["gsm8k", f"{_file(tmp_path)}"]))
    assert [one.recipe.uses_reward_model for one in sets] == [False, True]
    assert reward_model_recipe(sets) is sets[1].recipe
    assert reward_model_recipe(sets[:1]) is sets[0].recipe


@pytest.mark.parametrize(
    ("data", "ks", "evaluation", "refused"),
    [
        (["few.jsonl", "few=few.jsonl"], [], {}, "two sets have the name `few`"),
        (["heldout.jsonl"], [], {}, "cannot have the name `heldout`"),
        (["heldout=few.jsonl"], [], {}, "cannot have the name `heldout`"),
        (["no.jsonl"], [], {}, "there is no file"),
        ([], [], {}, "there are no prompts to evaluate on"),
        (["few.jsonl"], [8], {"samples_per_prompt": 4, "temperature": 1.0}, "pass@8 cannot"),
        (["few.jsonl"], [], {"samples_per_prompt": 4}, "would be identical"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: list[str],
    ks: list[int],
    evaluation: dict[str, object],
    refused: str,
) -> None:
    _file(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MilesError, match=refused) as error:
        sets_of(_recipe(**evaluation), EvalOptions(data=data, ks=ks))
    assert error.value.why and error.value.fixes


def test_a_prompt_has_the_domain_of_its_row(tmp_path: Path, inputs: Any) -> None:
    file = _file(tmp_path)
    lines = [
        json.dumps({**json.loads(line), "kind": 1 + at}) for at, line in enumerate(file.open())
    ]
    file.write_text("\n".join(lines))
    output = Output(stdout=io.StringIO(), stderr=io.StringIO())
    (one,) = sets_of(_recipe(num_prompts=2), EvalOptions(data=[f"{file}[1:4]"], domain="kind"))
    loaded = load_set(one, RunDir(tmp_path), inputs, output=output)
    assert [loaded.domains[prompt.index] for prompt in loaded.prompts] == ["2", "3"]
    (one,) = sets_of(_recipe(), EvalOptions(data=[f"{file}"], domain="topic"))
    with pytest.raises(DataError, match="has no column `topic`"):
        load_set(one, RunDir(tmp_path), inputs, output=output)


def test_a_set_without_the_labels_that_its_reward_needs_is_refused(
    tmp_path: Path, inputs: Any
) -> None:
    file = tmp_path / "bare.jsonl"
    file.write_text('{"prompt": "1?"}\n')
    (one,) = sets_of(_recipe(), EvalOptions(data=[f"{file}"]))
    with pytest.raises(DataError, match="no label column"):
        load_set(one, RunDir(tmp_path), inputs, output=Output(stderr=io.StringIO()))


def test_prompts_that_are_left_out_are_told(tmp_path: Path, inputs: Any) -> None:
    file, said = _file(tmp_path), io.StringIO()
    with file.open("a") as rows:
        rows.write(json.dumps({"prompt": "long " * 200, "label": "1"}) + "\n")
    (one,) = sets_of(_recipe(), EvalOptions(data=[f"{file}"]))
    loaded = load_set(one, RunDir(tmp_path), inputs, output=Output(stderr=said))
    assert len(loaded.prompts) == 4
    assert "few: 1 of 5 prompts are longer than 256 tokens" in said.getvalue()
