"""E8M0, the scale of the MX formats: a byte b that stands for 2 ** (b - 127); 255 is NaN (OCP
Microscaling Formats v1.0, section 5.4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

BIAS = 127
_SMALLEST_NORMAL = -126


def smallest_power(value: Tensor) -> Tensor:
    """The smallest power of two that is not below `value` (float32, positive), within the normal
    numbers of float32."""
    mantissa, exponent = torch.frexp(value)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(value), exponent.clamp(_SMALLEST_NORMAL, BIAS))


def to_e8m0(power: Tensor) -> Tensor:
    """Powers of two, float32 -> uint8."""
    return (torch.frexp(power)[1] - 1 + BIAS).to(torch.uint8)


def from_e8m0(stored: Tensor) -> Tensor:
    """uint8 or float8_e8m0fnu -> float32."""
    exponent = stored.view(torch.uint8).to(torch.int32) - BIAS
    power = torch.ldexp(torch.ones(stored.shape, device=stored.device), exponent)
    return torch.where(exponent == 255 - BIAS, torch.full_like(power, torch.nan), power)
