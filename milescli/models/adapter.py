"""Makes the weight table of a LoRA adapter from that of its base model: PEFT's names <-> tensors
beside Megatron's linear layers, which are cut as the base model's are. Loads no torch.

For a matrix W [out, in] of the base, A [r, in] and B [out, r]: W' = W + scaling * B A (arXiv
2106.09685, section 4.1).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from milescli.core.errors import CheckpointError, RecipeError
from milescli.core.files import read_json
from milescli.models.base import REPLICATED, Entry, Rule, Sharding, WeightTable
from milescli.models.facts import ModelFacts
from milescli.models.transforms import as_list, identity

if TYPE_CHECKING:
    from torch import Tensor

PEFT_PREFIX = "base_model.model."
PEFT_WEIGHTS = "adapter_model.safetensors"
A, B = "lora_A", "lora_B"
SOLE_ADAPTER = "policy"
"""Name under which engines know the adapter of a run that trains only one."""
ALL_LINEAR = "all-linear"
"""Stands for all linear layers of the decoder that can have an adapter."""
_WEIGHT = ".weight"
_NUMBER = re.compile(r"\.experts\.\d+\.(\w+)$")
_NEVER = ("router", "gate_weight", "indexer", "conv1d")
"""Parts of Megatron names whose matrices route, choose or convolve; they are not linear layers of a
module."""
SHAPE_FILE = "adapter.json"
"""File that marks a checkpoint as one of an adapter with this shape; such a checkpoint holds
nothing of the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """Describes an adapter without its weights."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Last parts of module names (q_proj), or ALL_LINEAR."""
    exclude: tuple[str, ...] = ()
    """Name patterns of modules without an adapter; also whole names (`mlp.experts`)."""
    kind: Literal["lora", "rslora"] = "lora"
    experts: Literal["each", "shared_outer"] = "each"
    """each: every expert has its own A and B; shared_outer: all experts of a layer share one A
    where they read the residual stream and one B where they write to it, and have their own other
    matrix."""

    @property
    def scaling(self) -> float:
        """Return the factor of B A."""
        root = math.sqrt(self.rank) if self.kind == "rslora" else self.rank
        return self.alpha / root

    def adapts(self, module: str) -> bool:
        """Return True if the module of this name (as in the folder) gets an adapter."""
        last = module.rpartition(".")[2]
        parts = f".{module}."
        if any(last == name or f".{name}." in parts for name in self.exclude):
            return False
        return self.targets == (ALL_LINEAR,) or last in self.targets


def write_shape(folder: Path, shape: LoraShape, *, base: str) -> None:
    """Write the shape next to an adapter's tensors. `base` is the digest of its base model."""
    text = json.dumps({**asdict(shape), "base": base}, indent=2) + "\n"
    (folder / SHAPE_FILE).write_text(text, encoding="utf-8")


def read_shape(folder: Path) -> tuple[LoraShape, str] | None:
    """Return (shape, digest of the base model), or None if the folder is not a checkpoint of an
    adapter. Raises CheckpointError if the file is corrupt."""
    file = folder / SHAPE_FILE
    if not file.is_file():
        return None
    try:
        read = read_json(file)
        names = {name: tuple(read.pop(name)) for name in ("targets", "exclude")}
        base = str(read.pop("base"))
        return LoraShape(**read, **names), base
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"cannot read `{file}`",
            why=f"{type(error).__name__}: {error}",
            fix="use another checkpoint of the run: --step N",
        ) from error


def adapter_table(base: WeightTable, shape: LoraShape) -> WeightTable:
    """Return the weight table of the adapter. Raises RecipeError if a target matches no module, or
    if the family's adapters are not computed."""
    if base.facts.compressed is not None:
        raise RecipeError(
            f"adapters of `{base.facts.family}` models are not supported",
            why="its output projection multiplies each group of heads by a separate matrix, but "
            "adapters only support linear layers",
            fix="--set train.lora.rank=null   # train all weights",
        )
    rules = tuple(
        made
        for rule in base.rules
        if _may_have_adapter(rule, base)
        for number, name in enumerate(rule.hf)
        if shape.adapts(name.removesuffix(_WEIGHT))
        for made in _pair(rule, number, shape)
    )
    table = replace(base, rules=rules, passthrough=(), ignored=())
    _require_targets(base, table, shape)
    if shape.experts == "shared_outer" and not any(is_shared(entry) for entry, _ in table.counted):
        raise RecipeError(
            "`train.lora.experts=shared_outer` does not apply to any expert",
            why=f"no matrix of an expert of this {base.facts.family} model has an adapter",
            fix="--set train.lora.experts=each",
        )
    return table


