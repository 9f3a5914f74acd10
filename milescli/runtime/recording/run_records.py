"""Records the recipe, code, machine and layout of a run when it starts (recipe.yaml, plan.json,
manifest.json), and finds what has changed when it is resumed. A change of what the run learns is
refused."""

from __future__ import annotations

import json
import os
import platform as python_platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

import milescli
from milescli.checkpoint.run_dir import FORKED_FROM, RunDir, utc_now, write_json
from milescli.checkpoint.store import newest_recipe_sha256, write_atomically
from milescli.core.errors import CheckpointError
from milescli.core.files import parse_json, read_json
from milescli.models import table
from milescli.models.costs import token_flops
from milescli.plan.types import Plan
from milescli.platform.machine import Machine
from milescli.recipe.load import LoadedRecipe, values_of
from milescli.recipe.resolved import resolved_yaml
from milescli.runtime.spec import RunSpec

RECORDED_PACKAGES = ("torch", "sglang", "megatron-core", "ray", "transformers")
MAY_CHANGE = (
    "machine",
    "fault",
    "run.hooks",
    "run.trackers",
    "run.project",
    "run.metrics_address",
    "run.alerts",
    "run.alerts_on",
    "run.keep_groups",
    "parallel",
    "engines",
    "weights",
    "checkpoint",
    "rollout.speculative",
    "train.draft",
    "train.on_policy",
    "train.steps",
)
"""Where and how long a run runs may change; what it learns may not."""
GIT_TIMEOUT_S = 5.0
_LAYOUT = ("tp", "pp", "cp", "ep", "etp", "dp")


def run_conditions(machine: Machine) -> dict[str, object]:
    """Return the conditions besides the recipe on which a run's figures depend, by name, for
    manifest.json."""
    return {
        "miles": milescli.__version__,
        "commit": _commit(),
        "packages": {name: version(name) for name in RECORDED_PACKAGES},
        "python": python_platform.python_version(),
        "machine": describe_machine(machine),
    }


def describe_machine(machine: Machine) -> str:
    """Describe a machine in a few words: the properties that affect numerical results, without the
    memory that is free today."""
    nodes, devices = len(machine.nodes), machine.nodes[0].devices
    what = f"{len(devices)} x {devices[0].name}" if devices else _processor()
    return what if nodes == 1 else f"{nodes} nodes, {what} each"


def read_record(run: RunDir) -> dict[str, object]:
    """Read the manifest.json of the last attempt; empty if it is unreadable."""
    try:
        record = read_json(run.manifest_file)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def edited_keys(run: RunDir, recorded: LoadedRecipe, *, may_change: Sequence[str]) -> list[str]:
    """Return `key: old -> new` for each permitted change that was made to the run's recipe.yaml by
    hand. `recorded`: the file as it is now. Raises CheckpointError if another key was changed,
    because the run would learn something else from here on."""
    record = read_record(run)
    # where manifest.json is lost, the newest checkpoint knows what it was made by
    known = record.get("recipe_sha256") if record else newest_recipe_sha256(run.path)
    if known in (None, run.recipe_sha256):
        return []
    before, now = record.get("recipe"), parse_json(json.dumps(values_of(recorded.recipe)))
    if not isinstance(before, dict):  # lost, or of an older version
        raise _edited(run, ["the keys that it had before are unknown"], [])
    changed = [name for name in now if name in before and before[name] != now[name]]
    lines = {name: f"{name}: {_short(before[name])} -> {_short(now[name])}" for name in changed}
    refused = [name for name in changed if not is_below(name, may_change)]
    if refused:
        back = [f"{name}: {json.dumps(before[name])}" for name in refused]
        raise _edited(run, [lines[name] for name in refused], back)
    return list(lines.values())


def _edited(run: RunDir, changed: list[str], back: list[str]) -> CheckpointError:
    new = f"miles launch --recipe {run.typed}/recipe.yaml --name {shlex.quote(run.name)}-edited"
    return CheckpointError(
        f"the recipe of run `{run.name}` was edited",
        why=f"a run uses the same recipe from start to end; {run.shown}/recipe.yaml now has\n"
        + "\n".join(changed),
        fix=[
            f"{new}   # a new run with the edited recipe",
            f"undo the changes in {run.shown}/recipe.yaml: {'; '.join(back) or 'what was there'}",
        ],
    )


def changes_since(
    before: Mapping[str, object], now: Mapping[str, object], *, plan: Plan, run: RunDir
) -> list[str]:
    """Return one line for each difference from the last attempt and its effect; empty if there is
    none. `before`, `now`: of `run_conditions`; `plan`: of this attempt."""
    lines = _differences(before, now)
    try:
        old = read_json(run.plan_file)
        lines += _differences(layout_of(old), layout_of(asdict(plan)))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # of an older version
    if lines:
        lines.append(
            "the run continues from its checkpoint, but may differ in the last bits from an "
            "uninterrupted run, because sums may be computed in another order"
        )
    return lines


def _differences(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    lines: list[str] = []
    for name, value in now.items():
        old = before.get(name)
        if isinstance(value, Mapping):
            lines += _differences(old if isinstance(old, Mapping) else {}, value)
        elif old is not None and value is not None and old != value:
            lines.append(f"{name}: {_short(old)} -> {_short(value)}")
    return lines


def layout_of(plan: Mapping[str, dict[str, object]]) -> dict[str, object]:
    """Return the parts of a plan that determine the order of floating-point sums."""
    trainer, engines = plan["trainer"], plan["engines"]
    return {
        **{f"trainer {name}": trainer[name] for name in _LAYOUT},
        **{f"engines {name}": engines[name] for name in ("num", "tp") if name in engines},
        "tokens of a microbatch": plan["batch"]["max_tokens_per_microbatch"],
        "precision": plan["precision"],
    }


def is_below(name: str, sections: Sequence[str]) -> bool:
    """Return True if a key is one of these, or in one of these sections."""
    return any(name == section or name.startswith(f"{section}.") for section in sections)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@cache
def _commit() -> str | None:
    """Return the commit of the source tree that miles runs from, with `-dirty` if the tree has
    changes; None for an installed package."""
    root = Path(milescli.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    """Return the processor's model, which decides which kernels a CPU runs."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU {names[0] if names else python_platform.machine()}"


def write_records(spec: RunSpec, loaded: LoadedRecipe) -> None:
    """Write recipe, plan and manifest. `loaded`: the recipe with the origin of each value."""
    run, model_dir = spec.run, spec.inputs.model_dir
    before = read_record(run)
    write_atomically(run.recipe_file, resolved_yaml(loaded))
    write_atomically(run.plan_file, spec.plan.to_json())
    write_json(
        run.manifest_file,
        {
            "created": utc_now(),
            **({FORKED_FROM: before[FORKED_FROM]} if FORKED_FROM in before else {}),
            **run_conditions(spec.nodes.machine),
            "seed": spec.recipe.run.seed,
            "recipe_sha256": run.recipe_sha256,
            "recipe": values_of(loaded.recipe),
            "plan_fingerprint": spec.plan.fingerprint,
            "token_flops": asdict(token_flops(table(spec.inputs.facts))),
            "data": spec.inputs.as_manifest(),
            "model_dir": os.path.relpath(model_dir, run.path)
            if run.path in model_dir.parents
            else str(model_dir),
        },
    )
