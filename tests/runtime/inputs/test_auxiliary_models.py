"""A model that is a run, one of its checkpoints, or a converted model."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milescli.backends.stores.store import ObjectStore
from milescli.checkpoint.hf_to_megatron import FILE_BYTES
from milescli.checkpoint.run_dir import RunDir
from milescli.conversion.verify import Verify
from milescli.core.errors import CheckpointError, FitError, MachineError, MilesError, RecipeError
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tokenizer import load_tokenizer
from milescli.export.adapter import Adapter, adapter_of, write_adapter
from milescli.models import ModelFacts, load_facts, parse_facts, scratch, table
from milescli.models.adapter import (
    ALL_LINEAR,
    LoraShape,
    adapter_table,
    pairs_of,
    peft_name,
)
from milescli.recipe.load import load
from milescli.recipe.model import Model, ScratchModel
from milescli.recipe.schema import Recipe
from milescli.runtime.inputs.auxiliary_models import (
    is_checkpoint,
    policies_by_role,
    policy_folders,
    policy_paths,
    require_adapter,
    require_channel,
    require_learning_draft,
    require_policies,
    require_weight_store,
    teacher_facts,
    without_policies,
)
from milescli.runtime.inputs.model_facts import facts_of_recipe, require_model
from milescli.runtime.inputs.run_inputs import RunInputs, model_dir_of, prepare_inputs
from tests.backends.megatron.harness import plan_of
from tests.backends.megatron.tiny_models import DENSE, MODELS
from tests.checkpoint.making import add_checkpoint, make_run
from tests.conversion.making import to_megatron
from tests.export.models import QWEN3, make_base


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `base`, `converted` and the run `runs/mine`, which has the same weights at step 2."""
    place = tmp_path_factory.mktemp("models")
    make_base(place / "base", QWEN3)
    to_megatron(place / "base", place / "converted", verify=Verify.NONE, file_bytes=FILE_BYTES)
    made = make_run(place / "runs" / "mine", model_dir=place / "base")
    add_checkpoint(made, 2, tensors=place / "converted" / "release")
    return place


@pytest.mark.parametrize("named", ["converted", "runs/mine", "runs/mine/checkpoints/step_2"])
def test_a_run_begins_with_it(place: Path, tmp_path: Path, named: str) -> None:
    model = Model(path=str(place / named))
    require_model(model)
    assert facts_of_recipe(model) == load_facts(place / "base")
    folder = model_dir_of(model, RunDir(path=tmp_path / "new"))
    held, weights = (load_file(one / "model.safetensors") for one in (folder, place / "base"))
    assert held.keys() == weights.keys()
    assert all(torch.equal(held[name], weights[name]) for name in weights)


def test_a_checkpoint_that_is_not_there_is_named(place: Path) -> None:
    (place / "runs/mine/checkpoints/step_9").mkdir()
    with pytest.raises(CheckpointError, match="step 9"):
        facts_of_recipe(Model(path=str(place / "runs/mine/checkpoints/step_9")))


def test_folders_beside_a_recipe_are_what_they_are(place: Path) -> None:
    """`recipe.yaml` may lie two folders above a model, where people keep their own."""
    (place / "models" / "mine").mkdir(parents=True)
    (place / "recipe.yaml").write_text("")
    assert not is_checkpoint(place / "models" / "mine")
    assert not is_checkpoint(place / "base")


SMALL = parse_facts(MODELS["llama"])


@pytest.mark.parametrize(
    ("layout", "changes", "error", "what"),
    [
        ({}, {"device_kind": "cuda"}, MachineError, "cannot be trained on cuda"),
        ({}, {"channel": "distributed"}, FitError, "would not reach the engines"),
        ({"pp": 4}, {}, FitError, "under the policy's layout"),
    ],
)
def test_what_cannot_be_is_refused(
    layout: dict, changes: dict, error: type[MilesError], what: str
) -> None:
    with pytest.raises(error, match=what):
        require_learning_draft(replace(plan_of(layout), **changes), SMALL)


