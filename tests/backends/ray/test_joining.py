"""Ctrl-C and SIGTERM while Ray connects."""

from __future__ import annotations

import os
import signal

import pytest

from milescli.backends.ray.joining import uninterrupted


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
