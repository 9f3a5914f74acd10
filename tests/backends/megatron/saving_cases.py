"""A save that one rank cannot write: what all ranks say of it, and of the next. What a save holds
of the state while training goes on, and of memory."""

from __future__ import annotations

import ctypes
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from milescli.core.errors import CheckpointError
from milescli.platform.allocation import keep_freed_memory, release_freed_memory
from tests.backends.megatron.harness import policy_shard, trainer
from tests.backends.megatron.snapshot_cases import held_hashes
from tests.memory import peak_bytes, reset_peak_memory, resident_bytes


def saving_cases(models: dict[str, str], folder: Callable[[str], str]) -> list[dict[str, Any]]:
    """Of a world of two. `folder`: of a checkpoint, by a name."""
    delta = {"call": "save_bfloat16", "model": models["delta"]}
    on_host = {"dp": 2, "offload_optimizer": True}
    return [
        {**case, "name": name, "save": folder(name.replace(" ", "-"))}
        for name, case in {
            "delta bfloat16": {**delta, "layout": {"dp": 2}},
            "delta bfloat16 host": {**delta, "layout": on_host},
            "delta bfloat16 fused": {**delta, "layout": {"dp": 2}, "fused": True},
            "saves fail": {"call": "saves_fail", "model": models["dense"], "layout": {"tp": 2}},
            "changes wait": {"call": "changes_wait", "model": models["glm"], "layout": {"dp": 2}},
            "memory of a save": {
                "call": "memory_of_save",
                "model": models["wordy"],
                "layout": {"dp": 2},
            },
        }.items()
    ]


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


def changes_wait(
    *, rank: int, size: int, port: int, model: str, layout: dict, save: str
) -> dict[str, object]:
    """`waits`: by what would change the state while a save still reads it, whether it waited for
    the save, and whether what was saved is the state before. The writer is held until somebody
    waits. `is_counted_apart`: whether a step's report names the seconds of such a wait."""
    made = trainer(
        rank=rank, size=size, port=port, model=model, layout=layout, train={"kl_coef": 0.1}
    )
    made.freeze_reference()
    made.step(policy_shard(made, 0), 1e-2)
    made.take_copy()
    told = {}
    for number, (name, change) in enumerate(
        {
            "an update": lambda: made.policy.update(1e-2),
            "the reference in its place": lambda: made.step(policy_shard(made, 1), None),
            "a copy put back": made.take_over,
            "silent layers": lambda: made.bypass_layers(1),
        }.items()
    ):
        folder = str(Path(save) / str(number))
        before = held_hashes(made)
        with _held_until_waited_for() as is_waited_for:
            made.save(folder, True)
            change()
            waited = is_waited_for()
        made.finish_save()
        made.load(folder)
        told[name] = (waited, held_hashes(made) == before)
    with _clock_that_saves_move() as clock:
        report = made.step(policy_shard(made, 2), 1e-3).report
        waited_s = clock[0]
    made.close()
    laps = (report.forward_backward_s, report.save_wait_s, report.optimizer_s)
    return {"waits": told, "is_counted_apart": laps == (0.0, waited_s, 0.0)}


@contextmanager
def _clock_that_saves_move() -> Iterator[list[float]]:
    """Within it, time passes while a step waits for a save alone."""
    from milescli.backends.megatron import learner

    plain, now = (learner.time, learner.release_state), [0.0]

    def wait() -> None:
        now[0] += 7.0

    learner.time, learner.release_state = SimpleNamespace(monotonic=lambda: now[0]), wait
    try:
        yield now
    finally:
        learner.time, learner.release_state = plain


@contextmanager
def _held_until_waited_for() -> Iterator[Callable[[], bool]]:
    """Within it no save writes a tensor before `release_state` waits for it, or the end."""
    from milescli.backends.megatron.state import saving

    let_go, plain = threading.Event(), (saving._framed, saving.BackgroundSave.wait_until_read)

    def framed(*item):
        let_go.wait(60)
        return plain[0](*item)

    def wait(save):
        let_go.set()
        plain[1](save)

    saving._framed, saving.BackgroundSave.wait_until_read = framed, wait
    try:
        yield let_go.is_set
    finally:
        let_go.set()
        saving._framed, saving.BackgroundSave.wait_until_read = plain


def memory_of_save(
    *, rank: int, size: int, port: int, model: str, layout: dict, save: str
) -> list[dict[str, int]]:
    """[ranks] bytes: of the training state, of the rank's file, and by how much the process grew
    at most while it saved, and loaded, with small pieces."""
    from milescli.backends.megatron.state import checkpoint
    from milescli.backends.megatron.state.snapshot import tensors_of

    checkpoint.PIECE_BYTES = 2**22
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout)
    made.step(policy_shard(made, 0), 1e-2)
    buffers = made.model.buffers
    state = sum(each.numel() * each.element_size() for each in tensors_of(made.policy))
    state += sum(each.grad_data.numel() * each.grad_data.element_size() for each in buffers)
    told = {"state": state, "save": _growth(lambda: (made.save(save, True), made.finish_save()))}
    told["load"] = _growth(lambda: made.load(save))
    told["file"] = (Path(save) / f"__{rank}_0.distcp").stat().st_size
    everywhere: list[object] = [None] * size
    dist.all_gather_object(everywhere, told)
    made.close()
    return everywhere


def _growth(work: Callable[[], object]) -> int:
    """By how many bytes this process grows at most while it does it. What it freed and retained
    until now counts as growth again, so that the blocks which happen to fit change nothing."""
    mmap_threshold = -3  # of malloc.h; larger blocks are the system's again when freed
    ctypes.CDLL(None).mallopt(mmap_threshold, 2**20)
    release_freed_memory()
    reset_peak_memory()
    before = resident_bytes()
    work()
    peak = peak_bytes()
    keep_freed_memory()
    return peak - before
