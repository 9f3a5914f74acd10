"""Weight channels by name. `weights.channel` names one: built in here, an entry point, or an import
path to a class; `auto` lets the plan choose."""

from __future__ import annotations

from milescli.core.errors import RecipeError
from milescli.core.registry import Registry

AUTO = "auto"
_BUILT_IN = "milescli.backends.sglang.weights.channels"
CHANNELS = Registry(
    "channel",
    {"tensor": f"{_BUILT_IN}:TensorChannel", "distributed": f"{_BUILT_IN}:DistributedChannel"},
    signature=("backend", "host", "timeout_s"),
)
"""Classes of `milescli.weights.base.WeightChannel`."""
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
