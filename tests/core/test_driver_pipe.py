"""What a driver says through its pipe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from milescli.core.driver_pipe import read_report, report_to_parent, set_parent_pipe
from milescli.core.errors import RewardError


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


@pytest.mark.parametrize("sign", ["a", "\n", "\u7b54", "\U0001f600"])
def test_a_long_error_in_any_script_fits_beside_its_cause_and_is_heard_with_the_code(
    sign: str,
) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    set_parent_pipe(writing)
    error = RewardError(f"begins{sign * 90_000}", why=f"{sign * 90_000}ends", fix=[sign * 90_000])
    report_to_parent(run=Path("/a\udce4"), cause=error.as_dict())
    report_to_parent(error=error.as_dict())
    report_to_parent(code=1)
    report = read_report(reading)
    os.close(reading)
    os.close(writing)
    set_parent_pipe(-1)
    assert report["code"] == 1 and report["run"] == "/a\udce4"
    for told in (report["cause"], report["error"]):
        assert told["error"].startswith("begins") and told["why"].endswith("ends")
        assert told["kind"] == "RewardError" and "characters left out" in told["why"]
