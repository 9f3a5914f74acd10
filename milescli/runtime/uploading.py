"""Chooses where `miles export` writes: the folder that the user named, or an object store. Files of
weights go to the store one by one, from a temporary folder, and the others at the end. Called by
the command."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from milescli.backends.stores.copies import RECORD, Stored, read_record, upload, upload_one
from milescli.backends.stores.store import ObjectStore, open_store
from milescli.console.output import Output
from milescli.console.transfer import Transfer
from milescli.core.errors import CheckpointError
from milescli.export.folder import Deliver
from milescli.models.base import CONFIG_NAME
from milescli.recipe.store_url import is_store_url, require_store_url

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Holds the folder to write to, and the function that takes its files of weights away."""

    folder: Path
    deliver: Deliver | None
    """None: all files stay in the folder."""


@contextmanager
def destination(to: str, *, output: Output) -> Iterator[Destination]:
    """Provide the folder to write to, and upload it afterwards if `--to` names a store. The store
    is checked before anything is written: it must be writable, and contain nothing but what an
    earlier upload to the same URL has left. Raises RecipeError, CheckpointError, StoreError."""
    if not is_store_url(to):
        folder = Path(to).expanduser()
        is_unnamed = folder.name in ("", "..")  # `--to .`; a model card is titled by the name
        yield Destination(folder=folder.resolve() if is_unnamed else folder, deliver=None)
        return
    url = require_store_url(to, key="--to")
    store = open_store(url, instead="--to DIR   # a folder on this computer")
    _require_unused(store)
    sent = dict[str, Stored]()

    def deliver(file: Path, name: str, progress: Callable[[int], object]) -> None:
        sent[name] = upload_one(store, file, name, progress=progress)

    with tempfile.TemporaryDirectory(prefix="miles-export-") as scratch:
        folder = Path(scratch) / url.rpartition("/")[2]
        yield Destination(folder=folder, deliver=deliver)
        _upload(folder, store, sent, output=output)


def _require_unused(store: ObjectStore) -> None:
    present = store.sizes().keys() - {RECORD}
    is_whole = bool(present & {CONFIG_NAME, ADAPTER_CONFIG})
    others = sorted(present - read_record(store).keys())
    if is_whole or others:
        raise CheckpointError(
            f"{store.url} already {'exists' if is_whole else f'holds `{others[0]}`'}",
            why="an export never overwrites existing files",
            fix=f"--to {store.url}-2",
        )
    if not present:
        store.write(RECORD, b"{}")  # hours before the first file is there: may it be written?


def _upload(folder: Path, store: ObjectStore, sent: dict[str, Stored], *, output: Output) -> None:
    files = {str(one.relative_to(folder)): one for one in folder.rglob("*") if one.is_file()}
    last = CONFIG_NAME if CONFIG_NAME in files else ADAPTER_CONFIG
    total = sum(file.stat().st_size for file in files.values())
    total += sum(one.size_bytes for one in sent.values())
    output.note(f"uploading {len(files)} files to {store.url}")
    with Transfer(output, label=f"uploading {folder.name}", total=total) as transfer:
        upload(store, files, sha256={}, last=last, already=sent, progress=transfer)
