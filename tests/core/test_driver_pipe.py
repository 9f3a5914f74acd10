"""What a driver says through its pipe."""

from __future__ import annotations

import os
from pathlib import Path

from milescli.core.driver_pipe import heard, say, speak_into


def test_what_was_said_is_heard_and_a_torn_line_is_left_out() -> None:
    reading, writing = os.pipe()
    speak_into(writing)
    say(run=Path("/a"), token="t")
    say(run=Path("/b"))
    os.write(writing, b'{"code": ')
    assert heard(reading) == {"run": "/b", "token": "t"}
    os.close(reading)
    say(code=0)  # nobody listens any more
    os.close(writing)
    say(code=0)
    speak_into(-1)
