"""What a model is: facts read from config.json, and the vocabulary of the two-way weight table. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from milescli.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_NAME = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What every room may want to know of a model without loading it."""

    family: str
    """`model_type` of the config: qwen3, qwen3_moe, ..."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    """Of the dense layers."""
    vocab_size: int
    tied_embeddings: bool
    """The output layer uses the embedding's weight."""
    rope_theta: float
    norm_eps: float
    max_position_embeddings: int
    qk_norm: bool
    """Queries and keys are normalised per head before the rotary embedding."""
    qkv_bias: bool
    """Of the query, key and value projections."""
    num_experts: int = 0
    """0 for a dense model."""
    topk: int = 0
    """Experts per token."""
    moe_ffn_hidden_size: int = 0
    """Of one expert."""
    normalize_topk: bool = False
    """The chosen experts' probabilities are scaled to sum to 1."""
    moe_layers: tuple[bool, ...] = ()
    """[num_layers] which layers have experts; empty for a dense model."""
    dtype: str = "float32"
    """Of the weights on disk, as the config says: float32, bfloat16 or float16."""
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_query_heads_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has experts."""
        return bool(self.moe_layers) and self.moe_layers[layer]

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return sum(self.moe_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How tensor parallelism cuts the Hugging Face tensors of a rule. Fusing commutes with the cut, so a rank that holds
    cut tensors fuses them as if they were whole, and a rank's Megatron tensor splits into cut Hugging Face tensors."""

    axis: Literal["none", "tp", "etp"]
    """Mesh axis that cuts: none (every rank holds all), tp, or etp for tensors of an expert."""
    dim: int = 0
    """Tensor dim that is cut."""
    padded: bool = False
    """The dim is filled with zero rows up to a multiple of the mesh axis (vocabulary)."""


REPLICATED = Sharding(axis="none")
COLUMN = Sharding(axis="tp", dim=0)
ROW = Sharding(axis="tp", dim=1)
EXPERT_COLUMN = Sharding(axis="etp", dim=0)
EXPERT_ROW = Sharding(axis="etp", dim=1)
VOCABULARY = Sharding(axis="tp", dim=0, padded=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """Another way in which disks hold a tensor of one expert: all experts in one tensor. Read, never written."""

    hf: str
    """Pattern with {layer}; the tensor is [num_experts, ...]."""
    part: int = 0
    """Which of `num_parts` equal parts along dim 1 of the stack, i.e. dim 0 of one expert's tensor."""
    num_parts: int = 1


Fuse = Callable[["Sequence[Tensor]", ModelFacts], "Tensor"]
Split = Callable[["Tensor", ModelFacts], "list[Tensor]"]
Shapes = Callable[[ModelFacts], list[tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Hugging Face tensors <-> one Megatron tensor, for one layer or expert. `fuse` and `split` are inverse to each other."""

    hf: tuple[str, ...]
    """Names with {layer} and {expert} where there are such."""
    megatron: str
    """Name as Megatron's own (local) modules call it, with global {layer} and {expert}."""
    shapes: Shapes
    """Of the whole Hugging Face tensors, in the order of `hf`."""
    sharding: Sharding
    fuse: Fuse
    split: Split
    layers: Literal["none", "all", "dense", "moe"] = "all"
    """Which layers have it; none: it stands outside the layers."""
    stacked: tuple[Stacked, ...] = ()
    """[len(hf)] or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the table: a rule, applied to a layer and an expert."""

    rule: Rule
    hf: tuple[str, ...]
    """Hugging Face names."""
    megatron: str
    """Megatron name with global layer and expert numbers."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the whole Hugging Face tensors."""
    layer: int | None
    expert: int | None


@dataclass(frozen=True, kw_only=True)
class WeightTable:
    """The one two-way table of a model, used by loading, live publish and export alike."""

    facts: ModelFacts
    rules: tuple[Rule, ...] = field(repr=False)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """In the order of the model: embedding, layer by layer, final norm, output layer."""
        before = [
            rule for rule in self.rules if rule.layers == "none" and not rule.megatron.startswith(("decoder.", "output_layer."))
        ]
        after = [rule for rule in self.rules if rule.layers == "none" and rule not in before]
        found = [entry for rule in before for entry in self._outside(rule)]
        for layer in range(self.facts.num_layers):
            found += [entry for rule in self.rules for entry in self._in_layer(rule, layer)]
        return tuple(found + [entry for rule in after for entry in self._outside(rule)])

    @cached_property
    def by_megatron(self) -> dict[str, Entry]:
        """Megatron name (global numbers) -> entry."""
        return {entry.megatron: entry for entry in self.entries}

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face name with its shape, in the order of the model."""
        return {name: shape for entry in self.entries for name, shape in zip(entry.hf, entry.shapes, strict=True)}

    def _outside(self, rule: Rule) -> Iterator[Entry]:
        yield self._entry(rule, layer=None, expert=None)

    def _in_layer(self, rule: Rule, layer: int) -> Iterator[Entry]:
        kind = "moe" if self.facts.is_moe_layer(layer) else "dense"
        if rule.layers not in ("all", kind):
            return
        experts: Sequence[int | None] = range(self.facts.num_experts) if "{expert}" in rule.megatron else (None,)
        for expert in experts:
            yield self._entry(rule, layer=layer, expert=expert)

    def _entry(self, rule: Rule, *, layer: int | None, expert: int | None) -> Entry:
        return Entry(
            rule=rule,
            hf=tuple(name.format(layer=layer, expert=expert) for name in rule.hf),
            megatron=rule.megatron.format(layer=layer, expert=expert),
            shapes=tuple(rule.shapes(self.facts)),
            layer=layer,
            expert=expert,
        )

    @cached_property
    def num_parameters(self) -> int:
        """Numbers in the model; a tied output layer counts once."""
        return sum(_product(shape) for shape in self.hf_shapes().values())

    @cached_property
    def num_active_parameters(self) -> int:
        """Numbers that one token meets: of the experts only the chosen ones."""
        total = 0
        for entry in self.entries:
            size = sum(_product(shape) for shape in entry.shapes)
            total += size * self.facts.topk // self.facts.num_experts if entry.expert is not None else size
        return total


def _product(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def read_config(folder: Path) -> dict[str, object]:
    """config.json of a model folder. Raises CheckpointError where there is none or it is not JSON."""
    path = folder / CONFIG_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"`{folder}` is not a model folder",
            why=f"it has no {CONFIG_NAME}",
            fix="point `model.path` at a folder with config.json, *.safetensors and a tokenizer",
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot read `{path}`", why=str(error), fix="fetch the model again") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"cannot read `{path}`", why="it holds no JSON object", fix="fetch the model again")
    return raw
