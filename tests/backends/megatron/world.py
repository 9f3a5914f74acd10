"""Runs trainer ranks as real processes over gloo on loopback. `run_world` starts them; the file
itself is what each rank executes. Many cases share one start-up: a world of a given size runs them
one after the other."""

from __future__ import annotations

import functools
import importlib
import json
import os
import pickle
import pkgutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 480


def agree_on_port(folder: Path, rank: int, name: str) -> int:
    """A free port of loopback, found by rank 0 when it is needed: one found earlier may be taken by
    then."""
    file = folder / f"port-{name.replace(' ', '_')}"
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        file.with_suffix(".part").write_text(str(port))
        file.with_suffix(".part").rename(file)
        return port
    deadline = time.monotonic() + TIMEOUT_S
    while not file.exists():
        assert time.monotonic() < deadline, f"rank 0 named no port for {name}"
        time.sleep(0.01)
    return int(file.read_text())


class Results(dict[str, object]):
    """Case name -> what its function returned on rank 0. A case that failed says so where it is
    asked for, and no other with it."""

    failures: dict[str, str]

    def __missing__(self, name: str) -> object:
        raise AssertionError(f"the case `{name}` failed:\n{self.failures[name]}")


def run_world(size: int, cases: list[dict], folder: Path) -> Results:
    """`cases`: name, call (a function of `cases.py`), and its arguments."""
    folder.mkdir(parents=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    ranks = []
    for rank in range(size):
        log = (folder / f"rank{rank}.log").open("wb")
        command = [sys.executable, __file__, str(folder), str(rank), str(size)]
        settings = {
            "stdout": log,
            "stderr": subprocess.STDOUT,
            "env": environment,
            "cwd": ROOT,
            "start_new_session": True,
        }
        ranks.append(subprocess.Popen(command, **settings))
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while any(process.poll() is None for process in ranks):
            failed = any(process.poll() not in (None, 0) for process in ranks)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    logs = {rank: (folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(size)}
    assert all(process.returncode == 0 for process in ranks), "\n".join(
        f"rank {rank}: {text}" for rank, text in logs.items()
    )
    results = Results()
    results.failures = {
        case["name"]: "\n".join(
            file.read_text() for file in folder.glob(f"{case['name']}.failed-*")
        )
        for case in cases
    }
    for name, failure in results.failures.items():
        if not failure:
            results[name] = pickle.loads((folder / f"{name}.pkl").read_bytes())
    return results


def import_trainer() -> None:
    """All that cases import sooner or later, once."""
    from milescli.backends import megatron
    from milescli.backends.megatron import cpu_compat

    cpu_compat.install()
    modules = [
        module.name for module in pkgutil.walk_packages(megatron.__path__, f"{megatron.__name__}.")
    ]
    for name in [*modules, "torch._dynamo"]:  # the last is loaded by the first optimizer
        importlib.import_module(name)


def in_a_fork(work: Callable[[], None], *, failure: Path) -> None:
    """Do it in a child process; what it raises, or dies of, is written to `failure`. The other
    ranks of the case find out by their own bounds."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            failure.write_text(traceback.format_exc())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        failure.write_text(f"its process ended with status {status}")


def main() -> None:
    """One rank. Each case has a process of its own, since a model that Megatron-Core wrapped for
    data parallelism is never freed: its groups' threads, fifty a case, would poll until the last
    case is through."""
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    from tests.backends.megatron import cases

    import_trainer()

    def run(name: str, call: str, arguments: dict) -> None:
        port = agree_on_port(folder, rank, name)
        result = getattr(cases, call)(rank=rank, size=size, port=port, **arguments)
        if rank == 0:
            (folder / f"{name}.pkl").write_bytes(pickle.dumps(result))

    for case in json.loads((folder / "cases.json").read_text()):
        name = case.pop("name")
        work = functools.partial(run, name, case.pop("call"), case)
        in_a_fork(work, failure=folder / f"{name}.failed-{rank}")


if __name__ == "__main__":
    main()
