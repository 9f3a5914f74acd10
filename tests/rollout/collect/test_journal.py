"""Which of what was sampled belongs to the past of a checkpoint."""

from __future__ import annotations

from milescli.rollout.collect.group_record import GroupHead
from milescli.rollout.collect.journal import BatchRecord, select_usable


def _head(position: int, newest: int) -> GroupHead:
    return GroupHead(
        position=position, prompt_index=position, epoch=0, oldest=newest, newest=newest
    )


def _batch(step: int) -> BatchRecord:
    """Two groups a step, of positions 2 step - 2 and 2 step - 1."""
    at = 2 * step - 2
    return BatchRecord(step=step, start=at, end=at + 2, draws=[2], kept=[at], refused=[at + 1])


HEADS = {at: _head(at, newest) for at, newest in enumerate([1, 1, 1, 2, 2, 2, 3, 4])}
"""Steps 1 to 4, sampled ahead."""
BATCHES = [_batch(step) for step in (1, 2, 3, 4)]


def _taken(**changes: object) -> tuple[int, set[int], set[int]]:
    asked = {
        "heads": HEADS,
        "batches": BATCHES,
        "step": 1,
        "version": 2,
        "position": 2,
        "reproduced": HEADS,
        **changes,
    }
    take = select_usable(asked.pop("heads"), asked.pop("batches"), **asked)  # type: ignore[arg-type]
    return take.newest, set(take.groups), set(take.batches)


def test_what_weights_sampled_that_are_had_again_is_taken() -> None:
    assert _taken() == (5, set(range(8)), {1, 2, 3, 4})


def test_a_step_that_lacks_a_group_ends_what_can_be_had_again() -> None:
    lacking = {at: head for at, head in HEADS.items() if at != 5}
    assert _taken(heads=lacking) == (3, {0, 1, 2, 3, 4, 6}, {1, 2})
    assert _taken(batches=BATCHES[:1]) == (2, {0, 1, 2, 3, 4, 5}, {1})


def test_another_layout_takes_what_the_checkpoint_or_its_past_sampled_alone() -> None:
    assert _taken(reproduced=()) == (4, {0, 1, 2, 3, 4, 5}, {1, 2, 3})


def test_a_step_ends_it_of_which_other_weights_sampled_a_group() -> None:
    assert _taken(reproduced={7}) == (4, {0, 1, 2, 3, 4, 5, 7}, {1, 2, 3})
    assert _taken(reproduced={6}) == (4, {0, 1, 2, 3, 4, 5, 6}, {1, 2, 3})


def test_a_batch_that_began_elsewhere_ends_it_too() -> None:
    assert _taken(position=1)[0] == 2
