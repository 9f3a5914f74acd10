"""Chooses which tensors of a model are quantised in a number format, with the reason for each of
the others. The only table of exemptions, for trainer, publishing, export and plan alike. Consists
of pure functions of the weight table; reads no tensor.

It follows what the families' own releases store: FP8 for every linear layer of attention and MLP
(DeepSeek, Kimi K2, Qwen, GLM-5), INT4 for routed experts alone (Kimi K2 Thinking), NVFP4 for MLPs
and for attention that is not latent (NVIDIA's), MXFP4 for gpt-oss's experts. Norms, embeddings,
output layers, routers, small tensors and those that set decays are never quantised."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from milescli.core.errors import CheckpointError
from milescli.models.base import Entry, Rule, WeightTable
from milescli.models.facts import ModelFacts

Quantised = Literal["fp8", "mxfp8", "int4", "nvfp4", "mxfp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Describes a number format as far as a plan needs it."""

    block: tuple[int, int]
    """Rows and columns that share a scale."""
    bits: int
    """Bits of one number."""
    scale_bytes: int
    """Bytes of the scale of one block."""
    kinds: frozenset[str]
    """Kinds of tensors that releases store in this format, as `kind_of` names them."""

    def bytes_of(self, shape: Sequence[int]) -> int:
        """Return the bytes of numbers and scales of a tensor [..., rows, columns]."""
        *lead, rows, columns = shape
        count = 1
        for length in lead:
            count *= length
        scales = -(-rows // self.block[0]) * -(-columns // self.block[1])
        return count * (rows * columns * self.bits // 8 + scales * self.scale_bytes)


_ALL = frozenset({"attention", "latent attention", "indexer", "linear attention", "mlp", "experts"})
_DENSE = frozenset({"attention", "mlp", "experts"})
FORMATS: Mapping[Quantised, Format] = {
    "fp8": Format(block=(128, 128), bits=8, scale_bytes=4, kinds=_ALL),
    "mxfp8": Format(block=(1, 32), bits=8, scale_bytes=1, kinds=_ALL),
    "int4": Format(block=(1, 32), bits=4, scale_bytes=2, kinds=_DENSE),
    "nvfp4": Format(block=(1, 16), bits=4, scale_bytes=1, kinds=_DENSE),
    "mxfp4": Format(block=(1, 32), bits=4, scale_bytes=1, kinds=frozenset({"experts"})),
}
FP8_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Holds the number of parts into which one side (trainer or engines) cuts matrices over its
    ranks."""

    dense: int = 1
    experts: int = 1


UNCUT = Cut()

_LINEAR = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"), "attention"),
    **dict.fromkeys(
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), "latent attention"
    ),
    **dict.fromkeys(("wq_b", "wk"), "indexer"),
    **dict.fromkeys(("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj"), "linear attention"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "gate_up_proj"), "mlp"),
}
"""Last part of a module's name on disk -> the kind of module that it is part of."""
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
_SERVED_TOGETHER = (("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"))
"""Modules that an engine fuses although the table does not: either all of them are quantised or
none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Describes how one plain tensor is stored."""

    name: str
    shape: tuple[int, ...]
    form: Quantised | None
    """None: it is stored plain."""
    reason: str
    """Why it is stored plain; empty if it is quantised."""
    fused: tuple[str, ...]
    """Names that engines multiply at once, including this one: they share a global scale."""


def with_single_experts(table: WeightTable) -> WeightTable:
    """Return the table in the form of quantised releases, which store each expert separately.
    gpt-oss has no such form and keeps its own."""
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


def choose(
    table: WeightTable,
    form: Quantised,
    *,
    cuts: Sequence[Cut] = (UNCUT,),
    exempt: Sequence[str] = (),
    alike: bool = False,
) -> dict[str, Choice]:
    """Map the plain name of every tensor of the table to its choice. `cuts` are those of every side
    that holds the quantised tensors: no cut may divide a block. `exempt` are regular expressions of
    further module names to leave plain. With `alike`, the first expert of a layer stands for all.
    Raises CheckpointError if the format applies to no tensor of this model."""
    if table.facts.family == "deepseek_v4":
        raise CheckpointError(
            f"writing DeepSeek-V4 as {form.upper()} is not supported",
            why="its releases mix FP8 and FP4 under special names, which no engine here could read",
            fix="--format bf16",
        )
    if table.facts.family == "gpt_oss" and form != "mxfp4":
        raise CheckpointError(
            f"writing gpt-oss as {form.upper()} is not supported",
            why="SGLang 0.5.20 builds its attention without a format, and would read the numbers "
            "without their scales; its experts lie stacked",
            fix="--format mxfp4",
        )
    choices = {}
    entries = [entry for entry, _ in table.counted] if alike else table.entries
    reasons: dict[object, str | None] = {}
    for entry in entries:
        for number, (name, shape) in enumerate(zip(entry.hf, entry.shapes, strict=True)):
            whole = (table.facts.num_experts, *shape) if entry.rule.stacked else shape
            # only the recipe can tell the experts of a layer apart
            key = (entry.rule.megatron, entry.layer, entry.mtp, number, name if exempt else "")
            if key not in reasons or entry.expert is None:
                reasons[key] = _why_plain(entry, name, shape, form=form, cuts=cuts, exempt=exempt)
            reason = reasons[key]
            choices[name] = Choice(
                name=name,
                shape=whole,
                form=None if reason else form,
                reason=reason or "",
                fused=entry.hf,
            )
    for together in _units(choices, entries):
        plain = [name for name in together if choices[name].form is None]
        if plain and len(plain) < len(together):
            why = f"`{plain[0]}`, which engines hold in one tensor with it, is stored plain"
            choices |= {
                name: replace(choices[name], form=None, reason=why)
                for name in together
                if name not in plain
            }
    if not any(choice.form for choice in choices.values()):
        raise _nothing_quantised_error(form, table.facts, choices)
    return choices


def kind_of(entry: Entry, name: str) -> str | None:
    """Return attention, latent attention, indexer, linear attention, mlp or experts; None for any
    other tensor."""
    module = name.removesuffix(".weight")
    if entry.rule.of_vision:
        return None
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
    entry: Entry,
    name: str,
    shape: tuple[int, ...],
    *,
    form: Quantised,
    cuts: Sequence[Cut],
    exempt: Sequence[str],
) -> str | None:
    """Return why the tensor stays plain, or None if it is quantised."""
    module = name.removesuffix(".weight")
    if len(shape) != 2:
        return "it is not a matrix"
    for pattern, why in (*_NEVER, *((pattern, "the recipe exempts it") for pattern in exempt)):
        if re.search(pattern, module):
            return why
    kind = kind_of(entry, name)
    if kind is None:
        return "no release stores it in this format"
    if kind not in FORMATS[form].kinds:
        return f"releases in {form.upper()} keep {kind} plain"
    if (entry.facts.family, form) == ("qwen3_next", "nvfp4") and re.search(r"[qkv]_proj$", module):
        return "SGLang 0.5.20 builds it plain in this family"
    if form == "int4" and entry.facts.num_experts and kind != "experts":
        return "releases in INT4 quantise routed experts alone"
    if entry.rule.stacked is not (form == "mxfp4"):
        return "its experts lie stacked, and no engine loads them so in this format"
    if form == "mxfp4":
        shape = shape[::-1]
    return _why_not_in_blocks(entry, shape, form=form, cuts=cuts)


def _why_not_in_blocks(
    entry: Entry, shape: tuple[int, ...], *, form: Quantised, cuts: Sequence[Cut]
) -> str | None:
    """Return why the matrix cannot be cut into blocks, or None if it can. Blocks cover the matrices
    of a Hugging Face folder. A length must be a multiple of the block's if a side cuts it, if
    engines fuse the matrix with others along it, or if the block is one row; otherwise the last
    block may be a partial one."""
    sharding, block = entry.rule.sharding, FORMATS[form].block
    for dim, (length, size) in enumerate(zip(shape, block, strict=True)):
        sides = [cut.experts if entry.expert is not None else cut.dense for cut in cuts]
        sides = sides if sharding.axis != "none" and sharding.dim == dim else [1]
        fused = dim == 0 and len(entry.hf) > 1
        # transformers 5.12.1 takes rows / blocks for the block size where it dequantises, and is
        # silently wrong for a partial second block
        whole_blocks = block[0] == 1 or max(sides) > 1 or fused or length > size
        if max(sides) > 1 and entry.rule.unpack is not None:
            return "ranks that share it hold its rows in another order"
        # 2 ranks of one side and 3 of the other cut at different rows: each must cut at a block
        uneven = [parts for parts in sides if length % (size * parts)]
        if size > 1 and whole_blocks and uneven:
            over = f" over {max(uneven)} ranks" if max(uneven) > 1 else ""
            what = "rows" if dim == 0 else "columns"
            return f"{length} {what}{over} are no multiple of {size}"
    return None


def _units(choices: Mapping[str, Choice], entries: Sequence[Entry]) -> Iterator[Sequence[str]]:
    """Yield groups of names that are either all quantised or none: fused modules, and the routed
    experts of a layer."""
    experts: dict[str, list[str]] = {}
    for entry in entries:
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


def _nothing_quantised_error(
    form: Quantised, facts: ModelFacts, choices: Mapping[str, Choice]
) -> CheckpointError:
    linear = [
        choice for choice in choices.values() if choice.name.endswith(("proj.weight", "_proj"))
    ]
    example = next(
        (choice for choice in linear if "multiple" in choice.reason or "stacked" in choice.reason),
        (linear or [*choices.values()])[0],
    )
    return CheckpointError(
        f"no weight of this {facts.family} model can be stored as {form.upper()}",
        why=f"`{example.name}`: {example.reason}",
        fix="--format bf16",
    )


def modules_left_plain(choices: Mapping[str, Choice], facts: ModelFacts) -> list[str]:
    """Return the modules with a matrix that stays plain, for a config's list of modules that are
    not quantised. Experts of a layer count as one. A tied output layer is listed although no tensor
    has its name."""
    modules: dict[str, None] = {"lm_head": None} if facts.tied_embeddings else {}
    for choice in choices.values():
        if choice.form is None and len(choice.shape) >= 2 and not choice.name.endswith("bias"):
            stem, experts, _ = choice.name.partition(".experts.")
            modules[stem + ".experts" if experts else choice.name.removesuffix(".weight")] = None
    return list(modules)
