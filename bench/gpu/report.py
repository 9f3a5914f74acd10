"""From the lines of a visit to what is kept of it:

    python bench/gpu/report.py FOLDER/lines.jsonl...

writes `results/DATE-DEVICE.json` (every line, also the bad ones), the tables of docs/gpu.md, and,
where the device is one that the planner knows, its constants in milescli/plan/measured.json. Lines
of a rehearsal are shown and kept nowhere.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from checks import CHECKS
from constants import constants_of
from lines import Record, Verdict

from milescli.platform.machine import Device, model_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("bench/gpu/results")
DOCS = Path("docs/gpu.md")
MEASURED = Path("milescli/plan/measured.json")
BEGIN, END = "<!-- results: written by bench/gpu/report.py -->", "<!-- end of results -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One or more visits to one device on one day."""

    visits: list[dict]
    """The first line of each visit: command, commit, versions."""
    records: list[Record]
    """In the order in which they were written."""

    @property
    def device(self) -> str:
        """`NVIDIA H100 80GB HBM3`"""
        names = [visit["device_name"] for visit in self.visits if "device_name" in visit]
        return names[-1] if names else self.visits[-1]["device"]

    @property
    def name(self) -> str:
        """`2026-11-22-nvidia-h100-80gb-hbm3`"""
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        return f"{self.visits[-1]['when'][:10]}-{slug}"

    @property
    def is_rehearsal(self) -> bool:
        """On a CPU."""
        return any(visit["device"] == "cpu" for visit in self.visits)

    @property
    def model(self) -> str | None:
        """As `8xNAME` says; None for a device that the planner does not know."""
        memory = int(self.visits[-1].get("device_memory_bytes", 0))
        return model_of(Device(index=0, name=self.device, memory_bytes=memory, arch=""))

    def last(self) -> dict[tuple[str, str], Record]:
        """The newest line of each figure: what was mended was measured anew."""
        return {(record.check, record.name): record for record in self.records}


def read(paths: Sequence[Path]) -> Report:
    """Raises ValueError where a file is none of a visit's, or they are of several devices."""
    visits, records = [], []
    for path in paths:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                raw = json.loads(text)
                if "visit" in raw:
                    visits.append(raw)
                else:
                    records.append(Record.from_json(text))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number} is no line of a visit: {error}") from error
    if not visits or not records:
        raise ValueError(f"{', '.join(map(str, paths))}: no visit, or none with a line")
    # a visit that could not even open the device has no name of it
    devices = {visit["device_name"] for visit in visits if "device_name" in visit}
    if len(devices) > 1:
        raise ValueError(f"lines of several devices: {', '.join(sorted(devices))}")
    return Report(visits=visits, records=records)


def tables(report: Report) -> str:
    """For docs/gpu.md: one table for each check, in their order; every announced line is there."""
    last = report.last()
    visit = report.visits[-1]
    versions = ", ".join(f"{name} {version}" for name, version in visit.get("versions", {}).items())
    commit = visit.get("commit") or "not known"
    parts = [f"### {report.device}, {visit['when'][:10]}", ""]
    parts += [f"{versions}; commit {commit}. All lines: `{RESULTS}/{report.name}.json`; commands:"]
    parts += ["", *[f"    {other['visit']}" for other in report.visits], ""]
    for check in CHECKS:
        parts += [f"**{check.name}**", ""]
        parts += ["| figure | measured | predicted | bound | verdict |", "|---|---|---|---|---|"]
        for name in check.lines:
            parts.append(_row(name, last.get((check.name, name))))
        parts.append("")
    return "\n".join(parts)


def _row(name: str, record: Record | None) -> str:
    if record is None:
        return f"| {name} | | | | not visited |"
    note = f" ({record.note})" if record.note else ""
    cells = (
        name,
        f"{_figure(record.measured)} {record.unit if record.measured is not None else ''}{note}",
        _figure(record.predicted),
        record.bound,
        record.verdict.value,
    )
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def write(report: Report, *, root: Path = ROOT) -> list[Path]:
    """The three; returns what was written."""
    kept = root / RESULTS / f"{report.name}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    content = {"visits": report.visits, "records": [asdict(record) for record in report.records]}
    kept.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    docs = root / DOCS
    text = docs.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    docs.write_text(f"{before}{BEGIN}\n{tables(report)}\n{END}{after}", encoding="utf-8")
    written = [kept, docs]
    found = constants_of(report.last())
    if report.model and found:
        file = root / MEASURED
        rows: dict[str, Mapping] = json.loads(file.read_text(encoding="utf-8"))
        rows[report.model] = {"source": f"{RESULTS}/{kept.name}", **found}
        file.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        written.append(file)
    return written


def to_mend(records: Iterable[Record]) -> list[str]:
    """Lines that are not good, for people."""
    return [
        f"{record.verdict.value}: {record.check}.{record.name} {record.note}".rstrip()
        for record in records
        if not record.verdict.is_good
    ]


def main() -> int:
    """0, or 1 where something is to be mended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", nargs="+", type=Path)
    options = parser.parse_args()
    try:
        report = read(options.lines)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if report.is_rehearsal:
        print(tables(report))
        print("a rehearsal on a CPU: nothing is kept of it")
    else:
        for path in write(report):
            print(f"written: {path.relative_to(ROOT)}")
    wrong = to_mend(report.last().values())
    print("\n".join(wrong) or "nothing to mend")
    counts = dict.fromkeys(Verdict, 0)
    for record in report.last().values():
        counts[record.verdict] += 1
    print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
