"""Images of rows that stand at an address (`data.remote_images`): fetched once, then read from the
user's cache. `images` asks for them."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 30.0
NUM_TRIES = 2


def fetched(url: str, *, most: int) -> bytes:
    """Return the file at an address of http or https. Raises ValueError with the reason if it
    cannot be had, or has more than `most` bytes."""
    kept = _cache() / hashlib.sha256(url.encode()).hexdigest()
    if kept.is_file():
        return kept.read_bytes()
    data = _get(url, most)
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}")
    part.write_bytes(data)
    part.replace(kept)
    return data


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "miles" / "images"


def _get(url: str, most: int) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "miles"})
    for last in range(1, NUM_TRIES + 1):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                data = answer.read(most + 1)
        except urllib.error.HTTPError as error:
            raise ValueError(f"cannot fetch {url:.200}: {error.code} {error.reason}") from None
        except (OSError, ValueError) as error:
            if last == NUM_TRIES:
                reason = getattr(error, "reason", error)
                raise ValueError(f"cannot fetch {url:.200}: {reason}") from None
        else:
            if len(data) > most:
                raise ValueError(f"{url:.200} is larger than {most} bytes")
            return data
    raise AssertionError(url)
