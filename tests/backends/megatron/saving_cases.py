"""A save that one rank cannot write: what all ranks say of it, and of the next."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from milescli.core.errors import CheckpointError
from tests.backends.megatron.harness import policy_shard, trainer


@contextmanager
def _limited(size_bytes: int) -> Iterator[None]:
    """No file of this process may become larger: a write beyond fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def saves_fail(
    *, rank: int, size: int, port: int, model: str, layout: dict, save: str
) -> dict[str, object]:
    """What is raised where rank 1 has no room for tensors, rank 0 none for the common part; then a
    step, and a save that works."""
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout)
    told = []
    for number, (limited, size_bytes) in enumerate(((1, 4096), (0, 256))):
        folder = Path(save) / f"failed{number}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if rank == limited:
                with _limited(size_bytes):
                    made.save(str(folder), True)
                    made.finish_save()
            else:
                made.save(str(folder), True)
                made.finish_save()
            told.append("no error")
        except CheckpointError as error:
            told.append(error.why)
        made.step(policy_shard(made, number), 1e-3)
    whole = Path(save) / "whole"
    whole.mkdir(parents=True, exist_ok=True)
    made.save(str(whole), True)
    sha256 = made.finish_save()
    before = made.parameter_checksums()
    made.load(str(whole))
    same = made.parameter_checksums() == before
    made.close()
    return {"told": told, "sha256": sha256, "is_whole": same}
