"""From lines to what is kept of a visit: results, tables, the planner's constants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checks import CHECKS
from lines import Record, Verdict
from report import BEGIN, END, read, tables, to_mend, write

ROOT = Path(__file__).resolve().parents[3]
VISIT = {
    "visit": "python bench/gpu/visit.py all",
    "when": "2026-01-02T03:04:05+00:00",
    "device": "cuda",
    "device_name": "NVIDIA H100 80GB HBM3",
    "device_memory_bytes": 85_000_000_000,
    "versions": {"torch": "2.11.0"},
    "commit": "abc1234",
}
RATE = 3.35e12


def decode(name: str, *, step_s: float, size: float) -> Record:
    figures = {"step_s": step_s, "bytes_per_step": size, "sheet_bytes_per_s": RATE}
    return record("engine", name, figures=figures)


def record(check: str, name: str, *, verdict: Verdict = Verdict.MEASURED, **rest) -> Record:
    return Record(check=check, name=name, verdict=verdict, seconds=1.0, **{"measured": 1.0, **rest})


RECORDS = [
    record("ceilings", "copy", verdict=Verdict.MISSED, measured=1.5, predicted=3.35, note="a|b"),
    record("ceilings", "copy", verdict=Verdict.OK, measured=2.9, predicted=3.35),
    record("train.qwen3-1.7b", "miles", figures={"train_share": 0.31}),
    record("train.small-moe", "miles", figures={"expert_share": 7.0}),
    record("memory.qwen3-0.6b", "context", figures={"trainer_context_bytes": 1.0e9}),
    record("memory.qwen3-1.7b", "context", figures={"trainer_context_bytes": 1.1e9}),
    # a share of 0.5 and 3 ms beside it
    decode("decode_1", step_s=1.2e9 / (RATE * 0.5) + 0.003, size=1.2e9),
    decode("decode_512", step_s=9.2e9 / (RATE * 0.5) + 0.003, size=9.2e9),
    record(
        "publish",
        "publish",
        figures={"publish_s": 3.4e9 / (RATE * 0.5) + 0.07, "size_bytes": 3.4e9, "num_buckets": 7},
    ),
    record("sleep", "trainer_sleep", figures={"bytes_per_s": 20e9}),
    record("sleep", "trainer_wake", figures={"bytes_per_s": 30e9}),
    record("faults", "resumed", verdict=Verdict.TIMEOUT, measured=None, note="after 300 s"),
]


def visit_file(folder: Path, *, visit: dict = VISIT, name: str = "lines.jsonl") -> Path:
    lines = [json.dumps(visit), *(each.to_json() for each in RECORDS)]
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with the two files that a report changes."""
    for file in ("docs/gpu.md", "milescli/plan/measured.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    (tmp_path / "milescli/plan/measured.json").write_text('{"H200": {"train_share": 0.4}}')
    return tmp_path


def test_all_lines_are_kept_also_the_bad_ones(root: Path) -> None:
    report = read([visit_file(root)])
    kept, *_ = write(report, root=root)
    assert kept.name == "2026-01-02-nvidia-h100-80gb-hbm3.json"
    content = json.loads(kept.read_text())
    assert len(content["records"]) == len(RECORDS) and content["visits"] == [VISIT]
    assert to_mend(report.last().values()) == ["timeout: faults.resumed after 300 s"]


def test_the_docs_show_every_announced_line_and_what_was_not_visited(root: Path) -> None:
    write(read([visit_file(root)]), root=root)
    docs = (root / "docs/gpu.md").read_text()
    table = docs.split(BEGIN)[1].split(END)[0]
    assert "| copy | 2.9 | 3.35 |  | ok |" in table
    assert "| resumed | (after 300 s) |  |  | timeout |" in table
    assert table.count("not visited") == sum(len(check.lines) for check in CHECKS) - 11
    assert "No visit has been made" not in docs
    again = read([visit_file(root)])
    write(again, root=root)
    assert (root / "docs/gpu.md").read_text() == docs


def test_the_planner_gets_what_was_measured_and_keeps_the_rest(root: Path) -> None:
    write(read([visit_file(root)]), root=root)
    rows = json.loads((root / "milescli/plan/measured.json").read_text())
    assert rows["H200"] == {"train_share": 0.4}
    assert rows["H100"] == {
        "source": "bench/gpu/results/2026-01-02-nvidia-h100-80gb-hbm3.json",
        "train_share": 0.31,  # that of the experts is no share
        "decode_share": 0.5,
        "decode_step_s": 0.003,
        "host_bandwidth": 24_000_000_000,
        "trainer_context": 1.1e9,
        "bucket_s": 0.01,
    }


def test_nothing_is_kept_of_a_rehearsal_and_files_of_two_devices_are_refused(root: Path) -> None:
    rehearsal = visit_file(root, visit=VISIT | {"device": "cpu"}, name="cpu.jsonl")
    assert read([rehearsal]).is_rehearsal
    assert "not visited" in tables(read([rehearsal]))
    other = visit_file(root, visit=VISIT | {"device_name": "NVIDIA H200"}, name="other.jsonl")
    with pytest.raises(ValueError, match="several devices"):
        read([visit_file(root), other])
    unopened = {key: value for key, value in VISIT.items() if not key.startswith("device_")}
    failed = visit_file(root, visit=unopened | {"problem": "no driver"}, name="failed.jsonl")
    assert read([visit_file(root), failed]).device == VISIT["device_name"]
    (root / "junk").write_text("hello\n")
    with pytest.raises(ValueError, match="junk:1 is no line of a visit"):
        read([root / "junk"])
