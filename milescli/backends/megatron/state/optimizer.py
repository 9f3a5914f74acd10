"""Megatron's gradient buffers and distributed AdamW around a model; the check that gradients are
finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import utils
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamGroupOverride,
    clip_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from milescli.backends.megatron.state.host_adam import move_to_host
from milescli.backends.megatron.state.update_rules import Weights, install_rule
from milescli.core.errors import NotFiniteError
from milescli.core.plug_points import RULES
from milescli.recipe.train import Optimizer
from milescli.train.optimizers import ADAMW, AdamStep

Lists = Sequence[Sequence[torch.Tensor]]


def install_clipping() -> None:
    """Install gradient clipping in this process, unless TransformerEngine or apex provides it."""
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_of_all
        clip_grads.multi_tensor_scale_impl = scale_all


def norm_of_all(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return ([1] float32 L2 norm of all tensors of all lists together, no norms of single ones),
    with the interface of apex's multi_tensor_l2norm."""
    tensors = [tensor for tensors in lists for tensor in tensors]
    norms = torch._foreach_norm(tensors)
    return torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float32).reshape(1), None


def scale_all(chunk_size: int, overflow: torch.Tensor, lists: Lists, scale: float) -> None:
    """Write the tensors of the first list times `scale` into those of the second, which may be the
    same, with the interface of apex's multi_tensor_scale."""
    source, target = lists
    if any(one is not other for one, other in zip(source, target, strict=True)):
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, scale)


def wrap(model: GPTModel) -> DistributedDataParallel:
    """Return the model with contiguous gradient memory; gradients are summed over data- and
    context-parallel ranks in float32."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    # the weights of the batch have divided by the number of tokens already, so Megatron must not
    model.config.finalize_model_grads_func = lambda models, num_tokens=None, **options: (
        finalize_model_grads(models, None, **options)
    )
    return wrapped


def make_optimizer(
    model: DistributedDataParallel,
    recipe: Optimizer,
    *,
    weights: Weights,
    dtype: torch.dtype,
    on_host: bool = False,
) -> MegatronOptimizer:
    """Return AdamW, or the optimizer of the recipe's rule, with states sharded over the
    data-parallel ranks. The model's weights must be loaded, because bfloat16 weights are copied.
    `on_host`: store Adam's moments and those copies in host memory, and compute the step there."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=recipe.lr,
        min_lr=0.0,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        adam_eps=recipe.eps,
        clip_grad=recipe.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, [model], config_overrides=_groups(config))
    for inner in inner_optimizers(optimizer) if on_host else []:
        if inner.optimizer is not None:
            move_to_host(inner)
    if recipe.rule != ADAMW:
        rule = RULES.load(recipe.rule)
        for inner in inner_optimizers(optimizer):
            if inner.optimizer is not None:
                install_rule(inner, rule, recipe, weights=weights)
    if next(model.parameters()).device.type != "cpu":
        fuse(optimizer)
        install_clipping()
    for group in optimizer.param_groups:
        # Megatron's own scheduler, which is not run, would multiply: 0 for gains, biases and all
        # else that has one dimension
        group["weight_decay"] = recipe.weight_decay * group["wd_mult"]
    model.module.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def fuse(optimizer: MegatronOptimizer) -> None:
    """Select fused kernels, before the first step. By default torch's AdamW runs operation by
    operation on an accelerator, with a temporary copy of all weights."""
    for inner in inner_optimizers(optimizer):
        # not TransformerEngine's, which is one kernel anyway, nor that in host memory
        if type(inner.optimizer) is torch.optim.AdamW:
            for group in inner.optimizer.param_groups:
                group["fused"] = True


def _groups(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Return Megatron's own parameter groups, with float32 parameters in separate groups if the
    model is not float32: Megatron confuses them in a mixed group."""
    apart = ParamPredicate(
        name="float32", fn=lambda parameter: config.bf16 and parameter.dtype is torch.float32
    )
    # any setting makes a group; this one is what holds in any case
    same_lr = ParamGroupOverride(max_lr=config.lr)
    return {**get_standard_config_overrides(config), ParamKey(predicate=apart): same_lr}


def inner_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of dense and of expert weights; only one if there are no expert
    weights."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def set_step(optimizer: MegatronOptimizer, step: AdamStep) -> None:
    """Set the hyperparameters of the next step."""
    for group in optimizer.param_groups:
        group["lr"], group["eps"] = step.lr, step.eps
        group["betas"] = (step.beta1, step.beta2)
        group["weight_decay"] = step.weight_decay * group["wd_mult"]
    for each in (optimizer, *inner_optimizers(optimizer)):
        each.config.clip_grad = step.clip_grad


def set_lr(optimizer: MegatronOptimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def reset_moments(optimizer: MegatronOptimizer) -> None:
    """Reset the moments, as if no step had been made."""
    for inner in inner_optimizers(optimizer):
        if inner.optimizer is not None:
            inner.optimizer.state.clear()


def require_finite_gradients(model: DistributedDataParallel, *, device: torch.device) -> None:
    """Raise NotFiniteError on every rank, which names the first bad gradient of the lowest rank
    that has one. Collective."""
    buffers = [*model.buffers, *model.expert_parallel_buffers]
    bad = any(not bool(torch.isfinite(buffer.grad_data.sum())) for buffer in buffers)
    flag = torch.tensor([int(bad)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if not int(flag):
        return
    name = next(
        (
            name
            for name, weight in model.module.named_parameters()
            if weight.requires_grad and not bool(torch.isfinite(weight.main_grad).all())
        ),
        None,
    )
    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, name)
    bad_ranks = [(rank, name) for rank, name in enumerate(names) if name is not None]
    if not bad_ranks:  # a sum that overflowed although every value is finite
        return
    rank, name = bad_ranks[0]
    model.zero_grad_buffer()
    raise NotFiniteError(
        f"the gradient of `{name}` is not finite",
        why=f"on trainer rank {rank} ({len(bad_ranks)} of {len(names)} ranks have such values); "
        "the optimizer step was skipped",
        fix=[
            "lower train.optimizer.lr, or set train.optimizer.clip_grad=1.0",
            "resume from the previous checkpoint",
        ],
    )
