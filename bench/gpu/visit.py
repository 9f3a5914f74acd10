"""What `miles` does on this machine's accelerator, in one visit:

    python bench/gpu/visit.py PHASE... [--device cpu] [--out FOLDER] [--budget-s SECONDS]

PHASE is a phase (ceilings, numerics, ...), a check (train.qwen3-0.6b), part1 .. part3, or all. Each
check runs in a process of its own with a limit of its own; each figure is one line of JSON in
FOLDER/lines.jsonl as soon as it is there, and one line for people on stdout. What a check could not
say is said for it: failed, timeout, not reached. `--device cpu` rehearses all of it in small. Makes
no report: `report.py` does.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from checks import PARTS, PHASES, Check, chosen
from lines import Record, Verdict
from running import DESCRIPTOR, GRACE_S, Running, adopt_orphans, end_by_exception, say_lines

HERE = Path(__file__).resolve().parent
KEPT_LINES, KEPT_LINES_OF_FAILURE = 30, 400
"""Of a check's log."""
SHORTEST_S = 2 * GRACE_S
"""With less time left, no check is begun."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phases", nargs="+", metavar="PHASE", help=", ".join(PHASES))
    parser.add_argument("--device", choices=("auto", "cuda", "rocm", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="for lines.jsonl, logs.txt")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="end by then, whatever is left"
    )
    options = parser.parse_args()
    try:
        options.checks = chosen(options.phases)
    except ValueError as error:
        names = ", ".join([*PHASES, *(f"part{part}" for part in PARTS), "all"])
        parser.error(f"`{error}` is no phase of a visit; choose from: {names}")
    return options


def device_kind() -> str:
    """What this machine has, by the prober that `miles` itself uses."""
    from milescli.platform.probe import probe

    return probe().kind


def main() -> int:
    """0 where there is nothing to mend, else 1."""
    options = parse()
    device = device_kind() if options.device == "auto" else options.device
    if DESCRIPTOR in os.environ:
        say_lines(options.checks[0], device)
        return 0
    adopt_orphans()
    end_by_exception()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.budget_s
    good = True
    with (
        (options.out / "lines.jsonl").open("a", encoding="utf-8") as lines,
        (options.out / "logs.txt").open("a", encoding="utf-8") as logs,
        tempfile.TemporaryDirectory(prefix="miles-visit-logs-") as log_dir,
    ):
        lines.write(json.dumps(_machine(device)) + "\n")
        for check in options.checks:
            log_path = Path(log_dir) / f"{check.name}.log"
            left_s = until - time.monotonic()
            running = Running(check=check, device=device, log_path=log_path)
            records = _not_reached(check) if left_s < SHORTEST_S else running.records(left_s)
            verdicts = set()
            for record in records:
                lines.write(record.to_json() + "\n")
                lines.flush()
                print(show(record), flush=True)
                verdicts.add(record.verdict)
            is_good = all(verdict.is_good for verdict in verdicts)
            _keep_log(log_path, logs, num_lines=KEPT_LINES if is_good else KEPT_LINES_OF_FAILURE)
            good &= is_good
    return 0 if good else 1


def _machine(device: str) -> dict[str, object]:
    """The first line of a visit; where the device does not even open, what was said of it."""
    command = "python bench/gpu/visit.py " + " ".join(sys.argv[1:])
    try:
        asked = [sys.executable, str(HERE / "machine.py")]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=180, check=True)
        seen = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        seen = {"problem": error.stderr[-2000:]}
    except subprocess.TimeoutExpired:
        seen = {"problem": "torch did not open the device within 180 s"}
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {"visit": command, "when": when, "device": device, **seen}


def _not_reached(check: Check) -> Iterator[Record]:
    for name in check.lines:
        yield Record(check=check.name, name=name, verdict=Verdict.NOT_REACHED, seconds=0.0)


def _keep_log(log_path: Path, logs: TextIO, *, num_lines: int) -> None:
    if log_path.exists():
        kept = log_path.read_text(errors="replace").splitlines()[-num_lines:]
        logs.write("\n".join([f"== {log_path.stem}", *kept, ""]))


def show(record: Record) -> str:
    """For people."""
    figures = [
        f"{label} {value:.6g}"
        for label, value in (("predicted", record.predicted), ("measured", record.measured))
        if value is not None
    ]
    parts = [f"{record.verdict:<11} {record.check}.{record.name:<24} {', '.join(figures)}"]
    parts += [record.unit] if figures else []
    parts += [f"[{record.bound}]"] if record.bound else []
    parts += [f"({record.note})"] if record.note else []
    return " ".join([*parts, f"{record.seconds:.1f} s"])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the lines so far are kept", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if DESCRIPTOR in os.environ or error.errno not in (errno.ENOSPC, errno.EACCES, errno.EROFS):
            raise
        sys.exit(f"error: a line cannot be kept\n  why: {error}\n  fix: --out FOLDER with room")
