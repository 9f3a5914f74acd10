"""The mapping of a preview, in few lines."""

from __future__ import annotations

from milescli.conversion.report import collapsed


def test_lines_that_differ_in_numbers_alone_are_one() -> None:
    pairs = [
        (f"model.layers.{layer}.a.weight", f"decoder.layers.{layer}.a", "2x2")
        for layer in range(12)
    ]
    assert collapsed([*pairs, ("b", "c", "1")]) == [
        ("model.layers.*.a.weight", "decoder.layers.*.a", "2x2", 12),
        ("b", "c", "1", 1),
    ]
