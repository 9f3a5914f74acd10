"""Loads the user's function that trainer ranks call before they compute log-probs:
`train.before_log_probs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milescli.core.registry import Registry

BEFORE_LOG_PROBS = Registry("before_log_probs", {}, signature=("model", "stream"))
"""Functions (*, model, stream): `model` is this rank's part of the policy, or of the reference
whose weights stand in its place, under torch.no_grad; `stream`: what the log-probs are for (`old`,
`reference`)."""


def load_before_log_probs(path: str | None) -> Callable[..., Any] | None:
    """Load the hook, or return None without a path. Raises RecipeError if it cannot be loaded."""
    if path is None:
        return None
    return BEFORE_LOG_PROBS.resolve_function(path, key="train.before_log_probs")
