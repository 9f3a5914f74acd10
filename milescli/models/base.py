"""Defines the two-way weight table of a model: Hugging Face tensors <-> Megatron tensors. Loads no
torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from milescli.core.errors import CheckpointError
from milescli.core.files import read_json
from milescli.models.facts import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_NAME = "config.json"
VISION_PREFIX = "vision."
"""Prefix of Megatron's names for a vision tower's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Describes how tensor parallelism cuts the parts of a rule. Fusing commutes with the cut, so a
    rank that holds cut parts fuses them as if they were whole, and a rank's Megatron tensor splits
    into cut parts."""

    axis: Literal["none", "tp", "etp"]
    """Mesh axis that cuts: none (every rank holds the whole tensor), tp, or etp for tensors of an
    expert."""
    dim: int = 0
    """Tensor dim that is cut."""
    padded: bool = False
    """True if the dim is padded with zero rows to a multiple of the mesh axis (vocabulary)."""


REPLICATED = Sharding(axis="none")
COLUMN = Sharding(axis="tp", dim=0)
ROW = Sharding(axis="tp", dim=1)
EXPERT_COLUMN = Sharding(axis="etp", dim=0)
EXPERT_ROW = Sharding(axis="etp", dim=1)
VOCABULARY = Sharding(axis="tp", dim=0, padded=True)

Fuse = Callable[["Sequence[Tensor]", ModelFacts], "Tensor"]
Split = Callable[["Tensor", ModelFacts], "list[Tensor]"]
Repack = Callable[["Sequence[Tensor]", ModelFacts], "list[Tensor]"]
Shapes = Callable[[ModelFacts], list[tuple[int, ...]]]
Where = Callable[[ModelFacts, int], bool]
"""(facts, layer from 0) -> True if that layer has the rule's tensors"""


ShapeOf = Callable[[str], tuple[int, ...] | None]
"""Name of a tensor on disk -> its shape, or None if it is not known."""


def any_shape(_: str) -> None:
    """Return None, which means that shapes are not known."""


def every_layer(facts: ModelFacts, layer: int) -> bool:
    """Select all layers."""
    return True


def dense_layers(facts: ModelFacts, layer: int) -> bool:
    """Select the layers with a plain MLP."""
    return facts.layers[layer].mlp == "dense"


def moe_layers(facts: ModelFacts, layer: int) -> bool:
    """Select the layers with experts."""
    return facts.layers[layer].mlp == "moe"


