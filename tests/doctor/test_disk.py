"""Tests of disks: full, slow, read-only, in the way; and space for a recipe's checkpoints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from milescli.core.units import GIB, MIB
from milescli.doctor import disk
from milescli.doctor.disk import (
    check_checkpoints,
    check_disk,
    check_download,
    check_scratch,
    write_speed,
)
from milescli.doctor.finding import Status
from milescli.models import parse_facts, table
from milescli.models.scratch import config_of
from milescli.platform.machine import parse_machine
from milescli.recipe.model import ScratchModel
from milescli.recipe.schema import Recipe
from tests.doctor.small_model import SMALL


@pytest.mark.parametrize(
    ("free", "speed", "status"),
    [
        (GIB, 500 * MIB, Status.FAIL),
        (10 * GIB, 500 * MIB, Status.WARN),
        (99 * GIB, 5 * MIB, Status.WARN),
        (99 * GIB, 500 * MIB, Status.OK),
    ],
)
def test_a_full_or_slow_disk_is_found(
    tmp_path: Path, free: int, speed: int, status: Status
) -> None:
    assert (
        check_disk(tmp_path / "runs" / "deep", free_bytes=free, bytes_per_s=speed)[0].status
        is status
    )


def test_the_write_speed_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    assert write_speed(tmp_path, size_bytes=MIB) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_more_is_a_fail_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> float:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(disk, "write_speed", full)
    finding = check_disk(tmp_path)[0]
    assert finding.status is Status.FAIL and finding.why.startswith("Disk quota exceeded")


def test_a_file_in_the_place_of_the_folder_is_a_fail_and_its_command_mends_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "my runs").touch()
    finding = check_disk(tmp_path / "my runs", free_bytes=99 * GIB, bytes_per_s=99 * MIB)[0]
    assert finding.status is Status.FAIL and "is a file" in finding.why
    subprocess.run(finding.fix[0], shell=True, check=True, timeout=120)
    assert (
        check_disk(tmp_path / "my runs", free_bytes=99 * GIB, bytes_per_s=99 * MIB)[0].status
        is Status.OK
    )


def test_a_scratch_folder_that_is_not_there_is_a_fail(tmp_path: Path) -> None:
    assert check_scratch(folder=tmp_path)[0].status is not Status.FAIL
    assert check_scratch(folder=tmp_path / "none")[0].status is Status.FAIL


def _recipe(keep: int, folder: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"scratch": SMALL},
            "checkpoint": {"keep": keep},
            "run": {"dir": str(folder / "runs")},
        }
    )


def test_a_disk_without_room_for_the_checkpoints_is_a_fail_and_fewer_fit(tmp_path: Path) -> None:
    machine, recipe = parse_machine("cpu"), _recipe(4, tmp_path)
    size_bytes = (
        table(parse_facts(config_of(ScratchModel.model_validate(SMALL)))).num_parameters * 16
    )
    assert check_checkpoints(recipe, machine, free_bytes=5 * size_bytes)[0].status is Status.OK
    finding = check_checkpoints(recipe, machine, free_bytes=4 * size_bytes)[0]
    assert (finding.status, finding.fix[0]) == (Status.FAIL, "--set checkpoint.keep=3")
    assert (
        check_checkpoints(_recipe(3, tmp_path), machine, free_bytes=4 * size_bytes)[0].status
        is Status.OK
    )
    assert (
        check_checkpoints(recipe, machine, free_bytes=size_bytes)[0]
        .fix[0]
        .startswith("--set run.dir=/")
    )


def test_a_disk_on_which_a_checkpoint_takes_long_is_a_warning_with_the_time(tmp_path: Path) -> None:
    size_bytes = (
        table(parse_facts(config_of(ScratchModel.model_validate(SMALL)))).num_parameters * 16
    )
    findings = check_checkpoints(
        _recipe(2, tmp_path), parse_machine("cpu"), bytes_per_s=size_bytes / 1200
    )[0]
    assert findings.status is Status.WARN and "20 m 00 s" in findings.what


def test_a_cache_without_room_for_the_model_is_a_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    recipe = Recipe.model_validate({"model": {"path": "Qwen/Qwen3-0.6B"}})
    finding = check_download(recipe, free_bytes=GIB)[0]
    assert (
        finding.status is Status.FAIL
        and "about 1.1 GiB" in finding.what
        and finding.fix[0].startswith("export HF_HOME=/")
    )
    assert check_download(recipe, free_bytes=9 * GIB)[0].status is Status.OK
    assert check_download(_recipe(1, tmp_path), free_bytes=0)[0].status is Status.OK


def test_a_number_format_changes_no_checkpoint(tmp_path: Path) -> None:
    """It holds the weights as they are, not as they are rounded."""
    machine, recipe = parse_machine("cpu"), _recipe(2, tmp_path)
    train = recipe.train.model_copy(update={"precision": "int4_qat"})
    rounding = recipe.model_copy(update={"train": train})
    sizes = [
        check_checkpoints(one, machine, free_bytes=10**15)[0].what.split(" each")[0]
        for one in (recipe, rounding)
    ]
    assert sizes[0] == sizes[1]
