"""Which trackers a recipe names, and what is refused before anything starts."""

from __future__ import annotations

import sys

import pytest

from milescli.core.errors import RecipeError
from milescli.core.plug_points import TRACKERS
from milescli.recipe.machine import RunSettings
from milescli.trackers.base import load_trackers
from milescli.trackers.mlflow import VARIABLE


def refusal(*names: str) -> RecipeError:
    with pytest.raises(RecipeError) as refused:
        load_trackers(RunSettings(trackers=list(names)))
    return refused.value


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "opentelemetry"])
def test_a_package_that_is_not_there_is_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    TRACKERS.resolve(name)  # our own module, before nothing can be found any more
    monkeypatch.setattr(sys, "meta_path", [])
    for module in [one for one in sys.modules if one.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    error = refusal(name)
    assert error.what == f"{name} is not installed"
    assert error.fixes[0] == f"pip install 'miles-cli[{name}]'"


def test_a_key_is_asked_for_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert refusal("wandb").fixes == ["export WANDB_API_KEY=...", "export WANDB_MODE=offline"]


def test_a_server_is_asked_for_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert refusal("mlflow").fixes == [f"export {VARIABLE}=http://127.0.0.1:5000"]


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    assert refusal("tensorbord").fixes == ["--set 'run.trackers=[tensorboard]'"]


def test_one_of_the_users_is_had_by_its_path_and_each_once() -> None:
    mine = "tests.trackers.test_background:Kept"
    assert "cannot be a run_tracker" in refusal(mine).what
    names = ["tensorboard", "milescli.trackers.tensorboard:TensorBoard", "tensorboard"]
    assert list(load_trackers(RunSettings(trackers=names))) == names[:2]
