"""The objects below one URL of an object store, through fsspec. Credentials are the store's own:
its environment variables and files; miles takes none, and writes none. What the store's library
raises becomes an error with a cause and a fix. Called by `copies` and by the runtime."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from milescli.core.errors import DISK_FULL, MachineError, MilesError
from milescli.core.private import without_private, without_secret_values
from milescli.recipe.store_url import PACKAGES, scheme_of

_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "max_concurrency": 4,  # of parts of 50 MiB, which are in memory
        "config_kwargs": {"signature_version": "s3v4"},  # of links: new regions refuse v2
    },
    "file": {"auto_mkdir": True},
}
_LOGINS = {
    "s3": ["export AWS_PROFILE=NAME", "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=..."],
    "gs": ["gcloud auth application-default login"],
    "az": ["export AZURE_STORAGE_ACCOUNT_NAME=... AZURE_STORAGE_ACCOUNT_KEY=..."],
    "hf": ["hf auth login"],
}
_LISTS = {"s3": "aws s3 ls", "gs": "gcloud storage ls", "hf": "hf repo list"}
_NO_LOGIN = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "LocalTokenNotFoundError",
}
"""Names of the exceptions that clients raise without credentials: most clients are not
installed."""
_MOST_SAID = 300
"""Largest number of characters of a library's message."""
CALL_S, SLOWEST = 60.0, 128 * 1024
"""Seconds for one call, and bytes a second below which a transfer counts as hung."""


class StoreError(MachineError):
    """Reports that an object store refused something, or did not answer."""

    is_final = False
    """True if a retry is useless: no credentials, no permission, no such bucket."""