@dataclass(frozen=True, slots=True)
class Place:
    """Locates a matrix of an adapter among its tensors."""

    name: str
    row: int | None
    """Row of this expert in a tensor that holds several experts; None: the matrix is the whole
    tensor."""


def pairs_of(table: WeightTable) -> dict[str, tuple[Place, Place]]:
    """Map each adapted module, by its name in the base model's folder and in order, to the places
    of its A and B. `table` is an adapter's table."""
    places = {A: dict[str, Place](), B: dict[str, Place]()}
    modules = dict[str, None]()
    for entry in table.entries:
        module = base_name(entry).removesuffix(_WEIGHT)
        row = 0 if is_shared(entry) else entry.row
        places[parts_of(entry.megatron)[1]][module] = Place(entry.hf[0], row)
        if not is_shared(entry):
            modules[module] = None
    return {
        module: (
            places[A].get(module) or places[A][outer_module(module)],
            places[B].get(module) or places[B][outer_module(module)],
        )
        for module in modules
    }


def shared_matrices(table: WeightTable) -> dict[str, str]:
    """Map each `outer_module` to the matrix (lora_A or lora_B) that its experts share. `table` is
    an adapter's table."""
    return {
        base_name(entry).removesuffix(_WEIGHT): parts_of(entry.megatron)[1]
        for entry in table.entries
        if is_shared(entry)
    }


def is_shared(entry: Entry) -> bool:
    """Return True if all experts of the layer share this one matrix."""
    return entry.rule.pack is _with_row_dim


def outer_module(module: str) -> str:
    """Drop the expert's number from a name: `layers.0.mlp.experts.3.up_proj` ->
    `layers.0.mlp.experts.up_proj`."""
    return _NUMBER.sub(r".experts.\1", module)


def of_expert(outer: str, expert: int) -> str:
    """Insert an expert's number into a name; the inverse of `outer_module`."""
    head, _, leaf = outer.rpartition(".")
    return f"{head}.{expert}.{leaf}"


def peft_name(module: str, which: str) -> str:
    """Return PEFT's name of `lora_A` or `lora_B` beside a module, which is named as in the base
    model's folder."""
    return f"{PEFT_PREFIX}{module}.{which}{_WEIGHT}"


def engine_name(adapter: str, name: str) -> str:
    """Return the name under which a tensor of an adapter is sent to the engines; `name` comes from
    `peft_name`."""
    return f"{adapter}/{name}"


def of_engine_name(name: str) -> tuple[str, str] | None:
    """Split an engine name into (adapter, PEFT name), or return None for a weight of the model. A
    name without an adapter refers to the only one."""
    adapter, _, inner = name.rpartition("/")
    return (adapter or SOLE_ADAPTER, inner) if inner.startswith(PEFT_PREFIX) else None


def engine_slots(num_adapters: int) -> int:
    """Return the number of adapters for which an engine reserves memory: the trained ones, and one
    for no adapter."""
    return max(1, num_adapters) + 1


def base_name(entry: Entry) -> str:
    """Return the name, in the base model's folder, of the matrix that this tensor adapts."""
    name = entry.hf[0].removeprefix(PEFT_PREFIX)
    name = name.replace(f".{A}.", ".").replace(f".{B}.", ".")
    if entry.row is None:
        return name
    return of_expert(name.removesuffix(_WEIGHT), entry.row) + _WEIGHT


def checkpoint_key(entry: Entry) -> str:
    """Return the key of an adapter's tensor in a checkpoint; each expert has its own, as in
    Megatron."""
    return entry.megatron.replace(f".local_experts.{entry.expert}.", f".experts.{entry.expert}.")


