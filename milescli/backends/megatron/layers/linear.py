"""Megatron's linear layers with or without a bias, whatever its config says for all of them at
once. Used by `specs`."""

from __future__ import annotations

from functools import cache


@cache
def with_bias(module: type, has_bias: bool) -> type:
    """`module`, a class of Megatron's, whose instances have a bias or have none."""

    class Linear(module):
        def __init__(self, *args, bias: bool = False, **options) -> None:
            super().__init__(*args, bias=has_bias, **options)

    Linear.__name__ = Linear.__qualname__ = module.__name__
    return Linear
