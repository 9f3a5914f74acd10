"""What py-spy saw of an engine's scheduler -> how often it was at what. Pure; reads the stacks
that py-spy writes, one a line, the outermost function first, with how often it was seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

FORWARD, SAMPLING, RESULTS = "forward", "sampling", "handing out results"
SCHEDULER, IDLE, WEIGHTS = "scheduler", "idle", "taking weights"
LOOP = "event_loop"
"""In the name of the function that the scheduler lives in; other threads do not count."""
_BY_FUNCTION = (
    (WEIGHTS, ("update_weights", "resume_memory", "release_memory", "flush_cache")),
    (RESULTS, ("process_batch_result",)),
    (SAMPLING, ("sample ", "Sampler", "sampling")),
    (FORWARD, ("forward_batch", "forward_", "model_runner", "run_batch")),
    (IDLE, ("on_idle", "recv_requests", "recv_", "sleep", "poll")),
)
"""The first of them that any function of a stack bears, with its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """How a scheduler spent its time."""

    num_samples: int
    shares: dict[str, float]
    """0 to 1 by what it did, the largest first."""
    functions: dict[str, str]
    """By what it did: the innermost function that was seen most."""


def read_stacks(text: str) -> Iterator[tuple[list[str], int]]:
    """(functions, how often) of each line; torn ones are left out."""
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack and count.isdigit():
            yield stack.split(";"), int(count)


def split(text: str) -> Seen:
    """Of the loop of a scheduler. Empty where it was not seen."""
    counts, leaves = Counter[str](), dict[str, Counter[str]]()
    for stack, count in read_stacks(text):
        places = [place for place, function in enumerate(stack) if LOOP in function]
        if not places:
            continue
        kind = kind_of(stack[places[0] + 1 :])
        counts[kind] += count
        leaves.setdefault(kind, Counter())[stack[-1]] += count
    total = counts.total()
    return Seen(
        num_samples=total,
        shares={kind: count / total for kind, count in counts.most_common()},
        functions={kind: seen.most_common(1)[0][0] for kind, seen in leaves.items()},
    )


def kind_of(stack: list[str]) -> str:
    """Of the functions below the scheduler's loop."""
    for kind, marks in _BY_FUNCTION:
        if any(mark in function for function in stack for mark in marks):
            return kind
    return SCHEDULER
