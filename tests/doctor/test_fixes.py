"""Tests of commands that mend: whole, valid, with the user's own arguments."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from milescli.doctor import fixes
from milescli.doctor.fixes import DoctorOptions, another_folder, as_root, pip_install

MINE = DoctorOptions(
    recipe="my recipe.yaml",
    sets=["run.dir=/full", "data.prompts=a b.jsonl"],
    address="10.0.0.1:6379",
)


def test_an_option_becomes_the_users_own_command_and_replaces_what_it_changes() -> None:
    words = shlex.split(MINE.full_command("--set run.dir=/roomy   # why"), comments=True)
    assert words == [
        *("miles", "launch", "--recipe", "my recipe.yaml", "--set", "data.prompts=a b.jsonl"),
        *("--address", "10.0.0.1:6379", "--set", "run.dir=/roomy"),
    ]


def test_without_a_recipe_the_command_starts_the_quickstart() -> None:
    assert (
        DoctorOptions().full_command("--set run.dir=/roomy")
        == "miles launch --recipe quickstart --set run.dir=/roomy"
    )
    assert (
        DoctorOptions().full_command("miles doctor   # try again") == "miles doctor   # try again"
    )
    assert DoctorOptions().full_command("unset HF_ENDPOINT") == "unset HF_ENDPOINT"


def test_doctor_is_proposed_with_the_users_own_arguments() -> None:
    assert MINE.full_command("miles doctor").startswith(
        "miles doctor --recipe 'my recipe.yaml' --set run.dir=/full --set"
    )


def test_packages_go_into_the_python_that_runs_this() -> None:
    words = shlex.split(pip_install("--no-deps", "ray[default]>=2.48"))
    assert words == [sys.executable, "-m", "pip", "install", "--no-deps", "ray[default]>=2.48"]


@pytest.mark.parametrize(
    ("user", "command"), [(0, "ip link set lo up"), (1000, "sudo ip link set lo up")]
)
def test_who_is_not_root_gets_sudo(
    user: int, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixes.os, "geteuid", lambda: user)
    assert as_root("ip link set lo up") == command


def test_another_folder_is_on_another_file_system_or_for_the_user_to_name(tmp_path: Path) -> None:
    assert another_folder(but_not=Path("/proc/self"), needed_bytes=1).name == "miles-runs"
    assert another_folder(but_not=tmp_path, needed_bytes=2**80) == Path("/path/to/a/larger/disk")


def test_every_whole_fix_is_valid_shell() -> None:
    for fix in ("--set run.dir=/roomy", "miles doctor   # again", "unset A && export B=1"):
        subprocess.run(["bash", "-n", "-c", MINE.full_command(fix)], check=True, timeout=120)
