"""Models and data sets from the hub: how much is told first, room is checked, progress is shown,
what came is checked and kept in the hub's own cache. Without the hub, what is in the cache will do.
Called by `material`; knows no recipe."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from milescli.core.errors import CheckpointError, DataError, MachineError, MilesError
from milescli.core.units import format_bytes
from milescli.recipe.hub_name import HubData
from milescli.rollout.hub_files import choose_files

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

    from milescli.console.output import Output

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*")
NOT_MODEL_FILES = ("original/*", "metal/*", "consolidated*")
"""The same weights once more, in other frameworks' forms."""
POLL_S = 0.5
"""The bar is fed so often from the sizes of the files on disk."""
ASK_TIMEOUT_S = 20.0
"""Bound on one question to the hub; nothing is downloaded by it."""
CARD = "README.md"
A_COPY = "/path/to/a/copy"
MODEL_COPY = f"--set model.path={A_COPY}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repo:
    """What is fetched from, and how its errors read."""

    name: str
    kind: Literal["model", "dataset"]
    revision: str | None
    instead: str
    """What a user writes to use a copy that lies on a disk, for the fix."""

    @property
    def what(self) -> str:
        return f"the {'model' if self.kind == 'model' else 'data set'} `{self.name}`"

    @property
    def error(self) -> type[MilesError]:
        return CheckpointError if self.kind == "model" else DataError

    @property
    def cache(self) -> Path:
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"{self.kind}s--{self.name.replace('/', '--')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    commit: str
    """Or the name of the revision, where the hub cannot be asked."""
    files: dict[str, RepoFile]
    online: bool


def fetch_model(
    name: str, *, revision: str | None, output: Output | None = None, instead: str = MODEL_COPY
) -> Path:
    """The folder of a model: config, safetensors, tokenizer. Raises CheckpointError, or
    MachineError where the disk is too small. `instead`: how its caller is told of a copy on a disk.

    Sizes are checked against the hub's; the hub's client checks them as they come.
    """

    def choose(paths: Sequence[str], _: Callable[[str], Path]) -> list[str]:
        unwanted = [
            path
            for path in paths
            if any(fnmatch.fnmatch(path, pattern) for pattern in NOT_MODEL_FILES)
        ]
        return [
            p
            for p in paths
            if p not in unwanted and any(fnmatch.fnmatch(p, pattern) for pattern in MODEL_FILES)
        ]

    repo = _Repo(name=name, kind="model", revision=revision, instead=instead)
    files = _fetch(repo, choose, output=output, check=_check_size)
    config = files.get("config.json")
    if config is None:
        raise CheckpointError(
            f"the model `{name}` has no config.json",
            why="the hub lists "
            f"{', '.join(sorted(files)[:5]) or 'nothing that a model is made of'}",
            fix="--set model.path=NAME   # of a model in the format of transformers",
        )
    return config.parent


def fetch_config(name: str, *, revision: str | None, instead: str = MODEL_COPY) -> Path:
    """A folder with the model's config.json, a few kilobytes. Raises CheckpointError."""
    repo = _Repo(name=name, kind="model", revision=revision, instead=instead)
    try:
        _commit(repo)
        online = True
    except _no_hub():
        online = False
    return _one(repo, "config.json", revision, online=online).parent


def fetch_tokenizer(name: str, *, revision: str | None) -> Path:
    """A folder with what `fetch_model` gives but the weights: config and tokenizer. Raises
    CheckpointError."""

    def choose(paths: Sequence[str], _: Callable[[str], Path]) -> list[str]:
        patterns = [pattern for pattern in MODEL_FILES if pattern != "*.safetensors"]
        return [
            path
            for path in paths
            if "/" not in path and any(fnmatch.fnmatch(path, pattern) for pattern in patterns)
        ]

    repo = _Repo(name=name, kind="model", revision=revision, instead=MODEL_COPY)
    _fetch(repo, choose, output=None, check=_check_size)
    return fetch_config(name, revision=revision)


