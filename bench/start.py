"""How long a command takes until it does something, beside TRL and plain transformers, in turns:

    python bench/start.py [--pairs 5] [--folder DIR]

Seconds from `miles launch` to its first optimizer step, evaluation before it included, and of a
whole `miles eval` and `miles doctor`, on the task of `rl.py`. The peers: TRL's GRPOTrainer until
its first step, and a script that loads the model and evaluates it with transformers; the doctor has
none.
"""

from __future__ import annotations

from pathlib import Path

from pairs import Machine, Table, command_line, report, take_turns
from rl import (
    DIFFERENCES,
    TRL,
    add_task_options,
    miles_command,
    peer_command,
    run_miles,
    run_trl,
    task_folder,
    timed,
    unique,
)


def start_miles(folder: Path, name: str) -> dict[str, float]:
    """Launch, evaluate, see the doctor."""
    first_s = run_miles(folder, name, num_steps=1)["first_step_s"]
    run = str(folder / "runs" / name)
    evaluation = timed(miles_command("eval", run, "--quiet"), log=folder / "miles.log")
    doctor = timed(miles_command("doctor", "--quiet"), log=folder / "miles.log")
    return {
        "first_step_s": first_s,
        "eval_s": evaluation.seconds,
        "doctor_s": doctor.seconds,
    }


def start_peer(folder: Path, name: str) -> dict[str, float]:
    """Launch and evaluate."""
    first_s = run_trl(folder, name, num_steps=1)["first_step_s"]
    model = str(folder / "trl" / name / "model")
    command = peer_command("evaluate", "--folder", str(folder), "--out", model)
    return {"first_step_s": first_s, "eval_s": timed(command, log=folder / "trl.log").seconds}


def main() -> None:
    """The command line."""
    parser = command_line(__doc__, num_pairs=5)
    add_task_options(parser)
    options = parser.parse_args()
    result = Table(peer=f"{TRL}; for the evaluation transformers.generate", machine=Machine.read())
    result.notes.append(DIFFERENCES)
    with task_folder(options) as folder:
        pairs = take_turns(
            lambda number: start_miles(folder, unique(folder, number)),
            lambda number: start_peer(folder, unique(folder, number)),
            num_pairs=options.pairs,
        )
    rows = {
        "first_step_s": "command to first optimizer step",
        "eval_s": "miles eval, command to exit",
        "doctor_s": "miles doctor, command to exit",
    }
    for name, what in rows.items():
        result.add(pairs, name=name, what=what, unit="s", better="less")
    report(result, options)


if __name__ == "__main__":
    main()
