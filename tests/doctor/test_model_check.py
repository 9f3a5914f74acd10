"""`miles models check`: what it finds in a folder that is not as its family's table says, and the
figures of one that is. Engines are tried in `test_trial` and in tests/backends/sglang."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milescli.console.output import Output
from milescli.conversion.convert import convert
from milescli.conversion.to_megatron import ToMegatron
from milescli.core.errors import CheckpointError
from milescli.doctor.finding import Status
from milescli.doctor.model_check import (
    check_memory,
    check_model_folder,
    check_names,
    differing_tensors,
)
from milescli.models import load_facts
from milescli.platform.machine import parse_machine
from milescli.recipe.model import Model
from milescli.runtime.inputs.model_facts import require_model
from tests.backends.megatron.tiny_models import make_model
from tests.models.families.v4_release import write_release

QUIET = Output(stderr=io.StringIO())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "moe")


def _changed(folder: Path, **changes: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.norm.weight": None}, "`model.norm.weight` is missing"),
        ({"model.extra.weight": torch.zeros(3)}, "`model.extra.weight` has no rule"),
        (
            {"model.norm.weight": torch.zeros(3)},
            r"has shape \[3\] on disk, but \[64\] according to config.json",
        ),
        *(
            ({"model.norm.weight": torch.ones(64, dtype=dtype)}, "whole ones .* on disk")
            for dtype in (torch.int64, torch.int16, torch.bool)
        ),
    ],
)
def test_a_tensor_that_is_not_as_the_table_says_is_named(
    folder: Path, changes: dict, says: str
) -> None:
    _changed(folder, **changes)
    (finding,) = check_names(folder, load_facts(folder))
    assert finding.status is Status.FAIL
    assert finding.what == "1 tensors differ from the table"
    assert re.search(says, finding.why), finding.why


def test_whole_numbers_where_real_ones_must_be_are_refused_before_a_run(folder: Path) -> None:
    model = Model(path=str(folder))
    require_model(model)
    _changed(folder, **{"model.norm.weight": torch.ones(64, dtype=torch.int64)})
    for refuse in (
        lambda: require_model(model),
        lambda: convert(ToMegatron(source=str(folder)), folder / "out", command=[], output=QUIET),
    ):
        with pytest.raises(CheckpointError, match="1 tensor cannot be weights") as refused:
            refuse()
        assert "`model.norm.weight` holds real numbers in this family" in refused.value.why


def test_a_table_of_experts_holds_whole_numbers(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "v4", "v4")
    facts = load_facts(folder)
    assert check_names(folder, facts)[0].status is Status.OK
    name = "layers.0.ffn.gate.tid2eid"
    _changed(folder, **{name: load_file(folder / "model.safetensors")[name].float()})
    (finding,) = check_names(folder, facts)
    assert f"`{name}` holds whole numbers in this family, and real ones" in finding.why


def test_a_release_in_fp8_and_fp4_is_as_its_table_says(tmp_path: Path) -> None:
    write_release(tmp_path / "v4")
    (finding,) = check_names(tmp_path / "v4", load_facts(tmp_path / "v4"))
    assert finding.status is Status.OK, finding


def test_a_bit_that_differs_is_seen_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "moe")
    assert differing_tensors(folder, other) == []
    norm = load_file(other / "model.safetensors")["model.norm.weight"]
    norm.view(torch.int32)[0] ^= 1
    _changed(other, **{"model.norm.weight": norm})
    assert differing_tensors(folder, other) == ["model.norm.weight"]


def test_a_good_folder_is_told_in_figures(folder: Path) -> None:
    facts = load_facts(folder)
    (names,) = check_names(folder, facts)
    (memory,) = check_memory(folder, facts, parse_machine("1xH100"))
    assert (names.status, memory.status) == (Status.OK, Status.OK)
    assert "all covered by rules" in names.what
    assert "of 79.0 GiB, bf16" in memory.what


def test_a_family_that_nobody_knows_is_refused(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace("qwen3_moe", "martian"))
    with pytest.raises(CheckpointError, match="martian"):
        check_model_folder(folder, output=None)  # type: ignore[arg-type]
