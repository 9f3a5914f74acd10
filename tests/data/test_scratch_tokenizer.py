"""Tests of the vocabulary that miles trains itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from milescli.core.errors import RecipeError
from milescli.data.scratch_tokenizer import SPECIAL_TOKENS, make_scratch_tokenizer
from milescli.data.tokenizer import ChatTokenizer

TEXTS = ["Tom has 345 apples and buys 278 more."] * 3


def test_equal_texts_give_equal_files(tmp_path: Path) -> None:
    first, second = (make_scratch_tokenizer(TEXTS, 300, tmp_path / name) for name in "ab")
    assert {f.name: f.read_bytes() for f in first.iterdir()} == {
        f.name: f.read_bytes() for f in second.iterdir()
    }


def test_a_vocabulary_without_room_for_all_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="258"):
        make_scratch_tokenizer(TEXTS, 258, tmp_path)


@settings(max_examples=50)
@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_survives_the_way_there_and_back(tokenizer: ChatTokenizer, text: str) -> None:
    assume(not any(special in text for special in SPECIAL_TOKENS))
    *ids, last = tokenizer.encode_response(text)
    assert last == tokenizer.eos_id
    assert tokenizer.decode(ids) == text


def test_digits_are_tokens_of_their_own(tokenizer: ChatTokenizer) -> None:
    assert len(tokenizer.encode_response("1234567890")) == 11


def test_the_chat_template_opens_the_turn_of_the_assistant(tokenizer: ChatTokenizer) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    assert tokenizer.render(chat) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + "
        "2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode_chats([chat])[0][0] == 1


def test_the_vocabulary_stays_within_its_bound(tokenizer: ChatTokenizer) -> None:
    assert 259 <= tokenizer.vocab_size <= 512
