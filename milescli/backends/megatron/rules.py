"""Another rule than AdamW's within Megatron's distributed optimizer: its states are saved, moved
and resumed as Adam's moments are. Used by `optimizer`."""

from __future__ import annotations

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from milescli.backends.megatron.host_adam import HostAdamW
from milescli.core.errors import RecipeError
from milescli.recipe.train import Optimizer
from milescli.train.optimizers import UpdateRule


class RuleOptimizer(torch.optim.AdamW):
    """AdamW to who asks for its type and its states; each step is the rule's."""

    rule: UpdateRule
    settings: Optimizer

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """One weight after the other."""
        assert closure is None, "Megatron gives none"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self._moments(weight)
                    state["step"] += 1
                    follow(self.rule, weight.data, weight.grad, state, group, self.settings)

    def _moments(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weight, dtype=torch.float32)
        return state


class HostRule(HostAdamW):
    """The same in host memory."""

    rule: UpdateRule
    settings: Optimizer

    def _update(
        self, weight: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], group: dict
    ) -> None:
        state["step"] += 1
        follow(self.rule, weight, grad, state, group, self.settings)


def follow(
    rule: UpdateRule,
    weight: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, torch.Tensor],
    group: dict,
    settings: Optimizer,
) -> None:
    """One step of one weight. `state` as torch's AdamW has it, its step counted already."""
    rule(
        weight=weight,
        grad=grad,
        first=state["exp_avg"],
        second=state["exp_avg_sq"],
        step=int(state["step"]),
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        settings=settings,
    )


def take_rule(inner: MegatronOptimizer, rule: UpdateRule, settings: Optimizer) -> None:
    """Make one of Megatron's optimizers, just made, follow `rule`."""
    kind = {torch.optim.AdamW: RuleOptimizer, HostAdamW: HostRule}.get(type(inner.optimizer))
    if kind is None:
        theirs = type(inner.optimizer).__name__
        raise RecipeError(
            f"the rule `{settings.rule}` cannot take the place of {theirs}",
            why="Megatron-Core takes the optimizer of TransformerEngine or Apex where one is "
            "installed, whose states are its own",
            fix=["--set train.optimizer.rule=adamw", "pip uninstall transformer_engine apex"],
        )
    inner.optimizer.__class__ = kind
    inner.optimizer.rule, inner.optimizer.settings = rule, settings
