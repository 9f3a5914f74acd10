"""`sample-steps`, `samples`: what a run kept of its rollouts, for people to read. Text of a model:
it is sent as JSON and nothing else."""

from __future__ import annotations

from milescli.insight.samples import by_group, read_samples, sample_steps
from milescli.web.asked import Asked, Json
from milescli.web.files import file_within, readable
from milescli.web.refusals import BadRequest, NotFound

MAX_BYTES = 256 * 2**20
"""Of the samples of one step."""


def steps(asked: Asked) -> Json:
    """Of which samples were kept, ascending."""
    return {"steps": sample_steps(asked.run)}


def samples(asked: Asked) -> Json:
    """Of one step, the newest where none is named, by their prompts."""
    step = asked.question.number("step")
    if step is None:
        kept = sample_steps(asked.run)
        if not kept:
            raise _none(asked, "of any step")
        step = kept[-1]
    try:
        file = file_within(asked.run.path, f"rollouts/step_{step}.jsonl")
    except NotFound:
        raise _none(asked, f"of step {step}") from None
    if (size := file.stat().st_size) > MAX_BYTES:
        raise BadRequest(
            f"the samples of step {step} are too large for a page",
            why=f"{file} has {size} bytes, {MAX_BYTES} are shown at most",
            fix=f"less {file}",
        )
    with readable(file), open(file, "rb"):
        found = read_samples(asked.run, step)
    groups = [
        {
            "prompt_index": index,
            "prompt": group[0].prompt,
            "label": group[0].record.get("label"),
            "samples": [one.record for one in group],
        }
        for (_, index), group in by_group(found).items()
    ]
    return {"step": step, "groups": groups}


def _none(asked: Asked, of_what: str) -> NotFound:
    return NotFound(
        f"run `{asked.shown.id}` kept no samples {of_what}",
        why="a run keeps some samples of each step that it has done; one over rows samples nothing",
        fix="ask for a step that sample-steps lists",
    )
