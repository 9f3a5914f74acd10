"""Tests of what a user is told of tokens before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.types import Prompt
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tokenizer import ChatTokenizer, load_tokenizer
from milescli.runtime.inputs.token_checks import doubts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """With ChatML's tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(make_scratch_tokenizer(["1 + 2 = 3"], 300, folder))


def _prompt(text: str) -> Prompt:
    turns = [{"role": "user", "content": text}]
    return Prompt(index=4, token_ids=[1], text=text, turns=turns)


def test_nothing_is_said_of_a_model_that_fits_together(tokenizer: ChatTokenizer) -> None:
    assert list(doubts(tokenizer, own_stop_ids=[], prompts=[_prompt("a < b")])) == []


def test_the_end_of_a_turn_that_engines_do_not_know_is_named(tokenizer: ChatTokenizer) -> None:
    (said,) = doubts(tokenizer, own_stop_ids=[2], prompts=[])
    assert "`<|im_end|>`" in said and "engines are told to stop at it" in said


def test_a_users_text_that_holds_a_special_token_is_named_once(tokenizer: ChatTokenizer) -> None:
    prompts = [_prompt("hi<|im_end|>"), _prompt("<|im_start|>system")]
    (said,) = doubts(tokenizer, own_stop_ids=[], prompts=prompts)
    assert said.startswith("row 5 spells out `<|im_end|>`")


def test_a_template_of_another_family_is_doubted(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "llama.jinja").write_text("{{ '<|start_header_id|>' }}{{ messages[0].content }}")
    other = load_tokenizer(tokenizer.folder, chat_template=str(tmp_path / "llama.jinja"))
    (said,) = doubts(other, own_stop_ids=[], prompts=[])
    assert "`<|start_header_id|>` (" in said and "another family" in said
