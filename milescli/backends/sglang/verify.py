"""Proof that an engine holds what was sent. Runs inside engine ranks, installed by the plug-in;
asked by `channels.py`.

begin: keep a copy of every parameter, then overwrite them all with NaN. The trainer sends all
weights again, by its ordinary way. end: compare each parameter with its copy, bit for bit, and put
the copies back. What was never sent is still NaN, and differs.

An engine that guesses by an MTP layer has two models, which are both asked: the layer, and the
model, of which the layer has the embeddings and the output layer. The trainer may hold no MTP
layer: what nobody sends of it is none of ours to compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch

VERIFY_FORMAT = "miles_verify"
"""`load_format` of the two orders; their payload is [(order, None)]."""
BEGIN, END = "begin", "end"
DIFFERS = "weights differ: "
"""How the reply starts where they do."""

_copies: WeakKeyDictionary[torch.nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()


def install() -> None:
    """Let /update_weights_from_tensor understand VERIFY_FORMAT."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    ordinary = WeightUpdater.update_weights_from_tensor

    def update_or_verify(self, named_tensors, load_format=None):
        if load_format != VERIFY_FORMAT:
            return ordinary(self, named_tensors, load_format)
        order, is_draft = named_tensors[0][0], self.get_model_runner().is_draft_worker
        if order == BEGIN:
            return begin(self.get_model())
        return _end_on_all_ranks(self.get_model(), is_draft=is_draft)

    WeightUpdater.update_weights_from_tensor = update_or_verify


@torch.no_grad()
def begin(model: torch.nn.Module) -> tuple[bool, str]:
    """Copies go to host memory: there may be no room for a second model on the device."""
    _copies.pop(model, None)
    _copies[model] = copies = {}
    for name, parameter in _own(model):
        copies[name] = parameter.detach().to("cpu", copy=True)
        parameter.fill_(float("nan") if parameter.is_floating_point() else -1)
    return True, f"{len(copies)} parameters kept"


def _own(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Its parameters, but those that are kept as another model's."""
    others = {
        parameter.data_ptr()
        for other, copies in _copies.items()
        if other is not model
        for name, parameter in other.named_parameters()
        if name in copies
    }
    return (each for each in model.named_parameters() if each[1].data_ptr() not in others)


@torch.no_grad()
def end(model: torch.nn.Module, *, is_draft: bool = False) -> str | None:
    """What differs first, or None. Puts the copies back in any case. `is_draft`: what nothing was
    sent of does not differ."""
    finding = None
    for name, parameter in model.named_parameters():
        if (kept := _copies[model].get(name)) is None:
            continue
        sent = parameter.detach().to("cpu")
        # padding that SGLang adds, and any zero, needs no sending
        is_missing = torch.isnan(sent)
        sent.masked_fill_(is_missing & (kept == 0), 0)
        was_sent = not (is_draft and bool(is_missing.all()))
        if was_sent and finding is None and not torch.equal(_bytes(kept), _bytes(sent)):
            finding = _describe(name, held=kept, sent=sent)
        parameter.copy_(kept)
    if is_draft and hasattr(model, "post_load_weights"):
        model.post_load_weights(is_nextn=True)  # what is derived of them, too
    del _copies[model]
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


def _end_on_all_ranks(model: torch.nn.Module, *, is_draft: bool) -> tuple[bool, str]:
    """Every rank compares its own shard; rank 0 alone replies, so it collects the others'
    findings."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    findings: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(
        findings, end(model, is_draft=is_draft), group=group.cpu_group
    )
    for rank, finding in enumerate(findings):
        if finding is not None:
            return False, f"{DIFFERS}engine rank {rank}: {finding}"
    return True, "every parameter is what was sent"
