"""Turns, ratios and the table of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pairs import Machine, Row, Table, command_line, report, take_turns

MACHINE = Machine(cores=2, cpu="a CPU", load_before=0.25, versions={"torch": "2.13.0"})


def row(miles: list[float], peer: list[float], better: str = "more") -> Row:
    return Row(what="rollout", unit="tokens/s", better=better, miles=miles, peer=peer)


def test_who_goes_first_alternates_and_both_get_the_same_round() -> None:
    calls: list[tuple[str, int]] = []

    def side(name: str):
        def run(number: int) -> dict[str, float]:
            calls.append((name, number))
            return {"s": float(number)}

        return run

    pairs = take_turns(side("miles"), side("peer"), num_pairs=3, num_warmups=1, say=lambda _: None)
    assert [name for name, _ in calls] == [
        "miles", "peer", "peer", "miles", "miles", "peer", "peer", "miles",
    ]  # fmt: skip
    assert all(ours == theirs for ours, theirs in pairs)
    assert [ours["s"] for ours, _ in pairs] == [1.0, 2.0, 3.0], "the warm-up does not count"


def test_a_ratio_is_of_medians_and_its_spread_is_of_neighbours() -> None:
    measured = row([10.0, 20.0, 40.0], [10.0, 10.0, 80.0])
    assert measured.ratio == 2.0
    assert measured.ratios == [1.0, 2.0, 0.5]


@pytest.mark.parametrize(
    ("miles", "peer", "better", "words"),
    [
        (150.0, 100.0, "more", "1.50 x faster"),
        (50.0, 100.0, "more", "2.00 x slower"),
        (50.0, 100.0, "less", "2.00 x faster"),
        (150.0, 100.0, "less", "1.50 x slower"),
        (101.0, 100.0, "less", "as fast"),
        (150.0, 100.0, "neither", ""),
        (150.0, 0.0, "neither", ""),
    ],
)
def test_a_verdict_says_who_is_faster(miles: float, peer: float, better: str, words: str) -> None:
    assert row([miles], [peer], better).verdict == words


def test_the_table_shows_medians_spread_and_pairs(tmp_path: Path, capsys) -> None:
    table = Table(peer="the peer", machine=MACHINE, notes=["what differs"])
    pairs = [({"s": 4.0, "own": 1.0}, {"s": 2.0}), ({"s": 6.0, "own": 3.0}, {"s": 2.0})]
    table.add(pairs, name="s", what="a step", unit="s", better="less")
    table.add(pairs, name="own", what="the doctor", unit="s", better="less")
    parser = command_line("A benchmark.", num_pairs=5)
    options = parser.parse_args(["--json", str(tmp_path / "figures.json")])
    report(table, options)
    shown = capsys.readouterr().out
    assert options.pairs == 5
    assert "2 cores (a CPU), load before 0.25" in shown and "torch 2.13.0" in shown
    step = next(line for line in shown.splitlines() if line.startswith("a step, s"))
    assert "5 (4..6)" in step and "2.50 (2.00..3.00)" in step
    assert step.endswith("2      2.50 x slower")
    assert "* what differs" in shown
    record = json.loads((tmp_path / "figures.json").read_text())
    assert record["rows"][0]["ratio"] == 2.5 and record["rows"][0]["miles"] == [4.0, 6.0]
    assert record["rows"][1]["ratio"] is None and record["machine"]["cores"] == 2
