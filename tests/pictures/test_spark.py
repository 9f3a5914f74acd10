"""A sparkline: within its frame, and nothing where there is nothing."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from milescli.pictures.spark import HEIGHT, WIDTH, spark_picture

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [0.0, math.nan, 5.0], [1e9, -1e9, 3.0]])
def test_a_sparkline_stays_within_its_frame(values: list[float]) -> None:
    svg = ET.fromstring(spark_picture(values, title="reward <up>"))
    pairs = svg.find(f"{SVG}polyline").attrib["points"].split()
    assert len(pairs) == sum(map(math.isfinite, values))
    for pair in pairs:
        x, y = map(float, pair.split(","))
        assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT
    assert svg.attrib["aria-label"] == "reward <up>"


def test_no_value_is_no_picture() -> None:
    assert spark_picture([], title="x") == spark_picture([math.nan], title="x") == ""
