"""A run whose trainer multiplies by INT4 weights, and whose engines hold them: it goes on bit for
bit, and its export is what was trained and served."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from tests.end_to_end.runs import Workplace, learned
from tests.end_to_end.test_layouts import MOE


def _sets(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def test_a_run_in_int4_agrees_with_its_engines_resumes_and_exports_what_it_trained(
    workplace: Workplace,
) -> None:
    sets = _sets("train.precision=int4_qat", "train.steps=4", "checkpoint.every=2")
    finished = workplace.miles("launch", "--recipe", "tiny.yaml", "--name", "int4", *sets)
    assert finished.code == 0, finished
    plan = json.loads((workplace.run("int4") / "plan.json").read_text())
    assert (plan["trainer_format"], plan["engine_format"]) == ("int4", "int4")
    whole = workplace.steps("int4")
    assert max(event["report"]["logprob_diff_max"] for event in whole) < 1e-4

    again = workplace.resume_without("int4", step=4)
    for one, other in zip(whole[2:], workplace.steps(again)[-2:], strict=True):
        assert learned(one) == learned(other)

    refused = workplace.miles("resume", "int4", "--steps", "5", "--set", "train.precision=fp32")
    assert refused.code == 3 and "train.precision" in refused.err

    folder = workplace.folder / "int4-hf"
    written = workplace.miles("export", "int4", "--to", str(folder), "--format", "int4")
    assert written.code == 0, written
    exported = load_file(folder / "model.safetensors")
    served = load_file(workplace.run("int4") / "engine_start" / "model.safetensors")
    packed = [name for name in exported if name.endswith("weight_packed")]
    assert packed and exported.keys() == served.keys(), "engines start from the exporter's form"
    assert any(not torch.equal(exported[name], served[name]) for name in packed), "it learned"

    score = workplace.miles("eval", "int4")
    assert score.code == 0, score


def test_engines_of_two_ranks_that_guess_hold_the_bytes_that_they_are_sent(
    workplace: Workplace,
) -> None:
    """`weights.verify` compares every byte after each update, of both ranks."""
    sets = _sets(
        *MOE,
        *("train.precision=nvfp4", "engines.tp=2", "rollout.speculative.kind=ngram"),
        *("weights.channel=distributed", "weights.verify=true", "train.steps=2", "eval.every=0"),
    )
    finished = workplace.miles("launch", "--recipe", "tiny.yaml", "--name", "two", *sets)
    assert finished.code == 0, finished
    steps = workplace.steps("two")
    assert len(steps) == 2 and all(each["rollout"]["accept_length"] >= 1 for each in steps)
    assert max(each["report"]["logprob_diff_max"] for each in steps) < 1e-4
