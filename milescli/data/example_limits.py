"""Selects which rows are trained on: drops, truncates or refuses rows that are too long, drops
pairs with equal sides, and reports lengths and counts over all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from milescli.core.errors import DataError
from milescli.core.types import Pair
from milescli.data.example_rows import RowField
from milescli.data.prompt_source import percentile
from milescli.data.rows import NUM_BAD_ROWS_SHOWN
from milescli.data.trajectories import cut
from milescli.recipe.data import Data

Reasons = dict[int, str]
"""By the number of a row among all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleReport:
    """What is in the file; for the manifest and for people."""

    path: str
    sha256: str
    """SHA-256 of the file's bytes."""
    num_rows: int
    """Rows in the file."""
    num_used: int
    num_too_long: int
    """Left out, being longer than `data.max_row_tokens`."""
    num_cut: int
    """Cut at that length."""
    num_equal: int
    """Pairs left out whose sides are equal."""
    tokens: int
    """Number of tokens of all rows that are used."""
    loss_tokens: int
    """Of these, learned ones."""
    tokens_p50: int
    """Over all rows, the longer side of a pair."""
    tokens_p90: int
    tokens_p99: int
    tokens_max: int
    note: str = ""
    """Which rows were left out, the first of them by line."""


def fitted(
    pairs: Sequence[Pair],
    *,
    data: Data,
    key: RowField,
    places: Sequence[str],
    path: str,
    sha256: str,
) -> tuple[list[Pair], ExampleReport]:
    """Those that are learned from, and the report on all. `places`: what each row is called;
    `path`: the files, for people. Raises DataError where nothing is left, or long rows are
    refused."""
    bound = data.max_row_tokens
    lengths = [pair.num_tokens for pair in pairs]
    long = {at: f"{n} tokens" for at, n in enumerate(lengths) if n > bound}
    if long and data.long_rows == "error":
        raise _too_long(path, long, lengths, bound, places)
    num_cut, now = 0, list(pairs)
    if data.long_rows == "truncate":
        now = [_cut(pair, bound) for pair in pairs]
        nothing = f"nothing learned in its first {bound} tokens"
        useless = {at: nothing for at in long if not _teaches(now[at])}
        num_cut, long = len(long) - len(useless), useless
    equal = {
        at: "both sides are equal"
        for at, pair in enumerate(now)
        if at not in long and _is_equal(pair)
    }
    kept = [pair for at, pair in enumerate(now) if at not in long and at not in equal]
    if not kept:
        if long:
            raise _too_long(path, long, lengths, bound, places)
        raise DataError(
            f"no row of {path} teaches anything",
            why=_shown(equal, places),
            fix=f"--set data.{key}=FILE   # pairs whose sides differ",
        )
    sides = [side for pair in kept for side in pair.sides]
    ascending = sorted(lengths)
    return kept, ExampleReport(
        path=path,
        sha256=sha256,
        num_rows=len(pairs),
        num_used=len(kept),
        num_too_long=len(long),
        num_cut=num_cut,
        num_equal=len(equal),
        tokens=sum(side.num_tokens for side in sides),
        loss_tokens=sum(side.num_loss_tokens for side in sides),
        tokens_p50=percentile(ascending, 50),
        tokens_p90=percentile(ascending, 90),
        tokens_p99=percentile(ascending, 99),
        tokens_max=ascending[-1],
        note=_note(path, key, {**long, **equal}, len(pairs), places),
    )


def _cut(pair: Pair, bound: int) -> Pair:
    return replace(
        pair,
        chosen=pair.chosen and cut(pair.chosen, bound),
        rejected=pair.rejected and cut(pair.rejected, bound),
    )


def _teaches(pair: Pair) -> bool:
    return all(side.num_loss_tokens for side in pair.sides)


def _is_equal(pair: Pair) -> bool:
    return (
        pair.chosen is not None
        and pair.rejected is not None
        and pair.chosen.token_ids == pair.rejected.token_ids
    )


def _note(path: str, key: RowField, reasons: Reasons, num_rows: int, places: Sequence[str]) -> str:
    if not reasons:
        return ""
    what = f"data.{key}: {len(reasons)} of {num_rows} rows of {path.rpartition('/')[2]}"
    return f"{what} are left out ({_shown(reasons, places)})"


def _shown(reasons: Reasons, places: Sequence[str]) -> str:
    """The first few."""
    first = sorted(reasons)[:NUM_BAD_ROWS_SHOWN]
    more = len(reasons) - len(first)
    texts = [f"{places[at]}: {reasons[at]}" for at in first]
    return "; ".join(texts) + (f"; and {more} more" if more else "")


def _too_long(
    path: str, long: Reasons, lengths: Sequence[int], bound: int, places: Sequence[str]
) -> DataError:
    return DataError(
        f"{len(long)} of {len(lengths)} rows of {path} are longer than {bound} tokens",
        why=f"{_shown(long, places)}; the longest has {max(lengths)}",
        fix=[f"--set data.max_row_tokens={max(lengths)}", "--set data.long_rows=truncate"],
    )
