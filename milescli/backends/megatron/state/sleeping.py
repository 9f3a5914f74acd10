"""Moves device memory to the host for a colocated engine, and back. Only for accelerators, so not
tested on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from milescli.backends.megatron.state.host_adam import HostAdamW
from milescli.backends.megatron.state.optimizer import inner_optimizers


class Sleeper:
    """Moves the device memory of a trainer rank. Its methods may be called in any order, and
    repeatedly."""

    def __init__(self, model: DistributedDataParallel, optimizer: MegatronOptimizer) -> None:
        """Manage model and optimizer, which keep their identity; only the memory behind their
        tensors moves."""
        self._model, self._optimizer = model, optimizer
        frozen = [each for each in model.parameters() if not each.requires_grad]
        self._frozen = FrozenSleeper(frozen)
        """Base weights of an adapter, which are never published."""
        self._asleep = self._slim = False

    def offload_optimizer_state(self) -> None:
        """Keep only the weights on the device, so that they can be published; move them back if
        they were asleep. Drops gradients, which each step recomputes."""
        if self._asleep:
            for buffer in self._buffers():
                buffer.reload_from_cpu(move_params=True, move_grads=False)
            torch.cuda.synchronize()
            self._asleep = False
        if self._slim:
            return
        torch.cuda.synchronize()
        self._frozen.sleep()
        self._move_optimizer("cpu")
        for buffer in self._buffers():
            buffer.offload_to_cpu(move_params=False, move_grads=True)
        torch.cuda.empty_cache()
        self._slim = True

    def sleep(self) -> None:
        """Move the weights to host memory too."""
        if self._asleep:
            return
        self.offload_optimizer_state()
        for buffer in self._buffers():
            buffer.offload_to_cpu(move_params=True, move_grads=False)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._asleep = True

    def wake(self) -> None:
        """Move everything back, bit for bit; gradients are zero."""
        if not self._slim:
            return
        for buffer in self._buffers():
            buffer.reload_from_cpu(move_params=self._asleep, move_grads=True)
        self._move_optimizer("cuda")
        self._frozen.wake()
        torch.cuda.synchronize()
        self._asleep = self._slim = False

    def _move_optimizer(self, device: str) -> None:
        # Megatron's own offload also moves float32 weights, which are views of the model's memory
        # and would part from it; of bfloat16 weights the optimizer has float32 copies of its own
        for inner in inner_optimizers(self._optimizer):
            if inner.optimizer is None or isinstance(inner.optimizer, HostAdamW):
                continue
            for copies in inner.shard_fp32_from_float16_groups:
                for weight in copies:
                    weight.data = weight.data.to(device)
            for state in inner.optimizer.state.values():
                state |= {
                    name: value.to(device)
                    for name, value in state.items()
                    if torch.is_tensor(value) and name != "step"
                }

    def _buffers(self) -> list:
        return [*self._model.buffers, *self._model.expert_parallel_buffers]


class FrozenSleeper:
    """Moves weights that never change, so that their copy in host memory is made once."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Manage the memory behind `parameters`."""
        self._parameters = parameters
        self._on_host: list[torch.Tensor] = []
        self._asleep = False

    def sleep(self) -> None:
        """Move the weights off the device."""
        if self._asleep:
            return
        self._on_host = self._on_host or [to_host(each.detach()) for each in self._parameters]
        for parameter, on_host in zip(self._parameters, self._on_host, strict=True):
            parameter.data = on_host
        torch.cuda.empty_cache()
        self._asleep = True

    def wake(self) -> None:
        """Move the weights back to the device."""
        if not self._asleep:
            return
        for parameter in self._parameters:
            parameter.data = parameter.data.to("cuda", non_blocking=True)
        self._asleep = False


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host copy of the tensor; pinned if it comes from an accelerator, so that it can be
    copied back at full speed."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return copy.copy_(tensor)
