"""Megatron's gradient buffers and distributed AdamW around a model; the guard against values that
are not finite."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamGroupOverride,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from milescli.backends.megatron import clipping
from milescli.backends.megatron.host_adam import move_to_host
from milescli.backends.megatron.rules import take_rule
from milescli.core.errors import NotFiniteError
from milescli.recipe.train import Optimizer
from milescli.train.optimizers import ADAMW, load_rule


def wrap(model: GPTModel) -> DistributedDataParallel:
    """Contiguous gradient memory; gradients are summed over data- and context-parallel ranks, in
    float32."""
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
    model: DistributedDataParallel, recipe: Optimizer, *, dtype: torch.dtype, on_host: bool = False
) -> MegatronOptimizer:
    """AdamW, or the recipe's rule, whose states are spread over the data-parallel ranks. The
    model's weights must be loaded: it copies them where they are bfloat16. `on_host`: Adam's
    moments and those copies are in host memory, and stepped there."""
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
        rule = load_rule(recipe.rule)
        for inner in inner_optimizers(optimizer):
            if inner.optimizer is not None:
                take_rule(inner, rule, recipe)
    if next(model.parameters()).device.type != "cpu":
        fuse(optimizer)
        clipping.install()
    for group in optimizer.param_groups:
        # Megatron's own scheduler, which is not run, would multiply: 0 for gains, biases and all
        # else that has one dimension
        group["weight_decay"] = recipe.weight_decay * group["wd_mult"]
    model.module.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def fuse(optimizer: MegatronOptimizer) -> None:
    """One kernel for a group of weights, before the first step. By itself torch's AdamW goes over
    them operation by operation on an accelerator, with a temporary copy as large as all of them."""
    for inner in inner_optimizers(optimizer):
        # not TransformerEngine's, which is one kernel anyway, nor that in host memory
        if type(inner.optimizer) is torch.optim.AdamW:
            for group in inner.optimizer.param_groups:
                group["fused"] = True


def _groups(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Megatron's own groups of parameters, but those apart that are in float32 while the model is
    not: it loses track of which is which in a group of both."""
    apart = ParamPredicate(
        name="float32", fn=lambda parameter: config.bf16 and parameter.dtype is torch.float32
    )
    # any setting makes a group; this one is what holds in any case
    same_lr = ParamGroupOverride(max_lr=config.lr)
    return {**get_standard_config_overrides(config), ParamKey(predicate=apart): same_lr}


def inner_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of dense and of expert weights, or the only one there is."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def set_lr(optimizer: MegatronOptimizer, lr: float) -> None:
    """For the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def forget_moments(optimizer: MegatronOptimizer) -> None:
    """As if no step had been made."""
    for inner in inner_optimizers(optimizer):
        if inner.optimizer is not None:
            inner.optimizer.state.clear()


def require_finite_gradients(model: DistributedDataParallel, *, device: torch.device) -> None:
    """Raises NotFiniteError on every rank, naming the first bad gradient of the lowest rank that
    has one. Collective."""
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
        why=f"on trainer rank {rank} ({len(bad_ranks)} of {len(names)} ranks have such); the "
        "optimizer was not stepped",
        fix=[
            "lower train.optimizer.lr, or set train.optimizer.clip_grad=1.0",
            "resume from the checkpoint before",
        ],
    )
