"""Weights that an engine rank reads by URL: a trainer rank has put them into an object store, and
signed a link to each message, so that engines need no credentials. The links are never shown
whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

import torch

from milescli.core.units import MIB

PART_BYTES = 16 * MIB
"""Bytes of one request: several at once are faster than one stream."""
NUM_AT_ONCE = 8
TIMEOUT_S = 60.0
"""Seconds without a byte after which a request is repeated."""
PAUSES_S = (0.2, 1.0, 5.0)
"""Seconds before each repetition of a request."""


def read_links(sources: Sequence[tuple[str, int, int]], *, size_bytes: int) -> torch.Tensor:
    """Return [size_bytes] uint8 in host memory, filled from (URL, first byte, one past the last) of
    each source. Raises OSError that names the object."""
    wire = torch.empty(size_bytes, dtype=torch.uint8)
    parts = [
        (link, at - first, memoryview(wire.numpy())[at : min(at + PART_BYTES, end)])
        for link, first, end in sources
        for at in range(first, end, PART_BYTES)
    ]
    with ThreadPoolExecutor(max(1, min(NUM_AT_ONCE, len(parts)))) as pool:
        list(pool.map(lambda part: _read(*part), parts))
    return wire


def _read(link: str, start: int, into: memoryview) -> None:
    """Fill `into` with the bytes of an object from `start` on."""
    place = urlsplit(link)
    if place.scheme == "file":
        with open(unquote(place.path), "rb") as file:
            file.seek(start)
            if _filled(file, into) < len(into):
                raise OSError(f"{place.path} is shorter than announced")
        return
    for pause_s in (*PAUSES_S, None):
        try:
            _ask(link, start, into)
            return
        except (OSError, HTTPException) as error:
            refused = isinstance(error, HTTPError) and error.code < 500 and error.code != 429
            if refused or pause_s is None:
                shown = f"{place.scheme}://{place.netloc}{place.path}"
                raise OSError(f"{shown} cannot be read: {type(error).__name__}: {error}") from None
            time.sleep(pause_s)


def _ask(link: str, start: int, into: memoryview) -> None:
    end = start + len(into) - 1
    request = Request(link, headers={"Range": f"bytes={start}-{end}"})
    with urlopen(request, timeout=TIMEOUT_S) as reply:
        if reply.status != 206:
            raise OSError(f"status {reply.status} for bytes {start} to {end}")
        if (count := _filled(reply, into)) < len(into):
            raise OSError(f"only {count} of {len(into)} bytes came")


def _filled(file, into: memoryview) -> int:
    """Read until `into` is full or the file ends; return the number of bytes."""
    count = 0
    while count < len(into) and (more := file.readinto(into[count:])):
        count += more
    return count
