"""Which model is on the device, if there is one: here are models that only count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from milescli.backends.megatron.learner import Learner
from milescli.core.errors import NotFiniteError
from milescli.recipe.schema import Recipe


class _Model:
    """Is its own sleeper."""

    def __init__(self, *, is_awake: bool) -> None:
        self.is_awake, self.sleeper = is_awake, self

    def sleep(self) -> None:
        self.is_awake = False

    def wake(self) -> None:
        self.is_awake = True


def test_the_policy_is_back_on_the_device_after_an_error_of_the_critic() -> None:
    policy, critic = _Model(is_awake=True), _Model(is_awake=False)
    models: dict[str, Any] = {"policy": policy, "critic": critic, "draft": None}
    mesh: Any = SimpleNamespace(device=torch.device("cuda"))
    rest: dict[str, Any] = {"reference": None, "teachers": []}
    learner = Learner(recipe=Recipe(), mesh=mesh, **models, **rest)
    error = NotFiniteError("the gradient is not finite", why="a test", fix="none")
    with pytest.raises(NotFiniteError), learner.on_device(models["critic"]):
        assert critic.is_awake and not policy.is_awake
        raise error
    assert policy.is_awake and not critic.is_awake
