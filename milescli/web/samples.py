"""Implements `sample-steps` and `samples`: the samples that a run stores of its rollouts, for
people to read. Text of a model is only sent as JSON."""

from __future__ import annotations

import json
import shlex
import stat
import time

from milescli.core.files import read_regular_bytes
from milescli.insight.samples import (
    by_group,
    images_in,
    read_file,
    read_image,
    read_samples,
    sample_steps,
)
from milescli.web.files import file_within, readable
from milescli.web.responses import BadRequest, NotFound
from milescli.web.run_request import Json, RunRequest

MAX_BYTES = 256 * 2**20
"""Largest file of one step's samples."""


def steps(request: RunRequest) -> Json:
    """Return the steps with stored samples, ascending."""
    return {"steps": sample_steps(request.run)}


def samples(request: RunRequest) -> Json:
    """Return the samples of one step (default: the newest), by prompt."""
    step = request.query.number("step")
    if step is None:
        steps = sample_steps(request.run)
        if not steps:
            raise _none(request, "of any step")
        step = steps[-1]
    try:
        file = file_within(request.run.path, f"rollouts/step_{step}.jsonl")
    except NotFound:
        raise _none(request, f"of step {step}") from None
    if (size := file.stat().st_size) > MAX_BYTES:
        raise BadRequest(
            f"the samples of step {step} are too large for a page",
            why=f"{file} has {size} bytes, {MAX_BYTES} are shown at most",
            fix=f"less {shlex.quote(str(file))}",
        )
    with readable(file), open(file, "rb"):
        found = read_samples(request.run, step)
    groups = [
        {
            "prompt_index": group[0].prompt_index,
            "prompt": group[0].prompt,
            "images": images_in(group[0].record),
            "label": group[0].record.get("label"),
            "samples": [
                one.record | {"returned_images": images_in(one.record, "returned_images")}
                for one in group
            ],
        }
        for group in by_group(found)
    ]
    return {"step": step, "groups": groups}


def image(request: RunRequest) -> bytes:
    """Return the PNG of the hash in the URL. Raises NotFound."""
    name = request.names["sha256"]
    if (png := read_image(request.run, name)) is None:
        raise NotFound(
            f"run `{request.shown.id}` kept no picture `{name[:80]}`",
            why="a run keeps the pictures of samples that it keeps, each named by its SHA-256",
            fix=f"ls {shlex.quote(str(request.run.images_dir))}",
        )
    return png


def _none(request: RunRequest, of_what: str) -> NotFound:
    return NotFound(
        f"run `{request.shown.id}` kept no samples {of_what}",
        why="a run keeps some samples of each step that it has done; one over rows samples nothing",
        fix="ask for a step that sample-steps lists",
    )


MAX_LIMIT = 500
SEARCH_S = 3.0
"""Longest that one search reads."""
MAX_SEARCHED_BYTES = 64 * 2**20
"""Files that are larger are skipped."""
_AROUND = 80
"""Characters shown on either side of a match."""


def find_samples(request: RunRequest) -> Json:
    """Find samples whose response contains `q`, in any case. If their prompt contains it, the first
    sample stands for all. `is_all`: True if every step was searched."""
    text = request.query.text("q").lower()
    limit = request.query.count("limit", 50, low=1, high=MAX_LIMIT)
    # the folder may be a link to somewhere else: then it is not the run's
    is_own = request.run.path.resolve() in request.run.rollouts_dir.resolve().parents
    steps = sample_steps(request.run)[::-1] if text and is_own else []
    until, found, searched, is_all = time.monotonic() + SEARCH_S, list[Json](), 0, True
    for step in steps:
        if time.monotonic() > until or len(found) >= limit:
            is_all = False
            break
        searched += 1
        is_all = _search(request, step, text, found) and is_all
    return {"found": found[:limit], "searched_steps": searched, "is_all": is_all}


def _search(request: RunRequest, step: int, text: str, found: list[Json]) -> bool:
    """Add the matches of one step; return False if it could not be read."""
    file = request.run.rollouts_dir / f"step_{step}.jsonl"
    try:
        seen = file.lstat()
        if seen.st_size > MAX_SEARCHED_BYTES or not stat.S_ISREG(seen.st_mode):
            return False
        # most files have none of it, and need not be read as JSON: within that, ASCII is written
        # in one way only
        if text.isascii() and _within_json(text) not in read_regular_bytes(file).lower():
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


def _excerpt(source: str, text: str) -> str | None:
    if (at := source.lower().find(text)) < 0:
        return None
    begin, end = max(0, at - _AROUND), at + len(text) + _AROUND
    return "…" * (begin > 0) + source[begin:end] + "…" * (end < len(source))
