"""Ticks and thinned points, for any numbers."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.pictures.svg import (
    SPARK_HEIGHT,
    SPARK_WIDTH,
    Line,
    Part,
    line_picture,
    reward_curve,
    spark_picture,
    stacked_bar,
    thinned,
    ticks,
)


@given(low=st.floats(-1e6, 1e6), span=st.floats(0, 1e6), whole=st.booleans())
def test_ticks_hold_both_ends_and_are_few(low: float, span: float, whole: bool) -> None:
    places = ticks(low, low + span, whole=whole)
    step = places[1] - places[0]
    assert 2 <= len(places) <= 9
    assert places[0] <= low + 1e-6 * step and places[-1] >= low + span - 1e-6 * step


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), most=st.integers(4, 80))
def test_thinned_points_are_few_in_order_and_hold_both_ends_and_extremes(
    values: list[float], most: int
) -> None:
    points = list(enumerate(values))
    kept = thinned(points, most)
    assert len(kept) <= most and kept == sorted(kept, key=lambda point: point[0])
    assert kept[0] == points[0] and kept[-1] == points[-1] and set(kept) <= set(points)
    assert {min(values), max(values)} <= {value for _, value in kept}


SVG = "{http://www.w3.org/2000/svg}"


def test_a_curve_is_well_formed_and_stays_within_its_frame() -> None:
    svg = ET.fromstring(
        reward_curve(
            [(1, 0.1), (2, float("nan")), (30, 0.9)], [(0, 0.2), (30, 1.0)], title="a <b> & c"
        )
    )
    points = [pair.split(",") for pair in svg.find(f"{SVG}polyline").attrib["points"].split()]
    assert len(points) == 2 and all(
        0 <= float(x) <= 720 and 0 <= float(y) <= 300 for x, y in points
    )
    assert len(svg.findall(f"{SVG}circle")) == 2
    assert float(points[0][1]) > float(points[1][1]), "more reward is higher up"
    assert not [element for element in svg.iter() if "href" in "".join(element.attrib)]


def test_one_point_is_a_dot() -> None:
    svg = ET.fromstring(reward_curve([(1, 0.0)], [], title="x"))
    assert len(svg.findall(f"{SVG}circle")) == 1 and svg.find(f"{SVG}polyline") is None


def test_screen_readers_are_told_what_it_shows() -> None:
    svg = ET.fromstring(
        line_picture([Line(name="a", points=[(1, 2.0)])], title="loss <1>", about="falls & rises")
    )
    assert svg.attrib["role"] == "img" and svg.attrib["aria-label"] == "loss <1>"
    assert svg.find(f"{SVG}title").text == "loss <1>"
    assert svg.find(f"{SVG}desc").text == "falls & rises"


def test_names_are_text_and_never_markup() -> None:
    evil = "<script>alert(1)</script>\"'"
    made = line_picture([Line(name=evil, points=[(1, 1.0), (2, 2.0)])], title=evil, about=evil)
    svg = ET.fromstring(made)
    assert "<script" not in made and [text.text for text in svg.iter(f"{SVG}text")].count(evil) == 2


def test_a_file_has_its_own_paper_and_a_part_of_a_page_has_neither_style_nor_size() -> None:
    line = Line(name="a", points=[(1, 1.0), (2, 2.0)])
    alone = line_picture([line], title="x")
    inside = line_picture([line], title="x", is_inline=True)
    assert "prefers-color-scheme:dark" in alone and 'class="mp-paper"' in alone
    assert "<style" not in inside and "mp-paper" not in inside and " width=" not in inside
    assert "style=" not in inside, "a strict content policy refuses it"


def test_a_long_line_keeps_its_spike_and_stays_small() -> None:
    points = [(step, 9.0 if step == 77_777 else 0.5) for step in range(200_000)]
    made = line_picture([Line(name="a", points=points)], title="x")
    ups = [
        float(pair.split(",")[1])
        for pair in ET.fromstring(made).find(f"{SVG}polyline").attrib["points"].split()
    ]
    assert len(made) < 20_000 and min(ups) < 60 < max(ups)


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [0.0, math.nan, 5.0], [1e9, -1e9, 3.0]])
def test_a_sparkline_stays_within_its_frame(values: list[float]) -> None:
    svg = ET.fromstring(spark_picture(values, title="reward <up>"))
    pairs = svg.find(f"{SVG}polyline").attrib["points"].split()
    assert len(pairs) == sum(map(math.isfinite, values))
    for pair in pairs:
        x, y = map(float, pair.split(","))
        assert 0 <= x <= SPARK_WIDTH and 0 <= y <= SPARK_HEIGHT
    assert svg.attrib["aria-label"] == "reward <up>"


def test_no_value_is_no_picture() -> None:
    assert spark_picture([], title="x") == spark_picture([math.nan], title="x") == ""


def test_parts_fill_the_bar_by_their_shares_and_those_without_size_are_left_out() -> None:
    parts = [
        Part(name="rollout", size=3.0, note="75%"),
        Part(name="save", size=0.0, note="0%"),
        Part(name="<train>", size=1.0, note="25%"),
    ]
    svg = ET.fromstring(stacked_bar(parts, title="where a step goes"))
    bars = [rect for rect in svg.iter(f"{SVG}rect") if rect.attrib["height"] == "26"]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert len(bars) == 2 and abs(sum(widths) - 496) < 0.2
    assert abs(widths[0] / widths[1] - 3) < 0.01
    words = [text.text for text in svg.iter(f"{SVG}text")]
    assert words == ["where a step goes", "rollout 75%", "<train> 25%"]
    assert bars[0].attrib["class"] == "mp-f0" and bars[1].attrib["class"] == "mp-f2"
