"""`make chaos SEED=1 TRIALS=20 FAULTS=engine,rank`: trials one after the other, a line each, and a
table at the end. Exit code 1 where one fails; `SEED=7 TRIALS=1` with the same FAULTS repeats number
7."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.chaos.faults import FAULTS, chosen, trial
from tests.chaos.place import Place
from tests.chaos.trial import Outcome, perform


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first trial")
    parser.add_argument("--trials", type=int, default=20, help="how many trials")
    parser.add_argument("--faults", default="", help="names or groups, with commas; all")
    parser.add_argument("--folder", type=Path, help="where they run, kept; a temporary one")
    parser.add_argument("--list", action="store_true", help="what there is")
    options = parser.parse_args()
    if options.list:
        for fault in FAULTS:
            print(f"{fault.group:<12}{fault.name:<22}{', '.join(fault.moments)}")
        return 0
    try:
        faults = chosen([name for name in options.faults.split(",") if name])
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as temporary:
        place = Place(options.folder or Path(temporary))
        outcomes = []
        for seed in range(options.seed, options.seed + options.trials):
            began = time.monotonic()
            outcome = perform(trial(faults, seed), place)
            outcomes.append(outcome)
            print(f"{line(outcome)}  ({time.monotonic() - began:.0f} s)", flush=True)
            for wrong in outcome.wrong:
                print(f"    {wrong}", flush=True)
            if outcome.wrong:
                print(f"    again: make chaos SEED={seed} TRIALS=1 FAULTS={options.faults}")
    print("\n".join(["", *table(outcomes)]))
    return int(any(outcome.wrong for outcome in outcomes))


def line(outcome: Outcome) -> str:
    """Of one trial."""
    asked = outcome.trial
    took = "-" if outcome.next_step_s is None else f"{outcome.next_step_s:.1f} s"
    verdict = "FAILED" if outcome.wrong else "equal, nothing left"
    if outcome.skipped:
        verdict = f"skipped: {outcome.skipped}"
    kills = f" after {outcome.kills} kills" if asked.fault.times > 1 else ""
    return (
        f"seed {asked.seed:<4} {asked.fault.name:<20} {asked.moment:<8} {outcome.instant:<36} "
        f"{outcome.ending or 'no end':<10} {took:>7}  {verdict}{kills}"
    )


def table(outcomes: list[Outcome]) -> list[str]:
    """A line for each fault: how many trials, and from the harm to the next step."""
    by_fault = defaultdict[str, list[Outcome]](list)
    for outcome in outcomes:
        by_fault[outcome.trial.fault.name].append(outcome)
    lines = [
        "| fault | trials | failed | seconds to the next step, or the end |",
        "|---|---|---|---|",
    ]
    for name, those in by_fault.items():
        failed = sum(bool(outcome.wrong) for outcome in those)
        seconds = sorted(o.next_step_s for o in those if o.next_step_s is not None)
        told = " to ".join(f"{s:.1f}" for s in dict.fromkeys([*seconds[:1], *seconds[-1:]]))
        lines.append(f"| {name} | {len(those)} | {failed} | {told or '-'} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
