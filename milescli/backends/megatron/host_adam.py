"""AdamW whose moments rest in host memory and are stepped there, for models whose optimizer does not fit on the device. Megatron's own offload
(HybridDeviceOptimizer) takes no float32 weights and computes nothing without CUDA, so that it could not be tested here. Used by `optimizer`."""

from __future__ import annotations

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.optim.adamw import adamw

_HOST = torch.device("cpu")


class HostAdamW(torch.optim.AdamW):
    """Weights stay where they are; each is fetched, updated and put back, one after the other."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2), in float32 on the host."""
        assert closure is None, "Megatron gives none"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.moments(weight)
                host = weight.detach().to(_HOST)
                adamw(
                    [host],
                    [weight.grad.to(_HOST)],
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
                if host.data_ptr() != weight.data_ptr():
                    weight.detach().copy_(host)

    def moments(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of a weight, in host memory; zeros at first."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(weight.shape, dtype=torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            # whoever restores a checkpoint may have made them beside the weight
            state[name] = state[name].to(_HOST)
        return state


def move_to_host(inner: MegatronOptimizer) -> None:
    """Put HostAdamW in the place of one of Megatron's optimizers, with its groups of weights."""
    device = inner.optimizer
    placeholder = torch.nn.Parameter(torch.zeros(1))
    host = HostAdamW([placeholder])
    host.defaults = {**host.defaults, **{name: device.defaults[name] for name in host.defaults if name in device.defaults}}
    # Adam of other makers has other settings in its groups; float32 weights are views, which a new optimizer would not take
    host.param_groups = device.param_groups
    inner.optimizer = host
