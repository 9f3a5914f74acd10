"""Controls how this process allocates memory from the system. Called by engines and trainers on a
CPU."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Names of parameters in glibc's malloc.h."""
_RETAINED_BYTES = 2**31 - 1
_STEP_BYTES = 2**26
_LARGEST_BYTES = 2**30


def keep_freed_memory() -> None:
    """Make this process retain up to 2 GiB of freed memory for the next tensors. By default glibc
    returns large blocks to the system, which clears every page of a new one: a tenth of a training
    step. Does nothing with another C library."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, _LARGEST_BYTES)
        set_option(_TRIM_THRESHOLD, _RETAINED_BYTES)
        set_option(_TOP_PAD, _STEP_BYTES)


def release_freed_memory() -> None:
    """Return all retained memory to the system, after work that needs much memory once. Does
    nothing with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
