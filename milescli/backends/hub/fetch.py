"""Downloads files of a repository into the hub client's cache: announces the size, checks the free
disk space, shows progress, and verifies the files. Called by `models` and `datasets`."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.hub.repo import (
    Listing,
    Repo,
    as_miles_errors,
    fetch_one,
    list_files,
    quiet_client,
    unreachable_error,
)
from milescli.core.errors import MachineError, MilesError
from milescli.core.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

    from milescli.console.output import Output

_PART = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")
POLL_S = 0.5
"""Seconds between two updates of the progress bar from the sizes of the files on disk."""

Read = Callable[[str], Path]
"""Path of a small file in the repository -> the file."""
Choose = Callable[[Sequence[str], Read], list[str]]
"""(every path of the repository, sorted; how to read one of them) -> the paths to download"""
Check = Callable[[Repo, Path, "RepoFile"], None]
"""Raises if a file differs from what the hub lists."""


def fetch_files(
    repo: Repo, choose: Choose, *, check: Check, output: Output | None
) -> dict[str, Path]:
    """Download files. Return path in the repository -> file on disk. Raises MachineError if the
    disk is too small, and the repository's error if the hub refuses access."""
    from huggingface_hub import snapshot_download

    listing = list_files(repo)
    chosen = chosen_files(repo, listing, choose)
    missing = missing_files(repo, listing, chosen)
    if not listing.is_whole:
        missing += missing_parts(chosen)
    if missing and not listing.online:
        raise unreachable_error(
            repo,
            f"{len(missing)} of {len({*chosen, *missing})} files are not in the cache "
            f"{repo.cache}: {', '.join(missing[:3])}",
        )
    size_bytes = sum(listing.files[path].size for path in missing)
    if missing:
        _announce(repo, listing, num_files=len(missing), size_bytes=size_bytes, output=output)
    with as_miles_errors(repo), _progress(repo, size_bytes, output=output):
        folder = Path(
            snapshot_download(
                repo.name,
                repo_type=repo.kind,
                revision=repo.revision if missing else listing.commit,
                allow_patterns=[glob.escape(path) for path in chosen],
                local_files_only=not missing,
            )
        )
    for path in chosen:
        check(repo, folder / path, listing.files[path])
    return {path: folder / path for path in chosen}


def chosen_files(repo: Repo, listing: Listing, choose: Choose) -> list[str]:
    """Return the paths that `choose` selects from the repository."""
    read = functools.partial(fetch_one, repo, revision=listing.commit, online=listing.online)
    return choose(sorted(listing.files), read)


def missing_files(repo: Repo, listing: Listing, chosen: Sequence[str]) -> list[str]:
    """Return the files that are not in the cache."""
    return [path for path in chosen if not repo.is_cached(path, commit=listing.commit)]


def missing_parts(paths: Sequence[str]) -> list[str]:
    """Return the files that are not among `paths`, although the names of others say so:
    `train-00000-of-00002.parquet` has a second part."""
    found: dict[tuple[str, str, str, int], set[int]] = {}
    for start, number, total, end in (m.groups() for path in paths if (m := _PART.fullmatch(path))):
        found.setdefault((start, total, end, len(number)), set()).add(int(number))
    missing = list[str]()
    for (start, total, end, digits), numbers in found.items():
        # parts of models count from 1, those of data mostly from 0
        first = int(end == ".safetensors" or int(total) in numbers)
        lacking = sorted(set(range(first, first + int(total))) - numbers)
        missing += [f"{start}-{part:0{digits}}-of-{total}{end}" for part in lacking]
    return missing


def _announce(
    repo: Repo, listing: Listing, *, num_files: int, size_bytes: int, output: Output | None
) -> None:
    """Announce how much is downloaded. Raises MachineError if the disk is too small."""
    if output is not None:
        output.note(
            f"downloading {repo.what} ({repo.revision or 'main'}, commit {listing.commit[:12]}) "
            f"from the hub: {format_bytes(size_bytes)} in {num_files} "
            f"file{'s' if num_files > 1 else ''}, to {repo.cache}"
        )
    existing = next(folder for folder in (repo.cache, *repo.cache.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if size_bytes > free:
        raise MachineError(
            f"{repo.what} does not fit on the disk",
            why=f"{format_bytes(size_bytes)} remain to be downloaded to {repo.cache}, but only "
            f"{format_bytes(free)} are free there",
            fix=["export HF_HOME=/path/on/a/larger/disk", repo.instead],
        )


@contextlib.contextmanager
def _progress(repo: Repo, size_bytes: int, *, output: Output | None) -> Iterator[None]:
    """Show our progress bar instead of the client's. It adds up the sizes of files on disk, so it
    includes what earlier, interrupted downloads left."""
    if output is None or not size_bytes:
        with quiet_client():
            yield
        return
    from milescli.console.transfer import Transfer

    before, done = _bytes_on_disk(repo), threading.Event()
    with quiet_client(), Transfer(output, label=repo.name, total=size_bytes) as transfer:

        def feed() -> None:
            transfer.reached(min(_bytes_on_disk(repo) - before, size_bytes))

        def watch() -> None:
            while not done.wait(POLL_S):
                feed()

        thread = threading.Thread(target=watch, name="hub-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            feed()


def _bytes_on_disk(repo: Repo) -> int:
    total = 0
    for blob in (repo.cache / "blobs").glob("*"):
        with contextlib.suppress(OSError):  # renamed as it became complete
            total += blob.stat().st_size
    return total


def check_size(repo: Repo, file: Path, listed: RepoFile) -> None:
    """Raise the repository's error if a file's size differs from the hub's. The hub's client has
    checked the content of a large file as it arrived."""
    if file.stat().st_size != listed.size:
        raise _corrupt_error(
            repo, file, f"it has {file.stat().st_size} bytes, and the hub says {listed.size}"
        )


def check_hash(repo: Repo, file: Path, listed: RepoFile) -> None:
    """Raise the repository's error if a file's hash differs from the hub's, where it is known:
    SHA-256 of large files, git's own hash of small ones."""
    check_size(repo, file, listed)
    if listed.lfs is None and not listed.blob_id:
        return
    with file.open("rb") as opened:
        if listed.lfs is not None:
            actual, expected = hashlib.file_digest(opened, "sha256").hexdigest(), listed.lfs.sha256
        else:
            content = b"blob %d\0" % listed.size + opened.read()
            actual = hashlib.sha1(content, usedforsecurity=False).hexdigest()
            expected = listed.blob_id
    if actual != expected:
        raise _corrupt_error(
            repo, file, f"its hash is {actual[:12]}..., and the hub says {expected[:12]}..."
        )


def _corrupt_error(repo: Repo, file: Path, why: str) -> MilesError:
    return repo.error(
        f"`{file.name}` of {repo.what} is corrupt",
        why=why,
        fix=f"rm {file.resolve()}   # then it is downloaded again",
    )
