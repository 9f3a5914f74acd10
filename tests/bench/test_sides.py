"""A side of a benchmark: its pipe, its end, its death."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from sides import Side, SideDied

OBEDIENT = """
import asyncio, os, sys
sys.path.insert(0, {bench!r})
from sides import Orders
orders = Orders()
async def handle(order):
    print("said by a library")
    if order.get("die"):
        print("the last words", file=sys.stderr, flush=True)
        os._exit(3)
    return {{"doubled": 2 * order["number"]}}
asyncio.run(orders.obey(handle, about=os.getpid()))
"""
BENCH = str(Path(__file__).resolve().parents[2] / "bench")


def side(folder: Path, program: str = OBEDIENT) -> Side:
    file = folder / "side.py"
    file.write_text(program.format(bench=BENCH))
    return Side("peer", [sys.executable, str(file)], log=folder / "side.log")


def test_a_side_obeys_until_it_is_left_and_prints_into_its_log(tmp_path: Path) -> None:
    with side(tmp_path) as peer:
        pid = peer.ready()["about"]
        assert [peer.ask({"number": number})["doubled"] for number in (1, 21)] == [2, 42]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "said by a library" in (tmp_path / "side.log").read_text()


def test_a_death_is_told_with_its_last_words(tmp_path: Path) -> None:
    with side(tmp_path) as peer:
        peer.ready()
        with pytest.raises(SideDied, match="`peer` ended before its reply") as caught:
            peer.ask({"die": True})
        with pytest.raises(SideDied):
            peer.ask({"number": 1})
    assert "the last words" in str(caught.value)
