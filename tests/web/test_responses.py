"""What is sent is strict JSON, whatever a model wrote or a run measured."""

from __future__ import annotations

import json
import math

import pytest

from milescli.web.responses import to_json


@pytest.mark.parametrize("odd", ["half a pair: \ud800", 2**70, "plain"])
def test_what_the_quick_writer_refuses_is_written_all_the_same(odd: object) -> None:
    told = {"odd": odd, "deep": [{"loss": math.nan}, (math.inf,)], 3: 0.5}
    read = json.loads(to_json(told), parse_constant=pytest.fail)
    assert read == {"odd": odd, "deep": [{"loss": None}, [None]], "3": 0.5}
