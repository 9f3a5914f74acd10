"""Tests of machines as data: named, written and read again, refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import MachineError, RecipeError
from milescli.platform.machine import (
    DEVICE_MODELS,
    Device,
    Machine,
    model_of,
    parse_machine,
    read_machine,
)


@settings(deadline=None)
@given(st.sampled_from(sorted(DEVICE_MODELS)), st.integers(1, 4), st.integers(1, 16))
def test_a_named_machine_survives_json_and_yaml(
    model: str, num_nodes: int, num_devices: int
) -> None:
    machine = parse_machine(f"{num_nodes}x{num_devices}x{model}")
    assert len(machine.nodes) == num_nodes and {len(node.devices) for node in machine.nodes} == {
        num_devices
    }
    assert Machine.from_text(machine.to_json(), origin="test") == machine
    assert Machine.from_text(yaml.safe_dump(asdict(machine)), origin="test") == machine


def test_names_without_counts_mean_one() -> None:
    assert parse_machine("h200") == parse_machine("1x1xH200")
    assert parse_machine("8xMI300X").kind == "rocm"
    assert parse_machine("cpu").kind == "cpu" and not parse_machine("cpu").nodes[0].devices


@pytest.mark.parametrize(
    ("text", "fixes"),
    [
        ("8xH20O", {"8xH200", "8xH100"}),
        ("8*H200", {"8xH200"}),
        ("0xH200", {"8xH200"}),
        ("", {"8xH200"}),
        ("4xMI35X", {"4xMI355X", "4xMI350X"}),
        ("2x4xGB", {"4xGB200", "4xGB300"}),
        ("8xA100-60GB", {"8xA100", "8xA100-40GB"}),
        ("8xH100-PCIe", {"8xH100"}),
        ("12xH100", {"2x8xH100"}),
        ("6xGB300", {"2x4xGB300"}),
    ],
)
def test_a_name_that_is_not_known_is_answered_with_the_nearest(text: str, fixes: set[str]) -> None:
    with pytest.raises(MachineError) as error:
        parse_machine(text)
    proposed = {fix.removeprefix("--on ") for fix in error.value.fixes}
    assert fixes <= proposed and all(fix.startswith("--on ") for fix in error.value.fixes)
    for fix in fixes:
        parse_machine(fix)


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "name"),
    [
        ("8xh100", 1, 8, "NVIDIA H100 80GB HBM3"),
        ("2X8XMI300X", 2, 8, "AMD Instinct MI300X"),
        ("8 x H200", 1, 8, "NVIDIA H200"),
        ("H100-SXM5-80GB", 1, 1, "NVIDIA H100 80GB HBM3"),
        ("8xA100-80GB", 1, 8, "NVIDIA A100-SXM4-80GB"),
        ("8xA100-SXM4-40GB", 1, 8, "NVIDIA A100-SXM4-40GB"),
        ("4xGB200", 1, 4, "NVIDIA GB200"),
        ("64xGB300", 16, 4, "NVIDIA GB300"),
        ("16xH100", 2, 8, "NVIDIA H100 80GB HBM3"),
        ("1x16xH100", 1, 16, "NVIDIA H100 80GB HBM3"),
    ],
)
def test_a_machine_is_named_as_people_write_it(
    text: str, nodes: int, devices: int, name: str
) -> None:
    machine = parse_machine(text)
    assert [len(node.devices) for node in machine.nodes] == [devices] * nodes
    assert {device.name for node in machine.nodes for device in node.devices} == {name}


@pytest.mark.parametrize(
    ("name", "memory_gib", "model"),
    [
        ("NVIDIA B300 SXM6 AC", 268, "B300"),
        ("NVIDIA A100-SXM4-40GB", 40, "A100-40GB"),
        ("NVIDIA A100-PG509-200", 40, "A100-40GB"),
        ("NVIDIA A100-SXM-64GB", 64, "A100"),
        ("NVIDIA GeForce RTX 4090", 23, "RTX4090"),
        ("AMD Instinct MI300X OAM", 191, "MI300X"),
        ("MI300X-O", 191, "MI300X"),
        ("NVIDIA H100 PCIe", 79, None),
        ("NVIDIA H200 NVL", 140, None),
        ("NVIDIA GH200 480GB", 95, None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39, None),
        ("", 0, None),
    ],
)
def test_a_device_is_known_by_the_words_of_its_name(
    name: str, memory_gib: int, model: str | None
) -> None:
    assert model_of(Device(index=0, name=name, memory_bytes=memory_gib * 2**30, arch="")) == model


@pytest.mark.parametrize(
    "text",
    ["", "[]", "kind: cuda", "{kind: cpu, nodes: []}", "{kind: tpu, nodes: [{cpu_cores: 1, "
                                                       "memory_bytes: 1, shm_bytes: 1}]}",
     "{kind: cuda, nodes: [{cpu_cores: 1, memory_bytes: 1, shm_bytes: 1}]}", "{kind: cpu, nodes: "
                                                                             "[{cpu_cores: 1}]}",
     "{kind: cpu, nodse: []}", "a: [", "{kind: cpu, nodes: [{cpu_core: 1}]}",
     "{kind: cpu, nodes: [{cpu_cores: 8, memory_bytes: 64GB, shm_bytes: 1}]}",
     "{kind: cpu, nodes: [{cpu_cores: true, memory_bytes: 1, shm_bytes: 1}]}",
     "{kind: cpu, nodes: [{cpu_cores: 1, memory_bytes: -1, shm_bytes: 1}]}"],
)  # fmt: skip
def test_a_file_that_describes_no_machine_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        read_machine(str(path))
    assert str(path) in error.value.what


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(RecipeError, match="does not exist"):
        read_machine("absent.json")
