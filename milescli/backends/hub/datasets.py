"""Data sets from the hub: one split as one file. Runs no code of theirs; called by runs and the
doctor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.hub.fetch import (
    Choose,
    Read,
    check_hash,
    chosen_files,
    fetch_files,
    missing_files,
)
from milescli.backends.hub.repo import Repo, list_files
from milescli.backends.hub.splits import choose_files
from milescli.core.errors import DataError
from milescli.recipe.hub_name import HubData

if TYPE_CHECKING:
    from milescli.console.output import Output

CARD = "README.md"


def fetch_data(data: HubData, *, key: str, into: Path, output: Output | None = None) -> Path:
    """One split as one file, with the hashes that the hub lists: where it lies in the cache, or
    joined within the folder `into` where the hub has it in parts. `key`: prompts, eval,
    demonstrations.

    Raises DataError, or MachineError where the disk is too small.
    """
    fetched = fetch_files(
        _repo(data, key=key), _chooser(data, key=key), check=check_hash, output=output
    )
    files = list(fetched.values())
    if len(files) == 1:
        return files[0]
    return join_files(files, into / f"{key}{files[0].suffix}", key=key)


def missing_bytes(data: HubData, *, key: str) -> int:
    """How much `fetch_data` would fetch now; raises as it does."""
    repo = _repo(data, key=key)
    listing = list_files(repo)
    chosen = chosen_files(repo, listing, _chooser(data, key=key))
    return sum(listing.files[path].size for path in missing_files(repo, listing, chosen))


def _repo(data: HubData, *, key: str) -> Repo:
    return Repo(
        name=data.name,
        kind="dataset",
        revision=data.revision,
        instead=f"--set data.{key}=/path/to/a/copy",
    )


def _chooser(data: HubData, *, key: str) -> Choose:
    def choose(paths: Sequence[str], read: Read) -> list[str]:
        card = read(CARD).read_text(encoding="utf-8", errors="replace") if CARD in paths else ""
        return choose_files(data, paths, card=card, key=key)

    return choose


def join_files(files: Sequence[Path], into: Path, *, key: str) -> Path:
    """The parts of one split as one file of the same format, in order; as it is where it was made
    before."""
    if into.exists():
        return into
    into.parent.mkdir(parents=True, exist_ok=True)
    part = into.with_suffix(".part")
    if into.suffix == ".jsonl":
        with part.open("wb") as joined:
            for file in files:
                lines = file.read_bytes()
                joined.write(lines if lines.endswith(b"\n") or not lines else lines + b"\n")
    else:
        _join_parquet(files, part, key=key)
    return part.replace(into)


def _join_parquet(files: Sequence[Path], into: Path, *, key: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.write_table(
            pa.concat_tables(pq.read_table(file, partitioning=None) for file in files), into
        )
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{files[0].name} and the {len(files) - 1} other parts of its split cannot be joined",
            why=str(error).splitlines()[0],
            fix=f"--set data.{key}={files[0]}   # one of them alone",
        ) from error
