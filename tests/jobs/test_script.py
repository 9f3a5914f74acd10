"""Job scripts: what they say, that shells and YAML read it as it was meant, and how they behave
when a node, a driver or the time fails them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import MachineError
from milescli.core.pins import pin
from milescli.jobs import job as job_module
from milescli.jobs.job import Job, machine_like_this
from milescli.jobs.script import FORMS as TABLE
from milescli.jobs.script import Form, fill, notes, script
from milescli.platform.machine import read_machine
from milescli.recipe.machine import MachineSettings
from milescli.recipe.train import Train
from tests.jobs import kuberay_fields
from tests.jobs.planned import job
from tests.tools import tool

FORMS: tuple[Form, ...] = tuple(TABLE)
SHELL: tuple[Form, ...] = ("slurm", "ssh")


def parts(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """ConfigMap and RayJob."""
    config, ray_job = yaml.safe_load_all(text)
    return config, ray_job


def words_of(text: str) -> list[str]:
    """What bash makes of `launch=(...)`, wherever in a script that stands."""
    start = text.index("launch=(")
    head = text[start : text.index("\nrun=" if "\nrun=" in text else "\n[ !", start)]
    done = subprocess.run(
        ["bash", "-c", head + "\nprintf '%s\\0' \"${launch[@]}\""],
        capture_output=True,
        timeout=120,
        check=True,
    )
    return done.stdout.decode().split("\0")[:-1]


def run_sh(text: str) -> str:
    return parts(text)[0]["data"]["run.sh"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("machine", ["2x8xH200", "16x4xGB300", "8xMI355X", "2xcpu"])
def test_every_form_is_filled_for_every_kind_of_machine(form: Form, machine: str) -> None:
    made = job(machine=machine)
    text = script(made, form)
    if form == "kuberay":
        kuberay_fields.check(parts(text)[1])
    else:
        subprocess.run(["bash", "-n"], input=text, text=True, timeout=120, check=True)
    assert made.plan.fingerprint in text and f"--nodes {made.num_nodes} --gpus {made.gpus}" in text


@pytest.mark.parametrize("form", SHELL)
def test_shellcheck_finds_nothing(form: Form) -> None:
    text = script(job("data.system_prompt=be brief & kind"), form)
    done = subprocess.run(
        [tool("shellcheck"), "-s", "bash", "-"],
        input=text,
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.text(
        st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")),
        min_size=1,
        max_size=40,
    )
)
def test_the_users_words_reach_the_program_as_they_were_said(prompt: str) -> None:
    sets = [
        f"data.system_prompt=be {prompt}\nand more @nodes@"
    ]  # a text that begins with a quote would be YAML
    made = job(*sets)
    wanted = made.launch(recipe="quickstart")
    assert wanted[wanted.index("--set") + 1] == sets[0]
    assert words_of(script(made, "slurm")) == wanted
    assert words_of(run_sh(script(made, "kuberay"))) == wanted


def test_the_command_that_a_script_names_makes_it_again(tmp_path: Path) -> None:
    def emitted(*words: str) -> str:
        command = [sys.executable, "-m", "milescli", *words]
        return subprocess.run(
            command, cwd=tmp_path, text=True, capture_output=True, timeout=400, check=True
        ).stdout

    text = emitted(
        "launch",
        "--recipe",
        "quickstart",
        "--on",
        "2x8xH200",
        "--set",
        "data.system_prompt=be `brief`",
        "--emit",
        "ssh",
    )
    (command,) = [
        line.removeprefix("# Made by `")[:-1]
        for line in text.splitlines()
        if line.startswith("# Made by `")
    ]
    assert emitted(*shlex.split(command)[1:]) == text


def test_a_script_says_what_environment_and_files_of_this_host_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("miles.yaml").write_text("run: {trackers: [wandb], project: sums}\n")
    words = job(
        environ={"MILES_RUN__DIR": "/data/runs", "MILES_MACHINE__GPUS": "4"},
        train__steps="--steps 7",
    ).words(recipe="r")
    assert words == [
        "--recipe",
        "r",
        "--steps",
        "7",
        "--set",
        'run.dir="/data/runs"',
        "--set",
        'run.trackers=["wandb"]',
        "--set",
        'run.project="sums"',
    ]


def test_equal_wishes_share_a_run_and_others_do_not(tmp_path: Path) -> None:
    assert job().name == job().name != job(run__seed="--seed 5").name
    assert job(run__name="--name Mine_1").name == "Mine_1"
    assert job(run__name="--name mine-1").label == "miles-mine-1"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("Mine_1", "mine-1"),
        ("mine.1", "mine_1"),
        ("Ä", "ä"),
        ("mine", "mine-"),
        (f"{'long-name' * 9}-1", f"{'long-name' * 9}-2"),
        ("Ä_long.name" * 9, "ä_long.name" * 9),
    ],
)
def test_a_label_is_one_that_kubernetes_takes_and_of_one_name(name: str, other: str) -> None:
    labels = [job(run__name=f"--name {one}").label for one in (name, other)]
    for label in labels:
        assert (
            len(label) <= 47
            and label.replace("-", "").isalnum()
            and label.isascii()
            and label == label.lower().strip("-")
        )
    assert labels[0] != labels[1]


@pytest.mark.parametrize("form", FORMS)
def test_keys_of_the_environment_are_in_no_script(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("WANDB_API_KEY", "verysecret")
    text = script(job(environ=dict(os.environ)), form)
    assert "verysecret" not in text and "HF_TOKEN" in text


def test_slurm_gets_whole_nodes_or_the_share_that_is_used() -> None:
    whole = script(job(), "slurm")
    assert "#SBATCH --gres=gpu:8\n#SBATCH --exclusive\n#SBATCH --mem=0\n" in whole
    half = script(job(machine__gpus="--gpus 4"), "slurm")
    assert "#SBATCH --gres=gpu:4\n#SBATCH --cpus-per-task=48\n#SBATCH --mem=1120G\n" in half
    assert "gres" not in script(job(machine="2xcpu"), "slurm")


def test_slurm_gets_twice_the_forecast_and_half_an_hour_but_no_more_than_a_day() -> None:
    def minutes(made: Job) -> int:
        (line,) = [
            line
            for line in script(made, "slurm").splitlines()
            if line.startswith("#SBATCH --time=")
        ]
        hours, minute, _ = line.partition("=")[2].split(":")
        return 60 * int(hours) + int(minute)

    short, long = job(train__steps="--steps 10"), job(train__steps="--steps 10000000")
    assert short.plan.forecast is not None
    assert minutes(short) == -(-(20 * short.plan.forecast.step_s + 1800) // 60)
    by_epochs = job("train.epochs=3", recipe="quickstart-sft")
    assert minutes(long) == minutes(by_epochs) == 24 * 60
    assert "#SBATCH --time" not in script(job(machine="cpu"), "slurm")


def test_kuberay_gets_one_pod_a_node_alike_and_what_each_may_use() -> None:
    spec = parts(script(job(machine="4x8xMI355X"), "kuberay"))[1]["spec"]["rayClusterSpec"]
    (workers,) = spec["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 3
    assert workers["template"] == spec["headGroupSpec"]["template"]
    (container,) = workers["template"]["spec"]["containers"]
    assert container["image"] == "miles:rocm"
    assert container["resources"]["limits"]["amd.com/gpu"] == "8"
    assert (
        spec["rayVersion"] == pin("ray")
        and spec["headGroupSpec"]["rayStartParams"]["num-gpus"] == "8"
    )


def test_kuberay_carries_a_recipe_of_the_users_own_along(tmp_path: Path) -> None:
    recipe = tmp_path / "my recipe.yaml"
    lines = Path("templates/quickstart.yaml").read_text()
    recipe.write_text(textwrap.indent(lines, "  "))
    text = script(job(recipe=str(recipe)), "kuberay")
    config, _ = parts(text)
    assert config["data"]["my-recipe.yaml"].rstrip() == recipe.read_text().rstrip()
    assert words_of(config["data"]["run.sh"])[:4] == [
        "miles",
        "launch",
        "--recipe",
        "/etc/miles/my-recipe.yaml",
    ]


def test_kuberay_tells_of_files_that_pods_will_not_see(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "1+1", "label": "2"}\n')
    made = job(f"data.prompts={file}", "eval.every=0", "data.eval=null", "warmup.steps=0")
    assert any("data.prompts" in note and "volume" in note for note in notes(made, "kuberay"))
    assert not any("data.prompts" in note for note in notes(made, "slurm"))


def test_every_file_and_model_of_this_host_is_told(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "1+1", "label": "2"}\n')
    made = job(
        f"data.mix=[{{path: '{file}[0:1]'}}]",
        *("data.prompts=null", "eval.every=0", "data.eval=null", "warmup.steps=0"),
    )
    asked = made.loaded.recipe.model_copy(
        update={"train": Train(distill={"teachers": [{"path": str(tmp_path)}]})}
    )
    told = notes(replace(made, loaded=replace(made.loaded, recipe=asked)), "kuberay")
    for key, name in (("data.prompts", file), ("train.distill.teachers", tmp_path)):
        assert any(note.startswith(f"{key}={name} ") for note in told)


def test_a_host_without_the_gpus_that_are_wanted_learns_how_to_name_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_module, "probe", lambda: read_machine("cpu"))
    with pytest.raises(
        MachineError, match="8 GPUs per node are requested, but this host has 0"
    ) as caught:
        machine_like_this(MachineSettings(gpus=8))
    assert caught.value.fixes[0] == "--on 1x8xH200"


@pytest.mark.parametrize("values", [{"a": "1"}, {"a": "1", "b": "2", "c": "3"}])
def test_a_place_without_a_value_or_a_value_without_a_place_is_our_mistake(
    values: dict[str, str],
) -> None:
    with pytest.raises(AssertionError):
        fill("@a@ and @b@", values)
    assert fill("@a@ and @b@", {"a": "@b@", "b": "2"}) == "@b@ and 2"
