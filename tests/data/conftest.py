"""One real tokenizer, made once, and a writer of data files: for tests of data and of rollout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tasks import TASKS, make_rows
from milescli.data.tokenizer import ChatTokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Trained on the sums task."""
    texts = [f"{row.prompt}\n{row.demonstration}" for row in make_rows(TASKS["sums-heldout"], 0)]
    return load_tokenizer(make_scratch_tokenizer(texts, 512, tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (objects, or raw lines as bytes) to a file."""

    def write(*rows: object, name: str = "data.jsonl") -> Path:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path = tmp_path / name
        path.write_bytes(b"\n".join(lines) + b"\n")
        return path

    return write
