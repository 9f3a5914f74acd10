"""A hub on loopback that has a data set and a model, and a client with an empty cache."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.loopback_hub import LoopbackHub, client_of, loopback_hub

CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# Sums
"""


def parquet_of(*questions: str) -> bytes:
    """A file of rows whose answer is always 1."""
    buffer = io.BytesIO()
    pq.write_table(
        pa.table({"question": list(questions), "answer": ["#### 1"] * len(questions)}), buffer
    )
    return buffer.getvalue()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """`org/sums`, whose training split has two parts, and `org/tiny`."""
    with loopback_hub() as served:
        client_of(served, cache=tmp_path / "cache", monkeypatch=monkeypatch)
        served.files["datasets/org/sums"] = {
            "README.md": CARD,
            "main/train-00000-of-00002.parquet": parquet_of("1+0?", "0+1?"),
            "main/train-00001-of-00002.parquet": parquet_of("2-1?"),
            "main/test-00000-of-00001.parquet": parquet_of("1*1?"),
            "socratic/train-00000-of-00001.parquet": parquet_of("why?"),
            "load.py": b"raise SystemExit('remote code')",
        }
        served.files["models/org/tiny"] = {
            "config.json": b'{"model_type": "qwen3"}',
            "model.safetensors": b"x" * 4096,
            "original/model.safetensors": b"y" * 4096,
            "pytorch_model.bin": b"z" * 4096,
        }
        yield served
