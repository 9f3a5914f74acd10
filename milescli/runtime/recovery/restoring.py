"""Downloads a run whose checkpoints were copied to an object store, so that `miles resume`
continues it on a computer that never had it. See `mirror` for the layout. Called by the command."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from milescli.backends.stores.copies import Stored, fetch, read_record
from milescli.backends.stores.store import ObjectStore, open_store
from milescli.checkpoint.base import MANIFEST_NAME
from milescli.checkpoint.integrity import free_bytes
from milescli.checkpoint.run_dir import CHECKPOINTS, RECIPE_FILE, RunDir
from milescli.checkpoint.store import PREFIX
from milescli.console.output import Output
from milescli.console.transfer import Transfer
from milescli.core.errors import CheckpointError, MachineError
from milescli.core.units import format_bytes
from milescli.recipe.resolved import load_resolved
from milescli.recipe.store_url import require_store_url
from milescli.runtime.recovery.mirror import MADE, RECORDS, objects_of_steps


def restore(url: str, *, runs: Path, output: Output) -> Path:
    """Download the newest complete checkpoint of a run, with its records, into the runs folder.
    Skip a damaged one with a warning. A repeated call does not download files again. Return the
    run's directory. Raises CheckpointError if no checkpoint is intact or the run already exists
    here, MachineError if the disk is too small, StoreError."""
    url = require_store_url(url, key="miles resume")
    target = runs / url.rpartition("/")[2]
    if target.exists():
        run = RunDir(target.absolute())
        raise CheckpointError(
            f"{run.shown} already exists",
            why="a run that is fetched never replaces one that is here",
            fix=[
                f"miles resume {run.typed}   # continue the one that is here",
                f"MILES_RUN__DIR=FOLDER miles resume {url}   # fetch it into another folder",
            ],
        )
    store = open_store(url, instead="miles runs   # lists those that are here")
    complete = _complete_steps(store)
    part = runs / f".{target.name}.fetched"
    part.mkdir(mode=0o700, parents=True, exist_ok=True)
    step = _newest_intact(store, complete, part, output=output)
    recipe = load_resolved(part / RECIPE_FILE).recipe
    needed = recipe.reference_step(step)
    if (recipe.keeps_reference or recipe.caches_reference) and needed != step:
        _fetch_step(store, needed, part, output=output, with_records=False)
    made = read_record(store, MADE)
    _fetch(store, made, below=MADE, into=lambda name: part / name, part=part, output=output)
    part.rename(target)
    output.note(f"fetched step {step} of {url} into {RunDir(target.absolute()).shown}")
    return target


def _complete_steps(store: ObjectStore) -> list[int]:
    """Return the steps whose copy was completed, the newest first. Raises CheckpointError if there
    is none."""
    found = objects_of_steps(store)
    if complete := sorted(
        (n for n, names in found.items() if MANIFEST_NAME in names), reverse=True
    ):
        return complete
    below = (re.match(rf"([^/]+)/{PREFIX}\d+/", name) for name in store.sizes())
    runs = sorted({match[1] for match in below if match})
    why = "nothing is there that `checkpoint.mirror` wrote"
    if runs:
        why = f"it holds the runs {', '.join(runs)}"
    elif found:
        why = "the copy of its first checkpoint was cut short"
    raise CheckpointError(
        f"there is no complete checkpoint in {store.url}",
        why=why,
        fix=[f"miles resume {store.url}/{name}" for name in runs[:4]]
        or "miles runs   # lists those that are here",
    )


def _newest_intact(store: ObjectStore, steps: list[int], part: Path, *, output: Output) -> int:
    damages = []
    for step in steps:
        shutil.rmtree(RunDir(part).journal_dir, ignore_errors=True)  # of another checkpoint
        try:
            _fetch_step(store, step, part, output=output, with_records=True)
            return step
        except CheckpointError as error:
            shutil.rmtree(RunDir(part).checkpoints / f"{PREFIX}{step}", ignore_errors=True)
            output.warn(f"{error.what}: {error.why}")
            damages.append(f"{error.what}: {error.why}")
    raise CheckpointError(
        f"no checkpoint in {store.url} is intact",
        why="\n".join(damages),
        fix="restore the objects, for example from the bucket's older versions",
    )


def _fetch_step(
    store: ObjectStore, step: int, part: Path, *, output: Output, with_records: bool
) -> None:
    folder, prefix = f"{PREFIX}{step}", f"{RECORDS}/"
    record = read_record(store, folder)
    if MANIFEST_NAME not in record or f"{RECORDS}/{RECIPE_FILE}" not in record:
        raise CheckpointError(
            f"the copy {store.url}/{folder} is damaged",
            why="its list of objects is missing or incomplete",
            fix="use another copy",
        )
    names = [name for name in record if with_records or not name.startswith(prefix)]
    # as a save, a fetch that is cut short leaves no manifest
    record = {name: record[name] for name in sorted(names, key=MANIFEST_NAME.__eq__)}

    def into(name: str) -> Path:
        if name.startswith(prefix):
            return part / name.removeprefix(prefix)
        return part / CHECKPOINTS / folder / name

    _fetch(store, record, below=folder, into=into, part=part, output=output)


def _fetch(
    store: ObjectStore,
    record: dict[str, Stored],
    *,
    below: str,
    into: Callable[[str], Path],
    part: Path,
    output: Output,
) -> None:
    missing = {name: one for name, one in record.items() if not into(name).exists()}
    size_bytes = sum(one.size_bytes for one in missing.values())
    if size_bytes > (free := free_bytes(part)):
        raise MachineError(
            f"{store.url} does not fit on the disk",
            why=f"{format_bytes(size_bytes)} are missing, and {format_bytes(free)} are free in "
            f"{part.parent}",
            fix=f"MILES_RUN__DIR=FOLDER miles resume {store.url}   # a folder on a larger disk",
        )
    total = sum(one.size_bytes for one in record.values())
    label = f"fetching {below}"
    with Transfer(output, label=label, total=total, tells_quick=False) as transfer:
        fetch(store, record, below=below, into=into, progress=transfer)
