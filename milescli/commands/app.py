"""`miles`: the entry point. Runs a verb, prints errors in three parts, and turns them into exit
codes.

The verbs live in their own files.
"""

from __future__ import annotations

import difflib
import errno
import os
import platform
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from milescli import __version__
from milescli.commands import (
    algorithms,
    chat,
    compare,
    convert,
    data,
    doctor,
    env,
    evaluate,
    export,
    fork,
    help,
    importing,
    launch,
    logs,
    mcp,
    models,
    note,
    plugins,
    profile,
    recipes,
    report,
    resume,
    rewards,
    rm,
    runs,
    serve,
    simulate,
    status,
    stop,
    sweep,
    ui,
    why,
)
from milescli.commands.driving import record_command_line, with_typed_command
from milescli.commands.find_run import state_folder
from milescli.commands.options import JsonOption, QuietOption, add_verbs, fill_bare_options
from milescli.console.output import Mode, Output
from milescli.console.standard_streams import (
    ReaderGone,
    open_standard_streams,
    outlive_readers,
    print_nothing_more,
)
from milescli.core.driver_pipe import report_to_parent
from milescli.core.errors import DISK_FULL, ExitCode, MachineError, MilesError, NodesJoined
from milescli.core.files import path_error


def write_crash_report(error: BaseException, *, argv: list[str]) -> Path:
    """Write traceback, versions and command line to a file, and return its path. Falls back to the
    temporary directory."""
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    text = "\n".join(
        [
            f"miles {__version__}, Python {platform.python_version()}, {platform.platform()}",
            f"command: miles {' '.join(argv)}",
            f"directory: {_working_folder() or 'it does not exist any more'}",
            "",
            *traceback.format_exception(error),
        ]
    )
    state = None
    try:
        state = state_folder()
        state.mkdir(parents=True, exist_ok=True)
        file = state / name
        file.write_text(text, encoding="utf-8", errors="replace")
    except (OSError, RuntimeError) as problem:  # a home that is read-only or unknown
        print(f"cannot write to {state or 'the home folder'}: {problem}", file=sys.stderr)
        file = Path(tempfile.gettempdir()) / f"miles-{name}"
        file.write_text(text, encoding="utf-8", errors="replace")
    return file


FIRST_PAGE = """\
miles {version}: post-train language models with reinforcement learning

  miles doctor                        is this machine ready?
  miles models                        list the supported model families
  miles recipes                       list the built-in recipes
  miles algorithms                    list the RL algorithms
  miles envs, miles tools             list environments, and tools for agents
  miles plugins                       list what you can extend with your own code
  miles data check train.jsonl        check a data file before a run uses it
  miles import run_grpo.sh            make a recipe of another framework's configuration
  miles launch quickstart             train a model
  miles sweep sweep.yaml              search the best settings of a recipe
  miles simulate RECIPE --on 8xH100   predict speed and cost on another machine
  miles runs                          list your runs
  miles stop RUN, logs RUN, rm RUN    stop a run, read its logs, delete it
  miles note RUN TEXT                 keep a note about a run
  miles status RUN --watch            follow whether it learns and where time goes
  miles ui                            watch your runs in the browser
  miles mcp                           let an assistant read your runs
  miles report RUN --to FILE.html     write a report to share
  miles compare RUN OTHER             compare the settings and results of two runs
  miles why RUN                       explain why a run ended
  miles profile RUN                   profile a running run
  miles resume RUN --steps 80         continue a run
  miles rewards try RUN --reward R    try another reward on a run's samples
  miles fork RUN --step 20            start a new run from a checkpoint
  miles eval RUN                      evaluate its checkpoints
  miles chat RUN                      chat with a checkpoint
  miles serve RUN                     serve a checkpoint to OpenAI clients
  miles export RUN --to DIR           write a Hugging Face folder
  miles convert hf-to-megatron SRC DST   convert to a Megatron checkpoint, or back

`miles VERB --help` shows options and examples; `miles help` shows more pages.
"""


class UsageError(MilesError):
    """Reports that the command line was not understood."""

    exit_code = ExitCode.USAGE


class InternalFault(MilesError):
    """Reports a fault in miles itself."""

    exit_code = ExitCode.INTERNAL


