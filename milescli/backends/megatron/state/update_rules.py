"""Update rules in place of Megatron's AdamW, whose distributed optimizer gives each rank flat parts
of weights. For rules of matrices (Muon) the momenta stay sharded, and are gathered matrix by
matrix. Used by `optimizer`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.state.host_adam import HostAdamW
from milescli.backends.megatron.state.weights import LocalWeight
from milescli.core.errors import RecipeError
from milescli.models.base import Entry
from milescli.recipe.train import Optimizer
from milescli.train.optimizers import MatrixRule, UpdateRule, takes_matrices


class RuleOptimizer(torch.optim.AdamW):
    """Applies an update rule, with AdamW's type and states for callers that inspect them."""

    rule: UpdateRule
    settings: Optimizer

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Update one weight after the other."""
        assert closure is None, "Megatron gives none"
        self.apply_rule_except(but=())

    def apply_rule_except(self, *, but: Collection[int]) -> None:
        """Apply the rule to each weight whose `id` is not in `but`."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and id(weight) not in but:
                    state = self.moments(weight)
                    state["step"] += 1
                    apply_rule(self.rule, weight.data, weight.grad, state, group, self.settings)

    def moments(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the moments of a weight, created as zeros."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weight, dtype=torch.float32)
        return state


class HostRule(HostAdamW):
    """Applies an update rule in host memory."""

    rule: UpdateRule
    settings: Optimizer

    def _update(
        self, weight: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], group: dict
    ) -> None:
        state["step"] += 1
        apply_rule(self.rule, weight, grad, state, group, self.settings)


def apply_rule(
    rule: UpdateRule,
    weight: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, torch.Tensor],
    group: dict,
    settings: Optimizer,
) -> None:
    """Update one weight. `state` is that of torch's AdamW, with its step count already
    incremented."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Holds the weights of a rank's model, and the rank's place among those that have cuts of
    them."""

    local: Sequence[LocalWeight]
    mesh: Mesh

    def matrices(self) -> dict[torch.Tensor, Entry]:
        """Return the trained parameters whose parts are all matrices of a layer."""
        found = dict[torch.Tensor, Entry]()
        for weight in self.local:
            entry = weight.entry
            in_layer = entry.layer is not None or entry.mtp is not None
            if in_layer and weight.parameter.requires_grad and weight.parameter.dim() > 1:
                parts = entry.rule.split(weight.parameter.detach(), entry.facts)
                if all(part.dim() == 2 and min(part.shape) > 1 for part in parts):
                    found[weight.parameter] = entry
        return found


class MatrixOptimizer(RuleOptimizer):
    """Applies a rule for matrices. Its first moment is sharded as Adam's is, and saved in its
    place; the second moment of matrices stays 0."""

    rule: MatrixRule
    inner: DistributedOptimizer
    matrices: Mapping[torch.Tensor, Entry]
    mesh: Mesh

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Update all weights. Collective over the ranks that hold parts of them."""
        assert closure is None, "Megatron gives none"
        parts = self._parts()
        self.apply_rule_except(but={id(part) for part, _ in parts.values()})
        for buffer in self.inner.buffers:
            for parameter in buffer.params:  # in the same order on all ranks
                if parameter in self.matrices:
                    self._update(parameter, *parts.get(parameter, (None, None)))

    def _parts(self) -> dict[torch.Tensor, tuple[torch.Tensor, dict]]:
        """Return matrix -> (this rank's part of it, its parameter group), for each matrix of which
        the rank has a part."""
        return {
            parameter: (self.param_groups[at]["params"][order], self.param_groups[at])
            for parameter, (at, order) in self.inner.model_param_group_index_map.items()
            if parameter in self.matrices
        }

    def _update(
        self, parameter: torch.Tensor, part: torch.Tensor | None, group: dict | None
    ) -> None:
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        own = slice(0, 0)
        if part is not None:
            held = self.inner._get_model_param_range_map(parameter)["param"]
            own, state = slice(held.start, held.end), self.moments(part)
            state["step"] += 1
            whole[own] = self.rule.momentum(
                grad=part.grad, first=state["exp_avg"], settings=self.settings
            )
        if self.inner.data_parallel_group.size() > 1:
            dist.all_reduce(whole, group=self.inner.data_parallel_group)
        made = self._direction(whole.view(parameter.shape), self.matrices[parameter])
        if part is not None and group is not None:
            part.mul_(1.0 - group["lr"] * group["weight_decay"])
            part.add_(made.reshape(-1)[own], alpha=-group["lr"])

    def _direction(self, momenta: torch.Tensor, entry: Entry) -> torch.Tensor:
        """Return the rule's direction for this rank's cut of a parameter. `momenta` has the shape
        of that cut; its matrices are gathered from the ranks that hold the other cuts."""
        mesh, sharding = self.mesh, entry.rule.sharding
        group, size, place = {
            "none": (None, 1, 0),
            "tp": (mesh.tp_group, mesh.layout.tp, mesh.tp_rank),
            "etp": (mesh.etp_group, mesh.layout.etp, mesh.etp_rank),
        }[sharding.axis]
        made = []
        for part in entry.rule.split(momenta, entry.facts):
            if size == 1:
                made.append(self.rule.direction(matrix=part))
                continue
            gathered = part.new_empty((size, part.numel()))
            dist.all_gather_into_tensor(gathered.view(-1), part.reshape(-1), group=group)
            matrix = torch.cat([row.view(part.shape) for row in gathered], dim=sharding.dim)
            whole = self.rule.direction(matrix=matrix)
            made.append(whole.chunk(size, dim=sharding.dim)[place])
        return entry.rule.fuse(made, entry.facts)


def install_rule(
    inner: MegatronOptimizer, rule: UpdateRule, settings: Optimizer, *, weights: Weights
) -> None:
    """Make one of Megatron's new optimizers apply `rule`. Raises RecipeError if that is
    impossible."""
    kind = {torch.optim.AdamW: RuleOptimizer, HostAdamW: HostRule}.get(type(inner.optimizer))
    if kind is None:
        theirs = type(inner.optimizer).__name__
        raise RecipeError(
            f"the rule `{settings.rule}` cannot replace {theirs}",
            why="if TransformerEngine or Apex is installed, Megatron-Core uses its optimizer, "
            "which has its own states",
            fix=["--set train.optimizer.rule=adamw", "pip uninstall transformer_engine apex"],
        )
    if takes_matrices(rule):
        matrices = weights.matrices()
        if kind is HostRule or not matrices:
            raise RecipeError(
                f"the rule `{settings.rule}` cannot update this model",
                why="it takes the matrices of layers, "
                + ("and they are in host memory" if matrices else "none of which is trained"),
                fix="--set train.optimizer.rule=adamw",
            )
        kind = MatrixOptimizer
        inner.optimizer.inner, inner.optimizer.mesh = inner, weights.mesh
        inner.optimizer.matrices = matrices
    inner.optimizer.__class__ = kind
    inner.optimizer.rule, inner.optimizer.settings = rule, settings
