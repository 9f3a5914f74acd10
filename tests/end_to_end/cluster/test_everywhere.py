"""each_node: every node is asked, in a stable order; what fails or is late on one is reported by
its address, and hides no other answer."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.end_to_end.cluster.small_cluster import SmallCluster

ASK = [sys.executable, "-m", "tests.end_to_end.cluster.ask"]
HERE = "tests.end_to_end.cluster.on_nodes"
QUESTIONS: dict[str, tuple[str, dict[str, object], float]] = {
    "greeting": (f"{HERE}:who", {"greeting": "hello"}, 60),
    "error": (f"{HERE}:stumble", {"on": "node-2"}, 60),
    "no module": ("no_such_module:f", {}, 60),
    "late": (f"{HERE}:linger", {"on": "node-1"}, 8),
}


@pytest.fixture(scope="module")
def answers(cluster: SmallCluster) -> dict[str, Any]:
    """Question -> one row for each node, or what the question raised; asked from the second
    node."""
    done = cluster.run([*ASK, cluster.address, json.dumps([*QUESTIONS.values()])], node=1)
    assert done.returncode == 0, done.stderr
    return dict(zip(QUESTIONS, map(json.loads, done.stdout.splitlines()), strict=True))


def test_every_node_answers_the_driver_first(answers: dict[str, Any]) -> None:
    assert [(row["address"], row["is_driver"], row["result"]) for row in answers["greeting"]] == [
        ("10.77.0.2", True, ["hello", "node-2", "yes"]),
        ("10.77.0.1", False, ["hello", "node-1", None]),
    ]


def test_an_error_is_that_of_its_node_alone(answers: dict[str, Any]) -> None:
    rows = answers["error"]
    assert [(row["result"], row["error"]) for row in rows] == [(None, "DataError"), ("fine", None)]
    assert "row 7 is broken" in rows[0]["text"]


def test_a_node_that_cannot_import_the_function_says_so(answers: dict[str, Any]) -> None:
    for row in answers["no module"]:
        assert "No module named 'no_such_module'" in row["text"] and row["address"] in row["text"]


def test_a_late_node_holds_up_no_other(answers: dict[str, Any]) -> None:
    rows = answers["late"]
    assert [(row["result"], row["error"]) for row in rows] == [
        ("fine", None),
        (None, "WaitTimeout"),
    ]
    assert "node 10.77.0.1 (node-1) did not answer" in rows[1]["text"]


def test_a_cluster_that_is_not_there_is_named_within_the_bound(cluster: SmallCluster) -> None:
    question = json.dumps([("json:dumps", {}, 5)])
    done = cluster.run([*ASK, "10.77.0.1:7777", question], timeout_s=200)
    assert "no Ray cluster answers at 10.77.0.1:7777" in done.stderr