@lru_cache(maxsize=8)
def open_store(url: str, *, instead: str) -> ObjectStore:
    """Return the store at a URL, one for each process. Open it on the main thread before
    processes are started: secrets are hidden from those, and the client reads them once."""
    return ObjectStore(url, instead=instead)


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Names a store for another process, which opens it there."""

    url: str
    instead: str

    def open(self) -> ObjectStore:
        """Return the store, as `open_store` does."""
        return open_store(self.url, instead=self.instead)


class ObjectStore:
    """The objects below one URL, by their paths relative to it. A call that takes longer than
    CALL_S, and for its bytes at SLOWEST, has failed. May be used from any one thread at a time.
    Every call raises StoreError."""

    def __init__(self, url: str, *, instead: str) -> None:
        """Connect lazily. `instead`: how the user goes on without the store."""
        self.url, self._instead, self._scheme = url, instead, scheme_of(url)
        with self._explained("opening it"):
            import fsspec

            options = {"skip_instance_cache": True, "use_listings_cache": False}
            self._fs, root = fsspec.core.url_to_fs(url, **options, **_OPTIONS.get(self._scheme, {}))
            self._root = str(root).rstrip("/")

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the size in bytes of each object below a folder, by its path relative to that."""
        root = self._at(below)
        with self._explained("listing it"), suppress(NotADirectoryError):
            if self._scheme == "file" and not self._fs.isdir(root):
                return {}
            found = self._fs.find(root, detail=True, **self._bound())
            return {
                name.removeprefix(f"{root}/"): int(info["size"])
                for name, info in found.items()
                if name.startswith(f"{root}/") and info["type"] == "file"
            }
        return {}

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a small object; None if there is none."""
        with self._explained(f"reading {name}"):
            try:
                return self._fs.cat_file(self._at(name), **self._bound())
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """Write an object that fits into memory; it has its old bytes or all of the new ones."""
        with self._explained(f"writing {name}"):
            self._fs.pipe_file(self._at(name), data, **self._bound(len(data)))

    def link(self, name: str, *, expires_s: float) -> str:
        """Return a URL by which anybody who has it can read an object for `expires_s` seconds,
        without credentials; of a folder, the file's."""
        with self._explained(f"signing a link to {name}"):
            if self._scheme == "file":
                return Path(self._at(name)).as_uri()
            return self._fs.sign(self._at(name), expiration=int(expires_s))

    def put(self, file: Path, name: str, *, progress: Callable[[int], object]) -> None:
        """Upload a file, which does not change meanwhile. `progress` gets the number of newly sent
        bytes. Raises FileNotFoundError if the file itself is gone."""
        size = file.stat().st_size

        def sent(callback: Any) -> int:
            bound = self._bound(size)
            self._fs.put_file(str(file), self._at(name), callback=callback, **bound)
            return size

        self._move(f"writing {name}", progress, sent)

    def get(
        self, name: str, file: Path, *, size_bytes: int, progress: Callable[[int], object]
    ) -> None:
        """Download an object of this size to a file. `progress` gets the number of newly received
        bytes."""

        def received(callback: Any) -> int:
            bound = self._bound(size_bytes)
            self._fs.get_file(self._at(name), str(file), callback=callback, **bound)
            return file.stat().st_size

        self._move(f"reading {name}", progress, received)

    def _move(
        self, doing: str, progress: Callable[[int], object], move: Callable[[Any], int]
    ) -> None:
        """Report the bytes as the client does, and at the end those that it did not report."""
        from fsspec.callbacks import Callback

        class _Progress(Callback):
            num_bytes = 0

            def relative_update(self, inc: int = 1) -> None:
                self.num_bytes += inc
                progress(inc)

        callback = _Progress()
        with self._explained(doing):
            size = move(callback)
        progress(max(0, size - callback.num_bytes))

    def remove(self, names: list[str]) -> None:
        """Remove objects, in this order; one that is not there counts as removed."""
        for name in names:
            with self._explained(f"removing {name}"), suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name), **self._bound())

    def _bound(self, size_bytes: int = 0) -> dict[str, float]:
        """Return the argument by which fsspec bounds a call of a client that speaks to a server."""
        return {"timeout": CALL_S + size_bytes / SLOWEST} if self._fs.async_impl else {}

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except MilesError:
            raise
        except Exception as error:  # libraries of others raise what they like
            raise self._error_of(error, doing) from error

    def _error_of(self, error: Exception, doing: str) -> StoreError:
        names = {kind.__name__ for kind in type(error).__mro__}
        shown, scheme = without_private(self.url), self._scheme
        said = without_secret_values(" ".join(str(error).split()), os.environ)[:_MOST_SAID]
        why = f"{doing}: {type(error).__name__}: {without_private(said)}"
        bucket = f"{scheme}://{shown.partition('://')[2].partition('/')[0]}"
        if scheme == "file":
            bucket = shown
        look = [f"{_LISTS[scheme]} {bucket}   # what is there?"] if scheme in _LISTS else []
        what, fixes, is_final = f"{shown} does not answer as it should", look, False
        if "FSTimeoutError" in names:
            why = f"{doing}: no reply in time"
        elif isinstance(error, ImportError):
            package = PACKAGES[scheme]
            what, fixes = f"{shown} needs the package {package}", [f"pip install {package}"]
            is_final = True
        elif names & _NO_LOGIN:
            what, fixes = f"there are no credentials for {shown}", _LOGINS.get(scheme, [])
            is_final = True
        elif isinstance(error, OSError) and error.errno in DISK_FULL:
            what = f"{shown} is full"
            if scheme == "file":
                fixes = [f"df -h {shlex.quote(self._root)}   # free some disk space"]
        elif isinstance(error, PermissionError):
            what, fixes = f"access to {shown} is denied", [*_LOGINS.get(scheme, []), *look]
            is_final = True
        elif isinstance(error, FileNotFoundError):
            what, is_final = f"{bucket} does not exist, or has lost what was there", True
            fixes = [f"aws s3 mb {shlex.quote(bucket)}"] if scheme == "s3" else look
        failure = StoreError(what, why=why, fix=[*fixes, self._instead])
        failure.is_final = is_final
        return failure
