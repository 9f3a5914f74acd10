"""Which variables of the environment are secrets, so that a process which needs none inherits
none. Knows names alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

WORDS = frozenset(
    {"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS", "PAT"}
)
"""Of names, between underscores: a TOKENIZERS_PARALLELISM or an NCCL_IB_PKEY is none."""
OURS = ("MILES_", "RAY_")
"""Names that begin so are of the run itself: its mark, and Ray's."""


def is_secret(name: str) -> bool:
    """WANDB_API_KEY, HF_TOKEN, db_password."""
    return not name.startswith(OURS) and not WORDS.isdisjoint(name.upper().split("_"))


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process inherits that calls nobody outside."""
    return {name: value for name, value in environ.items() if not is_secret(name)}


@contextmanager
def hidden_secrets() -> Iterator[None]:
    """What is started inside inherits none of this process's secrets."""
    hidden = {name: value for name, value in os.environ.items() if is_secret(name)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
