"""The device of a process that computes with Megatron: taken once, before Megatron is imported."""

from __future__ import annotations

import logging

import torch

from milescli.backends.megatron.cpu_compat import import_megatron
from milescli.plan.types import Plan


def take_device(plan: Plan) -> torch.device:
    """The CPU, or the one accelerator that this process sees."""
    from milescli.backends.megatron import cpu_compat

    # it announces every layer and buffer, and warns of what this room has chosen on purpose
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if cpu_compat.install():
        torch.set_num_threads(plan.cpu_threads)
        return torch.device("cpu")
    import_megatron()
    from milescli.backends.megatron.layers.attention import avoid_cudnn

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    avoid_cudnn()
    return device
