"""Tests of what a user is told of tokens before a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from milescli.core.types import Prompt
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tokenizer import ChatTokenizer, load_tokenizer
from milescli.models import parse_facts
from milescli.runtime.inputs.checks import INPUTS, run_checks
from milescli.runtime.inputs.token_checks import (
    check_embedding,
    check_end_tokens,
    check_markers,
    check_special_tokens,
)
from tests.families.cases import ALL


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """With ChatML's tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(make_scratch_tokenizer(["1 + 2 = 3"], 300, folder))


def _told(tokenizer: ChatTokenizer, *, ends: Sequence[int] = (), texts: Sequence[str] = ()) -> Any:
    """Return what all of the checks say."""
    prompts = [
        Prompt(index=4, token_ids=[1], text=text, turns=[{"role": "user", "content": text}])
        for text in texts
    ]
    part = SimpleNamespace(first=lambda count: prompts[:count], files=())
    subject: Any = SimpleNamespace(tokenizer=tokenizer, own_stop_ids=ends, trained=[(part, None)])
    checks = (check_embedding, check_end_tokens, check_markers, check_special_tokens)
    return [said for check in checks for said in check(subject)]


def test_nothing_is_said_of_a_model_that_fits_together(tokenizer: ChatTokenizer) -> None:
    assert _told(tokenizer, texts=["a < b"]) == []


def test_the_end_of_a_turn_that_engines_do_not_know_is_named(tokenizer: ChatTokenizer) -> None:
    (said,) = _told(tokenizer, ends=[2])
    assert "`<|im_end|>`" in said and "makes engines stop at it" in said


def test_a_users_text_that_holds_a_special_token_is_named_once(tokenizer: ChatTokenizer) -> None:
    (said,) = _told(tokenizer, texts=["hi<|im_end|>", "<|im_start|>system"])
    assert said.startswith("row 5 contains the text `<|im_end|>`")


def test_a_template_of_another_family_is_doubted(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "llama.jinja").write_text("{{ '<|start_header_id|>' }}{{ messages[0].content }}")
    other = load_tokenizer(tokenizer.folder, chat_template=str(tmp_path / "llama.jinja"))
    (said,) = _told(other)
    assert "`<|start_header_id|>` (" in said and "another family" in said


def test_tokens_without_an_embedding_are_named(tokenizer: ChatTokenizer) -> None:
    small = load_tokenizer(tokenizer.folder)
    small.num_embeddings = small.vocab_size - 2
    (said,) = _told(small)
    assert "2 more tokens than the model's embedding has rows" in said


@pytest.mark.parametrize(
    ("family", "on_policy", "is_refused"),
    [("gemma3-vl", "exact", True), ("gemma3-vl", "auto", False), ("qwen3-vl", "exact", False)],
)
def test_images_that_no_engine_shows_are_refused_before_one_starts(
    family: str, on_policy: str, is_refused: bool
) -> None:
    plain = Prompt(index=0, token_ids=[1], text="a")
    shown: Any = replace(plain, images=(SimpleNamespace(sha256="a"),))
    check = next(one for one in INPUTS if one.name == "images")
    for prompts, refused in (([plain], False), ([plain, shown], is_refused)):
        part = SimpleNamespace(first=lambda count, prompts=prompts: prompts[:count])
        subject: Any = SimpleNamespace(
            recipe=SimpleNamespace(train=SimpleNamespace(on_policy=on_policy)),
            facts=parse_facts(ALL[family].config),
            prompts=[(part, None)],
            missing={},
        )
        (outcome,) = run_checks([check], subject)
        assert (outcome.refusal is not None) is refused
