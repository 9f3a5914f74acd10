"""Checks that the converted checkpoint computes what the model computes. Compares logits of a few
prompts, computed by transformers from the Hugging Face folder and by Megatron-Core from the
checkpoint in separate processes, with the effect of rounding on Megatron-Core's logits. Called by
`convert` before the target gets its name."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.core.errors import DataError, MismatchError
from milescli.core.units import format_bytes
from milescli.models.catalogue import evidence
from milescli.platform.cpu import available_memory

if TYPE_CHECKING:
    from milescli.console.output import Output
    from milescli.models import WeightTable

_BOUND_S = 3600.0
_TEXTS = (
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?",
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)",
    "Der Fluss fließt durch das Tal, und am Ufer stehen alte Bäume. 河边有很多老树。",
)
"""Texts like those that models were trained on. At random token ids, a real model's own float32
differs from its float64 by a hundred times as much as in any text."""
_LARGEST = 64.0
"""`train.agreement` judges logits up to this size: all are scaled to it."""
_SHARE_OF_MEMORY = 0.5
"""Share of the free memory for the weights: the loader's second copy of a file, and activations
need the rest."""
_LENGTHS = (7, 2, 20)
_MEGATRON, _TRANSFORMERS = (
    "milescli.backends.megatron.logits",
    "milescli.backends.transformers.logits",
)
_CANNOT = (
    "NotImplementedError",
    "FitError",
    "does not recognize this architecture",
    "No module named",
    "Unrecognized model",
    "MemoryError",
    "can't allocate memory",
    "Cannot allocate memory",
)


class Verify(StrEnum):
    """Names what is compared."""

    NONE = "none"
    TENSORS = "tensors"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class _CannotCompute(Exception):
    why: str


def verify_logits(
    folder: Path, checkpoint: Path, *, table: WeightTable, verify: Verify | None, output: Output
) -> tuple[str, float | None]:
    """Compare the logits of both models. Return (what was compared or why nothing was, largest
    difference relative to the largest logit). `verify` None: compare if the model fits into memory.
    Raises MismatchError if rounding does not explain the difference."""
    if verify in (Verify.NONE, Verify.TENSORS):
        return f"not compared (--verify {verify})", None
    dtype, why = _choose_dtype(folder, table, verify=verify)
    if dtype is None:
        return f"not compared: {why}", None
    rows = _prompts(folder, table.facts.vocab_size)
    output.note(
        f"comparing logits of {len(rows)} prompts in {dtype}: transformers from the source, "
        "Megatron-Core from the checkpoint"
    )
    with tempfile.TemporaryDirectory(prefix="miles-logits-") as scratch:
        try:
            theirs = _run(
                _TRANSFORMERS,
                {"folder": str(folder), "rows": rows, "dtype": dtype},
                Path(scratch) / "transformers",
            )
            job = {
                "folder": str(folder),
                "checkpoint": str(checkpoint),
                "rows": rows,
                "dtype": dtype,
            }
            ours = _run(_MEGATRON, {**job, "rounded": True}, Path(scratch) / "megatron")
            has_experts = table.facts.num_moe_layers > 0
            return _compare(theirs, ours, dtype=dtype, has_experts=has_experts)
        except _CannotCompute as error:
            if verify is Verify.LOGITS:
                output.warn(f"the logits were not compared: {error.why}")
            return f"not compared: {error.why}", None


def _choose_dtype(
    folder: Path, table: WeightTable, *, verify: Verify | None
) -> tuple[str | None, str]:
    """Return (dtype, ""), or (None, why nothing is compared)."""
    from milescli.models.base import quantization_config, read_config

    family = table.facts.family
    known = evidence().get(family)
    if known is not None and known.logits is None and known.logits_why:
        return None, f"of the family {family}, {known.logits_why}"
    if quantization_config(read_config(folder)) is not None:
        return (
            None,
            "the source is quantised, and transformers would compute with other numbers than the "
            "dequantised ones",
        )
    share = 0.9 if verify is Verify.LOGITS else _SHARE_OF_MEMORY
    free = available_memory() * share
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        if table.num_parameters * size <= free:
            return dtype, ""
    return (
        None,
        f"{format_bytes(2 * table.num_parameters)} of weights do not fit into {share:.0%} of the "
        "memory that is free",
    )


def _prompts(folder: Path, vocab_size: int) -> list[list[int]]:
    """Tokenise texts with the model's tokenizer, as chats if it has a template; return random ids
    if it has no tokenizer, or one with another vocabulary."""
    from milescli.data.chat_template import ignoring_template_errors
    from milescli.data.tokenizer import load_tokenizer

    rows = list[list[int]]()
    with contextlib.suppress(DataError), ignoring_template_errors():
        tokenizer = load_tokenizer(folder)
        rows = tokenizer.encode_chats([[{"role": "user", "content": text}] for text in _TEXTS])
    if rows and max(map(max, rows)) < vocab_size:
        return rows
    chance = random.Random(0)
    return [[chance.randrange(vocab_size) for _ in range(length)] for length in _LENGTHS]


def _run(module: str, job: dict[str, object], scratch: Path) -> Path:
    """Return the file of logits that a worker process wrote."""
    out = scratch.with_suffix(".safetensors")
    request = scratch.with_suffix(".json")
    threads = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    request.write_text(
        json.dumps({"threads": threads, "jobs": [{**job, "out": str(out)}]}), encoding="utf-8"
    )
    environment = {
        **os.environ,
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, str(request)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_BOUND_S,
        )
    except subprocess.TimeoutExpired:
        raise _CannotCompute(f"{module} took longer than {_BOUND_S:.0f} s") from None
    if done.returncode:
        last = ([line for line in done.stderr.splitlines() if line.strip()] or ["no word"])[-1]
        who = "transformers" if module == _TRANSFORMERS else "Megatron-Core"
        if done.returncode < 0:
            raise _CannotCompute(
                f"{who}'s process was ended by signal {-done.returncode} (memory?)"
            )
        if any(word in done.stderr for word in _CANNOT):
            raise _CannotCompute(f"{who} cannot compute it here ({last.strip()})")
        raise MismatchError(
            f"{who} cannot load the "
            f"{'source' if module == _TRANSFORMERS else 'converted checkpoint'}",
            why=last.strip(),
            fix=[
                "--verify tensors   # convert without this comparison",
                "please report this with the lines above",
            ],
        )
    return out


def _compare(theirs: Path, ours: Path, *, dtype: str, has_experts: bool) -> tuple[str, float]:
    """Compare the logits. `ours` has each row twice: unchanged, and rounded in another way. Raises
    _CannotCompute if the source's logits tell nothing."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from milescli.train.agreement import Agreement, judge

    expected, actual = load_file(theirs), load_file(ours)
    largest = float(torch.cat([row.abs().max()[None] for row in expected.values()]).max())
    if not 0 < largest < math.inf:
        raise _CannotCompute(f"the largest logit of the source is {largest}")
    places, gaps, floors = [], [], []
    for key, row in expected.items():
        plain, rounded = actual[key], actual[f"{key}.rounded"]
        for apart, of_tokens in ((plain - row, gaps), (rounded - plain, floors)):
            of_tokens.append(apart.square().mean(dim=1).sqrt() * _LARGEST / largest)
        places += [f"token {token} of prompt {key}" for token in range(len(row))]
    gap, floor = (torch.cat(of_tokens).numpy() for of_tokens in (gaps, floors))
    judgement = judge(gap, np.zeros_like(gap), floor, has_experts=has_experts)
    worst = int(np.argmax(np.where(np.isnan(gap), np.inf, gap)))
    difference = max(float((actual[key] - row).abs().max()) for key, row in expected.items())
    text = (
        f"{len(gap)} tokens of {len(expected)} prompts in {dtype}, transformers against "
        f"Megatron-Core: {difference / largest:.1e} of the largest logit at most, and "
        f"{judgement.times:.2g} times what rounding does (bound {judgement.most_times:.2g})"
    )
    if judgement.agreement is Agreement.WRONG:
        raise MismatchError(
            "the converted checkpoint computes something different from the source",
            why=f"{text}; the largest difference is {places[worst]}",
            fix="please report this; --verify tensors converts without the comparison, but do "
            "not trust the result here",
        )
    return text, difference / largest
