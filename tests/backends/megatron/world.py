"""Runs trainer ranks as real processes over gloo on loopback. `run_world` starts this file, which
forks them once their imports are paid. Many cases share one start-up: a world of a given size runs
them one after the other."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from milescli.platform.ports import free_ports

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 1300


def agree_on_port(folder: Path, rank: int, name: str) -> int:
    """A free port of loopback, found by rank 0 when it is needed: one found earlier may be taken by
    then."""
    file = folder / f"port-{name.replace(' ', '_')}"
    if rank == 0:
        port = free_ports(1)[0]
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
    command = [sys.executable, __file__, str(folder), str(size)]
    with (folder / "ranks.log").open("wb") as log:
        ranks = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True
        )
    code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = ranks.wait(TIMEOUT_S)
    finally:
        if code != 0:  # else all of its group have ended
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
            ranks.wait()
    logs = {file.name: file.read_text()[-3000:] for file in sorted(folder.glob("*.log"))}
    assert code == 0, "\n".join(f"{name}: {text}" for name, text in logs.items())
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


def run_rank(folder: Path, rank: int, size: int) -> None:
    """All cases of one rank. Each has a process of its own, since a model that Megatron-Core
    wrapped for data parallelism is never freed: its groups' threads, fifty a case, would poll until
    the last case is through."""
    from tests.backends.megatron import cases

    def run(name: str, call: str, arguments: dict) -> None:
        port = agree_on_port(folder, rank, name)
        result = getattr(cases, call)(rank=rank, size=size, port=port, **arguments)
        if rank == 0:
            (folder / f"{name}.pkl").write_bytes(pickle.dumps(result))

    for case in json.loads((folder / "cases.json").read_text()):
        name = case.pop("name")
        work = functools.partial(run, name, case.pop("call"), case)
        in_a_fork(work, failure=folder / f"{name}.failed-{rank}")


def main() -> None:
    """Imports once, then forks the ranks; ends with the first of them that fails."""
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    import_trainer()
    importlib.import_module("tests.backends.megatron.cases")
    for rank in range(size):
        if os.fork() == 0:
            log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                run_rank(folder, rank, size)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    for _ in range(size):
        _, status = os.wait()
        if status:
            sys.exit(f"a rank ended with status {status}")


if __name__ == "__main__":
    main()
