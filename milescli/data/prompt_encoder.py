"""The protocol that turns chats into token ids for readers of prompts, and an implementation
without a tokenizer, for a model whose tokenizer is elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from milescli.core.types import Prompt

Chat = Sequence[dict[str, Any]]
MAX_CHARS_OF_TOKEN = 256
"""Vocabularies have runs of spaces and dashes of half as many."""


def enough_of(text: str, most: int) -> str:
    """So much of a text's beginning that it has more than `most` tokens, or all of it."""
    return text[: MAX_CHARS_OF_TOKEN * (most + 1)]


def told_length(prompt: Prompt, most: int) -> str:
    """How many tokens it has, for messages; of one that was cut, how many at least."""
    is_cut = enough_of(prompt.text, most) != prompt.text
    return f"at least {len(prompt.token_ids)}" if is_cut else str(len(prompt.token_ids))


class PromptEncoder(Protocol):
    """A tokenizer with its chat template; see milescli.data.tokenizer.ChatTokenizer."""

    folder: Path
    vocab_size: int

    def render(self, messages: Chat, *, tools: Sequence[Any] | None = None) -> str:
        """The chat template applied."""

    def encode_chats(
        self,
        chats: Sequence[Chat],
        *,
        tools: Sequence[Sequence[Any]] | None = None,
        most: int | None = None,
    ) -> list[list[int]]:
        """[num_chats][num_tokens], of a chat with more than `most` no fewer than one more."""

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of tokens."""


class NoTokens:
    """Implements PromptEncoder for a model that is asked with messages: no prompt has tokens, and
    none is too long."""

    folder = Path()
    vocab_size = sys.maxsize
    """Any token may be known there."""

    def render(self, messages: Chat, *, tools: Sequence[Any] | None = None) -> str:
        """Who is asked renders; all that it is told counts."""
        return repr((messages, tools))

    def encode_chats(
        self,
        chats: Sequence[Chat],
        *,
        tools: Sequence[Sequence[Any]] | None = None,
        most: int | None = None,
    ) -> list[list[int]]:
        """Of each none."""
        return [[] for _ in chats]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Nothing can be said of them."""
        return ""
