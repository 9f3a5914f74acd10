"""A stacked bar: parts as wide as their shares, each named."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from milescli.pictures.stack import Part, stacked_bar

SVG = "{http://www.w3.org/2000/svg}"


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
