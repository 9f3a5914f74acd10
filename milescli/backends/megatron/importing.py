"""How a process gets Megatron-Core."""

from __future__ import annotations

from milescli.core.imports import without_garbage_search, without_packages

_TRACKERS = ("wandb", "torch.utils.tensorboard")


def import_megatron() -> None:
    """As if no tracker were installed: here it writes to none, and wandb takes half as long to
    import as all of Megatron-Core does."""
    with without_garbage_search(), without_packages(*_TRACKERS):
        import megatron.core.inference.contexts
        import megatron.core.timers  # noqa: F401
