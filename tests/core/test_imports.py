"""Imports that go as if something were not installed, and without a search for garbage."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.core.imports import (
    import_object,
    run_gc_rarely,
    without_gc,
    without_packages,
)


def test_a_package_is_absent_for_a_while() -> None:
    sys.modules.pop("colorsys", None)
    with without_packages("colorsys", "json"):
        with pytest.raises(ImportError):
            importlib.import_module("colorsys")
        assert importlib.import_module("json").loads("1") == 1, "what was imported before stays"
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_garbage_is_looked_for_again_after_a_failure() -> None:
    with pytest.raises(ImportError), without_gc():
        assert not gc.isenabled()
        importlib.import_module("there_is_no_such_module")
    assert gc.isenabled()


def test_what_is_there_is_left_out_of_a_search_that_is_rare() -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(700)  # another test of this process may have called it
    gc.unfreeze()
    try:
        run_gc_rarely()
        assert gc.get_threshold()[0] > 700 and gc.get_freeze_count() > 0
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def test_a_file_that_a_module_of_python_hides_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("def score(**asked): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="`queue` is a module of Python itself") as raised:
        import_object("queue:score", key="rollout.reward")
    assert raised.value.fixes == ["mv queue.py my_queue.py   # then name it my_queue:score"]
