"""What a driver says through its pipe."""

from __future__ import annotations

import os
from pathlib import Path

from milescli.core.driver_pipe import read_report, report_to_parent, set_parent_pipe


def test_what_was_said_is_heard_and_a_torn_line_is_left_out() -> None:
    reading, writing = os.pipe()
    set_parent_pipe(writing)
    report_to_parent(run=Path("/a"), token="t")
    report_to_parent(run=Path("/b"))
    os.write(writing, b'{"code": ')
    assert read_report(reading) == {"run": "/b", "token": "t"}
    os.close(reading)
    report_to_parent(code=0)  # nobody listens any more
    os.close(writing)
    report_to_parent(code=0)
    set_parent_pipe(-1)
