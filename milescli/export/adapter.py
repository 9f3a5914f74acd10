"""Reads, writes and merges LoRA adapters as PEFT folders: adapter_config.json and
adapter_model.safetensors. Does not train them.

For a module of weight W [out, in], A [r, in] and B [out, r]: W' = W + scaling * B A, scaling =
alpha / r, or alpha / sqrt(r) with `use_rslora` (arXiv 2106.09685, section 4.1; arXiv 2312.03732).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from milescli.checkpoint.formats.schemes import scheme_of
from milescli.checkpoint.formats.stored import rounded
from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.source import open_source
from milescli.checkpoint.weight_files import require_base
from milescli.core.errors import CheckpointError
from milescli.export.folder import ReadTensors, write_folder
from milescli.export.peft import CONFIG_FILE, read_outline, scaling_of
from milescli.export.stored import Named, converted, read_folder
from milescli.models import load_facts, table
from milescli.models.adapter import (
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    A,
    B,
    LoraShape,
    Place,
    adapter_table,
    merge_weight,
    outer_module,
    pairs_of,
    peft_name,
    read_shape,
    shared_matrices,
)
from milescli.models.base import WeightTable, read_config
from milescli.models.layers import OUTPUT_LAYER
from milescli.models.precision import with_single_experts
from milescli.plan.precision import quantised
from milescli.plan.types import Plan
from milescli.recipe.resolved import load_resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Holds a LoRA adapter in memory; adapters are small."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """module, as the base model names it -> (A [r, in], B [out, r])"""
    alpha: float
    rank: int
    use_rslora: bool = False
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Alphas of modules that differ from `alpha`."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Module of all experts of a layer (`mlp.experts.up_proj`) -> lora_A or lora_B, which is one
    for all of them; `pairs` still has a pair of each expert."""
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    """Whole tensors that were trained beside the pairs (`modules_to_save`), by name in the base
    model's folder."""
    base_model: str | None = None
    """`base_model_name_or_path`: a hub name or a folder."""
    rounds_base: Callable[[Iterable[Named]], Iterator[Named]] | None = None
    """Rounds the base model's tensors to the number format over which a run trained the adapter."""

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of its pairs; matrices that experts share count once."""
        counted, total = set[tuple[str, str]](), 0
        for module, pair in self.pairs.items():
            outer = outer_module(module)
            for which, tensor in zip((A, B), pair, strict=True):
                place = (outer if self.shared.get(outer) == which else module, which)
                total += 0 if place in counted else tensor.numel()
                counted.add(place)
        return total

    def scaling(self, module: str) -> float:
        """Return the factor of B A."""
        rank, alpha = self.pairs[module][0].shape[0], self.alphas.get(module, self.alpha)
        return scaling_of(alpha, rank, use_rslora=self.use_rslora)


def adapter_of(
    tensors: Mapping[str, Tensor], table: WeightTable, shape: LoraShape, *, base_model: Path
) -> Adapter:
    """Make an adapter from `tensors`, named as in the adapter's `table`."""
    return Adapter(
        pairs={
            module: (_tensor_at(a, tensors), _tensor_at(b, tensors))
            for module, (a, b) in pairs_of(table).items()
        },
        alpha=shape.alpha,
        rank=shape.rank,
        use_rslora=shape.kind == "rslora",
        shared=shared_matrices(table),
        base_model=str(base_model),
    )


def read_adapter(folder: Path) -> Adapter:
    """Read a PEFT folder; reads safetensors only. Raises CheckpointError as `read_outline` does."""
    outline = read_outline(folder)
    tensors = load_file(folder / PEFT_WEIGHTS)
    return Adapter(
        pairs={
            module: (_tensor_at(a, tensors), _tensor_at(b, tensors))
            for module, (a, b) in outline.pairs.items()
        },
        alpha=outline.alpha,
        rank=outline.rank,
        use_rslora=outline.use_rslora,
        alphas=outline.alphas,
        shared=outline.shared,
        saved={name: tensors[stored] for name, stored in outline.saved.items()},
        base_model=outline.base_model,
    )


