"""What was decided, in order, each with its reason: the log of a plan while it is made. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from milescli.plan.types import Decision


@dataclass(slots=True)
class Log:
    """Filled by `make` and what it calls."""

    decisions: list[Decision] = field(default_factory=list)

    def note(self, key: str, value: object, reason: str) -> None:
        """One choice."""
        text = str(value).lower() if isinstance(value, bool) else str(value)
        self.decisions.append(Decision(key=key, value=text, reason=reason))
