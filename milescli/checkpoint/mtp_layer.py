"""Whether a model's folder has the MTP layer that a run is to train. Called before a device is
taken."""

from __future__ import annotations

from pathlib import Path

from milescli.models import load_facts, table
from milescli.models.mtp import require_mtp_weights, with_mtp


def require_mtp_layer(folder: Path) -> None:
    """Raises CheckpointError where it has none, or one that the trainer does not compute."""
    from milescli.checkpoint.source import open_source  # with torch

    wanted = table(with_mtp(load_facts(folder)))
    with open_source(folder) as source:
        names = source.names()
        require_mtp_weights(wanted.as_on_disk(names), names, folder=str(folder))
