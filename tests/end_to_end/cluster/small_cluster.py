"""A cluster in small: Ray nodes on this one machine that are apart as computers are. Each has an
address, processes, a /tmp, a /dev/shm and a host name of its own (Linux namespaces); folders that
are `shared` are the network file system. Not for users: tests and their fixtures.

Everything lives in namespaces without names, which the kernel ends with their first process:
nothing is left on the host, whatever happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.waiting import PIPE_BYTES, until

ROOT = Path(__file__).resolve().parents[3]
RAY = Path(sys.executable).with_name("ray")
PORT = 6379
TOOLS = ("ip", "unshare", "nsenter", "mount", "bash")
START_TIMEOUT_S = 120.0
START_TRIES = 3
"""Ray gives a node up that is not there after 30 s, which a busy machine may need."""
_SETUP = """\
set -eu
ip link set lo up
hostname "$NAME"
mount -t tmpfs -o size=4g tmpfs /dev/shm
for folder in $VISIBLE; do
  mkdir -p "$PRIVATE/${folder#/tmp/}"
  mount --bind "$folder" "$PRIVATE/${folder#/tmp/}"
done
echo "nameserver 127.0.0.1" > "$PRIVATE/resolv.conf"
mount --bind "$PRIVATE/resolv.conf" /etc/resolv.conf
mount --rbind "$PRIVATE" /tmp
echo ready
while :; do sleep 3600 & wait; done
"""
"""Of a node's first process. Bash adopts and buries orphans, as an init does."""


def why_impossible() -> str | None:
    """Why this machine cannot hold a small cluster, for `pytest.skip`; None where it can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = subprocess.run(
        [
            "unshare",
            *_NAMESPACES,
            "bash",
            "-c",
            "ip link add bridge0 type bridge && mount -t tmpfs tmpfs /dev/shm",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return (
        None
        if tried.returncode == 0
        else f"namespaces cannot be made here: {tried.stderr.strip()[:200]}"
    )


_NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallNode:
    """One computer of the cluster."""

    address: str
    name: str
    """Its host name, which leads nowhere."""
    init: psutil.Process
    """Its first process, as this machine sees it; every other process of the node ends with it."""
    private: Path
    """What the node has as /tmp, but for the shared folders."""

    def processes(self) -> list[psutil.Process]:
        """All that run there now, zombies left out."""
        return [
            process
            for process in self.init.children(recursive=True)
            if _state(process) not in (None, psutil.STATUS_ZOMBIE)
        ]

    def cut_off(self) -> None:
        """The network cable is pulled."""
        subprocess.run(
            [*_enter(self.init.pid, "net"), "ip", "link", "set", "eth0", "down"],
            check=True,
            timeout=120,
        )


@dataclass(slots=True, kw_only=True)
class SmallCluster:
    """Ray runs on all `nodes`; the first is the head."""

    nodes: list[SmallNode]
    shared: Path
    """The same folder on every node."""
    token_file: Path
    """Ray's, for whoever may join."""
    switch: psutil.Process
    """Holds the namespace of the bridge that all nodes are plugged into."""
    add: Callable[[], SmallNode]
    """Make another node, whose Ray joins."""
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """As `--address` takes it."""
        return f"{self.nodes[0].address}:{PORT}"

    def environment(self) -> dict[str, str]:
        """What a driver on a node needs, beside its own."""
        return _ray_environment(self.token_file)

    def start(
        self,
        command: Sequence[str | Path],
        *,
        node: int = 0,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a process on a node and go on; `env` comes on top of `environment`. It ends with
        the cluster, at the latest."""
        process = subprocess.Popen(
            [*self.entered(node, cwd=cwd or self.shared), *map(str, command)],
            env={**_own_environment(), **self.environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pipesize=PIPE_BYTES,
            text=True,
        )
        self._started.append(process)
        return process

    def run(
        self,
        command: Sequence[str | Path],
        *,
        node: int = 0,
        timeout_s: float = START_TIMEOUT_S,
        **options: object,
    ) -> subprocess.CompletedProcess[str]:
        """The same, waited for. Raises TimeoutExpired."""
        process = self.start(command, node=node, **options)  # type: ignore[arg-type]
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def on_switch(self, *command: str) -> None:
        """A command where the cables come together; the port of a node has the node's name."""
        subprocess.run([*_enter(self.switch.pid, "net"), *command], check=True, timeout=120)

    def entered(self, node: int, *, cwd: Path) -> list[str]:
        """What stands before a command that is run on a node."""
        return _enter(self.nodes[node].init.pid, "net", "mount", "pid", "uts", cwd=cwd)

    def end(self, node: int) -> None:
        """Every process of a node is killed at once."""
        _kill(self.nodes[node].init)


@contextmanager
def small_cluster(
    base: Path,
    *,
    num_nodes: int = 2,
    cpus: int = 4,
    gpus: int = 0,
    node_environment: dict[int, dict[str, str]] | None = None,
) -> Iterator[SmallCluster]:
    """Ray on `num_nodes` computers, reachable by token only. `base`: an empty folder of the caller.
    `gpus`: that Ray is made to count, per node; there need be none. `node_environment`: further
    variables of single nodes, by number: how one of them differs from the others."""
    shared, token_file = base / "shared", base / "shared" / ".ray-token"
    shared.mkdir(parents=True)
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(32))
    with ExitStack() as stack:
        switch = stack.enter_context(
            _first_process(["--net", "--fork", "--kill-child"], "echo ready; sleep infinity", {})
        )
        subprocess.run(
            [*_enter(switch.pid, "net"), "ip", "link", "add", "switch", "type", "bridge"],
            check=True,
            timeout=120,
        )
        subprocess.run(
            [*_enter(switch.pid, "net"), "ip", "link", "set", "switch", "up"],
            check=True,
            timeout=120,
        )

        def add() -> SmallNode:
            number = len(cluster.nodes)
            node = stack.enter_context(_node(base, shared, switch, number + 1))
            cluster.nodes.append(node)
            env = (node_environment or {}).get(number, {})
            _start_ray(cluster, node, number, cpus=cpus, gpus=gpus, env=env)
            return node

        cluster = SmallCluster(
            nodes=[], shared=shared, token_file=token_file, switch=switch, add=add
        )
        stack.callback(_end_started, cluster)
        for _ in range(num_nodes):
            add()
        yield cluster


