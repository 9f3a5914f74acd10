"""A tensor of this process as a string that an engine's process on the same machine opens. Nothing
of SGLang is imported: that would cost a trainer rank seconds; SGLang reads plain pickle of torch's
own handles."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from milescli.weights.buckets import Slice

_DEVICE_ARGUMENT = 6
"""Place of the device index among the arguments of torch's rebuild_cuda_tensor."""


class _Handle:
    """Pickles as torch's handle of the tensor, with the device as its UUID: sender and receiver may
    number devices differently."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, arguments = reductions.reduce_tensor(self.tensor)
        if self.tensor.is_cuda:
            uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
            arguments = (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
        return rebuild, arguments


def flat_bucket_payload(flat: torch.Tensor, slices: list[Slice]) -> str:
    """What /update_weights_from_tensor takes for one engine rank with load_format=flattened_bucket.

    `flat`: [bytes] uint8; it must live until the engine has replied. CPU tensors are moved to
    shared memory under a name that torch's shm manager removes when the last process that holds it
    ends, also by a crash; torch's default, a file descriptor handed over a socket, kills SGLang's
    scheduler.
    """
    metadata = [
        SimpleNamespace(
            name=piece.name,
            shape=piece.shape,
            dtype=piece.dtype,
            start_idx=piece.start,
            end_idx=piece.end,
            numel=piece.end - piece.start,
        )
        for piece in slices
    ]
    stream = io.BytesIO()
    with _shared_by_name():
        ForkingPickler(stream).dump({"flattened_tensor": _Handle(flat), "metadata": metadata})
    return base64.b64encode(stream.getvalue()).decode()


def new_buffer(size_bytes: int, device: torch.device) -> torch.Tensor:
    """[size_bytes] uint8; on a CPU in shared memory, whither it would be copied when it is sent."""
    held = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    with _shared_by_name():
        return held.share_memory_() if device.type == "cpu" else held


@contextmanager
def _shared_by_name() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def plain_payload(value: object) -> str:
    """A value without tensors, in the same envelope."""
    return base64.b64encode(pickle.dumps(value)).decode()
