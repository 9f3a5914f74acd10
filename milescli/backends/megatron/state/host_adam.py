"""AdamW in host memory, for models whose optimizer does not fit on the device: moments, and float32
copies of bfloat16 weights, are stored and updated there. Megatron's own offload
(HybridDeviceOptimizer) supports no float32 weights, needs TransformerEngine to leave nothing on the
device, and computes nothing without CUDA, so that it could not be tested here. Used by
`optimizer`."""

from __future__ import annotations

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.optim.adamw import adamw

_HOST = torch.device("cpu")


class HostAdamW(torch.optim.AdamW):
    """Implements AdamW in host memory. Its parameters come from Megatron: float32 parts of the
    model's own memory, which stay there, or placeholders for float32 copies of bfloat16 weights,
    which have a shape and a gradient and no memory; the copies themselves are in `copies`."""

    copies: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
    """placeholder -> (float32 weights in host memory, the bfloat16 weights on the device)"""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Update one weight after the other, with decoupled weight decay (Loshchilov & Hutter,
        arXiv 1711.05101, algorithm 2), in float32."""
        assert closure is None, "Megatron gives none"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                pair = self.copies.get(weight)
                host, device = pair or (weight.detach().to(_HOST), weight.detach())
                self._update(host, weight.grad.to(_HOST), self.moments(weight), group)
                if device.data_ptr() != host.data_ptr():
                    device.copy_(host)

    def _update(
        self, weight: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], group: dict
    ) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            [weight],
            [grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            foreach=False,
            fused=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def moments(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the moments of a weight, created as zeros."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(weight.shape, dtype=torch.float32)
        return state


class _HostOptimizer(DistributedOptimizer):
    """Wraps Megatron's optimizer so that it uses the float32 weights in host memory."""

    optimizer: HostAdamW

    def _copy_main_params_to_model_params(self) -> None:
        """Do nothing: HostAdamW has copied them already."""

    def _copy_model_params_to_main_params(self, state_dict: object = None) -> None:
        assert state_dict is None, "weights come from the model"
        for host, device in self.optimizer.copies.values():
            host.copy_(device)

    def _get_main_param_and_optimizer_states(
        self, model_param: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        tensors = super()._get_main_param_and_optimizer_states(model_param)
        stand_in = tensors["param"]
        return (
            {**tensors, "param": self.optimizer.copies[stand_in][0]}
            if stand_in in self.optimizer.copies
            else tensors
        )

    def _set_main_param_and_optimizer_states(
        self, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> None:
        for name, own in self._get_main_param_and_optimizer_states(model_param).items():
            own.copy_(tensors[name])


@torch.no_grad()
def move_to_host(inner: MegatronOptimizer) -> None:
    """Replace one of Megatron's new optimizers by one in host memory, in place."""
    assert type(inner) is DistributedOptimizer, type(inner)
    device = inner.optimizer
    host = HostAdamW([torch.nn.Parameter(torch.zeros(1))])
    host.defaults = {
        **host.defaults,
        **{name: device.defaults[name] for name in host.defaults if name in device.defaults},
    }
    # in place of a new optimizer's own check: float32 weights are views of the model's memory,
    # which it would not take
    host.param_groups = device.param_groups
    host.copies = {}
    for mains, weights in zip(
        inner.shard_fp32_from_float16_groups, inner.shard_float16_groups, strict=True
    ):
        for main, weight in zip(mains, weights, strict=True):
            host.copies[main] = (main.detach().to(_HOST, copy=True), weight)
            main.data = torch.zeros(1, dtype=main.dtype, device=main.device).expand(main.shape)
    inner.optimizer = host
    inner.__class__ = _HostOptimizer
