"""One repository of the hub: lists it, downloads single files, and converts the client's errors to
ours. If the hub is unreachable, the client's cache is used. Called by the rest of this package."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from milescli.core.errors import CheckpointError, DataError, MilesError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile


def cache_dir() -> Path:
    """Return the folder of the client's cache (HF_HOME, HF_HUB_CACHE)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cache_of(kind: str, name: str) -> Path:
    """Return the folder of one repository in the cache. `kind`: model or dataset."""
    return cache_dir() / f"{kind}s--{name.replace('/', '--')}"


def saved_token() -> str | None:
    """Return the client's token: HF_TOKEN, or the file that `hf auth login` writes."""
    from huggingface_hub import get_token

    return get_token()


_SHA1, _SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")
REQUEST_TIMEOUT_S = 20.0
"""Time limit of one request to the hub that downloads nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repo:
    """Describes a repository to download from, and its errors."""

    name: str
    kind: Literal["model", "dataset"]
    revision: str | None
    instead: str
    """What a user writes to use a local copy instead, for the fix of an error."""

    @property
    def what(self) -> str:
        """Return the name for people."""
        return f"the {'model' if self.kind == 'model' else 'data set'} `{self.name}`"

    @property
    def error(self) -> type[MilesError]:
        """Return the error type for a repository that is missing or unusable."""
        return CheckpointError if self.kind == "model" else DataError

    @property
    def page(self) -> str:
        """Return the path of its page on the hub."""
        return f"datasets/{self.name}" if self.kind == "dataset" else self.name

    @property
    def cache(self) -> Path:
        """Return the repository's folder in the client's cache."""
        return cache_of(self.kind, self.name)

    def is_cached(self, path: str, *, commit: str) -> bool:
        """Return True if the file at `path` is in the cache."""
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.name, path, revision=commit, repo_type=self.kind)
        return isinstance(cached, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Lists the files of a repository."""

    commit: str
    """Commit hash; the name of the revision if the hub is unreachable."""
    files: dict[str, RepoFile]
    """Path -> size and hash."""
    online: bool
    """True if the hub replied."""
    is_whole: bool = True
    """False if only the files in the cache are known."""


def list_files(repo: Repo) -> Listing:
    """List every file with size and hash; from the cache if the hub is unreachable."""
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.hf_api import RepoFile

    try:
        commit = newest_commit(repo)
        with as_miles_errors(repo, but_not=no_hub()), quiet_client():
            tree = list(
                HfApi().list_repo_tree(
                    repo.name, recursive=True, revision=commit, repo_type=repo.kind
                )
            )
        files = {item.path: item for item in tree if isinstance(item, RepoFile)}
        return Listing(commit=commit, files=files, online=True)
    except no_hub() as error:
        is_whole = True
        try:
            known = get_cached_repo_tree(repo.name, repo_type=repo.kind, revision=repo.revision)
        except CachedRepoTreeNotFoundError:
            known, is_whole = _files_of_snapshot(repo), False
        if not known:
            raise unreachable_error(
                repo, f"{first_line(error)}; and it is not in the cache {repo.cache}"
            ) from None
        files = {item.path: item for item in known}
        commit = repo.revision or "main"
        return Listing(commit=commit, files=files, online=False, is_whole=is_whole)


def _files_of_snapshot(repo: Repo) -> list[RepoFile]:
    """List the files of the repository in the cache, which may be a part of those on the hub. Only
    newer clients write a list of all of them. The cache names a file by its hash, unless its file
    system has no links: then there is no hash."""
    from huggingface_hub.hf_api import RepoFile

    revision = repo.revision or "main"
    ref = repo.cache / "refs" / revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    folder, files = repo.cache / "snapshots" / commit, list[RepoFile]()
    for path in sorted(folder.rglob("*")) if commit else ():
        if not path.is_file():
            continue
        name, size = path.resolve().name, path.stat().st_size
        large = {"size": size, "oid": name, "pointerSize": 0} if _SHA256.fullmatch(name) else None
        shown, small = path.relative_to(folder).as_posix(), name if _SHA1.fullmatch(name) else None
        files.append(RepoFile(path=shown, size=size, oid=small, lfs=large))
    return files


