"""The text of a response while it comes: what may begin a stop string, and what is sent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from milescli.rollout.episode.text_pieces import TextPieces, num_begun

TEXTS = ["so ", "7", "</", "answer", ">", "<", "", "\u3002", " and"]


def decode(token_ids: Sequence[int]) -> str:
    """Tokens 0 to 8 are `TEXTS`; 100 and 101 are the two parts of one character."""
    text = "".join(TEXTS[one] if one < 100 else "\ufffd" for one in token_ids)
    return text.replace("\ufffd\ufffd", "\u3002")


@pytest.mark.parametrize(
    ("token_ids", "count"),
    [
        ([0, 1], 0),
        ([0, 1, 2], 1),
        ([0, 1, 2, 3], 2),
        ([0, 1, 2, 6, 3], 3),
        ([0, 1, 5], 1),
        ([0, 2, 1], 0),
        ([5, 2], 1),
        ([2], 1),
        ([1, 100], 1),
        ([], 0),
    ],
)
def test_the_last_tokens_may_begin_a_stop_string(token_ids: list[int], count: int) -> None:
    assert num_begun(token_ids, stop=["</answer>", "\u3002"], decode=decode) == count


def test_tokens_that_are_sampled_anew_replace_those_that_were_not_sent() -> None:
    sent = list[str]()
    pieces = TextPieces(
        emit=lambda part, text: sent.append(text),
        decode=decode,
        parse=None,
        has_tools=False,
        stop=["</answer>"],
    )
    for token_ids in ([0], [0, 1], [0, 1, 2], [0, 1, 8], [0, 1, 8, 1], [0, 1, 8, 1, 2, 3, 4]):
        pieces.add(token_ids)
    assert sent == ["so ", "7", " and", "7"]