def test_a_channel_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milescli.runtime.inputs.auxiliary_models.find_spec", lambda _: None)
    require_channel(plan_of({}))
    with pytest.raises(MachineError, match="over RDMA") as caught:
        require_channel(replace(plan_of({}), channel="rdma"))
    assert caught.value.fixes[0] == "pip install 'miles-cli[rdma]'"


def stored(tmp_path: Path, url: str) -> tuple[Recipe, RunDir]:
    sets = [f"weights.store={url}"]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    return loaded.recipe, RunDir(tmp_path / "mine")


def test_a_store_for_weights_is_tried_with_a_probe_that_is_removed(tmp_path: Path) -> None:
    recipe, run = stored(tmp_path, (tmp_path / "store").as_uri())
    require_weight_store(recipe, run)
    assert os.listdir(tmp_path / "store" / "mine" / "weights") == []


def test_a_store_whose_links_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = stored(tmp_path, (tmp_path / "store").as_uri())
    monkeypatch.setattr(ObjectStore, "link", lambda *_, **__: "file:///not/there")
    with pytest.raises(MachineError, match="gives no links that engines can read") as caught:
        require_weight_store(recipe, run)
    assert "/not/there" in caught.value.why
    assert caught.value.fixes == ["--set weights.store=null --set weights.channel=auto"]


def test_what_fits_passes() -> None:
    require_learning_draft(plan_of({"pp": 2}), SMALL)


