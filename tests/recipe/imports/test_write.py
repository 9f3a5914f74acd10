"""Configurations of other frameworks become recipes that load, with the values that they mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.imports.reading import read_files
from milescli.recipe.imports.tables import READ
from milescli.recipe.imports.write import Imported, frameworks, import_files
from milescli.recipe.keys import keys as recipe_keys
from milescli.recipe.load import load, value_at
from tests.recipe.imports.cases import CASES
from tests.recipe.imports.launchers import MILES_PYTHON


def written(folder: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


def imported(folder: Path, name: str, text: str, *words: str) -> Imported:
    return import_files(written(folder, {name: text}), overrides=words)


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_becomes_a_recipe(tmp_path: Path, case: str) -> None:
    framework, files, expected, without = CASES[case]
    made = import_files(written(tmp_path, files))
    assert made.framework == framework and made.reason
    file = tmp_path / "recipe.yaml"
    file.write_text(made.text)
    loaded = load(str(file), environ={}, cwd=tmp_path, home=tmp_path)
    found = {key: value_at(loaded.recipe, key) for key in expected}
    assert found == expected
    names = [one.name for one, _ in made.without]
    assert set(without) <= set(names)
    assert not [name for name in names if "not known" in dict(_reasons(made))[name]]


def _reasons(made: Imported) -> list[tuple[str, str]]:
    return [(one.name, why) for one, why in made.without]


@pytest.mark.parametrize("name", frameworks())
def test_a_table_names_keys_that_there_are(name: str) -> None:
    table = frameworks()[name]
    keys = {*table.rows, *table.defaults}
    for new in table.aliases.values():
        assert new in keys or (new.endswith(".") and any(key.startswith(new) for key in keys))
    assert not set(table.aliases) & set(table.rows)
    assert not set(recipe_keys()) & set(map(str, table.defaults.values()))
    assert all(len(why) > 10 or why == READ for why in table.groups.values())


def test_a_bound_that_they_do_not_have_is_chosen_and_said(tmp_path: Path) -> None:
    made = imported(tmp_path, "run.sh", CASES["slime gspo"][1]["run.sh"])
    chosen = made.entries["data.max_prompt_tokens"]
    assert chosen.value == 4096 and "choice" in chosen.comment


def test_every_value_names_its_line(tmp_path: Path) -> None:
    made = imported(tmp_path, "run.sh", CASES["verl grpo"][1]["run.sh"])
    lines = {line.split(":")[0].strip(): line for line in made.text.splitlines() if "  # " in line}
    assert lines["prompts_per_step"].endswith("# run.sh:6: data.train_batch_size=64")
    assert lines["kl_estimator"].endswith(
        '# verl\'s default: actor_rollout_ref.actor.kl_loss_type="low_var_kl"'
    )


def test_a_layout_stays_in_comments_unless_it_is_wanted(tmp_path: Path) -> None:
    paths = written(tmp_path, {"run.sh": CASES["verl grpo"][1]["run.sh"]})
    assert "#   --set engines.tp=2" in import_files(paths).text
    kept = import_files(paths, keep_layout=True)
    assert kept.entries["engines.tp"].value == 2 and not kept.layout


def test_words_of_the_command_line_and_later_files_override(tmp_path: Path) -> None:
    text = CASES["trl python"][1]["train.py"]
    assert (
        imported(tmp_path, "a.py", text, "num_processes=4")
        .entries["rollout.prompts_per_step"]
        .value
        == 16
    )
    paths = written(
        tmp_path,
        {"model.sh": "MODEL_ARGS=(--num-layers 4)\n", "run.sh": CASES["slime grpo"][1]["run.sh"]},
    )
    assert not [note for note in import_files(paths).notes if "MODEL_ARGS" in note]
    assert [note for note in import_files(paths[1:]).notes if "MODEL_ARGS" in note]


def test_what_miles_refuses_is_listed_with_why(tmp_path: Path) -> None:
    text = CASES["roll"][1]["rlvr.yaml"].replace("temperature: 0.9", "temperature: 0.9, top_k: 50")
    made = imported(tmp_path, "rlvr.yaml", text)
    assert "rollout.top_k" not in made.entries
    [why] = [why for one, why in made.without if one.name.endswith("top_k")]
    assert why.startswith("rollout.top_k=50 is refused: ")


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"X=$(touch {mark}; echo 7)\n`touch {mark}`\n" + CASES["verl ppo"][1]["run.sh"].rstrip()
    made = imported(tmp_path, "run.sh", f"{text} data.max_response_length=$X\n")
    assert not mark.exists()
    assert "rollout.max_response_tokens" not in made.entries or made.notes


def test_what_the_environment_sets_is_said(tmp_path: Path) -> None:
    text = CASES["verl ppo"][1]["run.sh"].replace("path=/m", "path=${MODEL}")
    assert [note for note in imported(tmp_path, "run.sh", text).notes if "${MODEL}" in note]


def test_what_a_recipe_needs_and_a_configuration_lacks_is_said(tmp_path: Path) -> None:
    made = imported(tmp_path, "run.sh", "python -m verl.trainer.main_ppo algorithm.lam=0.9\n")
    assert {one.key for one in made.entries.values() if one.comment.startswith("not in")} == {
        "model.path",
        "data.prompts",
    }
    lacking = [note.split()[0] for note in made.notes if "is not in the configuration" in note]
    assert set(lacking) == {"model.path", "data.prompts", "train.steps"}


@pytest.mark.parametrize(
    ("name", "text", "framework", "said"),
    [
        ("a.sh", "echo hello\n", None, "sets nothing that miles can read"),
        ("a.yaml", "colour: red\n", None, "does not recognise"),
        ("a.yaml", "colour: [red\n", None, "not valid YAML"),
        ("a.toml", "colour = [\n", None, "is not valid TOML"),
        ("a.py", "f(\n", None, "is not valid Python"),
        ("a.md", "# words\n", None, "cannot read"),
        ("a.yaml", "pretrain: x\n", "rol", "reads no configurations of `rol`"),
    ],
)
def test_what_cannot_be_imported_is_refused(
    tmp_path: Path, name: str, text: str, framework: str | None, said: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        import_files(written(tmp_path, {name: text}), framework=framework)
    assert said in caught.value.what


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no file"):
        import_files([tmp_path / "none.sh"])


def test_all_keys_of_all_tables_are_keys_of_a_recipe(tmp_path: Path) -> None:
    for _, files, _, _ in CASES.values():
        made = import_files(written(tmp_path, files))
        assert set(made.entries) | set(made.layout) <= set(recipe_keys())
        assert json.dumps({key: one.value for key, one in made.entries.items()})


def test_a_launcher_in_python_is_read_for_its_defaults_and_for_other_settings(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run_base.py"
    file.write_text(MILES_PYTHON)
    found = read_files([file])
    line = next(n for n, text in enumerate(MILES_PYTHON.splitlines(), 1) if "--lr 2e-6" in text)
    assert found.settings["lr"].where == f"run_base.py:{line}"
    assert "use_tis" not in found.settings and "optimizer_cpu_offload" not in found.settings
    assert any("depends on what only a run knows" in warning for warning in found.warnings)
    assert any("get_default_wandb_args" in warning for warning in found.warnings)
    assert str(found.settings["save"].value) == "{U.create_run_id()}/ckpt"
    other = read_files([file], overrides=["size=large", "responses=2"])
    assert other.value("hf_checkpoint") == "/models/Base-8B"
    assert (found.value("tensor_model_parallel_size"), found.value("colocate")) == (2, True)
    assert (other.value("lr"), other.value("n_samples_per_prompt")) == (5e-7, 2)
    assert other.value("tensor_model_parallel_size") == 4


@pytest.mark.parametrize(
    "body",
    [
        "    run(args)",
        "    x = 'a' * 10**9\n    U.execute_train(train_args='--lr 1 ' + x)",
        "    x = '--lr 1 '\n" + 200 * "    x += x\n" + "    U.execute_train(train_args=x)",
        "    U.execute_train(train_args=9**9**9)",
        "    x = 3\n" + 99 * "    x *= x\n" + "    U.execute_train(train_args=f'--lr {x}')",
        "    U.execute_train(train_args='%99999999d' % 1)",
        "    x = 'a' * 1 + 9999 * 'a'\n    U.execute_train(train_args=x.replace('a', x))",
        "    U.execute_train(train_args=f'{1:>99999999}')",
        "    U.execute_train(train_args=' '.join(['a' * 9] * 10**9))",
        "    U.execute_train(train_args=__import__('os').system('touch ran'))",
        "    U.execute_train(train_args='--lr \\'')",
    ],
)
def test_a_launcher_that_computes_too_much_or_nothing_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.py").write_text(f"def run(args):\n{body}\n    U.execute_train()\n")
    found = read_files([Path("run.py")])
    assert found.form == "python" and not Path("ran").exists()
