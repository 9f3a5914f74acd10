"""Numbers and lists as people read and write them. Pure; used by tables, errors and reports, and
for counts that a recipe's decimals give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
KIB, MIB, GIB = 1024, 1024**2, 1024**3


def decimal_product(number: float, factor: float) -> float:
    """Multiply as decimals do, without the noise of binary fractions, which would change a count
    that is rounded up or down: 50 * 1.1 -> 55.0, not 55.00000000000001."""
    return float(f"{number * factor:.12g}")


def format_bytes(size_bytes: float) -> str:
    """Format bytes: 1536 -> '1.5 KiB'."""
    value = float(size_bytes)
    for unit in _BINARY:
        if abs(value) < 1024 or unit == _BINARY[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError(size_bytes)


def format_count(count: float) -> str:
    """Format a count of parameters or tokens in decimal steps: 1_234_000 -> '1.2M'."""
    for bound, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= bound:
            return f"{count / bound:.1f}{suffix}"
    return f"{count:.0f}"


def format_duration(seconds: float) -> str:
    """Format seconds: 4.2 -> '4.2 s'; 75 -> '1 m 15 s'; 7320 -> '2 h 02 m'."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m"


def format_few(texts: Sequence[str], most: int, *, joint: str = ", ") -> str:
    """List the first texts: `a, b and 3 more`; joined by semicolons: `a; b; and 3 more`."""
    more = len(texts) - most
    rest = f"{joint.strip(', ')} and {more} more" if more > 0 else ""
    return joint.join(texts[:most]) + rest


_SUFFIXES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 1024**4,
}


def parse_size(text: str) -> int:
    """Parse bytes: '5GB' -> 5_000_000_000; '512MiB' -> 536_870_912. Raises ValueError for anything
    else."""
    number = text.strip().rstrip("BbKkMmGgTtIi ")
    factor = _SUFFIXES.get(text.strip()[len(number) :].strip().upper())
    try:
        size = int(float(number) * factor) if factor is not None else 0
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(f"`{text}` is not a size; write 5GB or 512MiB, for example")
    return size


def format_time(seconds: float) -> str:
    """Format seconds since 1970: 2026-11-25T22:00:01.234Z."""
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")
    return f"{text[:-3]}Z"


def parse_time(text: object) -> float:
    """Invert `format_time`; NaN for any other text."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return math.nan
