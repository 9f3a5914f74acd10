"""Implements `miles models check FOLDER`: checks a new family, or a model of one, on this machine:
its names, its weights through Megatron and back, its logits against transformers', an engine
against the trainer, memory. Called by the command; consists of parts of `convert` and `doctor`."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from milescli.checkpoint.hf_folder import HfReader
from milescli.checkpoint.matching import kind_faults
from milescli.checkpoint.source import open_source
from milescli.console.output import Output
from milescli.conversion.convert import convert
from milescli.conversion.to_hf import ToHf
from milescli.conversion.to_megatron import ToMegatron
from milescli.conversion.verify import Verify
from milescli.core.errors import ExitCode, MilesError
from milescli.core.units import format_bytes, format_count, format_few
from milescli.doctor.engine_trial import MODEL_VARIABLE
from milescli.doctor.finding import Finding, Status, fail, failed, ok, skip
from milescli.doctor.run import show_findings
from milescli.doctor.trial import run_trial
from milescli.models import ModelFacts, load_facts, table
from milescli.plan.main_memory import bytes_by_phase
from milescli.plan.make import make_plan
from milescli.platform.machine import Machine
from milescli.platform.probe import probe
from milescli.recipe.schema import Recipe

_ENGINE_TIMEOUT_S = 600.0
"""Time limit of the engine's trial, which loads the model and generates."""
_ENGINE = ("engine", "agreement", "trainer", "weights")


def run_model_check(folder: Path, *, output: Output) -> int:
    """Check the folder, show the findings, and return an exit code."""
    with contextlib.redirect_stdout(sys.stderr):
        findings = check_model_folder(folder, output=output)
    output.json("model_check", {"findings": [asdict(finding) for finding in findings]})
    show_findings(findings, output)
    bad = any(finding.status is Status.FAIL for finding in findings)
    return int(ExitCode.FAILED if bad else ExitCode.DONE)


def check_model_folder(folder: Path, *, output: Output) -> list[Finding]:
    """Check a Hugging Face folder, and return one finding per question. Raises CheckpointError if
    the folder is not a model, or is of a family that miles does not know."""
    facts, machine = load_facts(folder), probe()
    steps: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("names", lambda: check_names(folder, facts)),
        ("round trip", lambda: _check_round_trip(folder, output=output)),
        ("engine", lambda: _check_engine(folder, facts, machine)),
        ("memory", lambda: check_memory(folder, facts, machine)),
    ]
    findings = []
    for name, run in steps:
        try:
            findings += run()
        except MilesError as error:
            findings += failed(name, error)
    return findings


def check_names(folder: Path, facts: ModelFacts) -> list[Finding]:
    """Compare names and shapes of the folder with the family's table."""
    lines = table(facts)
    with open_source(folder) as reader:
        names = reader.names()
        there = {
            name: reader.shape(name)
            for name in names
            if not lines.is_passthrough(name) and not lines.is_ignored(name)
        }
        on_disk = lines.as_on_disk(names, reader.shape)
        kinds = kind_faults(on_disk, lambda name: reader.is_real(name) if name in there else None)
    expected = on_disk.hf_shapes()
    wrong = [
        *(f"`{name}` is missing" for name in expected if name not in there),
        *(f"`{name}` has no rule" for name in there if name not in expected),
        *(
            f"`{name}` has shape {list(there[name])} on disk, but {list(shape)} according to "
            "config.json"
            for name, shape in expected.items()
            if there.get(name, shape) != shape
        ),
        *kinds,
    ]
    if wrong:
        why = format_few(wrong, 3, joint="; ")
        fix = [
            "download the model again, if it is of a release",
            f"correct the family's table: milescli/models/families   # {facts.family}",
        ]
        return fail("names", f"{len(wrong)} tensors differ from the table", why=why, fix=fix)
    num_others = len(names) - len(there)
    what = (
        f"{len(there):,} tensors, {format_count(lines.num_parameters)} parameters, all covered by "
        "rules"
    )
    return ok(
        "names", what + (f"; {num_others} are passed through unchanged" if num_others else "")
    )


def _check_round_trip(folder: Path, *, output: Output) -> list[Finding]:
    """Convert to Megatron, compare logits, convert back and compare every tensor."""
    with tempfile.TemporaryDirectory(prefix="miles-model-check-") as scratch:
        megatron, back = Path(scratch) / "megatron", Path(scratch) / "hf"
        there = convert(
            ToMegatron(source=str(folder)),
            megatron,
            command=[],
            verify=Verify.LOGITS,
            output=output,
        )
        logits = there.proof.logits
        findings = (
            skip("logits", logits)
            if there.proof.logits_difference is None
            else ok("logits", logits)
        )
        convert(ToHf(source=str(megatron)), back, command=[], verify=Verify.TENSORS, output=output)
        differ = differing_tensors(folder, back)
    if differ:
        return findings + fail(
            "round trip",
            f"{len(differ)} tensors change in the round trip",
            why=", ".join(f"`{name}`" for name in differ[:3]),
            fix="correct fuse, split, pack and unpack of their rules: milescli/models/families",
        )
    size = format_bytes(there.size_bytes)
    return findings + ok(
        "round trip", f"every tensor is bit-identical after the round trip, {size}"
    )


def differing_tensors(first: Path, second: Path) -> list[str]:
    """Return the names of tensors that differ in any bit, or that only one folder has."""
    import torch

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor

    with HfReader(first) as one, HfReader(second) as other:
        names, theirs = set(one.names()), set(other.names())
        differ = names ^ theirs
        for name in names & theirs:
            mine, same = one.read(name), other.read(name)
            if mine.dtype != same.dtype or not torch.equal(bits(mine), bits(same)):
                differ.add(name)
    return sorted(differ)


def _check_engine(folder: Path, facts: ModelFacts, machine: Machine) -> list[Finding]:
    """Let an engine and a trainer compute the same tokens, and send new weights."""
    from milescli.backends.sglang.launch.servable import fault_of_sglang, servable_on_cpu

    on_cpu = machine.kind == "cpu"
    fault = fault_of_sglang(facts)
    served, why = servable_on_cpu(facts) if on_cpu else (fault is None, fault or "")
    if not served:
        return skip("engine", f"no engine can serve it here: {why}")
    return run_trial(
        "engine",
        device_kind=machine.kind,
        timeout_s=_ENGINE_TIMEOUT_S,
        names=_ENGINE,
        settings={MODEL_VARIABLE: str(folder.absolute())},
    )


def check_memory(folder: Path, facts: ModelFacts, machine: Machine) -> list[Finding]:
    """Plan supervised training of all weights on this machine."""
    recipe = Recipe.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"train": "rows.jsonl", "max_row_tokens": 1024},
            "train": {"objective": "supervised"},
        }
    )
    plan = make_plan(recipe, machine, facts)
    if plan.forecast is not None:
        parts = [part.size_bytes for part in plan.forecast.training if part.name != "margin"]
        needed, there = sum(parts), plan.forecast.memory_bytes
    else:
        needed = max(bytes_by_phase(plan.processes).values())
        there = machine.nodes[0].memory_bytes
    return ok(
        "memory",
        f"supervised training of all weights on rows of 1,024 tokens needs {format_bytes(needed)} "
        f"of {format_bytes(there)}, {plan.precision}",
    )