def missing_bytes(wish: HubData, *, key: str) -> int:
    """How much `fetch_data` would fetch now; raises as it does."""
    from huggingface_hub import try_to_load_from_cache

    repo = _Repo(
        name=wish.name, kind="dataset", revision=wish.revision, instead=f"--set data.{key}={A_COPY}"
    )
    listing = _list(repo)
    sizes = 0
    read = functools.partial(_one, repo, revision=listing.commit, online=listing.online)
    for path in _data_files(wish, key=key)(sorted(listing.files), read):
        if not isinstance(
            try_to_load_from_cache(repo.name, path, revision=listing.commit, repo_type=repo.kind),
            str,
        ):
            sizes += listing.files[path].size
    return sizes


def fetch_data(wish: HubData, *, key: str, output: Output | None = None) -> list[Path]:
    """The files of one split, in order, with the hashes that the hub tells. `key`: prompts, eval,
    demonstrations.

    Raises DataError, or MachineError where the disk is too small.
    """
    repo = _Repo(
        name=wish.name, kind="dataset", revision=wish.revision, instead=f"--set data.{key}={A_COPY}"
    )
    return list(_fetch(repo, _data_files(wish, key=key), output=output, check=_check_hash).values())


def _data_files(
    wish: HubData, *, key: str
) -> Callable[[Sequence[str], Callable[[str], Path]], list[str]]:
    def choose(paths: Sequence[str], read: Callable[[str], Path]) -> list[str]:
        card = read(CARD).read_text(encoding="utf-8", errors="replace") if CARD in paths else ""
        return choose_files(wish, paths, card=card, key=key)

    return choose


