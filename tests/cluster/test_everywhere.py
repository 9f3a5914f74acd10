"""each_node: every node is asked, in a stable order; what fails or is late on one is told by its
address, and hides no other answer."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from tests.cluster_in_small import SmallCluster

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

ASK = textwrap.dedent(
    """
    import json, sys
    from milescli.backends.ray.everywhere import each_node, joined
    with joined(sys.argv[1]):
        for target, kwargs, timeout_s in json.loads(sys.argv[2]):
            told = each_node(sys.argv[1], target, kwargs, timeout_s=timeout_s)
            print(json.dumps([[a.node.address, a.node.is_driver, a.result, a.error and type(a.error).__name__, str(a.error)] for a in told]))
    """
)


def _ask(
    cluster: SmallCluster, *questions: tuple[str, dict, float], node: int = 0
) -> list[list[list]]:
    done = cluster.run(
        [sys.executable, "-c", ASK, cluster.address, json.dumps(questions)], node=node
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_node_answers_and_its_failures_are_its_own(cluster: SmallCluster) -> None:
    here = "tests.cluster.on_nodes"
    told, stumbled, missing, late = _ask(
        cluster,
        (f"{here}:who", {"greeting": "hello"}, 60),
        (f"{here}:stumble", {"on": "node-2"}, 60),
        ("no_such_module:f", {}, 60),
        (f"{here}:linger", {"on": "node-1"}, 8),
        node=1,
    )
    assert [answer[:3] for answer in told] == [
        ["10.77.0.2", True, ["hello", "node-2", "yes"]],
        ["10.77.0.1", False, ["hello", "node-1", None]],
    ]
    assert [answer[2:4] for answer in stumbled] == [[None, "DataError"], ["fine", None]]
    assert "row 7 is broken" in stumbled[0][4]
    assert all(
        "No module named 'no_such_module'" in answer[4] and answer[0] in answer[4]
        for answer in missing
    )
    assert [answer[2:4] for answer in late] == [["fine", None], [None, "WaitTimeout"]]
    assert "node 10.77.0.1 (node-1) did not answer" in late[1][4]


def test_a_cluster_that_is_not_there_is_named_within_the_bound(cluster: SmallCluster) -> None:
    question = json.dumps([("json:dumps", {}, 5)])
    done = cluster.run([sys.executable, "-c", ASK, "10.77.0.1:7777", question], timeout_s=60)
    assert "no Ray cluster answers at 10.77.0.1:7777" in done.stderr
