"""Stores what clients of a service save: training states, and adapters to sample from. Each has a
folder below the service's, which is complete if its `state.json` exists; that is written last."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from milescli.core.concurrency import in_thread
from milescli.core.errors import CheckpointError, MilesError
from milescli.core.files import read_json
from milescli.runtime.service.wire import ClientError

Kind = Literal["weights", "sampler_weights"]
"""Kind of a state: one from which training continues, or an adapter that engines serve."""
SCHEME = "tinker://"
EPHEMERAL = "ephemeral-"
"""Prefix of the names of unnamed samplers, which end with the server."""
_FILE = "state.json"
_OLD = ".old-"
"""Prefix of the folders of older states that a newer state replaces."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_PATH = re.compile(rf"{SCHEME}([0-9a-f]+:train:\d+)/(weights|sampler_weights)/([^/]+)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """Describes one saved state."""

    tenant: str
    """Tenant that saved it; nobody else may use it."""
    model_id: str
    kind: Kind
    name: str
    base_model: str
    adapter: str
    """Shape of the adapter, in words."""
    rank: int
    seed: int
    saved_at: float
    """Seconds since 1970."""

    @property
    def path(self) -> str:
        """Return its URI: tinker://MODEL/KIND/NAME."""
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class States:
    """Holds all states of a service."""

    root: Path

    def clean(self) -> None:
        """Remove what earlier servers left: unnamed samplers, and incomplete folders. An older
        state is restored if its replacement is incomplete."""
        for old in self.root.glob(f"*/*/{_OLD}*"):
            folder = old.with_name(old.name.removeprefix(_OLD))
            if not folder.exists():
                old.rename(folder)
        for folder in self.root.glob("*/*/*"):
            is_complete = (folder / _FILE).is_file()
            if folder.name.startswith((EPHEMERAL, ".")) or not is_complete:
                shutil.rmtree(folder, ignore_errors=True)

    async def add(
        self, info: Info, fill: Callable[[Path], Awaitable[None]], *, overwrite: bool = False
    ) -> Path:
        """Let `fill` write the files of a new state; return its folder. Raises ClientError if the
        name is invalid or taken, and CheckpointError if the disk is full; an existing state of that
        name then stays as it was."""
        if not _NAME.match(info.name):
            raise ClientError(
                f"`{info.name[:40]}` cannot be a name: use at most 128 letters, digits, `.`, `_` "
                "and `-`"
            )
        folder = self._folder(info.model_id, info.kind, info.name)
        if folder.exists() and not overwrite:
            raise ClientError(f"there is a state at {info.path} already")
        fresh = folder.with_name(f".{folder.name}-{os.getpid()}")
        try:
            await in_thread(lambda: _empty_folder(fresh))
            await fill(fresh)
            await in_thread(lambda: _replace_folder(fresh, info, folder))
        except BaseException as error:
            await in_thread(lambda: shutil.rmtree(fresh, ignore_errors=True))
            if (why := _why_not_written(error)) is not None:
                fix = f"df -h {self.root}   # free some disk space"
                raise CheckpointError(f"{info.path} was not saved", why=why, fix=fix) from error
            raise
        return folder

    def find(self, path: str, *, tenant: str, kind: Kind | None = None) -> tuple[Path, Info]:
        """Return the folder of a state, and its description. Raises ClientError if the tenant has
        no such state."""
        if match := _PATH.match(path):
            model_id, its_kind, name = match.groups()
            folder = self._folder(model_id, its_kind, name)
            info = _info(folder) if _NAME.match(name) else None
            if info is not None and info.tenant == tenant and kind in (None, info.kind):
                return folder, info
        wanted = f"{SCHEME}MODEL/{kind or 'weights'}/NAME"
        raise ClientError(f"you have no state {path}; a path looks like {wanted}")

    def all_of(self, *, tenant: str, model_id: str | None = None) -> list[Info]:
        """Return the tenant's states, oldest first, without samplers that have no name."""
        found = [_info(folder) for folder in self._folders()]
        own = [each for each in found if each is not None and each.tenant == tenant]
        named = [each for each in own if not each.name.startswith(EPHEMERAL)]
        chosen = [each for each in named if model_id in (None, each.model_id)]
        return sorted(chosen, key=lambda each: each.saved_at)

    def _folders(self) -> Iterator[Path]:
        return self.root.glob("*/*/[!.]*")

    def _folder(self, model_id: str, kind: str, name: str) -> Path:
        return self.root / model_id.replace(":", "-") / kind / name


def _why_not_written(error: BaseException) -> str | None:
    """Return why a state could not be written; None if the disk is not the cause."""
    if isinstance(error, CheckpointError):
        return error.why
    is_of_disk = isinstance(error, OSError | SafetensorError) and not isinstance(error, MilesError)
    return f"{type(error).__name__}: {error}" if is_of_disk else None


def _empty_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _replace_folder(fresh: Path, info: Info, folder: Path) -> None:
    """Move a complete folder to its place, and remove an older one of that name."""
    with open(fresh / _FILE, "w", encoding="utf-8") as file:
        json.dump({**asdict(info), "saved_at": time.time()}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    if folder.exists():
        old = folder.with_name(f"{_OLD}{folder.name}")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        fresh.rename(folder)


def _info(folder: Path) -> Info | None:
    """Return the state's Info; None if it does not exist, or is damaged."""
    try:
        return Info(**read_json(folder / _FILE))
    except (OSError, ValueError, TypeError):
        return None
