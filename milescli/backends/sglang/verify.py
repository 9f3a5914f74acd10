"""Proof that an engine holds what was sent. Runs inside engine ranks, installed by the plug-in;
asked by `channels.py`.

begin: keep a copy of every parameter, then overwrite them all with NaN. The trainer sends all
weights again, by its ordinary way. end: compare each parameter with its copy, bit for bit, and put
the copies back. What was never sent is still NaN, and differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from milescli.backends.sglang.adapter import adapter_tensors

VERIFY_FORMAT = "miles_verify"
"""`load_format` of the two orders; their payload is [(order, None)]."""
BEGIN, END = "begin", "end"
DIFFERS = "weights differ: "
"""How the reply starts where they do."""

Held = Sequence[tuple[str, torch.Tensor]]
"""(name, tensor)"""
_copies: dict[str, torch.Tensor] = {}


def install() -> None:
    """Let /update_weights_from_tensor understand VERIFY_FORMAT."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    ordinary = WeightUpdater.update_weights_from_tensor

    def update_or_verify(self, named_tensors, load_format=None):
        if load_format != VERIFY_FORMAT:
            return ordinary(self, named_tensors, load_format)
        order, held = named_tensors[0][0], _sent(self.get_model_runner())
        return begin(held) if order == BEGIN else _end_on_all_ranks(held)

    WeightUpdater.update_weights_from_tensor = update_or_verify


def _sent(runner: Any) -> Held:
    """What the trainer sends this engine, as its layers compute with it: all weights, or those of
    the adapter that it serves."""
    if runner.lora_manager is not None:
        return adapter_tensors(runner.lora_manager)
    return list(runner.model.named_parameters())


@torch.no_grad()
def begin(held: Held) -> tuple[bool, str]:
    """Copies go to host memory: there may be no room for a second model on the device."""
    _copies.clear()
    for name, parameter in held:
        _copies[name] = parameter.detach().to("cpu", copy=True)
        parameter.fill_(float("nan") if parameter.is_floating_point() else -1)
    return True, f"{len(_copies)} parameters kept"


@torch.no_grad()
def end(held: Held) -> str | None:
    """What differs first, or None. Puts the copies back in any case."""
    finding = None
    for name, parameter in held:
        kept = _copies[name]
        sent = parameter.detach().to("cpu")
        # padding that SGLang adds, and any zero, needs no sending
        sent.masked_fill_(torch.isnan(sent) & (kept == 0), 0)
        if finding is None and not torch.equal(_bytes(kept), _bytes(sent)):
            finding = _describe(name, held=kept, sent=sent)
        parameter.copy_(kept)
    _copies.clear()
    return finding


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _describe(name: str, *, held: torch.Tensor, sent: torch.Tensor) -> str:
    differs = held.reshape(-1) != sent.reshape(-1)
    where = differs.nonzero().squeeze(1)
    if len(where) == 0:  # equal as numbers, not as bits: signed zeros
        return f"{name}: the sign of zeros"
    first = int(where[0])
    if torch.isnan(sent.reshape(-1)[where]).all():
        return (
            f"{name}: {len(where)} of {held.numel()} values were not sent, the first at flat "
            f"index {first}"
        )
    held_value, sent_value = float(held.reshape(-1)[first]), float(sent.reshape(-1)[first])
    return (
        f"{name}: {len(where)} of {held.numel()} values, the first at flat index {first}, held "
        f"{held_value!r}, sent {sent_value!r}"
    )


def _end_on_all_ranks(held: Held) -> tuple[bool, str]:
    """Every rank compares its own shard; rank 0 alone replies, so it collects the others'
    findings."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    findings: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(findings, end(held), group=group.cpu_group)
    for rank, finding in enumerate(findings):
        if finding is not None:
            return False, f"{DIFFERS}engine rank {rank}: {finding}"
    return True, "every parameter is what was sent"
