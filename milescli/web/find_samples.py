"""`find-samples`: a text within the kept samples of all steps, the newest first, for as long as a
page can wait."""

from __future__ import annotations

import json
import stat
import time

from milescli.insight.samples import read_file, sample_steps
from milescli.web.asked import Asked, Json

MAX_LIMIT = 500
SEARCH_S = 3.0
"""Longest that one search reads."""
MAX_BYTES = 64 * 2**20
"""A file with more is passed over."""
_AROUND = 80
"""Characters shown on either side of what was found."""


def find_samples(asked: Asked) -> Json:
    """Samples whose response contains `q`, in any case; of a prompt that contains it the first
    sample stands for all. `is_all`: every step was searched."""
    text = asked.question.text("q").lower()
    limit = asked.question.count("limit", 50, low=1, high=MAX_LIMIT)
    # the folder may be a link to somewhere else: then it is not the run's
    is_own = asked.run.path.resolve() in asked.run.rollouts_dir.resolve().parents
    steps = sample_steps(asked.run)[::-1] if text and is_own else []
    until, found, searched, is_all = time.monotonic() + SEARCH_S, list[Json](), 0, True
    for step in steps:
        if time.monotonic() > until or len(found) >= limit:
            is_all = False
            break
        searched += 1
        is_all = _search(asked, step, text, found) and is_all
    return {"found": found[:limit], "searched_steps": searched, "is_all": is_all}


def _search(asked: Asked, step: int, text: str, found: list[Json]) -> bool:
    """Adds what one step has; whether it could be read."""
    file = asked.run.rollouts_dir / f"step_{step}.jsonl"
    try:
        seen = file.lstat()
        if seen.st_size > MAX_BYTES or not stat.S_ISREG(seen.st_mode):
            return False
        # most files have none of it, and need not be read as JSON: within that, ASCII is written
        # in one way only
        if text.isascii() and _within_json(text) not in file.read_bytes().lower():
            return True
    except OSError:
        return False
    places = dict[int, int]()
    for sample in read_file(file, step=step):
        place = places[sample.prompt_index] = places.get(sample.prompt_index, -1) + 1
        excerpt, where = _excerpt(sample.response, text), "response"
        if excerpt is None and place == 0:
            excerpt, where = _excerpt(sample.prompt, text), "prompt"
        if excerpt is not None:
            found.append(
                {
                    "step": step,
                    "prompt_index": sample.prompt_index,
                    "sample": place,
                    "where": where,
                    "reward": sample.reward,
                    "excerpt": excerpt,
                }
            )
    return True


def _within_json(text: str) -> bytes:
    return json.dumps(text)[1:-1].lower().encode()


def _excerpt(said: str, text: str) -> str | None:
    if (at := said.lower().find(text)) < 0:
        return None
    begin, end = max(0, at - _AROUND), at + len(text) + _AROUND
    return "…" * (begin > 0) + said[begin:end] + "…" * (end < len(said))
