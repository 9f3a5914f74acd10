"""Runs modules in processes of their own, forked from one that has imported torch and transformers:
that takes four seconds of a core, more than most of them compute."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900.0
# threads that wait for each other spin, which takes minutes where others want the cores
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "transformers", "transformers.modeling_utils"),
        *("transformers.generation", "transformers.models.auto.modeling_auto"),
        *("transformers.masking_utils", "transformers.modeling_layers"),
    ]
)


def run_module(module: str, *arguments: object, folder: Path = ROOT) -> str:
    """What `python -m module arguments` prints, called in `folder`. Raises AssertionError where it
    fails."""
    with tempfile.TemporaryDirectory() as own, mock.patch.dict(os.environ, ENVIRONMENT):
        said, failure = Path(own) / "said", Path(own) / "failure"
        words = [module, *map(str, arguments)]
        process = _FORKING.Process(target=_run, args=(words, str(folder), str(said), str(failure)))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode == 0, f"{module}: {process.exitcode}\n{failure.read_text()[-4000:]}"
        return said.read_text()


def _run(words: list[str], folder: str, said: str, failure: str) -> None:
    for name, descriptor in ((said, 1), (failure, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(folder)
    sys.path.insert(0, str(ROOT))
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
