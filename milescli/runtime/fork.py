"""Implements `miles fork`: creates a new run that begins with a checkpoint of another one, as
`miles resume` would continue it. Large files are shared by hard links, so that either run may be
deleted; everything that a run writes (events, journal, logs, ids of trackers) is the fork's own.
Starts nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from milescli.checkpoint.integrity import sync_tree
from milescli.checkpoint.run_control import is_model_folder
from milescli.checkpoint.run_dir import (
    ADAPTERS,
    FORKED_FROM,
    RunDir,
    create,
    open_run,
    utc_now,
    write_json,
)
from milescli.checkpoint.store import CheckpointStore, StoredCheckpoint, write_manifest
from milescli.console.output import Output
from milescli.conversion.base import store_of
from milescli.core.errors import CheckpointError, RecipeError
from milescli.recipe.load import LoadedRecipe, override, values_of
from milescli.recipe.resolved import load_resolved, resolved_yaml
from milescli.runtime.recording import run_records
from milescli.runtime.recording.run_records import is_below

_LEARNING = ("rollout", "train")
MAY_CHANGE = (
    *(one for one in run_records.MAY_CHANGE if one.partition(".")[0] not in _LEARNING),
    *_LEARNING,
    "eval",
)
"""Keys that a fork may change from its step on, even if it learns something else."""
MUST_STAY = (
    "rollout.precision",
    "rollout.order",
    "train.epochs",
    "train.precision",
    "train.quantise_inputs",
    "train.exempt",
    "train.objective",
    "train.reference",
    "train.reference_every",
    "train.optimizer.rule",
    "train.optimizer.weight_decay",
    "train.optimizer.beta1",
    "train.optimizer.beta2",
    "train.optimizer.eps",
    "train.critic.path",
    "train.lora",
    "train.mtp",
    "train.distill.teachers",
    "train.preference.reference",
)
"""Keys on which the tensors of a checkpoint, or its place in the data, depend."""
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Describes a fork that was made."""

    run: RunDir
    step: int
    num_steps: int
    changed: list[str]
    """`key: old -> new`, a line each."""
    linked_bytes: int
    """Bytes shared with the trunk."""
    copied_bytes: int
    """Bytes of files that the file system refused to link."""


def fork(
    path: Path,
    *,
    step: int | None,
    name: str | None,
    steps: int | None,
    sets: list[str],
    output: Output,
) -> Fork:
    """Make a run beside the one in `path` that continues from its checkpoint of `step`, or from the
    newest. The original run may be running. Raises CheckpointError if there is no such checkpoint
    or it is damaged, RecipeError if `sets` change keys that must stay, or the name is taken."""
    trunk = open_run(path)
    recorded = load_resolved(trunk.recipe_file)
    if recorded.recipe.adapters or trunk.path.parent.name == ADAPTERS:
        raise RecipeError(
            f"`{trunk.name}` trains several adapters, and cannot be forked",
            why="its adapters share their ranks, and each has checkpoints of its own steps",
            fix=f"miles launch --recipe {shlex.quote(str(trunk.recipe_file))} --name NEW   "
            "# a new run",
        )
    flags = {"train.steps": f"--steps {steps}"} if steps is not None else {}
    loaded = override(recorded, sets=sets, flags=flags, only=MAY_CHANGE)
    _require_same_tensors(recorded, loaded)
    for line in run_records.edited_keys(trunk, recorded, may_change=run_records.MAY_CHANGE):
        output.warn(f"recipe.yaml was edited: {line}")
    store = store_of(trunk.checkpoints, output=output)
    start = store.find(step)
    shared = [start]
    if _needs_reference(loaded):
        reference = loaded.recipe.reference_step(start.step)
        if not _needs_reference(recorded) and reference not in {start.step, *store.steps()}:
            raise _no_reference(trunk, reference, sets=sets, flags=flags.values())
        shared += [store.find(reference)] if reference != start.step else []
    run = create(base=trunk.path.parent, recipe_name=f"{trunk.name}-fork", name=name)
    loaded = _named(loaded, run.name)
    try:
        return _write_fork(run, trunk, recorded, loaded, shared)
    except BaseException:
        shutil.rmtree(run.path)
        raise


def _needs_reference(loaded: LoadedRecipe) -> bool:
    return loaded.recipe.keeps_reference or loaded.recipe.caches_reference


def _no_reference(
    trunk: RunDir, step: int, *, sets: Iterable[str], flags: Iterable[str]
) -> RecipeError:
    """Return the error for a fork that compares with weights that its trunk no longer has."""
    recipe = shlex.quote(str(trunk.recipe_file))
    changes = " ".join([*flags, *(f"--set {shlex.quote(text)}" for text in sets)])
    return RecipeError(
        f"the fork needs a reference, which `{trunk.name}` does not have",
        why=f"the reference is the policy of step {step}; a run without one deletes that "
        "checkpoint when it has newer ones",
        fix=f"miles launch --recipe {recipe} --name NEW {changes}   # a new run from the start",
    )


