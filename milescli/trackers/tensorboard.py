"""Scalars for `tensorboard --logdir runs`, in the run's folder."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milescli.checkpoint.integrity import free_bytes
from milescli.trackers.base import TrackedRun, Tracker

FOLDER = "tensorboard"
_NEEDS = 2**20
"""Bytes that must be free before each write."""


class TensorBoard(Tracker):
    """Writes the numbers of a run for TensorBoard."""

    def __init__(self, *, run: TrackedRun) -> None:
        """Open the writer. Raises OSError if the disk is full."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run.folder / FOLDER
        _require_space(self._folder)
        self._writer: Any = SummaryWriter(
            str(self._folder),
            flush_secs=10,
            # steps that the checkpoint did not have are done again; without one, step 0 is, too
            purge_step=run.first_step + (run.first_step > 0),
        )
        if not run.first_step:
            lines = (f"    {key}: {json.dumps(value)}" for key, value in run.recipe.items())
            self._writer.add_text("recipe", "\n".join(lines), 0)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the numbers of a step. Raises OSError if the disk is full."""
        _require_space(self._folder)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self, outcome: str) -> None:
        """Write what is buffered."""
        self._writer.close()


def _require_space(folder: Path) -> None:
    """Raise OSError if the disk is full: a failed write would end TensorBoard's writer thread for
    good, with a traceback on the screen."""
    if free_bytes(folder) < _NEEDS:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
