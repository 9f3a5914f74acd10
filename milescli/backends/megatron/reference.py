"""The frozen reference of the KL term: a copy of this rank's weights in host memory, in the place
of the model's own while it scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from milescli.backends.megatron.saving import release_state
from milescli.backends.megatron.sleeping import to_host
from milescli.core.errors import RecipeError


class Reference:
    """Holds nothing until `freeze`."""

    def __init__(self, model: torch.nn.Module) -> None:
        """`model`: whose parameters are copied, and replaced in turn."""
        self._model = model
        self._frozen: list[torch.Tensor] | None = None

    def freeze(self) -> None:
        """The current weights become the reference."""
        if self._frozen is None:
            self._frozen = [to_host(parameter.detach()) for parameter in self._trained()]
            return
        for frozen, parameter in zip(self._frozen, self._trained(), strict=True):
            frozen.copy_(parameter.detach())

    @property
    def frozen(self) -> list[torch.Tensor] | None:
        """[parameters that are trained] in the order of the model, on the host."""
        return self._frozen

    def _trained(self) -> list[torch.nn.Parameter]:
        """What else there is, is the same in both."""
        return [each for each in self._model.parameters() if each.requires_grad]

    @contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """The model is the reference within; afterwards it is what it was, bit for bit."""
        if self._frozen is None:
            raise RecipeError(
                "there is no reference to measure the KL against",
                why="train.kl_coef is above 0, but the weights were not frozen before the first "
                "step",
                fix="--set train.kl_coef=0",
            )
        parameters = self._trained()
        if all(parameter.device.type == "cpu" for parameter in parameters):
            own = [parameter.data for parameter in parameters]
            _point(parameters, self._frozen)
            try:
                yield
            finally:
                _point(parameters, own)
            return
        release_state()
        current = [to_host(parameter.detach()) for parameter in parameters]
        try:
            for parameter, frozen in zip(parameters, self._frozen, strict=True):
                parameter.copy_(frozen, non_blocking=True)
            yield
        finally:
            for parameter, kept in zip(parameters, current, strict=True):
                parameter.copy_(kept)


def _point(parameters: Sequence[torch.nn.Parameter], tensors: Sequence[torch.Tensor]) -> None:
    """At memory that is there already: nothing is copied."""
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor
