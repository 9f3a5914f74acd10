"""Ticks and thinned points, for any numbers."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from milescli.export.reward_curve import reward_curve, thinned, ticks


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
    svg = ET.fromstring(reward_curve([(1, 2.0)], [], title="loss <1>"))
    assert svg.attrib["role"] == "img" and svg.attrib["aria-label"] == "loss <1>"
    assert svg.find(f"{SVG}title").text == "loss <1>"


def test_names_are_text_and_never_markup() -> None:
    evil = "<script>alert(1)</script>\"'"
    made = reward_curve([(1, 1.0), (2, 2.0)], [(2, 0.5)], title=evil)
    words = [text.text for text in ET.fromstring(made).iter(f"{SVG}text")]
    assert "<script" not in made and evil in words
    assert words[-2:] == ["held-out accuracy", "mean reward"]


def test_a_file_has_its_own_paper_in_both_themes() -> None:
    made = reward_curve([(1, 1.0), (2, 2.0)], [], title="x")
    assert "prefers-color-scheme:dark" in made and 'class="mp-paper"' in made


def test_a_long_line_keeps_its_spike_and_stays_small() -> None:
    points = [(step, 9.0 if step == 77_777 else 0.5) for step in range(200_000)]
    made = reward_curve(points, [], title="x")
    ups = [
        float(pair.split(",")[1])
        for pair in ET.fromstring(made).find(f"{SVG}polyline").attrib["points"].split()
    ]
    assert len(made) < 20_000 and min(ups) < 60 < max(ups)
