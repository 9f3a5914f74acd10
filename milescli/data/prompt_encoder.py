"""The interface of a tokenizer for readers of prompts, and the encoder of a model whose tokenizer
is elsewhere. `tokenizer` has the one of a model's folder."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from milescli.data.images import PromptImages

Message = dict[str, Any]
"""`role` (system, user, assistant, tool) and `content`, both text; and further keys that a template
takes."""


class PromptEncoder(Protocol):
    """Turns chats into token ids for readers of prompts."""

    folder: Path
    vocab_size: int
    images: PromptImages | None
    """How the model sees images; None: it sees none."""

    def render(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> str:
        """Return the text that the model reads: the chat template applied."""

    def encode_chats(
        self,
        chats: Sequence[Sequence[Message]],
        *,
        tools: Sequence[Sequence[Any]] | None = None,
        most: int | None = None,
    ) -> list[list[int]]:
        """Return [num_chats][num_tokens]. `tools`: of each chat. `most`: a chat with more tokens
        may be truncated to no fewer than `most` + 1."""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of tokens, without special tokens."""


class TokenlessEncoder:
    """Implements PromptEncoder for a model that reads messages, and whose tokenizer is unknown:
    prompts have no tokens, so none is too long."""

    folder = Path()
    vocab_size = sys.maxsize
    """Unbounded: the model may have any token."""

    def __init__(self, *, images: PromptImages | None = None) -> None:
        """Take `images`, which checks the images of prompts; None: the model sees none."""
        self.images = images

    def render(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> str:
        """Return a text that differs whenever messages or tools differ."""
        return repr((messages, tools))

    def encode_chats(
        self,
        chats: Sequence[Sequence[Message]],
        *,
        tools: Sequence[Sequence[Any]] | None = None,
        most: int | None = None,
    ) -> list[list[int]]:
        """Return an empty list for each chat."""
        return [[] for _ in chats]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return no text: the tokens are unknown."""
        return ""
