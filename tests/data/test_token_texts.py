"""Tokens as text that can be cut at them: the parts are the whole, whatever the tokens are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.token_texts import TokenTexts
from milescli.data.tokenizer import ChatTokenizer, load_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """As a model from scratch has it: bytes, and merges of two texts."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_scratch_tokenizer(["What is 2 + 3?", "größer als 5 \u4f60\u597d"], 280, folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Llama 2's kind: `▁` is a space, characters that are no token are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "\u2581the", "cat", "\u2581s", "at", "ü"]
    inner = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    folder: Path = tmp_path_factory.mktemp("pieces")
    return ChatTokenizer(fast, folder=folder, template=None)


def test_each_token_of_a_text_has_its_own_characters(byte_level: ChatTokenizer) -> None:
    ids = byte_level.inner("What is größer, \U0001f600?")["input_ids"]
    text, lengths = TokenTexts(byte_level).split([*ids, byte_level.eos_id])
    assert text.startswith("What is größer, \U0001f600?") and len(lengths) == len(ids) + 1
    end = byte_level.inner.convert_ids_to_tokens(byte_level.eos_id)
    assert text.endswith(end) and lengths[-1] == len(end)
    place = text.index("\U0001f600")
    covering = [n for n, start in zip(lengths, _starts(lengths), strict=True) if start == place]
    assert covering[-1] == 1 and covering[:-1] == [0, 0, 0], "four bytes, of which the last counts"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_parts_of_any_tokens_are_the_whole(
    data: st.DataObject, byte_level: ChatTokenizer
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=40))
    texts = TokenTexts(byte_level)
    text, lengths = texts.split(ids)
    assert (len(lengths), sum(lengths)) == (len(ids), len(text))
    assert text == texts.decode(ids)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_parts_of_sentence_pieces_are_the_whole(
    data: st.DataObject, sentence_piece: ChatTokenizer
) -> None:
    ids = data.draw(st.lists(st.integers(0, 264), max_size=40))
    text, lengths = TokenTexts(sentence_piece).split(ids)
    assert (len(lengths), sum(lengths)) == (len(ids), len(text))


def test_a_sentence_piece_keeps_its_space(sentence_piece: ChatTokenizer) -> None:
    ids = sentence_piece.inner.convert_tokens_to_ids(
        ["\u2581the", "cat", "\u2581s", "at", "<0xC3>", "<0xA4>"]
    )
    assert TokenTexts(sentence_piece).split(ids) == ("thecat satä", [3, 3, 2, 2, 0, 1])


def _starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:place]) for place in range(len(lengths))]
