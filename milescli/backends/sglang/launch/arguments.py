"""Checks `engines.extra` with SGLang's own parser, in a separate process, before a device is used:
refuses arguments that SGLang does not know, or that miles sets. Called by code that composes a run;
`python -m` is that process."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from milescli.backends.sglang.launch.command import engine_command, without_device
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.core.errors import MachineError, RecipeError
from milescli.core.files import parse_json

TIMEOUT_S = 180.0
"""Time to import SGLang and parse its arguments; 6 s on two cores."""
RECIPE_KEYS = {
    "attention_backend": "engines.attention_backend",
    "context_length": "rollout.max_response_tokens",
    "disable_cuda_graph": "engines.cuda_graphs",
    "dp_size": "engines.attention_dp",
    "dtype": "train.precision",
    "enable_return_routed_experts": "train.routing_replay",
    "ep_size": "engines.ep",
    "max_running_requests": "engines.max_running_requests",
    "max_total_tokens": "engines.max_total_tokens",
    "mem_fraction_static": "engines.memory_fraction",
    "model_path": "model.path",
    "random_seed": "run.seed",
    "tp_size": "engines.tp",
}
"""SGLang's name of an argument -> the recipe's key that sets it."""
REFUSED = {"config", "api_key", "admin_api_key", "enable_deterministic_inference", *RECIPE_KEYS}
"""Arguments that are refused although miles does not set them: those that let a file or another key
decide unseen, secrets that would be visible in a process list, and those for which the recipe has a
key."""
OVERRIDABLE = {"decode_log_interval", "log_level", "log_level_http", "sampling_backend"}
"""Arguments that miles sets, but users may change."""


def check_extra(spec: EngineSpec) -> None:
    """Raise RecipeError if `spec.extra_args` are not SGLang's, or if users may not set them;
    MachineError if SGLang's parser is not available."""
    if not spec.extra_args:
        return
    extra = list(spec.extra_args)
    ours = engine_command(replace(spec, extra_args=()))[3:]
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command,
            input=json.dumps({"ours": ours, "extra": extra}),
            env=os.environ | without_device(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lines = (error.stderr or "").strip().splitlines()
        raise MachineError(
            "SGLang's arguments cannot be read on this machine",
            why=lines[-1] if lines else str(error),
            fix=["miles doctor", "--set engines.extra=[]"],
        ) from error
    reply = parse_json(done.stdout.splitlines()[-1])
    if problem := reply.get("problem"):
        raise RecipeError(
            "SGLang's server does not accept `engines.extra`",
            why=str(problem),
            fix="python -m sglang.launch_server --help   # lists its arguments, each with its `--`",
        )
    for name, value in reply["given"].items():
        if name in REFUSED or (name in reply["ours"] and name not in OVERRIDABLE):
            raise _refusal(name, value)


def _refusal(name: str, value: str) -> RecipeError:
    flag = f"--{name.replace('_', '-')}"
    if key := RECIPE_KEYS.get(name):
        return RecipeError(
            f"`engines.extra` sets `{flag}`, but `{key}` controls it",
            why="the plan and the checks before the first step use the recipe's key",
            fix=f"--set {key}={'false' if value == 'True' else value}   # and remove `{flag}` "
            "from engines.extra",
        )
    return RecipeError(
        f"`engines.extra` cannot set `{flag}`",
        why="miles sets this argument itself",
        fix=f"remove `{flag}` from engines.extra",
    )


def read_arguments(ours: Sequence[str], extra: Sequence[str]) -> dict[str, object]:
    """Return the arguments that each of the two lists sets, by SGLang's names, with the values of
    `extra`; or the parser's error message about `extra`."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:  # so that only what is given is in the namespace
        action.default, action.required = argparse.SUPPRESS, False
    usage = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage):
            given = vars(parser.parse_args(list(extra)))
    except SystemExit:
        return {"problem": usage.getvalue().strip().rpartition("error: ")[2] or "it asks for help"}
    known = sorted(vars(parser.parse_args(list(ours))))
    return {"given": {name: str(value) for name, value in given.items()}, "ours": known}


if __name__ == "__main__":
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        reply = read_arguments(request["ours"], request["extra"])
    print(json.dumps(reply))
