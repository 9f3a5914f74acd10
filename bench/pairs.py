"""Two programs measured in turns, and one table of their ratios. Standard library alone: it is
imported by the process that only waits. Used by every benchmark of this folder that has a peer."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

Figures = Mapping[str, float]
"""What one run of one side measured, by name."""
PACKAGES = ("miles-cli", "torch", "transformers", "trl", "sglang", "megatron-core", "ray")
SIZES = ("MB", "MiB", "GiB")
"""Units of which there is less or more; nothing is faster by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: a figure that both sides measured."""

    what: str
    unit: str
    better: Literal["more", "less", "neither"]
    """neither: it says that both did the same, and is no speed."""
    miles: Sequence[float]
    """[num_pairs] in the order of the pairs."""
    peer: Sequence[float] = ()
    """[num_pairs] or, where there is no peer, empty."""

    @property
    def ratios(self) -> list[float]:
        """[num_pairs] miles / peer, of runs that were neighbours."""
        return [ours / theirs for ours, theirs in zip(self.miles, self.peer, strict=True) if theirs]

    @property
    def ratio(self) -> float | None:
        """Median of miles / median of the peer; None where there is no peer."""
        theirs = statistics.median(self.peer) if self.peer else 0.0
        return statistics.median(self.miles) / theirs if theirs else None

    @property
    def verdict(self) -> str:
        """The ratio in words; miles is the subject."""
        if self.ratio is None:
            return "no peer" if not self.peer else ""
        if self.better == "neither" or not self.ratio:
            return ""
        speed = self.ratio if self.better == "more" else 1 / self.ratio
        is_size = self.unit in SIZES
        if abs(speed - 1) < 0.02:
            return "as much" if is_size else "as fast"
        better, worse = ("less", "more") if is_size else ("faster", "slower")
        times, word = (speed, better) if speed > 1 else (1 / speed, worse)
        return f"{times:.2f} x {word}"

    def as_record(self) -> dict[str, object]:
        """For the file of `--json`."""
        record: dict[str, object] = {
            "what": self.what,
            "unit": self.unit,
            "better": self.better,
            "pairs": len(self.miles),
            "miles": list(self.miles),
            "peer": list(self.peer),
            "miles_median": statistics.median(self.miles),
            "peer_median": statistics.median(self.peer) if self.peer else None,
            "ratio": self.ratio,
        }
        if self.ratio is not None:
            record |= {"ratio_min": min(self.ratios), "ratio_max": max(self.ratios)}
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it was measured."""

    cores: int
    """That this process may use."""
    cpu: str
    load_before: float
    """Of the last minute, before the first run."""
    versions: Mapping[str, str]

    @classmethod
    def read(cls) -> Machine:
        """This one, now."""
        return cls(
            cores=len(os.sched_getaffinity(0)),
            cpu=_cpu_name(),
            load_before=round(os.getloadavg()[0], 2),
            versions={name: found for name in PACKAGES if (found := _version(name))},
        )

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {found}" for name, found in self.versions.items())
        return (
            f"{self.cores} cores ({self.cpu}), load before {self.load_before:.2f}, Python "
            f"{platform.python_version()}\n{packages}"
        )


@dataclass(slots=True, kw_only=True)
class Table:
    """The result of a benchmark."""

    peer: str
    """What the peer is, for the reader."""
    machine: Machine
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What differs between the sides."""

    def add(
        self,
        pairs: Sequence[tuple[Figures, Figures]],
        *,
        name: str,
        what: str,
        unit: str,
        better: Literal["more", "less", "neither"],
    ) -> None:
        """A row of the figure `name`, as `take_turns` measured it; a peer may lack it."""
        ours, theirs = zip(*pairs, strict=True)
        self.rows.append(
            Row(
                what=what,
                unit=unit,
                better=better,
                miles=[figures[name] for figures in ours],
                peer=[figures[name] for figures in theirs if name in figures],
            )
        )

    def __str__(self) -> str:
        head = ("what", "miles", "peer", "miles / peer", "pairs", "miles is")
        lines = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        body = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        rule = "-" * max(map(len, body))
        text = [str(self.machine), f"peer: {self.peer}", "", body[0], rule, *body[1:], ""]
        return "\n".join(text + [f"* {note}" for note in self.notes])

    def write(self, file: Path) -> None:
        """All figures of all pairs."""
        record = {
            "peer": self.peer,
            "machine": {
                "cores": self.machine.cores,
                "cpu": self.machine.cpu,
                "load_before": self.machine.load_before,
                "versions": dict(self.machine.versions),
            },
            "rows": [row.as_record() for row in self.rows],
            "notes": self.notes,
        }
        file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def take_turns(
    miles: Callable[[int], Figures],
    peer: Callable[[int], Figures],
    *,
    num_pairs: int,
    num_warmups: int = 1,
    say: Callable[[str], None] = partial(print, flush=True),
) -> list[tuple[Figures, Figures]]:
    """[num_pairs] (of miles, of the peer). Each side is called with the number of the round, so
    that both can take the same data; who goes first alternates; warm-up rounds are not counted."""
    pairs = []
    for number in range(num_warmups + num_pairs):
        if number % 2:
            theirs = peer(number)
            ours = miles(number)
        else:
            ours = miles(number)
            theirs = peer(number)
        counted = number >= num_warmups
        title = f"pair {number - num_warmups + 1}/{num_pairs}" if counted else "warm-up"
        say(f"{title}: miles {_shown(ours)} | peer {_shown(theirs)}")
        if counted:
            pairs.append((ours, theirs))
    return pairs


def command_line(description: str | None, *, num_pairs: int) -> argparse.ArgumentParser:
    """With the options that all benchmarks have. `description`: the docstring of one."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=num_pairs, help="counted turns of both sides")
    parser.add_argument("--json", type=Path, help="write every figure of every pair to this file")
    return parser


def report(table: Table, options: argparse.Namespace) -> None:
    """Print the table, and write it where `--json` says."""
    print(f"\n{table}", flush=True)
    if options.json:
        table.write(options.json)


def _cells(row: Row) -> tuple[str, ...]:
    spread = "-"
    if row.ratio is not None:
        spread = f"{row.ratio:.2f} ({min(row.ratios):.2f}..{max(row.ratios):.2f})"
    return (
        f"{row.what}, {row.unit}",
        _median(row.miles),
        _median(row.peer) if row.peer else "-",
        spread,
        str(len(row.miles)),
        row.verdict,
    )


def _median(values: Sequence[float]) -> str:
    middle = _number(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({_number(min(values))}..{_number(max(values))})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _shown(figures: Figures) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in figures.items())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