@contextmanager
def _node(base: Path, shared: Path, switch: psutil.Process, number: int) -> Iterator[SmallNode]:
    name, address, private = f"node-{number}", f"10.77.0.{number}", base / f"node-{number}"
    private.mkdir()
    visible = [
        str(folder) for folder in (shared, ROOT, Path(sys.prefix)) if folder.is_relative_to("/tmp")
    ]
    environment = {"NAME": name, "PRIVATE": str(private), "VISIBLE": " ".join(visible)}
    with _first_process(list(_NAMESPACES), _SETUP, environment) as init:
        on_switch = [*_enter(switch.pid, "net"), "ip", "link"]
        subprocess.run(
            [*on_switch, "add", name, "type", "veth", "peer", "eth0", "netns", str(init.pid)],
            check=True,
            timeout=120,
        )
        subprocess.run([*on_switch, "set", name, "master", "switch", "up"], check=True, timeout=120)
        inside = [*_enter(init.pid, "net"), "ip"]
        subprocess.run(
            [*inside, "address", "add", f"{address}/24", "dev", "eth0"], check=True, timeout=120
        )
        subprocess.run([*inside, "link", "set", "eth0", "up"], check=True, timeout=120)
        # Nobody is there: Ray finds a computer's own address by asking which way the world is.
        subprocess.run(
            [*inside, "route", "add", "default", "via", "10.77.0.254"], check=True, timeout=120
        )
        yield SmallNode(address=address, name=name, init=init, private=private)


@contextmanager
def _first_process(
    namespaces: list[str], script: str, environment: dict[str, str]
) -> Iterator[psutil.Process]:
    """The process that holds new namespaces; killed at the end, and if this process is killed."""
    holder = subprocess.Popen(
        ["unshare", *namespaces, "bash", "-c", script],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_die_with_parent,
    )
    try:
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            holder.wait(60)
            raise AssertionError(f"a namespace was not set up: {holder.stderr.read()}")
        yield psutil.Process(holder.pid).children()[0]
    finally:
        for process in (*psutil.Process(holder.pid).children(), psutil.Process(holder.pid)):
            _kill(process)
        holder.communicate(timeout=120)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _enter(pid: int, *namespaces: str, cwd: Path | None = None) -> list[str]:
    return [
        "nsenter",
        "--target",
        str(pid),
        *(f"--{kind}" for kind in namespaces),
        *([f"--wdns={cwd}"] if cwd else []),
        "--",
    ]


def _own_environment() -> dict[str, str]:
    """Ours, without what a Ray session of another test left in it: one variable binds Ray to
    loopback."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def _ray_environment(token_file: Path) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


def _start_ray(
    cluster: SmallCluster,
    node: SmallNode,
    number: int,
    *,
    cpus: int,
    gpus: int,
    env: dict[str, str],
) -> None:
    command = [
        RAY,
        "start",
        f"--node-ip-address={node.address}",
        f"--num-cpus={cpus}",
        f"--num-gpus={gpus}",
    ]
    command += ["--object-store-memory=134217728", "--disable-usage-stats"]
    command += (
        ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if number == 0
        else [f"--address={cluster.address}"]
    )
    # a file: Ray's daemons keep the output open, and a pipe would never end
    log = node.private / "ray-start.log"
    environment = {**_own_environment(), **cluster.environment(), **env}
    for _ in range(START_TRIES):
        if _ray(node, command, environment, log) == 0:
            return
        _ray(node, [RAY, "stop", "--force"], environment, log)
    raise AssertionError(f"Ray did not start on {node.name}:\n{log.read_text()}")


def _ray(
    node: SmallNode, command: Sequence[str | Path], environment: dict[str, str], log: Path
) -> int:
    entered = [
        *_enter(node.init.pid, "net", "mount", "pid", "uts", cwd=Path("/")),
        *map(str, command),
    ]
    with log.open("a") as out:
        done = subprocess.run(
            entered,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            timeout=START_TIMEOUT_S,
            check=False,
        )
    return done.returncode


def _end_started(cluster: SmallCluster) -> None:
    """Processes that were started from outside into the nodes end before their nodes do."""
    for process in cluster._started:
        if process.poll() is None:
            inside = psutil.Process(process.pid)
            for victim in (*inside.children(recursive=True), inside):
                _kill(victim)
            process.communicate(timeout=120)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _state(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None


def wait_until_gone(find, *, seconds: float = 200.0) -> list[object]:
    """What `find()` still gives after the wait; empty as soon as it gives nothing."""
    with contextlib.suppress(AssertionError):
        until(lambda: not find(), within_s=seconds)
    return find()
