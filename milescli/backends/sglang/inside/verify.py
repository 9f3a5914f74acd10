"""Proof that an engine holds what was sent. Runs inside engine ranks, installed by the plug-in;
asked by `channels.py`.

begin: keep a copy of every parameter, then overwrite them all with NaN, integers with -1. The
trainer sends all weights again, by its ordinary way. end: compare each parameter with its copy, bit
for bit, and put the copies back. What was never sent is still overwritten, and differs. Of a
quantised model, parameters are its numbers and scales, or what the engine makes of them.

An engine that guesses by an MTP layer has two models, which are both asked: the layer, and the
model, of which the layer has the embeddings and the output layer. The trainer may hold no MTP
layer: what nobody sends of it is none of ours to compare.

What was sent in pieces must also have been taken: SGLang's loaders skip names that their model does
not have, such as a bias. They may skip MTP layers, which only an engine that guesses by them has.

Of an engine that serves adapters, the one that is sent is kept, overwritten and compared, from the
moment before it is replaced: requests to the others may go on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from milescli.backends.sglang.inside.adapter import adapter_tensors, before_replacing
from milescli.backends.sglang.inside.quantised import NEVER_SENT
from milescli.backends.sglang.inside.shards import ignored_tensors
from milescli.platform.allocation import release_freed_memory

VERIFY_FORMAT = "miles_verify"
"""`load_format` of the two orders; their payload is [(order, None)]."""
BEGIN, END = "begin", "end"
DIFFERS = "weights differ: "
"""Start of the reply if weights differ."""

NamedTensors = Sequence[tuple[str, torch.Tensor]]
"""(name, tensor)"""
_copies: dict[bool, dict[str, torch.Tensor]] = {}
"""Copies by name, of the model (False) and of its MTP layer (True)."""
_pointers: dict[bool, set[int]] = {}
"""Addresses of the originals of `_copies`."""


def install() -> None:
    """Let /update_weights_from_tensor understand VERIFY_FORMAT."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    ordinary = WeightUpdater.update_weights_from_tensor

    def update_or_verify(self, named_tensors, load_format=None):
        if load_format != VERIFY_FORMAT:
            return ordinary(self, named_tensors, load_format)
        runner = self.get_model_runner()
        order, is_mtp = named_tensors[0][0], runner.is_draft_worker
        if runner.lora_manager is not None:
            return _begin_adapter() if order == BEGIN else _end_adapter(runner.lora_manager)
        weights = list(runner.model.named_parameters())
        if order == BEGIN:
            return begin(weights, is_mtp=is_mtp)
        text_config = runner.model_config.hf_text_config
        num_layers = getattr(text_config, "num_hidden_layers", None)
        verdict = _end_on_all_ranks(weights, is_mtp=is_mtp, num_layers=num_layers)
        if is_mtp and hasattr(runner.model, "post_load_weights"):
            runner.model.post_load_weights(is_nextn=True)  # what is derived of them, too
        return verdict

    WeightUpdater.update_weights_from_tensor = update_or_verify


_expected: list[str] = []
"""Adapters that were replaced since the begin order."""


def _begin_adapter() -> tuple[bool, str]:
    _expected.clear()
    before_replacing[:] = [_keep_adapter]
    return True, "the next adapter is kept"


def _keep_adapter(manager: Any, name: str) -> None:
    before_replacing.clear()
    _expected.append(name)
    begin(adapter_tensors(manager, name))


def _end_adapter(manager: Any) -> tuple[bool, str]:
    before_replacing.clear()
    if not _expected:
        return False, f"{DIFFERS}no adapter was sent"
    return _end_on_all_ranks(adapter_tensors(manager, _expected.pop()), is_mtp=False)


