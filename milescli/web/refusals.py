"""Why a request is refused, in three parts, and the HTTP status that says so."""

from __future__ import annotations

from milescli.core.errors import MilesError


class Refusal(MilesError):
    """A request that gets no response but what, why and fix."""

    status: int = 400

    def as_json(self) -> dict[str, str]:
        """As the page reads it."""
        return {"what": self.what, "why": self.why, "fix": " or ".join(self.fixes)}


class BadRequest(Refusal):
    """It asks for what makes no sense."""


class Forbidden(Refusal):
    """It is not let in, or the file is not ours to read."""

    status = 403


class NotFound(Refusal):
    """There is no such run, step or file."""

    status = 404


class WrongMethod(Refusal):
    """Only GET and HEAD are known."""

    status = 405


class Busy(Refusal):
    """Too much is asked at once, or a disk does not reply."""

    status = 503
