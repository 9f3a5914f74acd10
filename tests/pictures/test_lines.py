"""Pictures of lines: well formed, within their frame, escaped, without anything from elsewhere."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from milescli.pictures.lines import Line, line_picture, reward_curve

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
