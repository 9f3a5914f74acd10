"""Plug points: what is listed fits what is checked and written; what bears no contract is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from milescli.commands import suggest
from milescli.core.errors import MilesError, RecipeError
from milescli.core.plug_points import POINTS
from milescli.core.registry import PlugPoint
from milescli.listings.plugins import check, point_of, point_that_fits, write_plugin
from milescli.recipe.keys import keys
from tests.listings import bad_plugins
from tests.rollout.rewards import bad_rewards

KINDS = [point.kind for point in POINTS]


@pytest.mark.parametrize("point", POINTS, ids=KINDS)
def test_a_plug_point_is_a_key_whose_default_ships(point: PlugPoint) -> None:
    default = keys()[point.key].default
    chosen = default if isinstance(default, list) else [default]
    assert {*chosen} <= {*point.builtin, "none", "auto", None}
    assert point.arguments


def test_tab_offers_what_ships() -> None:
    offered = [value for value, _ in suggest.overrides("train.surrogate=d")]
    assert offered == ["train.surrogate=dppo_kl", "train.surrogate=dppo_tv"]


INFRASTRUCTURE_ERRORS = (
    *("math", "judge", "remote", "reward_model", "reasoning_gym"),
    *("environment", "gymnasium", "textarena", "multi_agent", "openenv"),
    *("verifiers", "harbor", "verifiers-heldout", "harbor-heldout"),
    *("wandb", "mlflow", "trackio", "opentelemetry"),
)
"""Take labels that parse; have nobody to ask, or no roles; need an extra, settings, or a virtual
environment of their own. They have
tests of their own."""


@pytest.mark.parametrize("point", POINTS, ids=KINDS)
def test_what_ships_bears_its_contract(point: PlugPoint) -> None:
    for name, path in point.builtin.items():
        if name not in INFRASTRUCTURE_ERRORS:
            check(point, path)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where new ones are written; one folder, so that one process can import all of them."""
    folder = tmp_path_factory.mktemp("shelf")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        yield folder


@pytest.mark.parametrize("point", POINTS, ids=KINDS)
def test_a_new_one_works_and_its_test_passes(point: PlugPoint, shelf: Path) -> None:
    name = f"fresh_{point.kind}"
    source, test = write_plugin(point, name, shelf)
    assert f"--set {point.setting(f'{name}:{name}')}" in source.read_text()
    check(point, f"{name}:{name}")
    namespace: dict[str, object] = {}
    exec(compile(test.read_text(), test, "exec"), namespace)
    namespace["test_it_bears_its_contract"]()  # type: ignore[operator]
    with pytest.raises(RecipeError, match="already exists"):
        write_plugin(point, name, shelf)
    sys.modules.pop(name)


def test_a_name_that_is_no_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="not a valid name for a Python module"):
        write_plugin(point_of("reward"), "my-reward", tmp_path)


def test_the_kind_is_told_by_the_parameters() -> None:
    assert point_that_fits(f"{bad_rewards.__name__}:good").kind == "reward"
    assert point_that_fits("milescli.train.surrogates:sapo").kind == "surrogate"
    for path, why in (
        ("milescli.rollout.collect.selectors:keep_all", "those of several plug points"),
        ("os:getcwd", "those of no plug point"),
    ):
        with pytest.raises(RecipeError, match="is unclear") as refused:
            point_that_fits(path)
        assert why in refused.value.why
    with pytest.raises(RecipeError, match="is not an import path"):
        point_that_fits("gsm8k")
    with pytest.raises(RecipeError, match="no plug point `rewrd`") as refused:
        point_of("rewrd")
    assert refused.value.fixes == ["miles plugins new reward my_reward"]


@pytest.mark.parametrize(("name", "said"), bad_plugins.CASES.items())
def test_what_bears_no_contract_is_named_with_the_reason(name: str, said: str) -> None:
    path = f"{bad_plugins.__name__}:{name}"
    fitting = [point for point in POINTS if name.startswith(f"{point.kind}_")]
    with pytest.raises(MilesError) as refused:
        check(max(fitting, key=lambda point: len(point.kind)), path)
    assert said in f"{refused.value.what} {refused.value.why}"


def test_a_reward_that_leaves_does_not_take_the_check_along() -> None:
    with pytest.raises(MilesError) as refused:
        check(point_of("reward"), f"{bad_rewards.__name__}:leaving")
    assert "its process ended with exit code 1" in refused.value.why