def _tensor_at(place: Place, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[place.name]
    return tensor if place.row is None else tensor[place.row]


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write the two files as PEFT and SGLang read them. The scaling is always written as alpha / r:
    SGLang 0.5.20 knows neither `use_rslora` nor settings of single modules. Matrices of a lower
    rank are filled up with zeros. Tensors keep their dtype, except those whose own scaling must go
    into B."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = max((len(first) for first, _ in adapter.pairs.values()), default=adapter.rank)
    whole = next(iter(adapter.pairs), None)
    scaling = adapter.scaling(whole) if whole else adapter.alpha / adapter.rank
    tensors, of_experts = {}, dict[str, list[Tensor]]()
    for module, (first, second) in adapter.pairs.items():
        padded = _padded(first, second, rank=rank)
        share = adapter.scaling(module) / scaling
        last = padded[1] if share == 1 else padded[1].float() * share
        outer = outer_module(module)
        for which, tensor in ((A, padded[0]), (B, last)):
            if outer in adapter.shared:
                of_experts.setdefault(peft_name(outer, which), []).append(tensor)
            else:
                tensors[peft_name(module, which)] = tensor.contiguous()
    shared = {peft_name(outer, which) for outer, which in adapter.shared.items()}
    tensors |= {
        name: torch.stack(rows[:1] if name in shared else rows) for name, rows in of_experts.items()
    }
    tensors |= {
        PEFT_PREFIX + (f"{module}.base_layer.weight" if module in adapter.pairs else name): (
            tensor.contiguous()
        )
        for name, tensor in adapter.saved.items()
        for module in [name.removesuffix(".weight")]
    }
    alpha = scaling * rank
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({module.rpartition(".")[2] for module in adapter.pairs}),
        "modules_to_save": sorted(
            {
                module.rpartition(".")[2]
                for module in (name.removesuffix(".weight") for name in adapter.saved)
                if module not in adapter.pairs
            }
        )
        or None,
        "use_rslora": False,
    }
    save_file(tensors, folder / PEFT_WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _padded(first: Tensor, second: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
    """Pad A and B with zero rows and columns up to the adapter's rank, which leaves B A
    unchanged."""
    missing = rank - first.shape[0]
    if missing <= 0:
        return first, second
    return torch.nn.functional.pad(first, (0, 0, 0, missing)), torch.nn.functional.pad(
        second, (0, missing)
    )


HEAD = OUTPUT_LAYER.hf[0]


def unties_embeddings(adapter: Adapter, embedding: str) -> bool:
    """Return True if the adapter gives the output layer other weights than the embedding of a base
    model that ties the two, as PEFT does: it trains one of them, or both separately. `embedding` is
    the embedding's name on disk."""
    if HEAD.removesuffix(".weight") in adapter.pairs:
        return True
    head, embedded = adapter.saved.get(HEAD), adapter.saved.get(embedding)
    if head is None or embedded is None:
        return head is not None or embedded is not None
    return not torch.equal(head, embedded)


def named_as_first(adapter: Adapter, base: WeightTable) -> Adapter:
    """Return the adapter with the names of the base table's first form; it may have those of any
    form in which folders store the model."""
    first = with_single_experts(base)
    names = _names_of_other_forms(base, first)
    for name in first.hf_shapes():
        names.pop(name, None)
    modules = {
        old.removesuffix(".weight"): new.removesuffix(".weight") for old, new in names.items()
    }
    outer = {outer_module(old): outer_module(new) for old, new in modules.items()}
    return replace(
        adapter,
        pairs={modules.get(module, module): pair for module, pair in adapter.pairs.items()},
        alphas={modules.get(module, module): alpha for module, alpha in adapter.alphas.items()},
        shared={outer.get(module, module): which for module, which in adapter.shared.items()},
        saved={names.get(name, name): tensor for name, tensor in adapter.saved.items()},
    )


def _names_of_other_forms(base: WeightTable, first: WeightTable) -> dict[str, str]:
    """Map the names of the forms that differ from the first only in names to the first's."""
    names = dict[str, str]()
    for rule, own in zip(base.rules, first.rules, strict=True):
        entries = replace(base, rules=(own,)).entries
        for form in (rule, *rule.alternatives):
            if form.stacked == own.stacked and len(form.hf) == len(own.hf):
                others = replace(base, rules=(form,)).entries
                for one, other in zip(entries, others, strict=True):
                    names |= zip(other.hf, one.hf, strict=True)
    return names


def merge_into(
    tensors: Iterable[Named], adapter: Adapter, *, tied_to: str | None = None
) -> Iterator[Named]:
    """Yield the base model's tensors with the adapter merged in. `tied_to` is the embedding that
    also serves as the base's output layer; if the adapter unties them (`unties_embeddings`), the
    output layer follows it. Raises CheckpointError for modules that the base lacks, and for other
    shapes."""
    left = set(adapter.pairs) | set(adapter.saved)
    if tied_to is not None:
        is_apart = unties_embeddings(adapter, tied_to)
        left -= set() if is_apart else {HEAD}  # the same as the embedding
        tensors = _with_head(tensors, tied_to) if is_apart else tensors
    for name, tensor in tensors:
        module = name.removesuffix(".weight")
        if name in adapter.saved:
            tensor = _replaced(name, tensor, adapter.saved[name])
            left.discard(name)
        if module in adapter.pairs:
            first, second = adapter.pairs[module]
            if (second.shape[0], first.shape[1]) != tuple(tensor.shape):
                raise CheckpointError(
                    "adapter and base model do not match",
                    why=f"`{module}` is {list(tensor.shape)} in the base model, but B A is "
                    f"{[second.shape[0], first.shape[1]]}",
                    fix="--base DIR   # the model that the adapter was trained on",
                )
            tensor = merge_weight(tensor, first, second, scaling=adapter.scaling(module))
            left.discard(module)
        yield name, tensor
    if left:
        raise CheckpointError(
            "adapter and base model do not match",
            why=f"the base model has no `{min(left)}`"
            + (f", nor {len(left) - 1} more" if len(left) > 1 else ""),
            fix="--base DIR   # the model that the adapter was trained on",
        )


def _with_head(tensors: Iterable[Named], embedding: str) -> Iterator[Named]:
    for name, tensor in tensors:
        yield name, tensor
        if name == embedding:
            yield HEAD, tensor.clone()


def _replaced(name: str, tensor: Tensor, saved: Tensor) -> Tensor:
    if saved.shape != tensor.shape:
        raise CheckpointError(
            "adapter and base model do not match",
            why=f"`{name}` is {list(tensor.shape)} in the base model, but {list(saved.shape)} in "
            "the adapter",
            fix="--base DIR   # the model that the adapter was trained on",
        )
    return saved.to(tensor.dtype)


PLAIN_OF = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""torch's name of a dtype -> the format that stores it."""


def read_trained_adapter(checkpoint: Path, *, base: Path) -> Adapter | None:
    """Read the adapter of a checkpoint; return None if the run trained all weights. `base` is the
    folder of its model. Raises CheckpointError if the two do not belong together."""
    recorded = read_shape(checkpoint)
    if recorded is None:
        return None
    shape, mark = recorded
    require_base(mark, base, checkpoint=checkpoint)
    of_adapter = adapter_table(table(load_facts(base)), shape)
    # torch's reader of checkpoints takes 0.7 s to import
    from milescli.checkpoint.torch_dist.weights import read_hf_tensors

    tensors = dict(read_hf_tensors(checkpoint, of_adapter))
    made = adapter_of(tensors, of_adapter, shape, base_model=base)
    return replace(made, rounds_base=_rounding_of_run(checkpoint, base))


def _rounding_of_run(
    checkpoint: Path, base: Path
) -> Callable[[Iterable[Named]], Iterator[Named]] | None:
    """Return the rounding of the run's base weights, or None if its trainer used them unrounded."""
    run = RunDir(checkpoint.absolute().parents[1])
    if not run.plan_file.is_file() or not run.is_run:
        return None
    plan = Plan.read(run.plan_file)
    if plan.trainer_format is None:
        return None
    exempt = load_resolved(run.recipe_file).recipe.train.exempt
    layouts = (plan.trainer, plan.engines)
    choices = quantised(table(load_facts(base)), plan.trainer_format, layouts, exempt)
    return partial(
        rounded, choices=choices, scheme=scheme_of(plan.trainer_format, read_config(base))
    )


def read_merged(base: Path, adapter: Adapter, of_base: WeightTable) -> Iterator[Named]:
    """Yield the base model's tensors with the adapter merged in; keeps the folder open
    meanwhile."""
    facts = load_facts(base)
    with open_source(base) as source:
        on_disk = table(facts).as_on_disk(source.names(), source.shape)
        yield from merged(
            lambda of_first: read_folder(source, of_first, on_disk=on_disk),
            adapter,
            first=table(facts),
            wanted=of_base,
        )


def merged(
    read: ReadTensors,
    adapter: Adapter,
    *,
    first: WeightTable,
    wanted: WeightTable,
    tied_to: str | None = None,
) -> Iterator[Named]:
    """Yield the base model's tensors, in the form of the table `wanted`, with the adapter merged
    in. Adapters and roundings name each expert in the first form of the model's tensors, so this
    is the form in which they are read and merged. `first` is the base model's table; `tied_to`: as
    in `merge_into`."""
    there = {rule.megatron for rule in wanted.rules}
    given = with_single_experts(
        replace(first, rules=tuple(rule for rule in first.rules if rule.megatron in there))
    )
    is_untied = tied_to is not None and unties_embeddings(adapter, tied_to)
    tensors = read(given.tied() if is_untied else given)
    if adapter.rounds_base is not None:
        tensors = adapter.rounds_base((name, tensor.float()) for name, tensor in tensors)
    yield from converted(merge_into(tensors, adapter, tied_to=tied_to), given=given, wanted=wanted)


def write_merged(target: Path, adapter: Adapter, *, base: Path) -> None:
    """Write the merged model as a Hugging Face folder, which must not exist or must be empty.
    Raises CheckpointError."""
    facts = load_facts(base)
    if facts.dtype not in PLAIN_OF:
        raise CheckpointError(
            f"`{base}` is stored as {facts.dtype}",
            why=f"an adapter can be merged into weights of {', '.join(PLAIN_OF)}",
            fix="export the model in one of these formats first",
        )
    write_folder(
        target,
        table=table(facts),
        read=lambda of_base: read_merged(base, adapter, of_base),
        base=base,
        format=PLAIN_OF[facts.dtype],
        card=lambda _: {},
    )
