"""The contract of weight channels, classes that `weights.channel` names."""

from __future__ import annotations

from milescli.core.errors import RecipeError

_METHODS = ("open", "send", "verify", "close")


def check_channel(channel: type) -> None:
    """Require the methods that ranks call. `weights.verify=true` shows that weights arrive. Raises
    RecipeError."""
    lacking = [name for name in _METHODS if not callable(getattr(channel, name, None))]
    if lacking:
        raise RecipeError(
            f"`{channel.__name__}` is no weight channel",
            why=f"it has no {', '.join(lacking)}",
            fix="give it what milescli.weights.base.WeightChannel has",
        )
