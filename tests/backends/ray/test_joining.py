"""Ctrl-C and SIGTERM while Ray connects, and how long its node is waited for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from milescli.backends.ray.joining import patiently, uninterrupted


@pytest.fixture(autouse=True)
def _interruptible():
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_effect_at_the_end(number: signal.Signals) -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), number)
        reached = True
    assert reached and signal.getsignal(number) is signal.default_int_handler


def test_a_second_one_takes_effect_at_once() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        reached = True
    assert not reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_fails_meanwhile_is_raised_and_whoever_ignores_interrupts_goes_on_to() -> None:
    with pytest.raises(ConnectionError), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        raise ConnectionError
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)


def test_a_node_that_starts_slowly_is_waited_for_and_a_dead_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import services

    looks = list[str]()

    def look(gcs_address: str, node_id: str) -> dict[str, str]:
        looks.append(node_id)
        if len(looks) < 4:
            raise RuntimeError("it has not told of itself yet")
        return {"node": node_id}

    monkeypatch.setattr(services, "get_node", look)
    raylet = Path(shutil.copy(shutil.which("sleep") or "", tmp_path / "raylet"))
    with patiently():
        with pytest.raises(RuntimeError, match="not told"):
            services.get_node("127.0.0.1:1", "first")
        with subprocess.Popen([str(raylet), "60"]) as child:
            assert services.get_node("127.0.0.1:1", "second") == {"node": "second"}
            child.kill()
    assert looks == ["first", "second", "second", "second"]
    assert services.get_node is look
