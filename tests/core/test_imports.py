"""Imports that go as if something were not installed, and without a search for garbage."""

from __future__ import annotations

import gc
import importlib
import sys

import pytest

from milescli.core.imports import without_garbage_search, without_packages


def test_a_package_is_absent_for_a_while() -> None:
    sys.modules.pop("colorsys", None)
    with without_packages("colorsys", "json"):
        with pytest.raises(ImportError):
            importlib.import_module("colorsys")
        assert importlib.import_module("json").loads("1") == 1, "what was imported before stays"
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_garbage_is_looked_for_again_after_a_failure() -> None:
    with pytest.raises(ImportError), without_garbage_search():
        assert not gc.isenabled()
        importlib.import_module("there_is_no_such_module")
    assert gc.isenabled()
