"""`timeline`: who did what from when to when, over some steps."""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from milescli.insight.history import Told
from milescli.insight.timeline import Interval, beside_steps, of_run, of_steps
from milescli.web.asked import Asked, Json

MAX_INTERVALS = 20_000
"""The newest of them."""
PROFILE = re.compile(r"profile (\d{1,6}) is in ")
"""What `runtime.profiler` tells when one is done."""
DEFAULT_STEPS = 50


def timeline(asked: Asked) -> Json:
    """Of the steps `first` to `last`; the last 50 where none are named. With the first step comes
    what was before it, with the last one what came after."""
    with asked.history() as history:
        steps = history.columns.steps
        newest = steps[-1] if steps else 0
        last = asked.question.count("last", newest)
        first = asked.question.count("first", max(1, last - DEFAULT_STEPS + 1))
        intervals = of_steps(history, first=first, last=last)
        begin_s = min((one.begin_s for one in intervals), default=math.nan)
        end_s = max((one.end_s for one in intervals), default=math.nan)
        notices = [one for one in history.told if one.kind == "Notice"]
        begin_s = -math.inf if not steps or first <= steps[0] else begin_s
        end_s = math.inf if last >= newest else end_s
        beside = [*of_run(history), *beside_steps(history)]
        intervals += [one for one in beside if _touches(one, begin_s=begin_s, end_s=end_s)]
    intervals = sorted(intervals, key=lambda one: one.begin_s)[-MAX_INTERVALS:]
    return {
        "begin_s": min((one.begin_s for one in intervals), default=None),
        "end_s": max((one.end_s for one in intervals), default=None),
        "intervals": [asdict(one) for one in intervals],
        "profiles": _profiles(asked, notices),
    }


def _profiles(asked: Asked, notices: Sequence[Told]) -> list[Json]:
    """Those that the run told of: when each was done, and its traces."""
    told = ((PROFILE.match(one.text), one.time_s) for one in notices)
    folder = asked.with_logs.profiles_dir
    return [
        {"number": int(match[1]), "time_s": time_s, "files": _files(folder / match[1])}
        for match, time_s in told
        if match
    ]


def _files(folder: Path) -> list[Json]:
    """Names and sizes; nothing of a folder that is gone or a link."""
    try:
        seen = [] if folder.is_symlink() else [(one.name, one.lstat()) for one in folder.iterdir()]
    except OSError:
        return []
    return [
        {"name": name, "size_bytes": seen_file.st_size}
        for name, seen_file in sorted(seen)
        if stat.S_ISREG(seen_file.st_mode) and not name.startswith(".")
    ]


def _touches(one: Interval, *, begin_s: float, end_s: float) -> bool:
    """Whether it is known and within."""
    return one.end_s >= begin_s and one.begin_s <= end_s  # not of NaN
