"""Shares memory of this process with engines on the same machine: a file in /dev/shm, or device
memory by IPC. Imports nothing of SGLang, which would cost a trainer rank seconds; its unpickler
allows what torch has."""

from __future__ import annotations

import base64
import os
import pickle
import secrets
import time
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.multiprocessing import reductions

from milescli.core.errors import DISK_FULL, MachineError
from milescli.core.units import MIB, format_bytes
from milescli.weights.base import Bucket, Slice, aligned, layout, write_flat

FOLDER = Path("/dev/shm")
ROOM_WITHIN_S = 10.0
"""Time for another process to release its memory in a full /dev/shm."""
_LOOK_EVERY_S = 0.2
_DEVICE_ARGUMENT = 6
"""Place of the device index among the arguments of torch's rebuild_cuda_tensor."""


class SharedBuffer:
    """Holds a bucket that engines read through handles until it is freed.

    Host memory is a file named by this process (`miles_PID_...`), which the run's watchdog removes
    after a kill. It is written, not mapped: no page of it is cleared before, and this process holds
    none. It does not use torch's sharing by name, whose manager process has to answer within a
    second of wall-clock time, nor its sharing by socket, whose descriptors kill SGLang's scheduler.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """Make room for `size_bytes` on a device, or a file for weights of the host."""
        self.made_for = self.device = device
        self.size_bytes = size_bytes
        self._file: Path | None = None
        if device.type == "cpu":
            self._file = FOLDER / f"miles_{os.getpid()}_{secrets.token_hex(8)}"
        else:
            self.flat = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def write(self, bucket: Bucket) -> None:
        """Let readers find a bucket of at most `size_bytes`. They have read the one before. Raises
        MachineError if /dev/shm has no room for it."""
        if self._file is None:
            write_flat(bucket, self.flat)
            torch.accelerator.synchronize(self.device)
            return
        deadline = time.monotonic() + ROOM_WITHIN_S
        while True:
            try:
                write_file(bucket, self._file)
                return
            except OSError as error:
                self.free()  # what it got is another's meanwhile
                if error.errno not in DISK_FULL:
                    raise
                if time.monotonic() > deadline:
                    raise _full_error(self.size_bytes) from None
            time.sleep(_LOOK_EVERY_S)

    def payload(self, slices: list[Slice]) -> str:
        """Return the payload of /update_weights_from_tensor for one engine rank with
        load_format=flattened_bucket. Handles of device memory count their readers: each reader
        takes its own."""
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
        handle = self._handle(slices[-1].end)
        return _encoded(ForkingPickler.dumps({"flattened_tensor": handle, "metadata": metadata}))

    def handle(self, used: int) -> str:
        """Return a handle of the first `used` bytes, for one reader."""
        return _encoded(ForkingPickler.dumps(self._handle(used)))

    def _handle(self, used: int) -> object:
        return _DeviceHandle(self.flat[:used]) if self._file is None else _File(self._file, used)

    def free(self) -> None:
        """Remove its name from /dev/shm; the memory is freed when the last reader closes it."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class _File:
    """Pickles as the reader's private view of a file, which is never written: a reader fails if the
    file is gone, and never recreates it."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._arguments = (str(path), False, size_bytes)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(torch.from_file, dtype=torch.uint8), self._arguments


class _DeviceHandle:
    """Pickles as torch's handle of the tensor, with the device given by UUID: sender and receiver
    may number devices differently."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, arguments = reductions.reduce_tensor(self.tensor)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
        return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])


def write_file(bucket: Bucket, path: Path) -> None:
    """Write a bucket into a file that this user alone reads, in the order of `layout`, over what it
    had. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        for (_, tensor), place in zip(aligned(bucket), layout(bucket), strict=True):
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
            left, at = memoryview(flat.numpy()), place.start
            while left:  # a call writes 2 GiB at most
                count = os.pwrite(descriptor, left, at)
                left, at = left[count:], at + count
    finally:
        os.close(descriptor)


def _full_error(size_bytes: int) -> MachineError:
    stats = os.statvfs(FOLDER)
    free, size = (blocks * stats.f_frsize for blocks in (stats.f_bavail, stats.f_blocks))
    return MachineError(
        f"{FOLDER} is full, so weights cannot be sent to the engines",
        why=f"one bucket of weights needs {format_bytes(size_bytes)}, and two are stored at a "
        f"time; {format_bytes(free)} of {format_bytes(size)} are free, even after "
        f"{ROOM_WITHIN_S:.0f} s",
        fix=[
            "--set weights.bucket_mib=16",
            f"ls -lS {FOLDER} | head   # what uses the space?",
            f"mount -o remount,size={(size + 4 * size_bytes) // MIB + 1}m {FOLDER}   # as root; in "
            "Docker: docker run --shm-size=...",
        ],
    )


def plain_payload(value: object) -> str:
    """Pack a value without tensors in the same envelope."""
    return _encoded(pickle.dumps(value))


def _encoded(pickled: bytes) -> str:
    return base64.b64encode(pickled).decode()
