"""A value of another framework becomes the value that means the same here."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.imports import trl
from milescli.recipe.imports.reading import ForeignConfig, read_files
from milescli.recipe.imports.write import import_files
from milescli.recipe.load import load, value_at
from tests.recipe.imports.meanings import MEANINGS


@pytest.mark.parametrize("meaning", MEANINGS)
def test_a_word_means_what_it_does_there(tmp_path: Path, meaning: str) -> None:
    name, text, expected = MEANINGS[meaning]
    (tmp_path / name).write_text(text)
    made = import_files([tmp_path / name])
    (tmp_path / "recipe.yml").write_text(made.text)
    recipe = load(str(tmp_path / "recipe.yml"), environ={}, cwd=tmp_path, home=tmp_path).recipe
    assert {key: value_at(recipe, key) for key in expected} == expected
    assert not [one.name for one, why in made.without if "not known" in why]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "run.sh",
            "python -m verl.trainer.main_ppo data.train_files=a.jsonl "
            "actor_rollout_ref.model.path=/m algorithm.adv_estimator=newest "
            "trainer.v1.trainer_mode=separate_async distillation.enabled=True",
            ["by `newest`, which miles", "rollout.max_staleness", "train.distill"],
        ),
        (
            "dpo.py",
            "DPOTrainer(model='/m', train_dataset=load_dataset('a/b'), args=DPOConfig("
            "loss_type=['ipo', 'sft'], loss_weights=[2.0, 1.0], use_weighting=True, "
            "f_divergence_type='js_divergence', sync_ref_model=True))",
            ["with weights [2.0, 1.0]", "use_weighting", "the reverse KL", "0.6 of the policy"],
        ),
    ],
)
def test_what_changes_the_loss_and_has_no_counterpart_is_a_note_at_the_head(
    tmp_path: Path, name: str, text: str, said: list[str]
) -> None:
    (tmp_path / name).write_text(text)
    notes = "\n".join(import_files([tmp_path / name]).notes)
    assert all(one in notes for one in said), notes


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("gkd.py", "GKDTrainer(args=GKDConfig(temperature=0.9))", "docs/distillation.md"),
        ("a.py", "OnlineDPOTrainer(args=OnlineDPOConfig(beta=0.1))", "a judge orders"),
        ("a.yaml", "model_name_or_path: m\ndataset_name: d\n", "add `trainer=sft`"),
    ],
)
def test_a_trainer_that_miles_has_not_is_refused(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError) as caught:
        import_files([tmp_path / name])
    assert said in str(caught.value.why)


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("gpt_oss_dpo.py", "dpo"),
        ("marigold_sft.py", "sft"),
        ("scripts/DPOTrainer", "dpo"),
        ("examples/online_dpo.py", "onlinedpo"),
        ("online_dpo_vlm.py", "onlinedpo"),
        ("OnlineDPOConfig", "onlinedpo"),
        ("NashMDTrainer", "nashmd"),
        ("MiniLLMConfig", "minillm"),
        ("SelfDistillationConfig", "distillation"),
        ("gold.py", "gold"),
    ],
)
def test_a_trainer_is_known_by_whole_words_of_its_name(program: str, wanted: str) -> None:
    """`gpt_oss_dpo` contains the letters of SDPO, which is another trainer."""
    assert trl.kind(ForeignConfig(program=program)) == wanted


def test_a_trainer_is_known_by_the_folder_or_the_command_line(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_mixture: {datasets: [{id: a/b, split: x}]}\n"
    text += "dataset_name: c/d\nloss_type: apo_zero\n"
    for folder, words in (("dpo", []), ("other", ["trainer=dpo"])):
        file = tmp_path / folder / "config.yaml"
        file.parent.mkdir()
        file.write_text(text)
        made = import_files([file], overrides=words)
        assert made.entries["train.objective"].value == "preference"
        assert made.entries["train.preference.loss"].value == "apo_zero"


@pytest.mark.parametrize(
    ("bounds", "distance"), [("", 0.0), ("epsilon: 0.3\n", 0.0), ("epsilon_high: 5.0\n", 4.0)]
)
def test_the_bound_of_trl_s_cispo_is_that_of_the_ratio(
    tmp_path: Path, bounds: str, distance: float
) -> None:
    """TRL takes `epsilon` where `epsilon_high` is absent; below 1 there is no counterpart."""
    file = tmp_path / "config.yaml"
    file.write_text(f"model_name_or_path: m\ndataset_name: c/d\nloss_type: cispo\n{bounds}")
    made = import_files([file], overrides=["trainer=grpo"])
    assert made.entries["train.clip_high"].value == distance
    assert made.entries["train.clip_low"].value == 1.0
    assert any("epsilon_high" in note for note in made.notes) == (distance == 0.0)


def test_defaults_of_hydra_are_read_into_their_places(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "own.yaml").write_text("optim: {lr: 3e-6}\n")
    file = tmp_path / "ppo.yaml"
    file.write_text("defaults: [actor@actor_rollout_ref.actor: own, _self_]\ndata: {shuffle: no}\n")
    assert read_files([file]).value("actor_rollout_ref.actor.optim.lr") == 3e-6


def test_keys_of_services_stay_out_of_a_recipe(tmp_path: Path) -> None:
    key = "0123456789abcdef" * 2
    file = tmp_path / "run.sh"
    file.write_text(
        f"python train.py --hf-checkpoint /m --rollout-batch-size 4 --wandb-key {key} "
        f"--custom-config-path https://me:{key}@host/x --prompt-data a.jsonl\n"
    )
    made = import_files([file])
    assert key not in made.text and key not in str(made.without) and "[removed]" in made.text


def test_a_name_that_only_a_run_knows_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    text = MEANINGS["verl: one step off-policy"][1]
    file.write_text(f"NOW=$(date +%Y %H)\n{text} trainer.experiment_name=try-${{NOW}}\n")
    made = import_files([file])
    assert "run.name" not in made.entries
    assert [why for one, why in made.without if one.name == "trainer.experiment_name"]


def test_a_launcher_with_positions_powers_and_unknown_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.py"
    file.write_text(
        "@dataclass\nclass Shape:\n    tp: int\n    lr: float\nSHAPE = Shape(2, 3e-6)\n"
        "def more(a):\n    raise NotImplementedError\n"
        "def run():\n    U.execute_train(train_script='train_async.py', train_args=\n"
        "        f'--hf-checkpoint /m --rollout-batch-size 8 --lr {SHAPE.lr} --use-tis '\n"
        "        f'{U.wandb_args(1)} --update-weight-buffer-size {2 * 1024 ** 3} {more(1)}'\n"
        "        f'--colocate --load {nowhere.name} --prompt-data a.jsonl')\n"
    )
    found = read_files([file])
    assert found.value("lr") == 3e-6 and found.value("update_weight_buffer_size") == 2 * 1024**3
    assert found.value("use_tis") is True and found.value("colocate") is True
    assert found.value("load") == "{nowhere.name}"
    assert import_files([file]).entries["rollout.max_staleness"].value == 1


@pytest.mark.parametrize("body", ["not json", "[]", '{"cells": [{"cell_type": "code"}]}'])
def test_a_notebook_without_cells_is_refused(tmp_path: Path, body: str) -> None:
    (tmp_path / "a.ipynb").write_text(body)
    with pytest.raises(RecipeError, match="not a valid notebook"):
        import_files([tmp_path / "a.ipynb"])


def test_a_configuration_that_a_script_names_is_read_below_it(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sft.yaml").write_text("model_name_or_path: m\nlearning_rate: 2e-5\n")
    file = tmp_path / "run.sh"
    file.write_text("trl sft --config own/sft.yaml --learning_rate 3e-5 --dataset_name a/b\n")
    entries = import_files([file]).entries
    assert (entries["model.path"].value, entries["train.optimizer.lr"].value) == ("m", 3e-5)
    file.write_text("uv run rl --trainer @ nowhere.toml --max-steps 5\n")
    assert "names nowhere.toml, which is not there" in import_files([file]).text


def test_a_file_that_a_script_sources_is_read_and_named(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "own.sh").write_text("LR=3e-6\nMODEL_ARGS=(\n  --seed 7\n)\n")
    file = tmp_path / "run.sh"
    file.write_text(
        'source "${DIR}/scripts/models/own.sh"\npython train.py ${MODEL_ARGS[@]} --lr $LR '
        "--hf-checkpoint /m --rollout-batch-size 8 --prompt-data a.jsonl\n"
    )
    entries = import_files([file]).entries
    assert entries["train.optimizer.lr"].value == 3e-6
    assert "own.sh:3" in import_files([file]).text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "python -m openrlhf.cli.train_dpo --pretrain /m --dataset a.jsonl --beta $B\n"),
        ("dpo.py", "DPOTrainer(model='m', args=DPOConfig(beta=beta_of(3)))\n"),
        ("ppo.yaml", "defaults:\ndata: {train_files: a.parquet}\nactor_rollout_ref: {nccl: 1}\n"),
        ("run.sh", "uv run rl @ " + "x" * 300 + ".toml --model.name m\n"),
    ],
)
def test_what_only_a_run_knows_or_nobody_is_no_fault(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert "name:" in import_files([tmp_path / name]).text
