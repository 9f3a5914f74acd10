"""The task `instructions`: labels that its reward reads, and topics that are held out."""

from __future__ import annotations

from milescli.data.short_instructions import INSTRUCTIONS, TOPICS, heldout_rows, rows
from milescli.rollout.rewards.text.instructions import instructions


def test_each_label_is_followed_by_the_example_of_its_prompt() -> None:
    for row in heldout_rows(seed=0):
        assert instructions.check_label(row["label"]) is None
        example = row["prompt"].partition("like this: ")[2]
        if example:
            assert instructions(prompt=row["prompt"], response=example, label=row["label"]) == 1.0


def test_held_out_topics_are_not_trained_on_and_rows_are_those_of_the_seed() -> None:
    assert len(set(TOPICS)) == len(TOPICS)
    trained, heldout = list(rows(seed=3)), list(heldout_rows(seed=3))
    assert trained == list(rows(seed=3)) != list(rows(seed=4))
    assert heldout == list(heldout_rows(seed=4))
    for topic in TOPICS[::8]:
        assert not any(f" {topic}" in row["prompt"] for row in trained)
    assert len(heldout) == 2 * len(INSTRUCTIONS) * len(TOPICS[::8])
