"""Which tensors of a model are stored in a quantised format, and why the others are not: a pure
function of the weight table.

It follows what the families' own releases store: FP8 for every linear layer of attention and MLP
(DeepSeek, Kimi K2, Qwen, GLM-5), INT4 for routed experts alone (Kimi K2 Thinking), NVFP4 for MLPs
and for attention that is not latent (NVIDIA's), MXFP4 for gpt-oss's experts. Norms, embeddings,
output layers, routers and what is small or sets decays are never quantised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from milescli.checkpoint.formats.base import Scheme
from milescli.checkpoint.formats.schemes import FP8, MXFP4_STACKED, MXFP8, NVFP4, int4_scheme
from milescli.core.errors import CheckpointError
from milescli.models.base import Entry, Rule, WeightTable
from milescli.models.facts import ModelFacts

Quantised = Literal["fp8", "mxfp8", "int4", "nvfp4", "mxfp4"]
SCHEMES: Mapping[Quantised, Scheme] = {
    "fp8": FP8,
    "mxfp8": MXFP8,
    "int4": int4_scheme(32),
    "nvfp4": NVFP4,
    "mxfp4": MXFP4_STACKED,
}
FP8_BLOCK = 128

_LINEAR = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"), "attention"),
    **dict.fromkeys(
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), "latent attention"
    ),
    **dict.fromkeys(("wq_b", "wk"), "indexer"),
    **dict.fromkeys(("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj"), "linear attention"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "gate_up_proj"), "mlp"),
}
"""Last part of a module's name on disk -> what it belongs to."""
_NEVER = (
    (r"(embed_tokens|embeddings?)$", "embeddings are looked up, not multiplied"),
    (r"(lm_head|shared_head\.head)$", "the output layer chooses between tokens"),
    (r"(gate|router)$", "the router chooses experts"),
    (r"shared_expert_gate$", "it is small and gates a whole expert"),
    (r"conv1d$", "it is small and no linear layer"),
    (r"(in_proj_ba|in_proj_a|in_proj_b)$", "it is small and sets decays"),
    (r"weights_proj$", "it weighs the indexer's heads"),
    (r"(eh_proj|mtp\.fc)$", "releases keep the projection before a multi-token-prediction layer"),
)
_KINDS: Mapping[Quantised, frozenset[str]] = {
    "fp8": frozenset(
        {"attention", "latent attention", "indexer", "linear attention", "mlp", "experts"}
    ),
    "mxfp8": frozenset(
        {"attention", "latent attention", "indexer", "linear attention", "mlp", "experts"}
    ),
    "nvfp4": frozenset({"attention", "mlp", "experts"}),
    "int4": frozenset({"attention", "mlp", "experts"}),
    "mxfp4": frozenset({"experts"}),
}
_SERVED_TOGETHER = (("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"))
"""Modules that an engine fuses although the table does not: all or none of them are quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Says how one plain tensor is stored."""

    name: str
    shape: tuple[int, ...]
    scheme: Scheme | None
    """None: it is stored plain."""
    reason: str
    """Why it is plain; empty where it is quantised."""
    fused: tuple[str, ...]
    """Names that engines multiply at once, this one among them: they share a global scale."""


def with_single_experts(table: WeightTable) -> WeightTable:
    """Return the table in the form of quantised releases, which store each expert separately.
    gpt-oss has no such form and stays."""
    return replace(table, rules=tuple(_single(rule) for rule in table.rules))


def _single(rule: Rule) -> Rule:
    if not rule.stacked:
        return rule
    stem = rule.hf[0].partition(".experts.")[0]
    single = [
        form
        for form in rule.alternatives
        if not form.stacked and form.hf[0].partition(".experts.")[0] == stem
    ]
    return replace(single[0], alternatives=()) if single else rule


def choose(table: WeightTable, form: Quantised, *, power_scales: bool = False) -> dict[str, Choice]:
    """Map the plain name of every tensor of the table to its choice. With `power_scales`, FP8
    scales are powers of two (DeepSeek-V3.2's `scale_fmt`).

    Raises CheckpointError if the format applies to no tensor of this model.
    """
    if table.facts.family == "deepseek_v4":
        raise CheckpointError(
            f"DeepSeek-V4 is not written as {form.upper()}",
            why="its releases mix FP8 and FP4 under names of their own, which no engine here could "
            "read back",
            fix="--format bf16",
        )
    scheme = _with_powers(SCHEMES[form]) if form == "fp8" and power_scales else SCHEMES[form]
    choices = {}
    for entry in table.entries:
        for name, shape in zip(entry.hf, entry.shapes, strict=True):
            whole = (table.facts.num_experts, *shape) if entry.rule.stacked else shape
            reason = _why_plain(entry, name, shape, form=form, scheme=scheme)
            chosen = None if reason else scheme
            choices[name] = Choice(
                name=name, shape=whole, scheme=chosen, reason=reason or "", fused=entry.hf
            )
    for together in _units(choices, table):
        plain = [name for name in together if choices[name].scheme is None]
        if plain and len(plain) < len(together):
            why = f"`{plain[0]}`, which engines hold in one tensor with it, is stored plain"
            choices |= {
                name: replace(choices[name], scheme=None, reason=why)
                for name in together
                if name not in plain
            }
    if not any(choice.scheme for choice in choices.values()):
        raise _nothing(form, table.facts, choices)
    return choices


