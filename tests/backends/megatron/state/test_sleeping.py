"""What of a trainer rank is on its device after each order. Memory that comes and goes needs a
device: here are buffers that only count."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.backends.megatron.state import sleeping
from milescli.backends.megatron.state.sleeping import Sleeper


class _Buffer:
    """As Megatron's: moves only what is elsewhere."""

    def __init__(self) -> None:
        self.weights = self.gradients = True

    def offload_to_cpu(self, *, move_params: bool, move_grads: bool) -> None:
        self.weights &= not move_params
        self.gradients &= not move_grads

    def reload_from_cpu(self, *, move_params: bool, move_grads: bool) -> None:
        self.weights |= move_params
        self.gradients |= move_grads


class _Optimizer:
    """Counts where its state is."""

    def __init__(self) -> None:
        self.device = "cuda"


HELD = {
    "offload_optimizer_state": (True, False, "cpu"),
    "sleep": (False, False, "cpu"),
    "wake": (True, True, "cuda"),
}
"""order -> (weights, gradients, optimizer) on the device"""


@given(st.lists(st.sampled_from(sorted(HELD)), max_size=8))
def test_each_order_leaves_what_it_promises_whatever_came_before(orders: Sequence[str]) -> None:
    buffers, optimizer = [_Buffer(), _Buffer()], _Optimizer()
    model = SimpleNamespace(
        buffers=buffers[:1], expert_parallel_buffers=buffers[1:], parameters=list
    )
    sleeper = Sleeper(model, optimizer)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(
            sleeping.Sleeper,
            "_move_optimizer",
            lambda self, device: setattr(optimizer, "device", device),
        )
        for order in orders:
            getattr(sleeper, order)()
            assert [(each.weights, each.gradients, optimizer.device) for each in buffers] == [
                HELD[order]
            ] * 2, orders
