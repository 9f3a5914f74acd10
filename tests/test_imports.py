"""What is loaded when: help, completion and refusals load none of the heavy libraries. Each case is
a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

HEAVY = ("torch", "ray", "sglang", "megatron", "transformers", "numpy", "huggingface_hub")
VERBS = (
    "launch",
    "resume",
    "eval",
    "export",
    "convert",
    "models",
    "data",
    "doctor",
    "recipes",
    "runs",
    "ui",
    "help",
)

PROBE = """
import json, sys
from milescli.commands.app import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
loaded = [name for name in {heavy!r} if name in sys.modules]
sys.stderr.write("\\nLOADED " + json.dumps([code, loaded]))
"""


def loaded_after(*argv: str, **environment: str) -> tuple[int, list[str], str]:
    """(exit code, heavy libraries that are loaded, stdout) of one command line."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(heavy=HEAVY), *argv],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert "LOADED " in done.stderr, done.stderr
    code, heavy = json.loads(done.stderr.rpartition("LOADED ")[2])
    return code or 0, heavy, done.stdout


@pytest.mark.parametrize(
    "verb", [[], *([name] for name in VERBS)], ids=lambda verb: " ".join(verb) or "miles"
)
def test_help_loads_nothing_heavy(verb: list[str]) -> None:
    code, heavy, stdout = loaded_after(*verb, "--help")
    assert (code, heavy) == (0, [])
    assert "Usage" in stdout


@pytest.mark.parametrize(
    "argv",
    [[], ["recipes"], ["help", "recipe"], ["recipes", "show", "quickstart"], ["--version"]],
    ids=" ".join,
)
def test_pages_load_nothing_heavy(argv: list[str]) -> None:
    assert loaded_after(*argv)[:2] == (0, [])


def test_conversion_and_export_load_no_megatron() -> None:
    probe = (
        "import sys, milescli.conversion.convert, milescli.runtime.export; sys.exit('megatron' "
        "in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe], timeout=200, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        ("miles la", "launch"),
        ("miles launch --recipe quick", "quickstart-moe"),
        ("miles launch --set train.optimizer.l", "train.optimizer.lr="),
        ("miles resume ", ""),
    ],
)
def test_completion_loads_nothing_heavy(words: str, offers: str) -> None:
    typed = words.split(" ")
    code, heavy, stdout = loaded_after(
        _MILES_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(typed) - 1)
    )
    assert (code, heavy) == (0, [])
    assert offers in stdout


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["launch", "--recipe", "nothing"], 3),
        (["launch", "--recipe", "quickstart", "--set", "train.stps=3"], 3),
        (["launch", "--recipe", "quickstart", "--set", "train.steps=many"], 3),
        (["launch", "--recipe", "quickstart", "--set", "train.surrogate=ppo_clop"], 3),
        (["launch", "--recipe", "quickstart", "--set", "data.prompts=nothing.jsonl"], 3),
        (["launch"], 2),
        (["eval", "no-such-run"], 6),
        (["data", "check", "nothing.jsonl"], 3),
        (["data", "check", os.devnull], 3),
        (["data", "check", "quickstart", "--set", "data.eval=nothing.jsonl"], 3),
        (["doctor", "--recipe", "nothing"], 3),
        (["convert", "hf-to-megatron", "somewhere"], 2),
        (["convert", "megatron-to-hf", "a", "b", "--max-shard-size", "big"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_refusals_come_before_anything_heavy(argv: list[str], code: int) -> None:
    assert loaded_after(*argv)[:2] == (code, [])


def test_a_dry_run_loads_nothing_heavy() -> None:
    assert loaded_after("launch", "--recipe", "quickstart", "--dry-run")[:2] == (0, [])


def test_a_worker_of_a_reward_loads_no_schema() -> None:
    probe = "import sys, milescli.rollout.rewards.forms; print('pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout == "False\n"
