"""Runs trainer ranks as real processes over gloo on loopback. A server, which is this file, pays
their imports once; it forks the ranks of a case when a test first asks for its result."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import pickle
import pkgutil
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from milescli.platform.ports import free_ports
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 600
"""Of one case."""


def agree_on_port(folder: Path, rank: int, name: str) -> int:
    """A free port of loopback, found by rank 0 when it is needed: one found earlier may be taken by
    then."""
    file = folder / f"port-{name.replace(' ', '_')}"
    if rank == 0:
        port = free_ports(1)[0]
        file.with_suffix(".part").write_text(str(port))
        file.with_suffix(".part").rename(file)
        return port
    until(file.exists, f"the port that rank 0 finds for {name}", within_s=TIMEOUT_S)
    return int(file.read_text())


class _Server:
    """The process that forks ranks; started by its first case, and ended with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.end)

    def run(self, size: int, case: dict[str, Any], folder: Path) -> None:
        """Return when all ranks of the case have ended."""
        if self._process is None:
            self._process = _start_server()
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        pipe_in.write(json.dumps({"size": size, "folder": str(folder), "case": case}) + "\n")
        pipe_in.flush()
        ready, _, _ = select.select([pipe_out], [], [], TIMEOUT_S)
        answer = pipe_out.readline() if ready else ""
        if not answer:
            self.end()
            logs = "\n".join(file.read_text()[-3000:] for file in sorted(folder.glob("*.log")))
            raise AssertionError(f"the case `{case['name']}` did not end in {TIMEOUT_S} s:\n{logs}")

    def end(self) -> None:
        """The server, and whatever ranks it has."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


def _start_server() -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )


_SERVER = _Server()


class Results(dict[str, Any]):
    """Case name -> what its function returned on rank 0. A case runs when it is first asked for,
    and says there that it failed."""

    def __init__(
        self,
        size: int,
        cases: Sequence[dict[str, Any]],
        folder: Path,
        prepare: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__()
        self._size, self._folder, self._prepare = size, folder, prepare
        self._cases = {case["name"]: case for case in cases}
        self._failures: dict[str, str] = {}

    def __missing__(self, name: str) -> Any:
        if name not in self._failures:
            self._prepare(self._cases[name])
            _SERVER.run(self._size, self._cases[name], self._folder)
            failures = self._folder.glob(f"{name}.failed-*")
            self._failures[name] = "\n".join(file.read_text() for file in failures)
        if failure := self._failures[name]:
            raise AssertionError(f"the case `{name}` failed:\n{failure}")
        self[name] = pickle.loads((self._folder / f"{name}.pkl").read_bytes())
        return self[name]


def run_world(
    size: int,
    cases: Sequence[dict[str, Any]],
    folder: Path,
    prepare: Callable[[dict[str, Any]], None] = lambda case: None,
) -> Results:
    """`cases`: name, call (a function of `cases.py`), and its arguments. `prepare`: called before
    one runs."""
    folder.mkdir(parents=True)
    return Results(size, cases, folder, prepare)


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


def fork(work: Callable[[], None], *, log: Path, failure: Path) -> int:
    """Do it in a child process, whose id is returned; what it raises is written to `failure`. The
    other ranks of the case find out by their own bounds."""
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        try:
            work()
        except BaseException:
            failure.write_text(traceback.format_exc())
        os._exit(0)
    return child


def run_case(size: int, case: dict[str, Any], folder: Path) -> None:
    """All ranks of one case. They have processes of their own, since a model that Megatron-Core
    wrapped for data parallelism is never freed: its groups' threads, fifty a case, would poll until
    the last case is through."""
    from tests.backends.megatron import cases

    name, call = case.pop("name"), getattr(cases, case.pop("call"))

    def work(rank: int) -> None:
        result = call(rank=rank, size=size, port=agree_on_port(folder, rank, name), **case)
        if rank == 0:
            (folder / f"{name}.pkl").write_bytes(pickle.dumps(result))

    failures = [folder / f"{name}.failed-{rank}" for rank in range(size)]
    ranks = {}
    for rank, failure in enumerate(failures):
        log = folder / f"rank{rank}.log"
        ranks[fork(functools.partial(work, rank), log=log, failure=failure)] = failure
    for process, failure in ranks.items():
        _, status = os.waitpid(process, 0)
        if status:
            failure.write_text(f"its process ended with status {status}")


def main() -> None:
    """Imports once; then a line of JSON for each case, and one back when it has run."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_trainer()
    importlib.import_module("tests.backends.megatron.cases")
    for line in sys.stdin:
        asked = json.loads(line)
        run_case(asked["size"], asked["case"], Path(asked["folder"]))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
