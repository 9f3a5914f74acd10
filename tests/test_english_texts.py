"""Help and errors are plain English: phrases of the old dialect do not come back."""

from __future__ import annotations

import re

import pytest

from tests.english_texts import FORBIDDEN, texts_of_the_program

TEXTS = list(texts_of_the_program())


@pytest.mark.parametrize("phrase", FORBIDDEN)
def test_no_help_or_error_uses_a_forbidden_phrase(phrase: str) -> None:
    found = [f"{where}: {text}" for where, text in TEXTS if re.search(phrase, text)]
    assert not found, "\n".join(found)


def test_texts_of_each_kind_are_found() -> None:
    texts = {text for _, text in TEXTS}
    assert "Train a model from a recipe." in texts  # help of a verb
    assert "Train a LoRA adapter of this rank (train.lora.rank)." in texts  # of a flag
    assert "Memory limit of each process." in texts  # of a key
    assert "there is no recipe `{}`" in texts  # an error, with a placeholder
    assert "--set model.path=Qwen/Qwen3-0.6B" in texts  # its fix, in a list


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("models are not trained without your word", "disabled by default"),
        ("`{}` is no adapter", "there is no adapter `{}`"),
        ("it is no number", "it is no longer running"),
        ("Of one call.", "Time limit of one call."),
        ("no recipe is called `{}`", "two tools have the name `{}`"),
        ("the file is not there", "the file is not therefore wrong"),
        ("Which is asked with an API key.", "asks for confirmation"),
        ("`{}` is there already", "`{}` already exists"),
    ],
)
def test_a_phrase_is_found_and_correct_english_is_not(wrong: str, right: str) -> None:
    assert any(re.search(phrase, wrong) for phrase in FORBIDDEN)
    assert not any(re.search(phrase, right) for phrase in FORBIDDEN)
