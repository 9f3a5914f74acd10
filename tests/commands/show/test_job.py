"""`miles launch --emit`: the script alone on stdout, all else on stderr, and what it goes together
with."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.commands.conftest import Miles


def test_stdout_is_the_script_and_nothing_else(miles: Miles) -> None:
    said = miles("launch", "-r", "quickstart", "--on", "2x8xH200", "--emit", "slurm")
    assert said.code == 0, said.err
    assert said.out.startswith("#!/usr/bin/env bash\n") and said.out.endswith('exit "$code"\n')
    assert "planned for 2 nodes of 8 x NVIDIA H200" in said.err


def test_as_json_the_script_is_one_field(miles: Miles) -> None:
    payload = json.loads(
        miles("launch", "-r", "quickstart", "--on", "2x8xH200", "--emit", "kuberay", "--json").out
    )
    assert [document["kind"] for document in yaml.safe_load_all(payload["script"])] == [
        "ConfigMap",
        "RayJob",
    ]
    assert payload["form"] == "kuberay" and payload["run"] in payload["script"]


def test_nodes_and_gpus_may_be_fewer_than_the_machine_has(miles: Miles) -> None:
    said = miles(
        "launch",
        "-r",
        "quickstart",
        "--on",
        "4x8xH200",
        "--nodes",
        "2",
        "--gpus",
        "4",
        "--emit",
        "ssh",
    )
    assert "--nodes 2 --gpus 4" in said.out and "num_hosts=2" in said.out


def test_an_address_has_no_place_in_a_script_that_starts_its_own_cluster(miles: Miles) -> None:
    said = miles(
        "launch", "-r", "quickstart", "--on", "2x8xH200", "--address", "h:1", "--emit", "slurm"
    )
    assert said.code == 0 and "h:1" not in said.out and "--address is ignored" in said.err


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--on", "8xH200", "--emit", "slurm", "--dry-run"], 2, "use only one"),
        (["--on", "8xH200", "--emit", "slurm", "--price-per-gpu-hour", "2"], 2, "--dry-run"),
        (["--on", "8xH200", "--emit", "pbs"], 2, "kuberay"),
        (["--on", "8xH200"], 2, "--emit"),
        (["--on", "8xH900", "--emit", "ssh"], 4, "H900"),
    ],
)
def test_what_does_not_go_together_is_refused(
    miles: Miles, options: list[str], code: int, reason: str
) -> None:
    said = miles("launch", "-r", "quickstart", *options)
    assert said.code == code and reason in said.err and not said.out
