"""NaN and infinity in weights, found by name. Called while tensors stream by."""

from __future__ import annotations

import torch

from milescli.core.errors import CheckpointError


def require_finite(tensor: torch.Tensor, *, name: str, where: str) -> None:
    """Raises CheckpointError where a number of `tensor` is none. One pass, at the speed of
    memory."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.itemsize == 1:
        return
    # both ends are NaN if any number is, and infinite if one is
    low, high = torch.aminmax(tensor)
    if bool(torch.isfinite(low)) and bool(torch.isfinite(high)):
        return
    wrong = ~torch.isfinite(tensor)
    place = [int(index) for index in wrong.nonzero()[0]] if tensor.dim() else []
    raise CheckpointError(
        f"`{name}` is not a weight that can be trained or served",
        why=f"{int(wrong.sum())} of its {tensor.numel()} numbers are NaN or infinite, the first at "
        f"{place}, in {where}",
        fix="fetch the model again, or take an earlier checkpoint",
    )
