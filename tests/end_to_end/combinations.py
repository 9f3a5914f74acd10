"""LoRA, speculation, routing replay and rollout beside training: what goes together, as a table,
and the runs that cover each two of it. Read by the quick test of the table and that of the runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One value of each feature."""

    lora: bool
    speculation: str
    replay: bool
    max_staleness: int
    order: str
    on_update: str

    def sets(self, draft: Path) -> list[str]:
        """Of `--set`. `draft`: the model that guesses where one does."""
        sets = [
            f"train.lora.rank={4 if self.lora else 'null'}",
            "train.lora.publish=adapter",
            f"rollout.speculative.kind={self.speculation}",
            f"train.routing_replay={str(self.replay).lower()}",
            f"rollout.max_staleness={self.max_staleness}",
            f"rollout.order={self.order}",
            f"rollout.on_update={self.on_update}",
        ]
        if self.speculation == "draft":
            sets.append(f"rollout.speculative.model={draft}")
        return sets

    @property
    def pairs(self) -> set[tuple[tuple[str, object], ...]]:
        """Each two features with their values. Without staleness nothing is running when new
        weights come, so that `on_update` is no feature then."""
        values = asdict(self)
        if not self.max_staleness:
            del values["on_update"]
        return set(combinations(values.items(), 2))


def everything() -> Iterator[Combination]:
    """The whole product."""
    for lora, speculation, replay, staleness, order, on_update in product(
        (False, True),
        ("none", "ngram", "draft", "mtp"),
        (False, True),
        (0, 2),
        ("prompts", "done"),
        ("continue", "drain", "abort"),
    ):
        yield Combination(
            lora=lora,
            speculation=speculation,
            replay=replay,
            max_staleness=staleness,
            order=order,
            on_update=on_update,
        )


_ENGINES = [
    (False, "none", False),
    (False, "none", True),
    (False, "ngram", False),
    (False, "ngram", True),
    (False, "draft", False),
    (False, "draft", True),
    (False, "mtp", False),
    (False, "mtp", True),
    (True, "none", False),
    (True, "none", True),
    (True, "ngram", False),
    (True, "ngram", True),
]
"""(LoRA, who guesses, routing replay) of what is allowed."""
_FLIGHT = [
    (0, "prompts", "continue"),
    (0, "prompts", "drain"),
    (0, "prompts", "abort"),
    (2, "prompts", "continue"),
    (2, "prompts", "drain"),
    (2, "prompts", "abort"),
    (2, "done", "continue"),
    (2, "done", "drain"),
    (2, "done", "abort"),
]
"""(staleness, order, what new weights do): each goes with each of the above."""


def _made(engine: tuple[bool, str, bool], flight: tuple[int, str, str]) -> Combination:
    return Combination(
        lora=engine[0],
        speculation=engine[1],
        replay=engine[2],
        max_staleness=flight[0],
        order=flight[1],
        on_update=flight[2],
    )


ALLOWED = [_made(engine, flight) for engine, flight in product(_ENGINES, _FLIGHT)]
RUNS = [
    _made((True, "ngram", True), (2, "done", "continue")),
    _made((False, "mtp", True), (2, "done", "abort")),
    _made((False, "draft", True), (2, "prompts", "drain")),
    _made((True, "none", True), (0, "prompts", "continue")),
    _made((True, "none", True), (2, "done", "drain")),
    _made((False, "none", False), (2, "prompts", "continue")),
    _made((False, "none", True), (2, "done", "abort")),
    _made((False, "ngram", False), (0, "prompts", "continue")),
    _made((True, "ngram", False), (2, "prompts", "abort")),
    _made((False, "ngram", False), (2, "done", "drain")),
    _made((False, "draft", False), (0, "prompts", "continue")),
    _made((False, "draft", False), (2, "done", "continue")),
    _made((False, "draft", True), (2, "done", "abort")),
    _made((False, "mtp", False), (0, "prompts", "continue")),
    _made((False, "mtp", False), (2, "prompts", "drain")),
    _made((False, "mtp", True), (2, "done", "continue")),
]
"""Which cover each two values that are allowed together; sixteen is the least, for four kinds of
guessing beside three things that new weights do, and none."""
