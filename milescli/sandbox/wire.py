"""Frames between a driver and its supervisor: a length and JSON, never pickle, as what is inside
came from code of a model. Standard library alone; used by both sides."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

_SIZE = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30


def write_frame(pipe: BinaryIO, message: dict[str, Any]) -> None:
    """Write one message. Raises ValueError if it is too large, OSError if nobody reads."""
    frame = json.dumps(message).encode()
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(frame)} bytes")
    pipe.write(_SIZE.pack(len(frame)) + frame)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> dict[str, Any] | None:
    """Read the next message; None at the end of the pipe."""
    head = pipe.read(_SIZE.size)
    if len(head) < _SIZE.size:
        return None
    size = _SIZE.unpack(head)[0]
    frame = pipe.read(size) if size <= MAX_FRAME_BYTES else b""
    return json.loads(frame) if len(frame) == size else None
