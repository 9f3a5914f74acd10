"""Tests of machines as data: named, written and read again, refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import MachineError, RecipeError
from milescli.platform.machine import DEVICE_MODELS, Machine, parse_machine, read_machine


@settings(deadline=None)
@given(st.sampled_from(sorted(DEVICE_MODELS)), st.integers(1, 4), st.integers(1, 16))
def test_a_named_machine_survives_json_and_yaml(model: str, num_nodes: int, num_devices: int) -> None:
    machine = parse_machine(f"{num_nodes}x{num_devices}x{model}")
    assert len(machine.nodes) == num_nodes and {len(node.devices) for node in machine.nodes} == {num_devices}
    assert Machine.from_text(machine.to_json(), origin="test") == machine
    assert Machine.from_text(yaml.safe_dump(asdict(machine)), origin="test") == machine


def test_names_without_counts_mean_one() -> None:
    assert parse_machine("h200") == parse_machine("1x1xH200")
    assert parse_machine("8xMI300X").kind == "rocm"
    assert parse_machine("cpu").kind == "cpu" and not parse_machine("cpu").nodes[0].devices


@pytest.mark.parametrize(
    ("text", "fix"), [("8xH20O", "8xH200"), ("8*H200", "8xH200"), ("0xH200", "8xH200"), ("", "8xH200"), ("4xMI35X", "4xMI355X")]
)
def test_an_unknown_name_is_answered_with_the_nearest(text: str, fix: str) -> None:
    with pytest.raises(MachineError) as error:
        parse_machine(text)
    assert error.value.fixes[0] in (fix, fix.replace("MI355X", "MI325X"), fix.replace("MI355X", "MI350X"))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "kind: cuda", "{kind: cpu, nodes: []}", "{kind: tpu, nodes: [{cpu_cores: 1, memory_bytes: 1, shm_bytes: 1}]}",
     "{kind: cuda, nodes: [{cpu_cores: 1, memory_bytes: 1, shm_bytes: 1}]}", "{kind: cpu, nodes: [{cpu_cores: 1}]}",
     "{kind: cpu, nodse: []}", "a: [", "{kind: cpu, nodes: [{cpu_core: 1}]}"],
)  # fmt: skip
def test_a_file_that_describes_no_machine_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        read_machine(str(path))
    assert str(path) in error.value.what


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(RecipeError, match="there is no file"):
        read_machine("absent.json")
