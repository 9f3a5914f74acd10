"""Prompts of one session that share what they have in common."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from milescli.core.types import StopReason
from milescli.rollout.base import Turn
from milescli.rollout.episode.shared_prefixes import SharedTexts, Turns, text_of_prefix


@given(st.lists(st.lists(st.integers(1, 2), max_size=5), min_size=1, max_size=8))
def test_turns_are_those_that_were_added(prompts: list[list[int]]) -> None:
    def make() -> list[Turn]:
        return [
            Turn(prompt_ids=prompt, response_ids=[place], text="a", stop_reason=StopReason.STOP)
            for place, prompt in enumerate(prompts)
        ]

    turns, made = Turns(), make()
    for turn in made:
        turns.append(turn)
    assert all(one is other for one, other in zip(turns, made, strict=True))
    del made, turn
    made = make()
    assert turns == made and list(reversed(turns)) == made[::-1] and turns[1:] == made[1:]
    assert turns.responses() == [[place] for place in range(len(made))]


@given(st.lists(st.text("aé€\ud800", max_size=5), max_size=8))
def test_texts_are_those_that_were_added(texts: list[str]) -> None:
    shared = SharedTexts()
    stored = [shared.add(text) for text in texts]
    assert [text_of_prefix(one) for one in stored] == texts
