"""Fixtures that the tests of rollout share with those of data."""

from __future__ import annotations

from tests.data.conftest import jsonl, tokenizer

__all__ = ["jsonl", "tokenizer"]
