"""Teachers are found, and held against the policy, before any process starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import RecipeError
from milescli.models import scratch
from milescli.recipe.load import load
from milescli.recipe.model import ScratchModel
from milescli.recipe.schema import Recipe
from milescli.rollout.scratch_tokenizer import make_scratch_tokenizer
from milescli.runtime.held_models import teacher_facts
from milescli.runtime.inputs import prepare

TEXTS = ["one and two", "two and three"]
SHAPE = {"hidden_size": 64, "num_layers": 2, "head_dim": 16, "ffn_hidden_size": 128}


def _model(folder: Path, *, texts: list[str] = TEXTS, **shape: int) -> Path:
    make_scratch_tokenizer(texts, 300, folder)
    scratch.make_model(ScratchModel(**{**SHAPE, "vocab_size": 300, **shape}), folder, 0)
    return folder


def _recipe(place: Path, teacher: str | Path) -> Recipe:
    (place / "prompts.jsonl").write_text(json.dumps({"prompt": "one", "label": "1"}))
    (place / "my.yaml").write_text("rollout: {reward: none}\n")
    sets = [
        f"model.path={_model(place / 'policy')}",
        f"data.prompts={place}/prompts.jsonl",
        f"train.distill.teachers=[{{path: {teacher}}}]",
    ]
    return load("my.yaml", sets=sets, environ={}, cwd=place, home=place).recipe


def test_a_teacher_of_another_size_is_taken_in(tmp_path: Path) -> None:
    teacher = _model(tmp_path / "teacher", num_layers=3, vocab_size=320)
    recipe = _recipe(tmp_path, teacher)
    assert [facts.num_layers for facts in teacher_facts(recipe)] == [3]
    inputs = prepare(recipe, RunDir(path=tmp_path / "run"))
    assert inputs.teacher_dirs == (teacher,)


def test_a_teacher_with_another_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    teacher = _model(tmp_path / "teacher", texts=["zebras and ibexes"] * 3)
    with pytest.raises(RecipeError) as refused:
        prepare(_recipe(tmp_path, teacher), RunDir(path=tmp_path / "run"))
    assert str(teacher) in refused.value.what
    assert "tokens differ" in refused.value.why
    assert "for the policy" in refused.value.why


def test_a_teacher_that_lacks_tokens_of_the_policy_is_refused(tmp_path: Path) -> None:
    teacher = _model(tmp_path / "teacher", vocab_size=290)
    with pytest.raises(RecipeError, match="another tokenizer") as refused:
        prepare(_recipe(tmp_path, teacher), RunDir(path=tmp_path / "run"))
    assert "knows 290 tokens, the policy 300" in refused.value.why


def test_a_teacher_that_cannot_read_so_far_is_refused(tmp_path: Path) -> None:
    teacher = _model(tmp_path / "teacher", max_position_embeddings=64)
    with pytest.raises(RecipeError, match="cannot read the longest sequence") as refused:
        teacher_facts(_recipe(tmp_path, teacher))
    assert "64 positions" in refused.value.why


def test_as_many_tokens_of_the_teacher_as_there_are_is_refused(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, _model(tmp_path / "teacher"))
    distill = recipe.train.distill.model_copy(update={"kl": "reverse", "top_k": 300})
    train = recipe.train.model_copy(update={"distill": distill})
    with pytest.raises(RecipeError, match="top_k` cannot be 300"):
        prepare(recipe.model_copy(update={"train": train}), RunDir(path=tmp_path / "run"))


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("runs/quickstart-1", "miles launch --recipe quickstart --name quickstart-1"),
        ("/nowhere/teacher", "miles export RUN --to /nowhere/teacher"),
    ],
)
def test_a_teacher_that_is_not_there_is_refused_with_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(RecipeError, match="is not there") as refused:
        teacher_facts(_recipe(tmp_path, path))
    assert fix in refused.value.fixes
