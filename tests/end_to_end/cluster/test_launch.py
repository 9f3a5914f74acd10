"""A run over two computers, with trainer ranks and an engine on each: processes, the driver and a
node die; then nothing is left anywhere."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from milescli.core.run_processes import TOKEN_VARIABLE
from tests.end_to_end.cluster.small_cluster import SmallCluster, SmallNode, wait_until_gone
from tests.end_to_end.runs import MILES, TINY, Finished

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


def _environments(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those in which they live."""
    return [process for process in processes if "workers.child" in " ".join(process.cmdline())]


def _the(processes: list[psutil.Process], part: str) -> psutil.Process:
    """The one with this in its command line."""
    return next(process for process in processes if part in " ".join(process.cmdline()))


@dataclass
class TwoNodes:
    """A run over two nodes, at work."""

    cluster: SmallCluster
    name: str
    driver: subprocess.Popen[str] = field(init=False)

    @property
    def run(self) -> Path:
        """Its directory."""
        return self.cluster.shared / "runs" / self.name

    def start(self, verb: str, *options: str) -> None:
        """`launch` or `resume`; returns after another step."""
        before = len(self.steps)
        self.driver = self.cluster.start(
            [MILES, verb, *options],
            cwd=self.cluster.shared,
            env=_environment(self.cluster),
        )
        self.wait_for_steps(before + 1)

    @property
    def steps(self) -> list[dict]:
        """Events of steps that were done, in all attempts."""
        return [event for event in _events(self.run) if event["event"] == "StepDone"]

    def wait_for_steps(self, number: int) -> None:
        """Until so many were done, over all attempts."""
        self.wait_until(lambda: len(self.steps) >= number)

    def wait_for(self, name: str, *, part: str = "", **fields: object) -> None:
        """For an event of that name with these fields; `part`: of its text."""
        wanted = {"event": name, **fields}.items()
        self.wait_until(
            lambda: any(
                wanted <= _plain(event).items() and part in str(event.get("text"))
                for event in _events(self.run)
            )
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Fails where the driver ends before, or after 1200 s."""
        in_vain = wait_until_gone(
            lambda: not condition() and self.driver.poll() is None, seconds=1200
        )
        if self.driver.poll() is not None:
            raise AssertionError(str(self.finish()))
        assert not in_vain

    def signal(self, number: signal.Signals) -> Finished:
        """To `miles` itself, which is awaited."""
        for child in psutil.Process(self.driver.pid).children():
            child.send_signal(number)
        return self.finish()

    def finish(self) -> Finished:
        out, err = self.driver.communicate(timeout=400)
        return Finished(self.driver.returncode, out, err)


def test_a_run_over_two_nodes_outlives_whatever_dies_and_leaves_nothing(
    own_cluster: SmallCluster,
) -> None:
    (own_cluster.shared / "tiny.yaml").write_text(TINY)
    run = TwoNodes(own_cluster, "two")
    sets = ("train.steps=9999", "weights.verify=true", "fault.copy_every=1")
    endless = [option for key in sets for option in ("--set", key)] + IN_ENVIRONMENTS
    run.start("launch", "--recipe", "tiny.yaml", "--name", run.name, "--nodes", "2", *endless)
    _shows_no_key_and_listens_to_nobody_else(run)
    _replaces_what_dies(run)
    _gives_new_ranks_the_copies_of_the_other_node(run)

    run.signal(signal.SIGKILL)
    assert not wait_until_gone(lambda: _left(own_cluster), seconds=300)
    run.start("resume", run.name)
    plan = _plan(run.run)
    assert [(slot["node"], slot["trainer_rank"], slot["engine"]) for slot in plan["slots"]] == [
        (0, 0, 0),
        (1, 1, 1),
    ]
    logs = {file.name for file in (run.run / "logs" / "latest").iterdir()}
    assert {
        "trainer-rank-0.log",
        "trainer-rank-1.log",
        "engine-0-server.log",
        "engine-1-server.log",
    } <= logs
    assert max(event["report"]["logprob_diff_max"] for event in run.steps) <= 1e-4

    _goes_on_without_a_node(run)


def test_a_process_that_collects_plays_on_nodes_that_have_none(own_cluster: SmallCluster) -> None:
    """Its environments live on both, and end with it; so does it with the driver."""
    (own_cluster.shared / "tiny.yaml").write_text(TINY)
    run, there = TwoNodes(own_cluster, "apart"), own_cluster.nodes[1]
    sets = ("train.steps=9999", "machine.collectors=1", "data.eval=null")
    endless = [option for key in sets for option in ("--set", key)] + IN_ENVIRONMENTS
    run.start("launch", "--recipe", "tiny.yaml", "--name", run.name, "--nodes", "2", *endless)
    log = "environments-of-collector-0-on-node-1.log"
    host = _writer(there, log)
    assert _environments(host.children())
    assert _environments(_writer(own_cluster.nodes[0], "collector-0.log").children())
    host.kill()
    run.wait_for("Notice", part="the environments of collector 0 on node 1 ended")
    run.wait_for_steps(len(run.steps) + 2)
    _writer(own_cluster.nodes[0], "collector-0.log").kill()
    run.wait_for("WorkerReplaced", worker="collector 0")
    run.wait_for_steps(len(run.steps) + 2)
    assert _environments(_writer(there, log).children())
    finished = run.signal(signal.SIGTERM)
    assert finished.code == 75, finished
    assert not wait_until_gone(lambda: _left(own_cluster), seconds=300)


def _shows_no_key_and_listens_to_nobody_else(run: TwoNodes) -> None:
    engines = [
        process
        for node in run.cluster.nodes
        for process in _ours(node)
        if "sglang" in " ".join(process.cmdline())
    ]
    keys = {process.environ().get("MILES_ENGINE_KEY") for process in engines} - {None, ""}
    visible = [*(" ".join(process.cmdline()) for process in engines), *_texts(run.run)]
    assert keys and not any(key in text for key in keys for text in visible)
    for node in run.cluster.nodes:
        assert _ours(node), f"nothing of the run is on {node.name}"
        assert _listening(node) <= {node.address, "127.0.0.1", "::1"}


def _replaces_what_dies(run: TwoNodes) -> None:
    """An engine; then the actor of environments, and its process with it."""
    there = run.cluster.nodes[1]
    _the(_ours(there), "sglang::scheduler").kill()
    run.wait_for("WorkerReplaced", worker="engine 1")
    run.wait_for_steps(len(run.steps) + 2)
    assert _environments(psutil.Process(run.driver.pid).children(recursive=True))
    [environments] = _environments(_ours(there))
    environments.parent().kill()
    run.wait_for("Notice", part="the environments on node 1 ended")
    run.wait_for_steps(len(run.steps) + 2)
    assert not wait_until_gone(lambda: len(_environments(_ours(there))) != 1)
    assert not environments.is_running()


def _gives_new_ranks_the_copies_of_the_other_node(run: TwoNodes) -> None:
    """Each rank's copy goes to the node after its own, and comes back from there."""
    keepers = [_writer(node, f"copy-keeper-{n}.log") for n, node in enumerate(run.cluster.nodes)]
    assert all(keeper.is_running() for keeper in keepers)
    _writer(run.cluster.nodes[1], "trainer-rank-1.log").kill()
    run.wait_for("WorkerReplaced", worker="trainer")
    [event] = [event for event in _events(run.run) if event.get("worker") == "trainer"][1:]
    assert event["source"].startswith("from the copy in memory")
    run.wait_for_steps(len(run.steps) + 2)


def _writer(node: SmallNode, log: str) -> psutil.Process:
    """The process of the run on a node that writes this log."""
    return next(
        process
        for process in _ours(node)
        if "ray::" in " ".join(process.cmdline())
        and any(Path(opened.path).name == log for opened in process.open_files())
    )


def _goes_on_without_a_node(run: TwoNodes) -> None:
    """In a new attempt, which nobody asked for, and in another one when a node has joined."""
    run.cluster.end(1)
    run.wait_for("RunEnded", outcome="failed")
    [lost] = [event for event in _events(run.run) if event["event"] == "RunEnded"]
    assert lost["error"]["error"] == "node 10.77.0.2 (node-2) died"
    run.wait_for_steps(len(run.steps) + 2)
    assert {slot["node"] for slot in _plan(run.run)["slots"]} == {0}

    run.cluster.add()
    run.wait_until(lambda: {slot["node"] for slot in _plan(run.run)["slots"]} == {0, 1})
    run.wait_for_steps(len(run.steps) + 2)
    finished = run.signal(signal.SIGTERM)
    assert finished.code == 75, finished
    assert "node 10.77.0.3 (node-3) joined" in finished.err, finished
    assert "the run is planned for these (machine.on_node_loss=shrink)" in finished.err, finished
    assert re.search(r"continuing from step \d+", finished.err), finished
    head, _, joined = run.cluster.nodes
    for node in (head, joined):
        assert not wait_until_gone(
            lambda n=node: [*_ours(n), *n.private.glob("miles-*")], seconds=300
        )


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
    refused = cluster.run(command, cwd=folder, env=_environment(cluster), timeout_s=600)
    assert refused.returncode == 4, Finished(refused.returncode, refused.stdout, refused.stderr)
    assert re.search(
        r"the run directory is not shared with node 10\.77\.0\.2 \(node-2\)", refused.stderr
    )
    assert not list((cluster.nodes[0].private / "alone").iterdir())


def _plan(run: Path) -> dict:
    return json.loads((run / "plan.json").read_text())


def _events(run: Path) -> list[dict]:
    file = run / "events.jsonl"
    return (
        [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        if file.exists()
        else []
    )


def _plain(event: dict) -> dict:
    """Without what no field is compared with."""
    return {name: value for name, value in event.items() if not isinstance(value, dict | list)}