def mixer_layers(*mixers: str) -> Where:
    """Return a selector of the layers with one of these token mixers."""
    return lambda facts, layer: facts.layers[layer].mixer in mixers


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Maps Hugging Face tensors to one Megatron tensor and back, for one layer or expert.

    disk tensors --unpack--> parts --(tensor parallelism cuts each)--> --fuse--> Megatron tensor,
    and back by split and pack. Every tensor has a fixed place at each stop, and no step loses
    anything. The functions get `facts.at(layer)`.
    """

    hf: tuple[str, ...]
    """Names on disk, with {layer}, {expert} and {mtp} as placeholders; {layer} of an MTP layer is
    num_layers + its number."""
    megatron: str
    """Name in Megatron's own (local) modules, with global {layer}, {expert} and {mtp} as
    placeholders."""
    shapes: Shapes
    """Shapes of the whole tensors on disk, in the order of `hf`; of one expert's row if they are
    `stacked`."""
    sharding: Sharding
    """Sharding of every part."""
    fuse: Fuse
    split: Split
    block: Literal["outside", "decoder", "mtp"] = "decoder"
    """outside: occurs once in the model; decoder: in each layer that `where` selects; mtp: in each
    multi-token-prediction layer."""
    where: Where = every_layer
    """Selects the layers of the decoder that have it."""
    stacked: bool = False
    """True if the disk tensors hold all experts along dim 0; an entry of the table is then one row
    of them."""
    unpack: Repack | None = None
    """Disk tensors (of one expert if stacked) -> parts that tensor parallelism can cut; None: they
    are the parts."""
    pack: Repack | None = None
    """The inverse of `unpack`."""
    suffixes: tuple[str, ...] = ()
    """Suffix of each part's name in Megatron's checkpoints, in order, if they store the parts
    separately (`in_proj.weight.query`)."""
    buffer: bool = False
    """True if it is not a parameter: it is neither trained nor counted (the router's bias)."""
    float32: bool = False
    """True if releases store it in float32, whatever dtype the other weights have; it must not be
    rounded."""
    integers: bool = False
    """True if it holds whole numbers, which must not be cast to the dtype of the weights."""
    optional: bool = False
    """True if folders of the family may lack it (`WeightTable.as_on_disk` then omits it)."""
    together: str = ""
    """Name shared by the rules of a layer that engines fuse while they load. Engines forget a part
    if the others arrive later, so these rules are next to each other in the table and are published
    in one bucket."""
    alternatives: tuple[Rule, ...] = ()
    """Other forms in which folders store the same tensors; `WeightTable.as_on_disk` takes the one
    that is present."""

    @property
    def of_vision(self) -> bool:
        """Return True if it belongs to the vision tower or its projector."""
        return self.megatron.startswith(VISION_PREFIX)

    @property
    def on_first_stage(self) -> bool:
        """Return True for a rule outside the decoder whose tensor is on the first pipeline
        stage."""
        return self.of_vision or self.megatron.startswith("embedding.")

    @property
    def is_per_expert(self) -> bool:
        """Return True if each expert has its own tensor."""
        return "{expert}" in self.megatron

    def to_parts(self, tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
        """Convert disk tensors to whole parts."""
        return list(tensors) if self.unpack is None else self.unpack(tensors, facts)

    def to_disk(self, parts: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
        """Convert whole parts to disk tensors."""
        return list(parts) if self.pack is None else self.pack(parts, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the table: a rule, applied to a layer and an expert."""

    rule: Rule
    hf: tuple[str, ...]
    """Names on disk. Entries of stacked experts share names; (name, row) is unique."""
    megatron: str
    """Megatron name with global layer and expert numbers."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the whole disk tensors, or of this expert's row."""
    facts: ModelFacts
    """The facts of this layer."""
    layer: int | None
    """Layer of the decoder, from 0; None outside the decoder."""
    expert: int | None
    mtp: int | None = None
    """Number of the multi-token-prediction layer, from 0."""

    @property
    def row(self) -> int | None:
        """Return the row in a stacked disk tensor, or None if the tensor is not stacked."""
        return self.expert if self.rule.stacked else None

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True, kw_only=True)
class WeightTable:
    """Maps the weights of a model in both directions; used by convert, loading, live publication
    and export alike."""

    facts: ModelFacts
    rules: tuple[Rule, ...] = field(repr=False)
    passthrough: tuple[str, ...] = ()
    """Regular expressions of names on disk that Megatron has no place for (vision towers); their
    tensors are copied unchanged from folder to folder."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of names on disk that hold no information (buffers that old releases
    wrote); they are omitted, and reported."""

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Return the entries in the order of the model: embedding, layer by layer, MTP layers,
        final norm, output layer."""
        return tuple(
            self._entry(rule, layer=layer, expert=expert, mtp=mtp)
            for rule, layer, mtp in self._places()
            for expert in (range(self.facts.num_experts) if rule.is_per_expert else (None,))
        )

    @cached_property
    def counted(self) -> tuple[tuple[Entry, int], ...]:
        """Return (entry, count) pairs for sums: one entry stands for all experts, which are
        alike."""
        return tuple(
            (self._entry(rule, layer=layer, expert=0, mtp=mtp), self.facts.num_experts)
            if rule.is_per_expert
            else (self._entry(rule, layer=layer, mtp=mtp), 1)
            for rule, layer, mtp in self._places()
        )

    def _places(self) -> Iterator[tuple[Rule, int | None, int | None]]:
        """Yield (rule, layer, MTP layer), in the order of the model."""
        after_decoder = ("decoder.", "output_layer.")
        outside = [rule for rule in self.rules if rule.block == "outside"]
        yield from (
            (rule, None, None) for rule in outside if not rule.megatron.startswith(after_decoder)
        )
        for layer in range(self.facts.num_layers):
            for rule in self.rules:
                if rule.block == "decoder" and rule.where(self.facts, layer):
                    yield rule, layer, None
        for mtp in range(self.facts.num_mtp_layers):
            yield from ((rule, None, mtp) for rule in self.rules if rule.block == "mtp")
        yield from (
            (rule, None, None) for rule in outside if rule.megatron.startswith(after_decoder)
        )

    def tied(self) -> WeightTable:
        """Return the same table without an output layer, which is then the embedding."""
        rules = tuple(rule for rule in self.rules if not rule.megatron.startswith("output_layer."))
        return replace(self, facts=replace(self.facts, tied_embeddings=True), rules=rules)

    @cached_property
    def by_megatron(self) -> dict[str, Entry]:
        """Map each Megatron name (with global numbers) to its entry."""
        return {entry.megatron: entry for entry in self.entries}

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Map every name on disk to its shape, in the order of the model."""
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in self.entries:
            rows = (self.facts.num_experts,) if entry.rule.stacked else ()
            shapes |= {
                name: (*rows, *shape) for name, shape in zip(entry.hf, entry.shapes, strict=True)
            }
        return shapes

    def as_on_disk(self, names: Collection[str], shape: ShapeOf = any_shape) -> WeightTable:
        """Return the table with the rules in the forms in which the folder stores them; `names` are
        its tensors. An alternative replaces a rule if only the alternative's names are present;
        `shape` tells forms of the same names apart. Optional rules whose names are absent are
        dropped, and so are MTP layers without a single tensor (transformers omits them when it
        saves)."""
        there = set(names)
        chosen = tuple(self._form_on_disk(rule, there, shape) for rule in self.rules)
        mtp = {name for rule in chosen if rule.block == "mtp" for name in self._first_names(rule)}
        chosen = tuple(
            rule
            for rule in chosen
            if not (rule.optional and self._first_names(rule).isdisjoint(there))
            and (rule.block != "mtp" or mtp & there)
        )
        return self if chosen == self.rules else replace(self, rules=chosen)

    def _form_on_disk(self, rule: Rule, there: set[str], shape: ShapeOf) -> Rule:
        forms = [form for form in (rule, *rule.alternatives) if self._first_names(form) <= there]
        if not forms or not (names := self._first_names(forms[0])):
            return rule
        alike = [form for form in forms if self._first_names(form) == names]
        if len(alike) == 1:
            return forms[0]
        return next((form for form in alike if self._has_shapes(form, shape)), forms[0])

    def _has_shapes(self, rule: Rule, shape: ShapeOf) -> bool:
        rows = (self.facts.num_experts,) if rule.stacked else ()
        first = self._first_tensors(rule).items()
        return all(shape(name) in (None, (*rows, *size)) for name, size in first)

    def holds(self, entry: Entry) -> bool:
        """Return True if the trainer holds the entry: everything except MTP layers that are not
        trained."""
        return entry.mtp is None or self.facts.trains_mtp

    def trains(self, entry: Entry) -> bool:
        """Return True if the trainer changes the entry. `model.indexer` decides it for the indexer
        of sparse attention, and `model.vision` for the tower of a vision-language model."""
        if entry.rule.of_vision and self.facts.vision is not None:
            return self.facts.vision.trains(entry.megatron)
        indexer = self.facts.indexer
        return ".indexer." not in entry.megatron or (indexer is not None and indexer.trained)

    def without_frozen_tower(self) -> WeightTable:
        """Return the table without the frozen weights of a vision tower: engines load those from
        the folder, so they are not sent."""
        vision = self.facts.vision
        rules = tuple(
            rule
            for rule in self.rules
            if not rule.of_vision or (vision is not None and vision.trains(rule.megatron))
        )
        return self if rules == self.rules else replace(self, rules=rules)

    def is_passthrough(self, name: str) -> bool:
        """Return True if a tensor on disk is copied unchanged, as Megatron has no place for it."""
        return any(re.search(pattern, name) for pattern in self.passthrough)

    def is_ignored(self, name: str) -> bool:
        """Return True if a tensor on disk carries no information."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    @cached_property
    def num_parameters(self) -> int:
        """Return the number of parameters of the model, including its MTP layers if they are
        trained; a tied output layer counts once."""
        return sum(
            times * entry.num_elements
            for entry, times in self.counted
            if self.holds(entry) and not entry.rule.buffer
        )

    @cached_property
    def num_vision_parameters(self) -> int:
        """Return the number of parameters of the vision tower, if it is computed."""
        return sum(entry.num_elements for entry in self.entries if entry.rule.of_vision)

    @cached_property
    def num_indexer_parameters(self) -> int:
        """Return the number of parameters of the trainer's indexers of sparse attention."""
        return sum(
            times * entry.num_elements
            for entry, times in self.counted
            if ".indexer." in entry.megatron and self.holds(entry)
        )

    @cached_property
    def num_mtp_parameters(self) -> int:
        """Return the number of parameters of the MTP layers."""
        return sum(
            times * entry.num_elements
            for entry, times in self.counted
            if entry.mtp is not None and not entry.rule.buffer
        )

    @cached_property
    def num_active_parameters(self) -> int:
        """Return the number of parameters that one token uses, counting only the chosen experts."""
        return sum(
            (times if entry.expert is None else self.facts.topk) * entry.num_elements
            for entry, times in self.counted
            if self.holds(entry) and not entry.rule.buffer
        )

    def _first_names(self, rule: Rule) -> set[str]:
        return set(self._first_tensors(rule))

    def _first_tensors(self, rule: Rule) -> dict[str, tuple[int, ...]]:
        """Map names on disk to shapes, for the first layer that the rule applies to; empty if it
        applies to none."""
        layers = [layer for layer in range(self.facts.num_layers) if rule.where(self.facts, layer)]
        if (rule.block == "decoder" and not layers) or (
            rule.block == "mtp" and not self.facts.num_mtp_layers
        ):
            return {}
        layer = layers[0] if rule.block == "decoder" else None
        number = self.facts.num_layers if rule.block == "mtp" else layer
        return {
            name.format(layer=number, expert=0, mtp=0): shape
            for name, shape in zip(rule.hf, rule.shapes(self.facts.at(layer)), strict=True)
        }

    def _entry(
        self,
        rule: Rule,
        *,
        layer: int | None = None,
        expert: int | None = None,
        mtp: int | None = None,
    ) -> Entry:
        facts = self.facts.at(layer)
        number = layer if mtp is None else self.facts.num_layers + mtp
        return Entry(
            rule=rule,
            hf=tuple(name.format(layer=number, expert=expert, mtp=mtp) for name in rule.hf),
            megatron=rule.megatron.format(layer=layer, expert=expert, mtp=mtp),
            shapes=tuple(rule.shapes(facts)),
            facts=facts,
            layer=layer,
            expert=expert,
            mtp=mtp,
        )


def read_config(folder: Path) -> dict[str, object]:
    """Read config.json of a model folder. Raises CheckpointError if it is missing, is not JSON, or
    has impossibly many layers or experts."""
    path = folder / CONFIG_NAME
    try:
        raw = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"`{folder}` is not a model folder",
            why=f"it does not contain {CONFIG_NAME}",
            fix="set `model.path` to a folder with config.json, *.safetensors and a tokenizer",
        ) from None
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"cannot read `{path}`", why=str(error), fix="download the model again"
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"cannot read `{path}`",
            why="it does not contain a JSON object",
            fix="download the model again",
        )
    _require_bounded(raw)
    return raw


_MAX_VALUES = {
    **dict.fromkeys(("size", "dim", "rank", "heads", "groups"), 2**31 - 1),
    "layers": 10_000,
    "depth": 10_000,
    "experts": 100_000,
}
"""Largest numbers allowed for fields by the end of their names: lengths of tensors, and counts for
which the weight table has one rule or entry each."""


def _require_bounded(config: Mapping[str, object]) -> None:
    for section in (config, *(one for one in config.values() if isinstance(one, Mapping))):
        for name, value in section.items():
            most = _MAX_VALUES.get(name.rpartition("_")[2])
            if most is not None and isinstance(value, int | float) and not value <= most:
                raise CheckpointError(
                    f"config.json is not supported: `{name}` is {str(value)[:20]}",
                    why=f"no model has more than {most:,}",
                    fix="compare its fields with those of the model's release",
                )


def quantization_config(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the quantization section of a config.json or of its text model; None if the weights
    are not quantised."""
    nested = config.get("text_config")
    quantised = config.get("quantization_config") or (
        nested.get("quantization_config") if isinstance(nested, Mapping) else None
    )
    return quantised if isinstance(quantised, Mapping) else None