def _with_powers(scheme: Scheme) -> Scheme:
    from milescli.checkpoint.formats import fp8_block

    return replace(scheme, codec=fp8_block.codec(powers=True))


def kind_of(entry: Entry, name: str) -> str | None:
    """Return attention, latent attention, indexer, linear attention, mlp or experts; None for any
    other tensor."""
    module = name.removesuffix(".weight")
    kind = _LINEAR.get(module.rpartition(".")[2])
    if kind is None or name == module + ".bias":
        return None
    if kind == "mlp" and entry.expert is not None:
        return "experts"
    if kind == "attention" and entry.facts.mla is not None:
        return "latent attention"
    if module.endswith("out_proj") and "linear_attn" not in module:
        return None
    return kind


def _why_plain(
    entry: Entry, name: str, shape: tuple[int, ...], *, form: Quantised, scheme: Scheme
) -> str | None:
    """None where it is quantised."""
    module = name.removesuffix(".weight")
    if len(shape) != 2:
        return "it is no matrix"
    for pattern, why in _NEVER:
        if re.search(pattern, module):
            return why
    kind = kind_of(entry, name)
    if kind is None:
        return "no release stores it in this format"
    if kind not in _KINDS[form]:
        return f"releases in {form.upper()} keep {kind} plain"
    if form == "int4" and entry.facts.num_experts and kind != "experts":
        return "releases in INT4 quantise routed experts alone"
    if entry.rule.stacked is not (form == "mxfp4"):
        return "its experts lie stacked, and no engine loads them so in this format"
    return _why_not_in_blocks(shape if form != "mxfp4" else shape[::-1], form=form, scheme=scheme)


def _why_not_in_blocks(shape: tuple[int, ...], *, form: Quantised, scheme: Scheme) -> str | None:
    rows, columns = shape
    if form == "fp8":
        # transformers 5.12.1 takes rows / blocks for the block size where it dequantises, and is
        # silently wrong for others
        uneven = next(
            (length for length in (rows, columns) if length > FP8_BLOCK and length % FP8_BLOCK),
            None,
        )
        return (
            f"{uneven} is no multiple of {FP8_BLOCK}, and transformers would read its scales "
            "wrongly"
            if uneven
            else None
        )
    size = scheme.codec.block[1]
    return f"rows of {columns} numbers are no multiple of {size}" if columns % size else None


def _units(choices: Mapping[str, Choice], table: WeightTable) -> Iterator[Sequence[str]]:
    """Names that are quantised all or not at all: fused modules, and the routed experts of a
    layer."""
    experts: dict[str, list[str]] = {}
    for entry in table.entries:
        if entry.expert is not None:
            stem = entry.hf[0].partition(".experts.")[0]
            experts.setdefault(stem, []).extend(
                name
                for name in entry.hf
                if len(choices[name].shape) >= 2 and not name.endswith("bias")
            )
        elif len(entry.hf) > 1:
            yield [name for name in entry.hf if kind_of(entry, name) is not None]
    yield from experts.values()
    for first, second in _SERVED_TOGETHER:
        for name in choices:
            other = name.replace(f".{first}.", f".{second}.")
            if f".{first}." in name and other in choices:
                yield [name, other]


def _nothing(form: Quantised, facts: ModelFacts, choices: Mapping[str, Choice]) -> CheckpointError:
    linear = [
        choice for choice in choices.values() if choice.name.endswith(("proj.weight", "_proj"))
    ]
    example = next(
        (choice for choice in linear if "multiple" in choice.reason or "stacked" in choice.reason),
        (linear or [*choices.values()])[0],
    )
    return CheckpointError(
        f"no weight of this {facts.family} model can be stored as {form.upper()}",
        why=f"of `{example.name}`: {example.reason}",
        fix="--format bf16",
    )


def modules_left_plain(choices: Mapping[str, Choice], facts: ModelFacts) -> list[str]:
    """Return the modules with a matrix that stays plain, for a config's list of what is not
    quantised. Experts of a layer count as one. A tied output layer is listed although no tensor has
    its name."""
    modules: dict[str, None] = {"lm_head": None} if facts.tied_embeddings else {}
    for choice in choices.values():
        if choice.scheme is None and len(choice.shape) >= 2 and not choice.name.endswith("bias"):
            stem, experts, _ = choice.name.partition(".experts.")
            modules[stem + ".experts" if experts else choice.name.removesuffix(".weight")] = None
    return list(modules)


def refused_by_sglang(choices: Mapping[str, Choice]) -> list[str]:
    """Return the FP8 tensors that SGLang 0.5.20 refuses: it fuses them with others, which requires
    whole blocks of rows of each."""
    return [
        choice.name
        for choice in choices.values()
        if choice.scheme is not None
        and choice.scheme.codec.name == "fp8"
        and len(choice.fused) > 1
        and choice.shape[0] % FP8_BLOCK
    ]
