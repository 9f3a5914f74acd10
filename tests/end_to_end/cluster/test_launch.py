"""Runs over two computers, with trainer ranks and an engine on each: a driver is killed and the run
resumed, a node dies; then nothing is left anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from milescli.core.run_processes import TOKEN_VARIABLE
from tests.end_to_end.cluster.small_cluster import SmallCluster, SmallNode, wait_until_gone
from tests.end_to_end.runs import MILES, TINY, Finished

pytestmark = pytest.mark.timeout(900)
SHORT = ["--set", "train.steps=2", "--set", "eval.num_prompts=2", "--set", "weights.verify=true"]

IN_ENVIRONMENTS = [
    "--set",
    "rollout.agent=environment",
    "--set",
    "rollout.environment={name: 'tests.agents.user_environments:Count', processes: 1}",
    "--set",
    "rollout.max_turn_tokens=4",
    "--set",
    "rollout.max_response_tokens=48",
]


@pytest.fixture
def folder(cluster: SmallCluster) -> Path:
    """Where `miles` is called on the first node."""
    (cluster.shared / "tiny.yaml").write_text(TINY)
    return cluster.shared


def _environment(cluster: SmallCluster) -> dict[str, str]:
    return {"HOME": str(cluster.shared), "RAY_ADDRESS": cluster.address, "COLUMNS": "160"}


def _ours(node: SmallNode) -> list[psutil.Process]:
    """Processes of a run on a node, its watchdog and folders of temporary files apart."""
    ours = []
    for process in node.processes():
        try:
            if process.environ().get(TOKEN_VARIABLE) or "milescli" in " ".join(process.cmdline()):
                ours.append(process)
        except psutil.Error:
            continue
    return ours


def _left(cluster: SmallCluster) -> list[object]:
    return [
        item for node in cluster.nodes for item in (*_ours(node), *node.private.glob("miles-*"))
    ]


def _listening(node: SmallNode) -> set[str]:
    """Addresses on which processes of the run listen, of the node agents and engines alone: Ray's
    own workers are the cluster's."""
    return {
        connection.laddr.ip
        for process in _ours(node)
        if "sglang" in " ".join(process.cmdline()) or "milescli" in " ".join(process.cmdline())
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def _texts(folder: Path) -> Iterator[str]:
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            yield file.read_bytes().decode(errors="replace")


def test_a_run_over_two_nodes_survives_its_driver_and_leaves_nothing(
    cluster: SmallCluster, folder: Path
) -> None:
    run, environment = folder / "runs" / "two", _environment(cluster)
    command = [MILES, "launch", "--recipe", "tiny.yaml", "--name", "two", "--nodes", "2", *SHORT]
    driver = cluster.start(command, cwd=folder, env=environment)
    _wait_for(run, "StepDone", driver)
    engines = [
        process
        for node in cluster.nodes
        for process in _ours(node)
        if "sglang" in " ".join(process.cmdline())
    ]
    keys = {process.environ().get("MILES_ENGINE_KEY") for process in engines} - {None, ""}
    visible = [*(" ".join(process.cmdline()) for process in engines), *_texts(run)]
    assert keys and not any(key in text for key in keys for text in visible)
    for node in cluster.nodes:
        assert _ours(node), f"nothing of the run is on {node.name}"
        assert _listening(node) <= {node.address, "127.0.0.1", "::1"}
    for child in psutil.Process(driver.pid).children():
        child.kill()
    driver.communicate(timeout=60)
    assert not wait_until_gone(lambda: _left(cluster), seconds=90)

    resumed = cluster.run([MILES, "resume", "two"], cwd=folder, env=environment, timeout_s=600)
    assert resumed.returncode == 0, Finished(resumed.returncode, resumed.stdout, resumed.stderr)
    assert "node 10.77.0.2 (node-2) (env RAY_ADDRESS)" in resumed.stderr
    assert not wait_until_gone(lambda: _left(cluster), seconds=30)
    logs = {file.name for file in (run / "logs" / "latest").iterdir()}
    assert {
        "trainer-rank-0.log",
        "trainer-rank-1.log",
        "engine-0-server.log",
        "engine-1-server.log",
        "router.log",
    } <= logs
    plan = json.loads((run / "plan.json").read_text())
    assert [(slot["node"], slot["trainer_rank"], slot["engine"]) for slot in plan["slots"]] == [
        (0, 0, 0),
        (1, 1, 1),
    ]
    reports = [event["report"] for event in _events(run) if event["event"] == "StepDone"]
    assert max(report["logprob_diff_max"] for report in reports) <= 1e-4


def _environments(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those in which they live."""
    return [process for process in processes if "user_worker" in " ".join(process.cmdline())]


def _the(processes: list[psutil.Process], part: str) -> psutil.Process:
    """The one with this in its command line."""
    return next(process for process in processes if part in " ".join(process.cmdline()))


def test_what_dies_of_a_run_is_replaced_and_it_goes_on_without_a_node_that_dies(
    own_cluster: SmallCluster,
) -> None:
    (own_cluster.shared / "tiny.yaml").write_text(TINY)
    command = [
        MILES,
        "launch",
        "--recipe",
        "tiny.yaml",
        "--name",
        "long",
        "--nodes",
        "2",
        "--set",
        "train.steps=9999",
        *IN_ENVIRONMENTS,
    ]
    driver = own_cluster.start(command, cwd=own_cluster.shared, env=_environment(own_cluster))
    run = own_cluster.shared / "runs" / "long"
    _wait_for(run, "StepDone", driver)
    for victim, worker in (
        (_the(psutil.Process(driver.pid).children(recursive=True), "router_process"), "router"),
        (_the(_ours(own_cluster.nodes[1]), "sglang::scheduler"), "engine 1"),
    ):
        victim.kill()
        _wait_for(run, "WorkerReplaced", driver, worker=worker)
        reached = max(event["step"] for event in _events(run) if event["event"] == "StepDone")
        _wait_for(run, "StepDone", driver, step=reached + 2)
    assert _environments(psutil.Process(driver.pid).children(recursive=True))
    [there] = _environments(_ours(own_cluster.nodes[1]))
    there.parent().kill()  # the actor, and its process with it
    _wait_for(run, "Notice", driver, part="the environments on node 1 ended, and begin again")
    reached = max(event["step"] for event in _events(run) if event["event"] == "StepDone")
    _wait_for(run, "StepDone", driver, step=reached + 2)
    assert not wait_until_gone(lambda: len(_environments(_ours(own_cluster.nodes[1]))) != 1)
    assert not there.is_running()
    own_cluster.end(1)
    _wait_for(run, "RunEnded", driver, outcome="failed")
    lost = [event for event in _events(run) if event["event"] == "RunEnded"]
    assert lost[0]["error"]["error"] == "node 10.77.0.2 (node-2) died"
    saved = max(event["step"] for event in _events(run) if event["event"] == "CheckpointSaved")
    again = [event for event in _events(run) if event["event"] == "StepDone"]
    assert not wait_until_gone(
        lambda: sum(event["event"] == "StepDone" for event in _events(run)) < len(again) + 2,
        seconds=300,
    ), "the run did not go on with the node that is left"
    [head] = own_cluster.nodes[:1]
    plan = json.loads((run / "plan.json").read_text())
    assert {slot["node"] for slot in plan["slots"]} == {0}
    for child in psutil.Process(driver.pid).children():
        child.terminate()
    out, err = driver.communicate(timeout=120)
    finished = Finished(driver.returncode, out, err)
    assert finished.code == 75, finished
    assert "the run is planned for these (machine.on_node_loss=shrink)" in err, finished
    assert f"going on from step {saved}" in err, finished
    assert not wait_until_gone(lambda: [*_ours(head), *head.private.glob("miles-*")], seconds=60)


def test_a_run_directory_that_is_not_shared_is_refused_before_anything_starts(
    cluster: SmallCluster, folder: Path
) -> None:
    command = [
        MILES,
        "launch",
        "--recipe",
        "tiny.yaml",
        "--nodes",
        "2",
        "--set",
        "run.dir=/tmp/alone",
    ]
    refused = cluster.run(command, cwd=folder, env=_environment(cluster), timeout_s=200)
    assert refused.returncode == 4, Finished(refused.returncode, refused.stdout, refused.stderr)
    assert re.search(
        r"the run directory is not the same on node 10\.77\.0\.2 \(node-2\)", refused.stderr
    )
    assert not list((cluster.nodes[0].private / "alone").iterdir())


def _events(run: Path) -> list[dict]:
    file = run / "events.jsonl"
    return (
        [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        if file.exists()
        else []
    )


def _wait_for(run: Path, name: str, driver, *, part: str = "", **fields: object) -> None:
    """For the first event of that name with these fields; `part`: of its text."""
    wanted = {"event": name, **fields}.items()
    assert not wait_until_gone(
        lambda: (
            not any(
                wanted <= _plain(event).items() and part in str(event.get("text"))
                for event in _events(run)
            )
            and driver.poll() is None
        ),
        seconds=600,
    )
    if driver.poll() is not None:
        out, err = driver.communicate()
        raise AssertionError(str(Finished(driver.returncode, out, err)))


def _plain(event: dict) -> dict:
    """Without what no field is compared with."""
    return {name: value for name, value in event.items() if not isinstance(value, dict | list)}
