"""What an optimizer does to one weight. `train.optimizer.rule` names a rule: built in here, an
entry point, or an import path. A rule sees flat parts of weights, each rank its own, so that it
must be element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from milescli.core.registry import Registry
from milescli.recipe.train import Optimizer

if TYPE_CHECKING:
    import torch

ADAMW = "adamw"


class UpdateRule(Protocol):
    """A plug-in of `train.optimizer.rule`. Called on ranks, for each part of a weight at each
    step."""

    def __call__(
        self,
        *,
        weight: torch.Tensor,
        grad: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        step: int,
        lr: float,
        weight_decay: float,
        settings: Optimizer,
    ) -> None:
        """Change `weight` [n] in place. `first`, `second` [n] float32: what the rule keeps from
        step to step, zeros at first, saved with the weights; `step`: from 1; `weight_decay`: 0 for
        gains and biases."""
        ...


RULES = Registry(
    "optimizer",
    {
        ADAMW: "milescli.train.update_rules:adamw",
        "lion": "milescli.train.update_rules:lion",
        "sgd": "milescli.train.update_rules:sgd",
    },
    signature=(
        *("weight", "grad", "first", "second", "step"),
        *("lr", "weight_decay", "settings"),
    ),
)


def load_rule(name: str) -> UpdateRule:
    """Raises RecipeError where `train.optimizer.rule` names nothing that fits."""
    return cast(UpdateRule, RULES.resolve_function(name, key="train.optimizer.rule"))
