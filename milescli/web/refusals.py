"""Why a request is refused, in three parts, and the HTTP status that says so."""

from __future__ import annotations

from milescli.core.errors import MilesError


class Refusal(MilesError):
    """A request that is refused with what, why and fix."""

    status: int = 400

    def as_json(self) -> dict[str, str]:
        """Return the three parts as the page reads them."""
        return {"what": self.what, "why": self.why, "fix": " or ".join(self.fixes)}


class BadRequest(Refusal):
    """The request makes no sense."""


class Forbidden(Refusal):
    """The request has no key, or the file is not ours to read."""

    status = 403


class NotFound(Refusal):
    """There is no such run, step or file."""

    status = 404


class WrongMethod(Refusal):
    """The method is neither GET nor HEAD."""

    status = 405


class Busy(Refusal):
    """Too many requests at once, or the disk does not reply."""

    status = 503
