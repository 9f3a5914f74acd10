"""What turns chats into a model's tokens, as who reads prompts needs it; and what does not, for a
model whose tokenizer is elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

Chat = Sequence[dict[str, Any]]


class PromptEncoder(Protocol):
    """A tokenizer with its chat template; see milescli.rollout.tokenizer.ChatTokenizer."""

    folder: Path
    vocab_size: int

    def render(self, messages: Chat, *, tools: Sequence[Any] | None = None) -> str:
        """The chat template applied."""

    def encode_chats(
        self, chats: Sequence[Chat], *, tools: Sequence[Sequence[Any]] | None = None
    ) -> list[list[int]]:
        """[num_chats][num_tokens]"""

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
        self, chats: Sequence[Chat], *, tools: Sequence[Sequence[Any]] | None = None
    ) -> list[list[int]]:
        """Of each none."""
        return [[] for _ in chats]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Nothing can be said of them."""
        return ""
