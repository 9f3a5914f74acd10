"""Copies everything that a rank needs to continue to host memory: weights, optimizer, random state,
reference. The copy is taken at once, read while the rank trains on, and restored into the same rank
of the same layout. It is not a checkpoint: its bytes have no names. `Reference` holds the weights
from which the policy started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from milescli.backends.megatron.state.checkpoint import (
    make_moments,
    random_states,
    set_random_states,
)
from milescli.backends.megatron.state.host_adam import HostAdamW
from milescli.backends.megatron.state.optimizer import inner_optimizers
from milescli.backends.megatron.state.saving import release_state
from milescli.backends.megatron.state.sleeping import to_host
from milescli.backends.megatron.trained_model import TrainedModel
from milescli.core.errors import RecipeError


class Reference:
    """Stores the reference weights; empty until `freeze`."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Manage `model`, whose parameters are copied, and temporarily replaced."""
        self._model = model
        self._frozen: list[torch.Tensor] | None = None

    def freeze(self) -> None:
        """Make the current weights the reference."""
        if self._frozen is None:
            self._frozen = [to_host(parameter.detach()) for parameter in self._trained()]
            return
        for frozen, parameter in zip(self._frozen, self._trained(), strict=True):
            frozen.copy_(parameter.detach())

    @property
    def frozen(self) -> list[torch.Tensor] | None:
        """Return [trained parameters] in the order of the model, on the host; None before
        `freeze`."""
        return self._frozen

    def _trained(self) -> list[torch.nn.Parameter]:
        """Return the trained weights; all others are equal in reference and policy."""
        return [each for each in self._model.parameters() if each.requires_grad]

    @contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Replace the model's weights by the reference within the block; afterwards restore them
        bit for bit."""
        if self._frozen is None:
            raise RecipeError(
                "there is no reference for the objective",
                why="it compares with weights that were not frozen before the first step",
                fix="--set train.reference=true",
            )
        parameters = self._trained()
        if _is_on_host(parameters):
            own = [parameter.data for parameter in parameters]
            _point_at(parameters, self._frozen)
            try:
                yield
            finally:
                _point_at(parameters, own)
            return
        release_state()
        current = [to_host(parameter.detach()) for parameter in parameters]
        try:
            for parameter, frozen in zip(parameters, self._frozen, strict=True):
                parameter.copy_(frozen, non_blocking=True)
            yield
        finally:
            release_state()  # the policy's weights come back to where the reference's were
            for parameter, saved in zip(parameters, current, strict=True):
                parameter.copy_(saved)


def _is_on_host(parameters: Sequence[torch.nn.Parameter]) -> bool:
    return all(parameter.device.type == "cpu" for parameter in parameters)


def _point_at(parameters: Sequence[torch.nn.Parameter], tensors: Sequence[torch.Tensor]) -> None:
    """Let parameters use the memory of `tensors`; nothing is copied."""
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor


_ALIGN = 64
"""Each tensor begins at a multiple of this, so that any type can be viewed there."""


class Snapshot:
    """Copies a rank's state. Its memory is allocated at the first copy, pinned if the rank has an
    accelerator, and reused by each later one. A copy has sections: each model, random state, the
    reference."""

    def __init__(
        self,
        models: Sequence[TrainedModel],
        reference: Reference,
        *,
        awake: Callable[[TrainedModel], AbstractContextManager[None]],
        device: torch.device,
    ) -> None:
        """Copy `models` and `reference`. Within `awake`, a model is on the device."""
        self._models, self._reference = models, reference
        self._awake, self._device = awake, device
        self._sections = list[torch.Tensor]()
        """[sections] uint8"""

    @torch.no_grad()
    def take(self) -> list[int]:
        """Copy the current state, and return the sizes of the sections in bytes."""
        self._sections = self._sections or [self._empty(0)] * self._num_sections
        for number, model in enumerate(self._models):
            with self._awake(model):
                self._copy_section(number, tensors_of(model))
                if self._device.type != "cpu":
                    torch.cuda.synchronize()
        self._copy_section(len(self._models), random_states())
        self._copy_section(len(self._models) + 1, self._reference.frozen or [])
        return [section.numel() for section in self._sections]

    def read(self, section: int, offset: int, size_bytes: int) -> np.ndarray:
        """Return a part of the last copy, as a view."""
        return self._sections[section][offset : offset + size_bytes].numpy()

    def allocate(self, sizes: Sequence[int]) -> None:
        """Allocate memory for a copy that is written in parts. `sizes`: as returned by `take`."""
        assert len(sizes) == self._num_sections, (sizes, self._num_sections)
        self._sections = [self._empty(size) for size in sizes]

    def write(self, section: int, offset: int, part: np.ndarray) -> None:
        """Write one part."""
        self._sections[section].numpy()[offset : offset + part.size] = part

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the rank's state from the copy."""
        release_state()
        for number, model in enumerate(self._models):
            with self._awake(model):
                self._restore_section(number, tensors_of(model))
                if self._device.type != "cpu":
                    torch.cuda.synchronize()
        states = [torch.empty_like(state) for state in random_states()]
        self._restore_section(len(self._models), states)
        set_random_states(states)
        if self._sections[-1].numel():
            self._reference.freeze()  # for its memory; what it holds is replaced
            self._restore_section(len(self._models) + 1, self._reference.frozen or [])

    @property
    def _num_sections(self) -> int:
        return len(self._models) + 2

    def _copy_section(self, section: int, tensors: Sequence[torch.Tensor]) -> None:
        if self._sections[section].numel() != _size_of(tensors):
            self._sections[section] = self._empty(_size_of(tensors))
        for tensor, place in self._places(section, tensors):
            place.copy_(tensor, non_blocking=True)

    def _restore_section(self, section: int, tensors: Sequence[torch.Tensor]) -> None:
        available, needed = self._sections[section].numel(), _size_of(tensors)
        assert available == needed, f"section {section} has {available} bytes, the rank {needed}"
        for tensor, place in self._places(section, tensors):
            tensor.copy_(place, non_blocking=True)

    def _places(
        self, section: int, tensors: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (tensor, its place in the section), as a tensor of the same type and shape."""
        offset, memory = 0, self._sections[section]
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if size:
                yield tensor, memory[offset : offset + size].view(tensor.dtype).view(tensor.shape)
            offset += _padded(size)

    def _empty(self, size_bytes: int) -> torch.Tensor:
        pinned = self._device.type != "cpu"
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


@torch.no_grad()
def tensors_of(model: TrainedModel) -> list[torch.Tensor]:
    """Return the trained weights, the buffers and the optimizer's state, in an order that depends
    on the layout alone. Weights that the optimizer only views are not repeated."""
    make_moments(model.optimizer)
    trained = [each for each in model.model.module.parameters() if each.requires_grad]
    tensors = [*trained, *model.model.module.buffers()]
    for inner in inner_optimizers(model.optimizer):
        for group in inner.optimizer.param_groups:
            for weight in group["params"]:
                state = inner.optimizer.state[weight]
                tensors += [state[name] for name in sorted(state)]
        copies = inner.optimizer.copies if isinstance(inner.optimizer, HostAdamW) else {}
        for mains in inner.shard_fp32_from_float16_groups:
            tensors += [copies[main][0] if main in copies else main for main in mains]
    return [tensor.detach() for tensor in tensors]


def _size_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_padded(tensor.numel() * tensor.element_size()) for tensor in tensors)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN) * _ALIGN
