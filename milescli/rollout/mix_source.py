"""Loads the sources of `data.mix`, and makes one of them. Called by `runtime.inputs`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from milescli.recipe.data import Data, MixSource
from milescli.rollout.mix import MixedPrompts, counts_of_weights
from milescli.rollout.source import Loaded, Say, SourceReport, load_part, percentile
from milescli.rollout.tokenizer import ChatTokenizer


def load_mix(
    data: Data,
    *,
    tokenizer: ChatTokenizer,
    seed: int,
    base_dir: str | Path,
    needs_label: Callable[[MixSource], bool | None],
    say: Say | None = None,
) -> tuple[MixedPrompts, SourceReport]:
    """Read and check all sources, as `load_source` does one. `needs_label`: whether the reward of a
    source compares with a label."""
    mix = data.mix or []
    loaded: list[Loaded] = []
    first_index = 0
    for number, source in enumerate(mix):
        part = load_part(
            data.model_copy(
                update={
                    "prompts": source.path,
                    "prompt_key": source.prompt_key or data.prompt_key,
                    "label_key": source.label_key or data.label_key,
                }
            ),
            "prompts",
            tokenizer=tokenizer,
            seed=_seed_of(seed, number),
            base_dir=base_dir,
            needs_label=needs_label(source),
            say=say,
            name=source.called,
            first_index=first_index,
        )
        last = part.source.files[-1]
        first_index = last.first_index + last.scan.last_line
        loaded.append(part)
    prompts = MixedPrompts([part.source for part in loaded], counts_of(mix), seed=seed)
    return prompts, _report(loaded, mix)


def counts_of(mix: Sequence[MixSource]) -> list[int]:
    """How many positions of a pass each source gets."""
    if all(source.quota is not None for source in mix):
        return [source.quota or 0 for source in mix]
    weights = [1.0 if source.weight is None else source.weight for source in mix]
    return counts_of_weights(weights, [source.called for source in mix])


def _seed_of(seed: int, number: int) -> int:
    """Of the order within a source: another one for each."""
    digest = hashlib.blake2b(f"{seed}/source/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _report(loaded: Sequence[Loaded], mix: Sequence[MixSource]) -> SourceReport:
    """Over all sources; the hash is over theirs, and over how they are mixed."""
    reports = [part.report for part in loaded]
    lengths = sorted(length for part in loaded for length in part.lengths)
    hashed = [
        f"{report.sha256} {count}" for report, count in zip(reports, counts_of(mix), strict=True)
    ]
    return replace(
        reports[0],
        path=", ".join(report.path for report in reports),
        sha256=hashlib.sha256("\n".join(hashed).encode()).hexdigest(),
        num_rows=sum(report.num_rows for report in reports),
        num_duplicates=sum(report.num_duplicates for report in reports),
        num_measured=len(lengths),
        num_dropped=sum(report.num_dropped for report in reports),
        num_demonstrations=sum(report.num_demonstrations for report in reports),
        prompt_tokens_p50=percentile(lengths, 50),
        prompt_tokens_p90=percentile(lengths, 90),
        prompt_tokens_p99=percentile(lengths, 99),
        prompt_tokens_max=lengths[-1],
    )
