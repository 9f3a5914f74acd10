"""Implements `evaluations` and `evaluation-samples`: results of a run's evaluations, during it and
by `miles eval`, and their samples."""

from __future__ import annotations

from dataclasses import asdict

from milescli.checkpoint.run_dir import RunDir
from milescli.core.files import read_regular_bytes
from milescli.insight.reader import object_of
from milescli.insight.samples import images_in
from milescli.web.files import LineIndex, LineIndexes, file_within, readable
from milescli.web.responses import NotFound
from milescli.web.run_request import Json, RunRequest

MAX_LIMIT = 500
MAX_RESULTS = 5000
"""Largest number of result files that are read."""
MAX_BYTES = 16 * 2**20
"""Largest size of such a file."""
MAX_FILTERED = 20_000
"""Largest number of lines that are read to find right or wrong samples only."""
HALF = 0.5
"""Reward above which a sample counts as right if its row does not say so."""
NOT_SHOWN = ("prompt_ids", "response_ids")
"""Fields of a sample that are left out, because they are long and not readable."""


def evaluations(request: RunRequest) -> Json:
    """List the results of the run itself, over held-out rows, and of `miles eval` on sets, by
    step."""
    with request.history() as history:
        own = [asdict(one) for one in history.evaluations]
        validations = [asdict(one) for one in history.validations]
    return {
        "evaluations": own,
        "validations": validations,
        "sets": _results(request.run),
    }


class EvaluationSamples:
    """Reads samples of evaluations; caches where the lines of each file begin."""

    def __init__(self) -> None:
        self._indexes = LineIndexes()

    def samples(self, request: RunRequest) -> Json:
        """Return rows of one file below `eval/`, in their order. `is_all`: False if counting took
        too long, or not all lines were searched."""
        query = request.query
        offset, limit = query.count("offset", 0), query.count("limit", 50, high=MAX_LIMIT)
        name = query.text("path").removeprefix("eval/")
        file = file_within(request.run.path, f"eval/{name}")
        if file.suffix != ".jsonl":
            raise NotFound(
                f"`{name}` holds no samples",
                why="samples of evaluations are .jsonl",
                fix="ask for a path that evaluations lists",
            )
        index = self._indexes.of(file)
        with index.lock, readable(file):
            index.count()
            if only := query.text("only"):
                rows, total, is_all = _filter_rows(index, is_right=only == "right")
                rows = rows[offset : offset + limit]
            else:
                lines, total, is_all = index.lines(offset, limit), index.num_lines, index.is_whole
                rows = [row for line in lines if (row := object_of(line)) is not None]
        shown = [
            {k: v for k, v in row.items() if k not in NOT_SHOWN} | {"images": images_in(row)}
            for row in rows
        ]
        return {"total": total, "samples": shown, "is_all": is_all}


def _filter_rows(index: LineIndex, *, is_right: bool) -> tuple[list[Json], int, bool]:
    """Return (the right or the wrong rows, their number, True if the whole file was read)."""
    rows = list[Json]()
    for line in index.lines(0, MAX_FILTERED):
        row = object_of(line)
        if row is not None and _is_right(row) == is_right:
            rows.append(row)
    return rows, len(rows), index.is_whole and index.num_lines <= MAX_FILTERED


def _is_right(row: Json) -> bool:
    """Return the row's own verdict; if it has none, as rows of other tools, judge by its reward."""
    told, reward = row.get("is_right"), row.get("reward")
    if isinstance(told, bool):
        return told
    return isinstance(reward, int | float) and reward > HALF


def _results(run: RunDir) -> list[Json]:
    """Read the results that can be read, by set and step, without rewards of single prompts."""
    results, root = list[Json](), run.path.resolve()
    for file in sorted(run.eval_dir.rglob("step_*.json"))[:MAX_RESULTS]:
        try:
            is_shown = root in file.resolve().parents and file.stat().st_size <= MAX_BYTES
            result = object_of(read_regular_bytes(file)) if is_shown else None
        except (OSError, RuntimeError):
            continue
        if result is not None and "accuracy" in result and "step" in result:
            results.append({name: value for name, value in result.items() if name != "rewards"})
    return sorted(results, key=lambda one: (str(one.get("set")), str(one["step"]).zfill(12)))