FACTS = parse_facts(DENSE)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Of rank 4 and alpha 8 at all matrices."""
    of_adapter = adapter_table(table(FACTS), LoraShape(rank=4, alpha=8, targets=(ALL_LINEAR,)))
    shapes = of_adapter.hf_shapes()
    pairs = {
        module: (
            torch.ones(shapes[peft_name(module, "lora_A")]),
            torch.ones(shapes[peft_name(module, "lora_B")]),
        )
        for module in pairs_of(of_adapter)
    }
    write_adapter(tmp_path, Adapter(pairs=pairs, alpha=8, rank=4))
    return tmp_path


def _adapter_recipe(given: Path, **lora: object) -> Recipe:
    return Recipe(model={"adapter": str(given)}, train={"lora": {"rank": 4, "alpha": 8, **lora}})


def test_one_of_the_same_shape_is_taken(given: Path) -> None:
    require_adapter(_adapter_recipe(given), FACTS)


@pytest.mark.parametrize(
    ("lora", "fix"),
    [
        ({"rank": 8, "alpha": 16}, "--lora 4"),
        ({"alpha": 4}, "--set train.lora.alpha=8"),
        ({"type": "rslora"}, "--set train.lora.alpha=4"),
        ({"targets": ["q_proj"]}, "train.lora.targets=["),
        ({"exclude": ["mlp"]}, "train.lora.targets=["),
    ],
)
def test_another_is_refused_with_what_to_set(
    given: Path, lora: dict[str, object], fix: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        require_adapter(_adapter_recipe(given, **lora), FACTS)
    assert any(fix in line for line in raised.value.fixes)


@pytest.mark.parametrize("kind", ["rslora", "lora"])
@pytest.mark.parametrize("rank", [5, 16])
def test_the_alpha_of_the_fix_is_accepted(tmp_path: Path, kind: str, rank: int) -> None:
    shape = LoraShape(rank=rank, alpha=8, targets=(ALL_LINEAR,), kind="rslora")
    of_adapter = adapter_table(table(FACTS), shape)
    ones = {name: torch.ones(size) for name, size in of_adapter.hf_shapes().items()}
    write_adapter(tmp_path, adapter_of(ones, of_adapter, shape, base_model=tmp_path))
    settings = {"rank": rank, "type": kind}
    with pytest.raises(RecipeError) as raised:
        require_adapter(_adapter_recipe(tmp_path, **settings, alpha=3), FACTS)
    [fix] = raised.value.fixes
    alpha = float(fix.rpartition("=")[2])
    require_adapter(_adapter_recipe(tmp_path, **settings, alpha=alpha), FACTS)


@pytest.mark.parametrize("given_as", ["each", "shared_outer"])
def test_one_whose_experts_share_otherwise_is_refused(tmp_path: Path, given_as: str) -> None:
    facts, other = parse_facts(MODELS["moe"]), {"each": "shared_outer", "shared_outer": "each"}
    shape = LoraShape(rank=4, alpha=8, targets=(ALL_LINEAR,), experts=given_as)
    of_adapter = adapter_table(table(facts), shape)
    ones = {name: torch.ones(size) for name, size in of_adapter.hf_shapes().items()}
    write_adapter(tmp_path, adapter_of(ones, of_adapter, shape, base_model=tmp_path))
    require_adapter(_adapter_recipe(tmp_path, experts=given_as), facts)
    with pytest.raises(RecipeError) as raised:
        require_adapter(_adapter_recipe(tmp_path, experts=other[given_as]), facts)
    assert raised.value.fixes == [f"--set train.lora.experts={given_as}"]


def test_one_of_another_model_is_refused(given: Path) -> None:
    wider = parse_facts({**DENSE, "hidden_size": 128})
    with pytest.raises(RecipeError, match="differs"):
        require_adapter(_adapter_recipe(given), wider)


ROLE_SHAPE = {"hidden_size": 64, "num_layers": 2, "head_dim": 16, "ffn_hidden_size": 128}


def _role_model(folder: Path, *, text: str = "one and two", **shape: int) -> Path:
    make_scratch_tokenizer([text] * 3, 300, folder)
    scratch.make_model(ScratchModel(**{**ROLE_SHAPE, "vocab_size": 300, **shape}), folder, 0)
    return folder


def _role_recipe(*policies: str, runs: Path = Path("runs")) -> Recipe:
    roles = {f"role{number}": {"policy": path} for number, path in enumerate(policies)}
    rollout = {"agent": "multi_agent", "roles": {**roles, "ours": {}}}
    return Recipe.model_validate({"rollout": rollout, "run": {"dir": str(runs)}})


def _inputs(place: Path) -> tuple[RunDir, ModelFacts, dict[str, object]]:
    own = _role_model(place / "own")
    facts = load_facts(own)
    asked = {"tokenizer": load_tokenizer(own, chat_template="chatml"), "facts": facts}
    return RunDir(path=place / "run"), facts, {**asked, "output": None}


def test_a_run_a_checkpoint_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "recipe.yaml").write_text("")
    recipe = _role_recipe("old@20", "old", "other/model", "some/folder@3", runs=tmp_path)
    known = [(path.path, path.step) for path in policy_paths(recipe)]
    run = str(tmp_path / "old")
    assert known == [(run, 20), (run, None), ("other/model", None), ("some/folder", 3)]


def test_roles_share_the_engine_of_the_policy_that_plays_them(tmp_path: Path) -> None:
    run, facts, asked = _inputs(tmp_path)
    one, two = str(_role_model(tmp_path / "one")), str(_role_model(tmp_path / "two"))
    recipe = _role_recipe(one, two, one)
    require_policies(recipe, facts)
    folders = policy_folders(recipe, run, **asked)  # type: ignore[arg-type]
    assert folders == (Path(one), Path(two)) and recipe.engines_apart == 2
    assert policies_by_role(recipe, {one: 1, two: 2}) == {"role0": 1, "role1": 2, "role2": 1}
    assert without_policies(recipe).engines_apart == 0
    inputs = RunInputs(
        model_dir=tmp_path,
        prompts=None,
        heldout=[],
        demonstrations=[],
        reports={},
        policy_dirs=folders,
        **{key: asked[key] for key in ("tokenizer", "facts")},  # type: ignore[arg-type]
    )
    started_on = [inputs.model_dir_of(engine, num_engines=4) for engine in range(4)]
    assert started_on == [tmp_path, tmp_path, Path(one), Path(two)]


@pytest.mark.parametrize(
    ("shape", "told"),
    [({"num_layers": 3}, "its `num_layers` is 3"), ({}, "does not exist")],
)
def test_what_is_no_version_of_the_policy_is_refused(
    tmp_path: Path, shape: dict[str, int], told: str
) -> None:
    _, facts, _ = _inputs(tmp_path)
    other = _role_model(tmp_path / "other", **shape) if shape else tmp_path / "nowhere"
    with pytest.raises(RecipeError) as caught:
        require_policies(_role_recipe(str(other)), facts)
    assert told in caught.value.what + caught.value.why and caught.value.fixes


def test_one_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    run, _, asked = _inputs(tmp_path)
    other = _role_model(tmp_path / "other", text="zebras and ibexes")
    with pytest.raises(RecipeError, match="another tokenizer"):
        policy_folders(_role_recipe(str(other)), run, **asked)  # type: ignore[arg-type]


TEXTS = ["one and two", "two and three"]
TEACHER_SHAPE = {"hidden_size": 64, "num_layers": 2, "head_dim": 16, "ffn_hidden_size": 128}


def _teacher_model(folder: Path, *, texts: list[str] = TEXTS, **shape: int) -> Path:
    make_scratch_tokenizer(texts, 300, folder)
    scratch.make_model(ScratchModel(**{**TEACHER_SHAPE, "vocab_size": 300, **shape}), folder, 0)
    return folder


def _teacher_recipe(place: Path, teacher: str | Path) -> Recipe:
    (place / "prompts.jsonl").write_text(json.dumps({"prompt": "one", "label": "1"}))
    (place / "my.yaml").write_text("rollout: {reward: none}\n")
    sets = [
        f"model.path={_teacher_model(place / 'policy')}",
        f"data.prompts={place}/prompts.jsonl",
        f"train.distill.teachers=[{{path: {teacher}}}]",
    ]
    return load("my.yaml", sets=sets, environ={}, cwd=place, home=place).recipe


def test_a_teacher_of_another_size_is_taken_in(tmp_path: Path) -> None:
    teacher = _teacher_model(tmp_path / "teacher", num_layers=3, vocab_size=320)
    recipe = _teacher_recipe(tmp_path, teacher)
    assert [facts.num_layers for facts in teacher_facts(recipe)] == [3]
    inputs = prepare_inputs(recipe, RunDir(path=tmp_path / "run"))
    assert inputs.teacher_dirs == (teacher,)


def test_a_teacher_with_another_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    teacher = _teacher_model(tmp_path / "teacher", texts=["zebras and ibexes"] * 3)
    with pytest.raises(RecipeError) as refused:
        prepare_inputs(_teacher_recipe(tmp_path, teacher), RunDir(path=tmp_path / "run"))
    assert str(teacher) in refused.value.what
    assert "tokens differ" in refused.value.why
    assert "for the policy" in refused.value.why


def test_a_teacher_that_lacks_tokens_of_the_policy_is_refused(tmp_path: Path) -> None:
    teacher = _teacher_model(tmp_path / "teacher", vocab_size=290)
    with pytest.raises(RecipeError, match="another tokenizer") as refused:
        prepare_inputs(_teacher_recipe(tmp_path, teacher), RunDir(path=tmp_path / "run"))
    assert "has 290 tokens, and the policy has 300" in refused.value.why


def test_a_teacher_that_cannot_read_so_far_is_refused(tmp_path: Path) -> None:
    teacher = _teacher_model(tmp_path / "teacher", max_position_embeddings=64)
    with pytest.raises(RecipeError, match="cannot read the longest sequence") as refused:
        teacher_facts(_teacher_recipe(tmp_path, teacher))
    assert "64 positions" in refused.value.why


def test_as_many_tokens_of_the_teacher_as_there_are_is_refused(tmp_path: Path) -> None:
    recipe = _teacher_recipe(tmp_path, _teacher_model(tmp_path / "teacher"))
    distill = recipe.train.distill.model_copy(update={"kl": "reverse", "top_k": 300})
    train = recipe.train.model_copy(update={"distill": distill})
    with pytest.raises(RecipeError, match="top_k` cannot be 300"):
        prepare_inputs(recipe.model_copy(update={"train": train}), RunDir(path=tmp_path / "run"))


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
    recipe = _teacher_recipe(tmp_path, path)
    with pytest.raises(RecipeError, match="does not exist") as refused:
        teacher_facts(recipe)
    assert fix in refused.value.fixes


def test_a_run_that_is_to_be_trained_further_and_is_not_there_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="runs/quickstart-1 does not exist") as refused:
        facts_of_recipe(Model(path="runs/quickstart-1"))
    assert "miles launch --recipe quickstart --name quickstart-1" in refused.value.fixes
