"""Norm and scaling of all gradients at once, on an accelerator without TransformerEngine, where
Megatron's own replacements ask the device for the norm of each tensor by itself, and wait for each
answer. Called by `optimizer`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads

Lists = Sequence[Sequence[torch.Tensor]]


def install() -> None:
    """In this process. TransformerEngine's and apex's are left where they are installed."""
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_of_all
        clip_grads.multi_tensor_scale_impl = scale_all


def norm_of_all(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """([1] float32 L2 norm of all tensors of all lists together, no norms of single ones); what
    apex's multi_tensor_l2norm takes and returns."""
    tensors = [tensor for tensors in lists for tensor in tensors]
    norms = torch._foreach_norm(tensors)
    return torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float32).reshape(1), None


def scale_all(chunk_size: int, overflow: torch.Tensor, lists: Lists, scale: float) -> None:
    """The tensors of the first list times `scale` into those of the second, which may be the same;
    what apex's multi_tensor_scale takes."""
    source, target = lists
    if any(one is not other for one, other in zip(source, target, strict=True)):
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, scale)