def _require_same_tensors(recorded: LoadedRecipe, loaded: LoadedRecipe) -> None:
    """Raise RecipeError if the checkpoint does not fit the fork's recipe."""
    before, now = values_of(recorded.recipe), values_of(loaded.recipe)
    names = [key for key in now if before[key] != now[key] and is_below(key, MUST_STAY)]
    if recorded.recipe.has_critic != loaded.recipe.has_critic:
        names.append("train.credit")
    if names:
        name = names[0]
        word = f"{name}={json.dumps(now[name])}"
        raise RecipeError(
            f"`{name}` cannot change during a run",
            why=f"`{word}` does not fit the checkpoint: its weights, its optimizer or its place "
            f"in the data were made with {json.dumps(before[name])}",
            fix=f"miles launch --recipe {recorded.source} --name NEW --set '{word}'   # a new run",
        )


def _named(loaded: LoadedRecipe, name: str) -> LoadedRecipe:
    run = loaded.recipe.run.model_copy(update={"name": name})
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"run": run}))


def _write_fork(
    run: RunDir,
    trunk: RunDir,
    recorded: LoadedRecipe,
    loaded: LoadedRecipe,
    shared: list[StoredCheckpoint],
) -> Fork:
    """Write the fork's files; recipe.yaml, which makes it a run, is the last."""
    recipe, start = resolved_yaml(loaded), shared[0]
    part = run.path / ".recipe.yaml.fork"
    part.write_text(recipe, encoding="utf-8")
    links = _Links(trunk)
    for one in shared:
        _share_checkpoint(one, run, recipe=recipe, links=links)
    for folder in trunk.path.iterdir():
        if is_model_folder(folder.name):
            files = [path for path in folder.rglob("*") if path.is_file()]
            links.share(files, folder, run.path / folder.name)
    if trunk.data_dir.is_dir():  # small, and written again in place when a run begins
        shutil.copytree(trunk.data_dir, run.data_dir)
    before, now = values_of(recorded.recipe), values_of(loaded.recipe)
    differing = [key for key in now if before[key] != now[key] and key != "run.name"]
    if all(is_below(key, run_records.MAY_CHANGE) for key in differing):
        _copy_journal(trunk, run)  # what the trunk has sampled is what the fork would sample
    with suppress(FileNotFoundError):
        shutil.copyfile(trunk.plan_file, run.plan_file)
    write_json(
        run.manifest_file,
        {
            **run_records.read_record(trunk),
            "created": utc_now(),
            "recipe": now,
            "recipe_sha256": hashlib.sha256(recipe.encode()).hexdigest(),
            FORKED_FROM: {
                "run": trunk.full_name,
                "path": str(trunk.path),
                "step": start.step,
                "changed": {key: [before[key], now[key]] for key in differing},
            },
        },
    )
    sync_tree(run.path)
    part.replace(run.recipe_file)
    return Fork(
        run=run,
        step=start.step,
        num_steps=loaded.recipe.train.steps,
        changed=[
            f"{key}: {json.dumps(before[key])} -> {json.dumps(now[key])}" for key in differing
        ],
        linked_bytes=links.linked_bytes,
        copied_bytes=links.copied_bytes,
    )


def _share_checkpoint(one: StoredCheckpoint, run: RunDir, *, recipe: str, links: _Links) -> None:
    """Link a checkpoint, with its own manifest: from that, a lost recipe.yaml is restored."""
    target = CheckpointStore(run.checkpoints).path(one.step)
    try:
        links.share([one.path / name for name in one.manifest.files], one.path, target)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"the checkpoint {one.path} was removed while it was forked",
            why=f"{error.filename} is gone: the run keeps only its newest checkpoints",
            fix="run it without --step   # from the newest checkpoint",
        ) from error
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    write_manifest(target, replace(one.manifest, recipe=recipe, recipe_sha256=digest))


class _Links:
    """Makes hard links to files, and counts their bytes."""

    def __init__(self, trunk: RunDir) -> None:
        self._trunk = trunk.path.resolve()
        self.linked_bytes = self.copied_bytes = 0

    def share(self, files: Iterable[Path], folder: Path, target: Path) -> None:
        """Link files below `folder` to the same names below `target`; copies those that the file
        system refuses to link. Raises OSError."""
        for file in files:
            new = target / file.relative_to(folder)
            new.parent.mkdir(parents=True, exist_ok=True)
            if file.is_symlink():
                file = file.resolve()
                if {self._trunk, folder.resolve()}.isdisjoint(file.parents):
                    # it stays when the trunk is removed
                    new.symlink_to(file)
                    continue
            try:
                os.link(file, new)
                self.linked_bytes += new.stat().st_size
            except OSError as error:
                if error.errno not in _CANNOT_LINK:
                    raise
                shutil.copyfile(file, new)
                self.copied_bytes += new.stat().st_size


def _copy_journal(trunk: RunDir, run: RunDir) -> None:
    """Copy the journal. A record that is being written is incomplete in the copy, and ignored when
    it is read."""
    run.journal_dir.mkdir(mode=0o700)
    for file in trunk.journal_files:
        copy = run.journal_dir / file.relative_to(trunk.journal_dir)
        copy.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # no checkpoint needs it any more
            shutil.copyfile(file, copy)