def newest_commit(repo: Repo) -> str:
    """Return the newest commit. Sends one request to the hub, so that an unreachable hub is noticed
    at once: the client's downloads would retry for half a minute."""
    from huggingface_hub import HfApi

    with as_miles_errors(repo, but_not=no_hub()):
        info = HfApi().repo_info(
            repo.name, repo_type=repo.kind, revision=repo.revision, timeout=REQUEST_TIMEOUT_S
        )
    assert info.sha, repo
    return info.sha


def fetch_one(repo: Repo, path: str, *, revision: str | None, online: bool) -> Path:
    """Return the path of one small file, which is downloaded unless it is in the cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with as_miles_errors(repo, but_not=(LocalEntryNotFoundError,)), quiet_client():
        try:
            return Path(
                hf_hub_download(
                    repo.name,
                    path,
                    repo_type=repo.kind,
                    revision=revision,
                    local_files_only=not online,
                )
            )
        except LocalEntryNotFoundError:
            raise unreachable_error(
                repo, f"the hub cannot be reached, and {path} is not in the cache {repo.cache}"
            ) from None


def no_hub() -> tuple[type[Exception], ...]:
    """Return the types of exceptions that the client raises if the hub is unreachable."""
    import httpx
    from huggingface_hub.errors import OfflineModeIsEnabled

    return httpx.TransportError, OfflineModeIsEnabled


@contextlib.contextmanager
def quiet_client() -> Iterator[None]:
    """Silence the client's own progress bars and warnings, which would bypass `Output`."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    had_bars, verbosity = not are_progress_bars_disabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            enable_progress_bars()


@contextlib.contextmanager
def as_miles_errors(repo: Repo, *, but_not: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn the client's exceptions into MilesErrors, except for those in `but_not`."""
    import httpx
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except but_not:
        raise
    except GatedRepoError as error:
        raise repo.error(
            f"{repo.what} is gated",
            why=f"its owners want to know who downloads it: {first_line(error)}",
            fix=[f"accept its terms at https://huggingface.co/{repo.page}, then: hf auth login"],
        ) from None
    except RevisionNotFoundError:
        raise repo.error(
            f"{repo.what} has no revision `{repo.revision or 'main'}`",
            why="the hub knows no branch, tag or commit of this name there",
            fix=[f"choose one of https://huggingface.co/{repo.page}/tree/main", repo.instead],
        ) from None
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise repo.error(
            f"{repo.what} is neither {'a folder' if repo.kind == 'model' else 'a file'} nor "
            "available on the hub",
            why=f"{type(error).__name__}: {first_line(error)}",
            fix=[repo.instead, "hf auth login   # if it is private or gated"],
        ) from None
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        if isinstance(error, MilesError):
            raise
        raise unreachable_error(repo, f"{type(error).__name__}: {first_line(error)}") from None


def unreachable_error(repo: Repo, why: str) -> MilesError:
    """Return the error for a repository that cannot be fetched now."""
    option = " --repo-type dataset" if repo.kind == "dataset" else ""
    if repo.revision is not None:
        option += f" --revision {repo.revision}"
    return repo.error(
        f"{repo.what} cannot be downloaded from the hub",
        why=why,
        fix=[
            f"hf download {repo.name}{option}   # on a machine that can reach the hub; finished "
            "files are kept",
            repo.instead,
        ],
    )


def first_line(message: object) -> str:
    """Return the first line of an error or message that is not blank; the name of its type if there
    is none."""
    lines = [line.strip() for line in str(message).splitlines() if line.strip()]
    return lines[0] if lines else type(message).__name__
