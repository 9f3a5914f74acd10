"""Bars: each part begins where the one before ended, and what does not fit stands out."""

from __future__ import annotations

from milescli.console.theme import Segment, staircase


def test_parts_follow_each_other_and_the_free_one_is_faint() -> None:
    parts = [
        Segment(name="a", size=50),
        Segment(name="b", size=25),
        Segment(name="free", size=25, is_free=True),
    ]
    assert [line.plain for line in staircase(parts, total=100, width=8)] == [
        "████",
        "    ██",
        "      ░░",
    ]


def test_a_small_part_is_seen_and_an_absent_one_is_not() -> None:
    parts = [Segment(name="tiny", size=0.1), Segment(name="none", size=0)]
    assert [line.plain for line in staircase(parts, total=100, width=10)] == ["█", ""]


def test_what_exceeds_the_whole_stands_beyond_it() -> None:
    (line,) = staircase([Segment(name="a", size=150)], total=100, width=10)
    assert line.plain == "█" * 15
