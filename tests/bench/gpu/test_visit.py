"""The rehearsal: the visit on a CPU in small, with real engines, trainers and runs. Whole runs that
other tests make as well (the quickstart, a killed engine) are left to them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checks import CHECKS, PARTS, PHASES, chosen
from lines import Record

from tests.bench.gpu.conftest import BENCH

WORDS = [
    "ceilings",
    "numerics",
    "nccl",
    "train.qwen3-0.6b",
    "train.small-moe",
    "memory.qwen3-0.6b",
    "engine",
    "publish",
    "sleep",
    "colocated.qwen3-0.6b",
]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder of the lines, and what was shown."""
    out = tmp_path_factory.mktemp("rehearsal")
    command = [sys.executable, str(BENCH / "visit.py"), *WORDS, "--device", "cpu"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=2000
    )
    _, *lines = (out / "lines.jsonl").read_text().splitlines()
    amiss = [record for record in map(Record.from_json, lines) if not record.verdict.is_good]
    logs = (out / "logs.txt").read_text()[-8000:]
    assert (done.returncode, amiss) == (0, []), f"{amiss}\n{done.stderr}\n{done.stdout}\n{logs}"
    return out, done.stdout


@pytest.mark.engine
@pytest.mark.trainer
@pytest.mark.ray
def test_a_visit_says_every_line_and_none_is_to_be_mended(rehearsed: tuple[Path, str]) -> None:
    out, shown = rehearsed
    head, *lines = map(json.loads, (out / "lines.jsonl").read_text().splitlines())
    assert head["device"] == "cpu" and head["versions"]["torch"]
    said = [(line["check"], line["name"]) for line in lines]
    assert said == [(check.name, name) for check in chosen(WORDS) for name in check.lines]
    # what a CPU cannot be held to says so
    assert {line["verdict"] for line in lines} <= {"ok", "measured", "rehearsed", "skipped"}
    assert all(line["note"] for line in lines if line["verdict"] == "skipped")
    assert len(shown.splitlines()) == len(lines)


def test_the_table_names_functions_that_are_there_and_parts_hold_all_phases() -> None:
    # in a process of their own: they load torch, SGLang's client and Megatron
    lookup = (
        "import checks, importlib\n"
        "for check in checks.CHECKS:\n"
        "    getattr(importlib.import_module(f'checks.{check.phase}'), check.function)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", lookup], cwd=BENCH, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert tuple(phase for part in PARTS.values() for phase in part) == PHASES
    assert chosen(["all"]) == list(CHECKS)
    assert [check.name for check in chosen(["faults", "part1"])][-1] == "faults"