def _fetch(
    repo: _Repo,
    choose: Callable[[Sequence[str], Callable[[str], Path]], list[str]],
    *,
    output: Output | None,
    check: Callable[[_Repo, Path, RepoFile], None],
) -> dict[str, Path]:
    """Path in the repository -> file on disk."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    listing = _list(repo)
    chosen = choose(
        sorted(listing.files), lambda path: _one(repo, path, listing.commit, online=listing.online)
    )
    missing = [
        path
        for path in chosen
        if not isinstance(
            try_to_load_from_cache(repo.name, path, revision=listing.commit, repo_type=repo.kind),
            str,
        )
    ]
    if missing and not listing.online:
        raise _unreachable(
            repo,
            f"{len(missing)} of {len(chosen)} files are not in the cache {repo.cache}: "
            f"{', '.join(missing[:3])}",
        )
    size_bytes = sum(listing.files[path].size for path in missing)
    if missing:
        _announce(repo, listing, num_files=len(missing), size_bytes=size_bytes, output=output)
    with _errors(repo), _progress(repo, size_bytes, output=output):
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


def _no_hub() -> tuple[type[Exception], ...]:
    """What the client raises where the hub cannot be asked."""
    import httpx
    from huggingface_hub.errors import OfflineModeIsEnabled

    return httpx.TransportError, OfflineModeIsEnabled


def _commit(repo: _Repo) -> str:
    """Asks the hub once, so that its absence is known at once: the client's downloads would try
    again for half a minute."""
    from huggingface_hub import HfApi

    with _errors(repo, but_not=_no_hub()):
        commit = (
            HfApi()
            .repo_info(
                repo.name, repo_type=repo.kind, revision=repo.revision, timeout=ASK_TIMEOUT_S
            )
            .sha
        )
    assert commit, repo
    return commit


def _list(repo: _Repo) -> _Listing:
    """Every file with size and hash; from the cache where the hub cannot be reached."""
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.hf_api import RepoFile

    try:
        commit = _commit(repo)
        with _errors(repo, but_not=_no_hub()), silent():
            found = list(
                HfApi().list_repo_tree(
                    repo.name, recursive=True, revision=commit, repo_type=repo.kind
                )
            )
        return _Listing(
            commit=commit,
            files={item.path: item for item in found if isinstance(item, RepoFile)},
            online=True,
        )
    except _no_hub() as error:
        try:
            known = get_cached_repo_tree(repo.name, repo_type=repo.kind, revision=repo.revision)
        except CachedRepoTreeNotFoundError:
            raise _unreachable(
                repo, f"{_first_line(error)}; and it is not in the cache {repo.cache}"
            ) from None
        return _Listing(
            commit=repo.revision or "main", files={item.path: item for item in known}, online=False
        )


def _one(repo: _Repo, path: str, revision: str | None, *, online: bool) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _errors(repo, but_not=(LocalEntryNotFoundError,)), silent():
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
            raise _unreachable(
                repo, f"the hub cannot be reached, and {path} is not in the cache {repo.cache}"
            ) from None


def _announce(
    repo: _Repo, listing: _Listing, *, num_files: int, size_bytes: int, output: Output | None
) -> None:
    """How much, and whether there is room for it."""
    if output is not None:
        output.note(
            f"fetching {repo.what} ({repo.revision or 'main'}, commit {listing.commit[:12]}) from "
            "the hub: "
            f"{format_bytes(size_bytes)} in {num_files} file{'s' if num_files > 1 else ''}, to "
            f"{repo.cache}"
        )
    existing = next(folder for folder in (repo.cache, *repo.cache.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if size_bytes > free:
        raise MachineError(
            f"{repo.what} does not fit on the disk",
            why=f"{format_bytes(size_bytes)} are still to be fetched to {repo.cache}, and "
            f"{format_bytes(free)} are free there",
            fix=["export HF_HOME=/path/on/a/larger/disk", repo.instead],
        )


@contextlib.contextmanager
def _progress(repo: _Repo, size_bytes: int, *, output: Output | None) -> Iterator[None]:
    """Our bar instead of the client's, fed from what lies on the disk: it counts what resumed
    downloads had already, too."""
    if output is None or not size_bytes:
        with silent():
            yield
        return
    from milescli.console.transfer import Transfer

    before, done = _bytes_on_disk(repo), threading.Event()
    with silent(), Transfer(output, label=repo.name, total_bytes=size_bytes) as transfer:

        def feed() -> None:
            now = min(_bytes_on_disk(repo) - before, size_bytes)
            if now > transfer.done_bytes:
                transfer(now - transfer.done_bytes)

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


def _bytes_on_disk(repo: _Repo) -> int:
    total = 0
    for blob in (repo.cache / "blobs").glob("*"):
        with contextlib.suppress(OSError):  # renamed as it became complete
            total += blob.stat().st_size
    return total


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """The client's own bars and warnings would speak past `Output`."""
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
def _errors(repo: _Repo, *, but_not: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """What the client raises, said in three parts."""
    import httpx
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except but_not:
        raise
    except GatedRepoError as error:
        raise repo.error(
            f"{repo.what} is gated",
            why=f"its owners want to know who takes it: {_first_line(error)}",
            fix=[f"accept its terms at https://huggingface.co/{repo.name}, then: hf auth login"],
        ) from None
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise repo.error(
            f"{repo.what} is neither {'a folder' if repo.kind == 'model' else 'a file'} nor to be "
            "had from the hub",
            why=f"{type(error).__name__}: {_first_line(error)}",
            fix=[repo.instead, "hf auth login   # for one that is private or gated"],
        ) from None
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        if isinstance(error, MilesError):
            raise
        raise _unreachable(repo, f"{type(error).__name__}: {_first_line(error)}") from None


def _unreachable(repo: _Repo, why: str) -> MilesError:
    return repo.error(
        f"{repo.what} cannot be had from the hub",
        why=why,
        fix=[
            f"hf download {repo.name}{' --repo-type dataset' if repo.kind == 'dataset' else ''}   "
            "# where the hub can be reached; "
            "what came already is kept",
            repo.instead,
        ],
    )


def _check_size(repo: _Repo, file: Path, told: RepoFile) -> None:
    if file.stat().st_size != told.size:
        raise _spoilt(
            repo, file, f"it has {file.stat().st_size} bytes, and the hub tells {told.size}"
        )


def _check_hash(repo: _Repo, file: Path, told: RepoFile) -> None:
    """SHA-256 of large files, git's own hash of small ones: what the hub tells of each."""
    _check_size(repo, file, told)
    with file.open("rb") as opened:
        if told.lfs is not None:
            found, wanted = hashlib.file_digest(opened, "sha256").hexdigest(), told.lfs.sha256
        else:
            found = hashlib.sha1(
                b"blob %d\0" % told.size + opened.read(), usedforsecurity=False
            ).hexdigest()
            wanted = told.blob_id
    if found != wanted:
        raise _spoilt(
            repo, file, f"its hash is {found[:12]}..., and the hub tells {wanted[:12]}..."
        )


def _spoilt(repo: _Repo, file: Path, why: str) -> MilesError:
    return repo.error(
        f"`{file.name}` of {repo.what} is spoilt",
        why=why,
        fix=f"rm {file.resolve()}   # it is fetched again",
    )


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