def parts_of(name: str) -> tuple[str, str, str]:
    """Split an adapter tensor's name into (Megatron's module, lora_A or lora_B, last part of the
    module's name in a folder)."""
    module, which, leaf = name.rsplit(".", 2)
    return module, which, leaf


def merge_weight(weight: Tensor, first: Tensor, second: Tensor, *, scaling: float) -> Tensor:
    """Return W + scaling * B A, computed in float32 and rounded once to W's dtype."""
    return (weight.float() + scaling * (second.float() @ first.float())).to(weight.dtype)


def _may_have_adapter(rule: Rule, base: WeightTable) -> bool:
    """Return True if the rule is that of a matrix in a decoder layer that folders store
    unchanged."""
    if rule.block != "decoder" or rule.buffer or rule.stacked or rule.unpack is not None:
        return False
    if not rule.megatron.endswith(_WEIGHT) or any(part in rule.megatron for part in _NEVER):
        return False
    layers = (n for n in range(base.facts.num_layers) if rule.where(base.facts, n))
    first = next(layers, None)
    return first is not None and all(len(s) == 2 for s in rule.shapes(base.facts.at(first)))


def _pair(rule: Rule, number: int, shape: LoraShape) -> tuple[Rule, Rule]:
    """Return the rules of A and B for part `number` of a base rule. What cuts the base's rows cuts
    those of B, and what cuts its columns cuts those of A."""
    cut, rank = rule.sharding, shape.rank
    is_column = cut.dim == 0
    outer = None
    if shape.experts == "shared_outer" and rule.is_per_expert:
        outer = A if is_column else B

    def made(which: str, sharding: Sharding) -> Rule:
        def shapes(facts: ModelFacts) -> list[tuple[int, ...]]:
            rows, columns = rule.shapes(facts)[number]
            size = (rank, columns) if which == A else (rows, rank)
            return [(1, *size) if which == outer else size]

        module = rule.hf[number].removesuffix(_WEIGHT)
        megatron_name = rule.megatron.removesuffix(_WEIGHT)
        leaf = module.rpartition(".")[2]
        if outer is not None:
            module = module.replace(".{expert}.", ".")
        if which == outer:
            megatron_name = experts_module(megatron_name)
        return Rule(
            hf=(peft_name(module, which),),
            megatron=f"{megatron_name}.{which}.{leaf}",
            shapes=shapes,
            sharding=sharding,
            fuse=identity,
            split=as_list,
            where=rule.where,
            stacked=outer is not None and which != outer,
            unpack=_without_row_dim if which == outer else None,
            pack=_with_row_dim if which == outer else None,
        )

    return made(A, REPLICATED if is_column else cut), made(B, cut if is_column else REPLICATED)


def experts_module(module: str) -> str:
    """Return Megatron's module that contains all experts, given one within an expert."""
    return module.partition(".local_experts.")[0]


def _without_row_dim(tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Reshape the tensor from [1, rows, columns] to [rows, columns]."""
    return [tensor[0] for tensor in tensors]


def _with_row_dim(tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Reshape the tensor from [rows, columns] to [1, rows, columns]; inverts `_without_row_dim`."""
    return [tensor[None] for tensor in tensors]


def _require_targets(base: WeightTable, table: WeightTable, shape: LoraShape) -> None:
    there = {
        base_name(entry).removesuffix(_WEIGHT).rpartition(".")[2]
        for entry, _ in table.counted
        if not is_shared(entry)
    }
    wanted = set() if shape.targets == (ALL_LINEAR,) else set(shape.targets)
    if there and wanted <= there:
        return
    possible = sorted(
        {
            name.removesuffix(_WEIGHT).rpartition(".")[2]
            for rule in base.rules
            if _may_have_adapter(rule, base)
            for name in rule.hf
        }
    )
    missing = ", ".join(sorted(wanted - there)) or "nothing that is left by `exclude`"
    raise RecipeError(
        f"no matrix of this model matches `train.lora.targets`: {missing}",
        why=f"the family {base.facts.family} supports them at {', '.join(possible)}",
        fix=[
            f"--set 'train.lora.targets=[{', '.join(possible)}]'",
            f"--set 'train.lora.targets=[{ALL_LINEAR}]'",
        ],
    )