app = typer.Typer(
    name="miles",
    help="Post-train language models with reinforcement learning, from a laptop CPU to a cluster.",
    epilog="`miles VERB --help` shows options and examples; `miles help` shows more pages.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    add_completion=True,
)
for module in (
    *(launch, sweep, simulate, resume, fork, evaluate, chat, serve, export, convert),
    *(data, rewards, importing, models, recipes, algorithms, env, plugins),
    *(runs, status, stop, logs, note, rm, ui, mcp, report, compare, why, profile, doctor, help),
):
    add_verbs(app, module)


@app.callback(invoke_without_command=True)
def first_page(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    json_mode: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Post-train language models with reinforcement learning, from a laptop CPU to a cluster."""
    output: Output = context.obj
    if version:
        output.json("version", {"version": __version__})
        output.text(f"miles {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        output.text(FIRST_PAGE.format(version=__version__))


def _program() -> Any:
    """Return the group of all verbs. In its help, flags show no type."""
    program = typer.main.get_command(app)
    for command in (program, *program.commands.values()):  # type: ignore[attr-defined]
        for option in command.params:
            if getattr(option, "is_flag", False):
                option.metavar = ""
    return program


def main(argv: list[str] | None = None) -> int:
    """Run one command line, and return the exit code. Only this function ends the program."""
    try:
        code = _run(argv)
    except SystemExit as ended:
        report_to_parent(code=ended.code)
        raise
    report_to_parent(code=int(code))
    return code


def _run(argv: list[str] | None) -> int:
    is_heard = open_standard_streams()
    if argv is None:
        _outlive_readers(sys.argv[1:])
        # else nothing is put in order where no run has begun that would catch it
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is by `nohup`
                signal.signal(number, lambda *_: sys.exit(ExitCode.TERMINATED))
    is_program = argv is None
    argv = fill_bare_options(sys.argv[1:] if argv is None else argv)
    record_command_line(argv, is_program=is_program)
    output = Output(_mode(argv))
    try:
        if not is_heard:
            raise UsageError(
                "standard output is closed",
                why="the process that started miles closed its standard output (`>&-`)",
                fix="keep it open, or discard the output: > /dev/null",
            )
        result = _program().main(args=argv, prog_name="miles", standalone_mode=False, obj=output)
        sys.stdout.flush()
        return result if isinstance(result, int) else ExitCode.DONE
    except MilesError as error:
        if isinstance(error, NodesJoined):  # nothing is wrong, and nothing is to be done
            output.note(f"{error.what}: {error.why}")
        else:
            output.error(with_typed_command(error))
        report_to_parent(error=error.as_dict())
        return error.exit_code
    except typer.TyperException as error:
        output.error(_usage_error(error, argv))
        return ExitCode.USAGE
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except ReaderGone:  # it has what it wanted (`miles runs | head`)
        print_nothing_more()
        return ExitCode.DONE
    except OSError as error:
        if error.errno in DISK_FULL:
            shown = _disk_full(error)
        elif isinstance(error, FileNotFoundError) and _working_folder() is None:
            shown = _no_working_folder()
        else:
            shown = path_error(error) or _internal_error(error, argv)
        output.error(shown)
        print_nothing_more()
        return shown.exit_code
    except Exception as error:  # a fault of ours: keep the traceback for the report, spare the user
        if (number := _number_in(error)) in DISK_FULL:
            shown = _disk_full(OSError(number, os.strerror(number)))
            output.error(shown)
            return shown.exit_code
        if isinstance(error, RuntimeError) and str(error) == _NO_HOME:
            shown = _no_home(argv)
            output.error(shown)
            return shown.exit_code
        output.error(_internal_error(error, argv))
        return ExitCode.INTERNAL


def _number_in(error: Exception) -> int:
    """Return the errno in the message of an error; 0 if there is none. Rust libraries such as
    safetensors raise errors that are not OSError: `I/O error: No space left on device (os error
    28)`."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else 0


def _outlive_readers(argv: list[str]) -> None:
    """Keep a command from failing when its terminal is closed. Commands that do work also continue
    when the reader of their output exits (`miles launch | head`); others end then. A run also
    continues when the disk of its output is full, or when nobody reads the output: its files
    contain everything."""
    verb = next((word for word in argv if not word.startswith("-")), "")
    ignored = (errno.EIO, *[errno.EPIPE] * (verb in _WORKS), *DISK_FULL * (verb in _RUNS))
    outlive_readers(ignored=ignored, patience_s=READER_TIMEOUT_S if verb in _RUNS else None)


_RUNS = ("launch", "resume", "sweep")
_WORKS = (*_RUNS, "eval", "convert", "export", "fork", "report")
READER_TIMEOUT_S = 60.0
"""Seconds that a run waits for a reader that no longer reads its output (Ctrl-S, a stalled
connection)."""


def _mode(argv: list[str]) -> Mode:
    """Return the output mode. It is read before parsing, so that errors in the command line are
    reported in this mode too."""
    options = argv[: argv.index("--")] if "--" in argv else argv
    if "--json" in options:
        return Mode.JSON
    return Mode.QUIET if "--quiet" in options or "-q" in options else Mode.HUMAN


OTHER_NAMES = {
    "launch": ("train", "run", "start", "rl", "sft", "grpo", "fit"),
    "resume": ("continue", "restart"),
    "simulate": ("sim", "predict", "estimate"),
    "sweep": ("tune", "search", "hpo", "optimize", "optimise"),
    "runs": ("list", "ls", "ps", "jobs"),
    "stop": ("kill", "cancel", "end"),
    "rm": ("delete", "remove", "del"),
    "logs": ("log", "tail"),
    "status": ("show", "info", "watch", "progress"),
    "compare": ("diff",),
    "eval": ("evaluate", "test", "benchmark"),
    "chat": ("talk", "ask", "generate", "infer"),
    "serve": ("api", "deploy", "host", "openai"),
    "export": ("save", "merge", "push"),
    "ui": ("web", "dashboard", "board", "view"),
    "doctor": ("check", "diagnose", "verify"),
    "recipes": ("recipe", "config", "configs", "templates"),
    "models": ("model", "families"),
    "algorithms": ("algorithm", "algos"),
    "envs": ("environments",),
    "plugins": ("plugin",),
}
"""Verb -> names for it in other programs."""


def _other_name_error(argv: list[str], verbs: Iterable[str]) -> MilesError | None:
    """Return the error for a verb that has another name, with the whole command line as its fix."""
    typed = next((word for word in argv if not word.startswith("-")), "")
    called = {name: right for right, others in OTHER_NAMES.items() for name in others}
    known = called.get(typed)
    like = difflib.get_close_matches(typed, [*verbs, *called], n=1, cutoff=0.7)
    right = known or next((called.get(name, name) for name in like), None)
    if right is None:
        return None
    return UsageError(
        f"there is no command `{typed}`",
        why=f"the command here is `miles {right}`" if known else f"the nearest name is `{right}`",
        fix=shlex.join(["miles", right, *argv[argv.index(typed) + 1 :]]),
    )


def _usage_error(error: typer.TyperException, argv: list[str]) -> MilesError:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "miles"
    message = error.format_message().rstrip(".")
    is_unknown = command == "miles" and message.startswith("No such command")
    if is_unknown and (found := _other_name_error(argv, _program().commands)):
        return found
    return UsageError(
        message[:1].lower() + message[1:],
        why=f"`{command}` could not be parsed",
        fix=f"{command} --help",
    )


def _disk_full(error: OSError) -> MilesError:
    return MachineError(
        "no space is left on the disk",
        why=f"{error.strerror}" + (f": {error.filename}" if error.filename else ""),
        fix=["df -h .   # which disk is full?", "--set run.dir=FOLDER   # on another disk"],
    )


def _working_folder() -> Path | None:
    """Return the working folder; None if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def _no_working_folder() -> MilesError:
    return MachineError(
        "the working folder does not exist any more",
        why="it was deleted after this shell had entered it",
        fix="cd   # and then to a folder that exists",
    )


_NO_HOME = "Could not determine home directory."
"""Message of the RuntimeError of `expanduser` and `Path.home`."""


def _no_home(argv: list[str]) -> MilesError:
    """Return the error for a path that begins with `~`, or with `~` and a user, where there is no
    such home."""
    typed = next((word for word in argv if re.search(r"(^|=)~[^/]", word)), None)
    if typed is not None:
        return UsageError(
            f"`{typed}` is in the home of a user who does not exist",
            why="`~NAME` at the start of a path is the home of the user NAME",
            fix="write the whole path; or ./~NAME for a folder of this name",
        )
    return MachineError(
        "the home folder of this user is unknown",
        why="HOME is not set, and the system has no entry for the user; or a path in a recipe "
        "begins with `~` and a name that no user has",
        fix="export HOME=DIR",
    )


def _internal_error(error: Exception, argv: list[str]) -> MilesError:
    file = write_crash_report(error, argv=argv)
    return InternalFault(
        f"internal error in miles: {type(error).__name__}",
        why=str(error) or "no message",
        fix=f"less {file}   # the traceback; please attach it to a bug report",
    )
