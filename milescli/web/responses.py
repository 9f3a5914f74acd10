"""Encodes what the server sends: values as strict JSON, with an ETag, compressed if that helps; and
refusals in three parts, with their HTTP status. Pure."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass

import orjson

from milescli.console.output import finite
from milescli.core.errors import MilesError

PACKED_FROM_BYTES = 4096
"""Smaller bodies are not compressed."""
_GZIP_LEVEL = 1
"""The fastest: it compresses JSON to a fifth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Holds the body of a response."""

    data: bytes
    etag: str
    """Equal for equal content."""
    is_packed: bool
    """True if compressed by gzip."""


def body_of(data: bytes, *, may_pack: bool) -> Body:
    """Make a body; `may_pack`: True if the client accepts gzip."""
    etag = f'W/"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'
    if may_pack and len(data) >= PACKED_FROM_BYTES:
        return Body(data=gzip.compress(data, _GZIP_LEVEL, mtime=0), etag=etag, is_packed=True)
    return Body(data=data, etag=etag, is_packed=False)


def to_json(value: object) -> bytes:
    """Encode as strict JSON: NaN and infinity become null."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        # half of a surrogate pair in a model's text, or a number of more than 64 bits
        return json.dumps(finite(value), default=str).encode()


class Refusal(MilesError):
    """Reports a request that is refused with what, why and fix."""

    status: int = 400

    def as_json(self) -> dict[str, str]:
        """Return the three parts as the page reads them."""
        return {"what": self.what, "why": self.why, "fix": " or ".join(self.fixes)}


class BadRequest(Refusal):
    """Reports an invalid request."""


class Forbidden(Refusal):
    """Reports a request without the key, or for a file that the server may not read."""

    status = 403


class NotFound(Refusal):
    """Reports that the run, step or file does not exist."""

    status = 404


class WrongMethod(Refusal):
    """Reports a method other than GET and HEAD."""

    status = 405


class Busy(Refusal):
    """Reports too many concurrent requests, or a disk that does not reply."""

    status = 503