@torch.no_grad()
def begin(weights: NamedTensors, *, is_mtp: bool = False) -> tuple[bool, str]:
    """Copy the weights to host memory, since the device may lack room for a second model, and
    overwrite them. Skips weights that the other of two models has already saved, and what nobody
    sends."""
    theirs = _pointers.get(not is_mtp, set())
    own = [
        (name, tensor)
        for name, tensor in weights
        if tensor.data_ptr() not in theirs and not name.endswith(NEVER_SENT)
    ]
    _pointers[is_mtp] = {tensor.data_ptr() for _, tensor in own}
    _copies[is_mtp] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in own}
    for _, tensor in own:
        tensor.fill_(unsent(tensor))
    return True, f"{len(own)} parameters kept"


@torch.no_grad()
def end(weights: NamedTensors, *, is_mtp: bool = False) -> str | None:
    """Return the first weight that differs, or None. Restores the copies in any case."""
    finding = None
    copies = _copies.pop(is_mtp)
    del _pointers[is_mtp]
    for name, tensor in weights:
        if (copy := copies.get(name)) is None:
            continue
        sent = tensor.detach().to("cpu")
        missing = is_missing(sent)
        # padding that SGLang adds, and any zero, needs no sending
        sent = torch.where(missing & (copy == 0), copy, sent)
        is_ours = not (is_mtp and bool(missing.all()))
        if is_ours and finding is None and not torch.equal(_bytes(copy), _bytes(sent)):
            finding = _describe(name, expected=copy, sent=sent)
        tensor.copy_(copy)
    return finding


def _is_of_mtp(name: str, num_layers: int | None) -> bool:
    """True for a weight of an MTP layer, which releases number after the last layer or call so."""
    layer = re.search(r"layers\.(\d+)\.", name)
    is_after = layer is not None and num_layers is not None and int(layer[1]) >= num_layers
    return is_after or name.startswith(("mtp.", "model.mtp."))


def unsent(tensor: torch.Tensor) -> float:
    """Return what a parameter holds until it is sent: NaN; in integers -1, all bits."""
    return float("nan") if tensor.is_floating_point() else -1


def is_missing(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a parameter still holds `unsent`."""
    if tensor.is_floating_point():
        return torch.isnan(tensor)
    return tensor == torch.full((), unsent(tensor)).to(tensor.dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _describe(name: str, *, expected: torch.Tensor, sent: torch.Tensor) -> str:
    differs = expected.reshape(-1) != sent.reshape(-1)
    where = differs.nonzero().squeeze(1)
    if len(where) == 0:  # equal as numbers, not as bits: signed zeros
        return f"{name}: the sign of zeros"
    first = int(where[0])
    if is_missing(sent.reshape(-1)[where]).all():
        return (
            f"{name}: {len(where)} of {expected.numel()} values were not sent, the first at flat "
            f"index {first}"
        )
    expected_value, sent_value = float(expected.reshape(-1)[first]), float(sent.reshape(-1)[first])
    return (
        f"{name}: {len(where)} of {expected.numel()} values, the first at flat index {first}, held "
        f"{expected_value!r}, sent {sent_value!r}"
    )


def _end_on_all_ranks(
    weights: NamedTensors, *, is_mtp: bool, num_layers: int | None = None
) -> tuple[bool, str]:
    """Compare on every rank its own shard, and collect the findings on rank 0, which alone
    replies."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    findings: list[Any] = [None] * group.world_size
    own = end(weights, is_mtp=is_mtp), ignored_tensors()
    release_freed_memory()  # else an engine on a CPU keeps as much as its weights, for good
    torch.distributed.all_gather_object(findings, own, group=group.cpu_group)
    for rank, (finding, _) in enumerate(findings):
        if finding is not None:
            return False, f"{DIFFERS}engine rank {rank}: {finding}"
    ignored = set.intersection(*(names for _, names in findings))
    if names := sorted(name for name in ignored if not _is_of_mtp(name, num_layers)):
        return False, f"{DIFFERS}the model took nothing of {len(names)} tensors: {names[0]}"
    return True, "every parameter is what was sent"
