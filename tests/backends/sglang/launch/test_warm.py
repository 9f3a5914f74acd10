"""Engines that are forked from a process that imported SGLang before: they are as any other, and
where that process cannot give one, the engine starts afresh."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from milescli.backends.sglang.launch.command import own_environment
from milescli.backends.sglang.launch.server import EngineServer
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.backends.sglang.launch.warm import (
    UNKNOWN_CODE,
    NotForked,
    WarmProcess,
    fork_engine,
    shared_warm_process,
)
from milescli.core.run_processes import TOKEN_VARIABLE, processes_of
from milescli.models.scratch import make_model
from milescli.platform.ports import free_ports
from milescli.recipe.model import ScratchModel
from tests.waiting import until

pytestmark = pytest.mark.engine
TOKEN = secrets.token_hex(8)
SHAPE = ScratchModel(num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1, ffn_hidden_size=64)
BOUND_S = 120.0
DRIVER = """\
import os, sys, time
from milescli.backends.sglang.launch.warm import WarmProcess
warm = WarmProcess()
warm.start(dict(os.environ))
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    make_model(SHAPE, tmp_path / "model", seed=0)
    return EngineSpec(
        model_dir=tmp_path / "model",
        tokenizer_dir=None,
        device_kind="cpu",
        precision="fp32",
        port=free_ports(1)[0],
        log_path=tmp_path / "engine.log",
        max_running_requests=4,
        max_total_tokens=1024,
        context_length=256,
        api_key="key of the test",
    )


@pytest.fixture
def warm(
    spec: EngineSpec, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[WarmProcess, Path]]:
    """The process, and its socket."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    process = WarmProcess()
    process.start({**os.environ, **own_environment(spec)})
    yield process, process.listen(tmp_path_factory.mktemp("w"))
    process.stop()
    assert not list(processes_of(TOKEN))


@contextmanager
def running(spec: EngineSpec, address: Path) -> Iterator[EngineServer]:
    """An engine that was asked for at `address`, and is stopped afterwards."""
    engine = EngineServer(replace(spec, warm=address))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def _warm_pid(besides: int | None = None) -> int:
    """A process that was just started has no environment yet for a moment."""
    (pid,) = until(lambda: {*processes_of(TOKEN)} - {besides})
    return pid


def test_an_engine_that_is_forked_is_as_any_other(
    spec: EngineSpec, warm: tuple[WarmProcess, Path]
) -> None:
    before = _warm_pid()
    with running(spec, warm[1]) as engine:
        engine.wait_ready(BOUND_S)
        assert engine.pid is not None and os.getpgid(engine.pid) == os.getsid(engine.pid)
        assert psutil.Process(engine.pid).ppid() == before
        assert set(processes_of(TOKEN)) > {before, engine.pid}
        held = os.readlink(f"/proc/{engine.pid}/fd/1"), os.readlink(f"/proc/{engine.pid}/fd/0")
        assert held == (str(spec.log_path), os.devnull)
        assert "returned no engine" not in spec.log_path.read_text()
        assert "key of the test" not in spec.log_path.read_text()
        assert engine.poll() is None
    assert engine.poll() == -signal.SIGINT
    assert list(processes_of(TOKEN)) == [before]


def test_an_engine_outlives_the_warm_process(
    spec: EngineSpec, warm: tuple[WarmProcess, Path]
) -> None:
    before = _warm_pid()
    with running(spec, warm[1]) as engine:
        os.kill(before, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(before)], timeout=BOUND_S)
        engine.wait_ready(BOUND_S)
        assert engine.poll() is None
    assert engine.poll() == UNKNOWN_CODE


def test_an_engine_that_dies_tells_how(spec: EngineSpec, warm: tuple[WarmProcess, Path]) -> None:
    with running(spec, warm[1]) as engine:
        assert engine.pid is not None
        os.killpg(engine.pid, signal.SIGKILL)
        while engine.poll() is None:
            pass
        assert engine.poll() == -signal.SIGKILL


def test_other_variables_than_those_of_its_imports_are_refused(
    spec: EngineSpec, warm: tuple[WarmProcess, Path]
) -> None:
    wanted = own_environment(replace(spec, cpu_threads=77)) | {"TMPDIR": "/tmp"}
    with pytest.raises(NotForked, match="other values of MKL_NUM_THREADS, OMP_NUM_THREADS"):
        fork_engine(warm[1], arguments=[], environment=wanted, log=spec.log_path)
    longer = own_environment(spec) | {"TMPDIR": "/tmp", TOKEN_VARIABLE: f"{TOKEN}0"}
    with pytest.raises(NotForked, match=f"without a {TOKEN_VARIABLE} that another can replace"):
        fork_engine(warm[1], arguments=[], environment=longer, log=spec.log_path)


def test_where_the_warm_process_has_ended_the_engine_starts_afresh_and_says_so(
    spec: EngineSpec, warm: tuple[WarmProcess, Path]
) -> None:
    warm[0].stop()
    with running(spec, warm[1]) as engine:
        assert "the warm process returned no engine" in spec.log_path.read_text()
        engine.wait_ready(BOUND_S)


def test_a_warm_process_that_is_killed_while_it_imports_keeps_nobody_waiting(
    spec: EngineSpec, warm: tuple[WarmProcess, Path]
) -> None:
    os.kill(_warm_pid(), signal.SIGKILL)
    with pytest.raises(NotForked):
        fork_engine(warm[1], arguments=[], environment={}, log=spec.log_path)


def test_a_warm_process_that_is_stopped_is_ended_and_keeps_nobody_waiting_for_long(
    spec: EngineSpec, warm: tuple[WarmProcess, Path]
) -> None:
    os.kill(_warm_pid(), signal.SIGSTOP)
    with pytest.raises(NotForked, match="was stopped"):
        fork_engine(warm[1], arguments=[], environment={}, log=spec.log_path)


def test_it_ends_with_its_driver_also_by_sigkill() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env={**os.environ, TOKEN_VARIABLE: TOKEN},
        stdout=subprocess.PIPE,
    ) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == b"started\n"
            child = psutil.Process(_warm_pid(besides=driver.pid))
        finally:
            driver.kill()
    assert not psutil.wait_procs([child], timeout=BOUND_S)[1]


def test_runs_that_share_one_have_engines_of_their_own(
    spec: EngineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its key, and is found by its run alone."""
    wanted, process = own_environment(replace(spec, api_key=None)), WarmProcess()
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    process.start({**os.environ, **own_environment(spec)})
    (name, path), *_ = process.lend(tmp_path, wanted).items()
    monkeypatch.setenv(name, path)
    assert shared_warm_process(wanted | {"OMP_NUM_THREADS": "7"}) is None
    shared = shared_warm_process(wanted)
    assert shared is not None
    with ExitStack() as held:
        for number, key in enumerate(("one key", "another key")):
            token = secrets.token_hex(8)
            monkeypatch.setenv(TOKEN_VARIABLE, token)
            own = replace(
                spec, api_key=key, port=free_ports(1)[0], log_path=tmp_path / f"{number}.log"
            )
            engine = held.enter_context(running(own, shared.listen(tmp_path)))
            engine.wait_ready(BOUND_S)  # which asks with its key, and without one
            assert engine.pid in set(processes_of(token)) and len(set(processes_of(token))) > 1
            assert not {*processes_of(token)} & {*processes_of(TOKEN)}
            shared.stop()  # by one run, of which the other hears nothing
    process.stop()
