"""What a launch refuses before it makes anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.run_lock import state_of
from milescli.console.output import Output
from milescli.core.errors import (
    CheckpointError,
    DataError,
    ExitCode,
    Interrupted,
    MachineError,
    MilesError,
    RewardError,
    Terminated,
)
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.models import parse_facts, scratch
from milescli.plan.make import make_plan
from milescli.platform.machine import parse_machine
from milescli.recipe.load import load
from milescli.recipe.model import ScratchModel
from milescli.recipe.resolved import load_resolved, resolved_yaml
from milescli.runtime.dry_run import dry_run
from milescli.runtime.inputs.model_facts import facts_of_recipe
from milescli.runtime.launch import launch, with_absolute_paths
from milescli.runtime.planning import refuse_unproven, replan_fetched


def test_several_nodes_without_a_cluster_are_refused_and_no_run_is_made(tmp_path: Path) -> None:
    sets = ["machine.nodes=2", f"run.dir={tmp_path / 'runs'}"]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises(
        MachineError, match="2 nodes are requested, but no Ray cluster is named"
    ) as caught:
        launch(loaded, output=None)  # type: ignore[arg-type]  (refused before anything is said)
    assert caught.value.exit_code is ExitCode.NOT_READY
    assert any("--address" in fix for fix in caught.value.fixes) and any(
        "--emit" in fix for fix in caught.value.fixes
    )
    assert not (tmp_path / "runs").exists()


def test_a_bad_index_is_refused_before_a_run_is_made(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    (model / "config.json").write_text(json.dumps(config))
    index = {"weight_map": {"model.embed_tokens.weight": "missing.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    sets = ["model.scratch=null", f"model.path={model}", f"run.dir={tmp_path / 'runs'}"]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises(CheckpointError, match="no usable weights") as caught:
        launch(loaded, output=Output())
    assert "missing.safetensors" in caught.value.why
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("sets", "kind", "says"),
    [
        ("data.label_key=anser", DataError, "no column `anser`"),
        ("rollout.reward=multiple_choice", DataError, "label that `multiple_choice` refuses"),
        ("data.eval=sums.jsonl eval.every=1", DataError, "are also training prompts"),
        ("rollout.reward=launch_rewards:none", RewardError, "failed before the run"),
        ("data.prompts=null data.train=sums.jsonl train.objective=preference", DataError, ""),
        ("model.path=model model.scratch=null data.max_prompt_tokens=2", DataError, "longer than"),
    ],
)
def test_bad_data_is_refused_before_ray_and_before_a_run_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: str, kind: type[MilesError], says: str
) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "launch_rewards.py").write_text("def none(*, prompt, response, label): ...\n")
    model = make_scratch_tokenizer([str(row) for row in rows], 300, tmp_path / "model")
    scratch.make_model(ScratchModel(vocab_size=300, max_position_embeddings=1024), model, 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("milescli.runtime.launch.prestart_ray", Mock(side_effect=AssertionError))
    own = ["data.prompts=sums.jsonl", "data.eval=null", "eval.every=0", "rollout.reward=gsm8k"]
    own += ["warmup.steps=0", "train.optimizer.lr=1e-4"]
    wanted = {one.partition("=")[0]: one for one in [*own, *sets.split()]}
    loaded = load("quickstart", sets=[*wanted.values()], environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises(kind, match=says):
        launch(loaded, output=Output())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("raised", "kind", "states"),
    [
        (KeyboardInterrupt(), Interrupted, ["stopped"]),
        (SystemExit(ExitCode.TERMINATED), Terminated, ["stopped"]),
        (MachineError("no Ray", why="", fix=""), MachineError, []),
    ],
)
def test_a_launch_that_ends_while_ray_starts_leaves_a_run_only_where_its_user_stopped_it(
    raised: BaseException,
    kind: type,
    states: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(settings: object, *, timeout_s: float) -> None:
        assert list((tmp_path / "runs").iterdir()), "the directory is there by then"
        raise raised

    monkeypatch.setattr("milescli.backends.ray.cluster.start_here", start)
    sets = [f"run.dir={tmp_path / 'runs'}"]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises(kind):
        launch(loaded, output=Output())
    assert [state_of(RunDir(run)) for run in (tmp_path / "runs").iterdir()] == states


def test_a_family_that_transformers_lacks_is_trained_on_the_users_word_only(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    }
    facts = parse_facts(
        {"model_type": "mimo", "vocab_size": 101, "num_nextn_predict_layers": 1, **sizes}
    )
    said = {"environ": {}, "cwd": tmp_path, "home": tmp_path}
    with pytest.raises(CheckpointError, match="is disabled by default"):
        refuse_unproven(load("quickstart", sets=[], **said).recipe, facts)
    refuse_unproven(load("quickstart", sets=["model.allow_unproven=true"], **said).recipe, facts)


def test_a_model_that_outgrew_the_shape_that_ships_is_planned_again_and_says_so(
    tmp_path: Path, capsys
) -> None:
    loaded = load("qwen3.6", sets=[], environ={}, cwd=tmp_path, home=tmp_path)
    machine = parse_machine("8xH200")
    shipped = facts_of_recipe(loaded.recipe.model)
    plan, output = make_plan(loaded.recipe, machine, shipped), Output()
    assert replan_fetched(plan, loaded, machine, shipped, output=output) is plan
    assert not capsys.readouterr().err
    larger = replace(shipped, layers=shipped.layers * 2, num_layers=shipped.num_layers * 2)
    grown = replan_fetched(plan, loaded, machine, larger, output=output)
    assert grown.fingerprint != plan.fingerprint
    assert "plans again" in capsys.readouterr().err


def test_a_dry_run_plans_what_a_launch_would_refuse_and_says_so(tmp_path: Path, capsys) -> None:
    loaded = load("kimi-k2.6", sets=["machine.nodes=32"], environ={}, cwd=tmp_path, home=tmp_path)
    plan = dry_run(loaded, parse_machine("32x8xH200"), output=Output())
    assert plan.trainer.world_size == 256
    assert "a launch would fail" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="is disabled by default"):
        launch(loaded, output=Output())


def test_relative_paths_become_absolute_and_everything_else_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}")
    sets = [
        *("model.scratch=null", "model.path=sft", "data.prompts=a.jsonl[0:4]"),
        *("data.demonstrations=missing.jsonl", "data.eval=task:sums-heldout"),
    ]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    anchored = with_absolute_paths(loaded)
    assert anchored.recipe.model.path == str(tmp_path / "sft")
    assert anchored.recipe.data.prompts == f"{tmp_path}/a.jsonl[0:4]"
    assert anchored.recipe.data.demonstrations == "missing.jsonl"
    assert anchored.recipe.data.eval == "task:sums-heldout"
    assert with_absolute_paths(anchored) is anchored
    (tmp_path / "recipe.yaml").write_text(resolved_yaml(anchored))
    assert load_resolved(tmp_path / "recipe.yaml").recipe == anchored.recipe


def test_files_of_templates_drafts_tasks_and_roles_are_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("chat.jinja", "draft", "tasks", "old", "none", "judge", "j.md"):
        (tmp_path / name).write_text("")
    sets = [
        *("data.chat_template=chat.jinja", "rollout.harbor.tasks=tasks"),
        *("rollout.speculative={kind: draft, model: draft}", "rollout.judge.model=judge"),
        *("rollout.judge.prompt=j.md", "rollout.code.packages=own"),
        *("rollout.agent=multi_agent", "rollout.roles={a: {}, b: {policy: old}}"),
    ]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    rollout = (anchored := with_absolute_paths(loaded).recipe).rollout
    named = (anchored.data.chat_template, rollout.speculative.model, rollout.harbor.tasks)
    assert named == tuple(str(tmp_path / name) for name in ("chat.jinja", "draft", "tasks"))
    assert rollout.roles["b"].policy == str(tmp_path / "old")
    assert rollout.judge.prompt == str(tmp_path / "j.md") and rollout.code.packages == "own"
    assert rollout.roles["a"].policy is None and rollout.judge.model == "judge"
    sets = ["data.chat_template=none"]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    assert with_absolute_paths(loaded) is loaded


def test_scripts_of_mcp_servers_are_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("server.py", "python", "run"):
        (tmp_path / name).write_text("")
    sets = ["rollout.agent=tools", "rollout.mcp={a: {command: [python, server.py, --x, no.py]}}"]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    anchored = with_absolute_paths(loaded)
    wanted = ["python", str(tmp_path / "server.py"), "--x", "no.py"]
    assert anchored.recipe.rollout.mcp["a"].command == wanted
    assert with_absolute_paths(anchored) is anchored


def test_paths_in_lists_are_made_absolute_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}")
    mix = "data.mix=[{path: a.jsonl, weight: 2}, {path: 'task:sums', weight: 1}]"
    loaded = load(
        "quickstart", sets=[mix, "data.prompts=null"], environ={}, cwd=tmp_path, home=tmp_path
    )
    sources = with_absolute_paths(loaded).recipe.data.mix
    assert sources is not None
    assert [source.path for source in sources] == [str(tmp_path / "a.jsonl"), "task:sums"]
