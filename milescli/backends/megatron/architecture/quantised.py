"""Makes a model's layers multiply by weights that are rounded to a number format, while gradients
are those of the unrounded weights (a straight-through estimator, arXiv 1308.3432):
quantisation-aware training. It rounds the matrices of a Hugging Face folder, so that the numbers
are those that publishing and export store, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.state.saving import last_change
from milescli.backends.megatron.state.stored_shards import rounded_shard, stored_shards
from milescli.backends.megatron.state.weights import LocalWeight, cut
from milescli.checkpoint.formats.base import Codec, Scheme, rounded_by_rows
from milescli.checkpoint.formats.schemes import INPUT_CODECS, scheme_of
from milescli.checkpoint.formats.stored import largest_of, rounded, stored
from milescli.models.base import Entry, WeightTable, read_config
from milescli.models.precision import Choice, with_single_experts
from milescli.plan.precision import quantised
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.weights.base import Bucket
from milescli.weights.shards import Shards


class QuantisedLayers:
    """Rounds the weights, and the inputs, of selected layers of one model on this rank."""

    def __init__(
        self,
        model: GPTModel,
        weights: Sequence[LocalWeight],
        table: WeightTable,
        choices: Mapping[str, Choice],
        codec: Codec,
        *,
        mesh: Mesh,
        inputs: Codec | None,
    ) -> None:
        """Hook into the layers of `weights` that have a matrix which `choices` quantises; `table`
        has the names of the choices. `inputs`: codec of the layers' inputs; None: they are not
        rounded."""
        self._choices, self._codec, self._mesh = choices, codec, mesh
        self._layers = list[_Layer]()
        for weight in weights:
            entry = table.by_megatron.get(weight.entry.megatron)
            if entry is not None and any(choices[name].form for name in entry.hf):
                module = model.get_submodule(weight.name.rpartition(".")[0])
                self._layers.append(_Layer(module, weight, entry))
        self._inputs = inputs
        for layer in self._layers:
            layer.module.rounding = Rounding(self, layer)
            layer.module.register_forward_pre_hook(layer.module.rounding.use_rounded_weight)
            layer.module.register_forward_hook(layer.restore_weight, always_call=True)

    def freeze(self) -> None:
        """Round the weights permanently, in place: those of an adapter's base, which are never
        trained."""
        for layer in self._layers:
            layer.parameter.data.copy_(self._rounded(layer))
            layer.is_frozen = True

    def free_rounded(self) -> None:
        """Free the memory of rounded weights; the next pass rounds them again."""
        for layer in self._layers:
            layer.rounded = layer.made_of = None

    def weight_of(self, layer: _Layer) -> torch.Tensor:
        """Return the rounded weight of the layer. Its gradient goes to the unrounded parameter."""
        if layer.is_frozen:
            return layer.parameter
        return _StraightThrough.apply(layer.parameter, self._rounded_now(layer))

    def rounded_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of a layer, [..., columns], rounded row by row if inputs are rounded."""
        codec = self._inputs
        if codec is None:
            return x
        with torch.no_grad():
            rows = x.detach().reshape(-1, x.shape[-1])
            rounded = rounded_by_rows(codec, rows).view(x.shape)
        return _StraightThrough.apply(x, rounded)

    def _rounded_now(self, layer: _Layer) -> torch.Tensor:
        """Return the rounded weight, computed once for all microbatches between two changes of the
        weights."""
        made_of = (last_change(), layer.parameter.data_ptr())
        if layer.rounded is None or layer.made_of != made_of:
            layer.rounded, layer.made_of = self._rounded(layer), made_of
        return layer.rounded

    @torch.no_grad()
    def _rounded(self, layer: _Layer) -> torch.Tensor:
        entry, rule = layer.entry, layer.entry.rule
        parts = rule.split(layer.parameter.detach(), entry.facts)
        matrices = rule.to_disk(parts, entry.facts)
        quantised = [self._choices[name].form is not None for name in entry.hf]
        largest = None
        if self._codec.needs_largest:
            chosen = [m for m, is_one in zip(matrices, quantised, strict=True) if is_one]
            largest = self._over_ranks(largest_of(chosen), entry)
        rounded = [
            rounded_by_rows(self._codec, matrix, largest) if is_one else matrix
            for matrix, is_one in zip(matrices, quantised, strict=True)
        ]
        return rule.fuse(rule.to_parts(rounded, entry.facts), entry.facts)

    def _over_ranks(self, largest: torch.Tensor, entry: Entry) -> torch.Tensor:
        """Return the maximum over the ranks that share the entry."""
        if cut(entry.rule.sharding, self._mesh)[0] > 1:
            group = self._mesh.etp_group if entry.rule.is_per_expert else self._mesh.tp_group
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return largest


@dataclass(slots=True)
class _Layer:
    """Holds one layer and its rounded weight."""

    module: torch.nn.Module
    weight: LocalWeight
    entry: Entry
    """Its entry of the table, in the form in which quantised folders store it."""
    rounded: torch.Tensor | None = None
    made_of: tuple[int, int] | None = None
    """(number of the last change, address) of the weights from which `rounded` was computed."""
    is_frozen: bool = False

    @property
    def parameter(self) -> torch.Tensor:
        return self.weight.parameter

    @property
    def attribute(self) -> str:
        return self.weight.name.rpartition(".")[2]

    def restore_weight(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        """Let the layer use its parameter again, after its forward pass; a forward hook."""
        module.__dict__.pop(self.attribute, None)


class Rounding:
    """Gives one layer its rounded weight and input: by a hook, or to `grouped_experts`, which does
    not call the layer itself."""

    def __init__(self, layers: QuantisedLayers, layer: _Layer) -> None:
        self._layers, self._layer = layers, layer

    def weight(self) -> torch.Tensor:
        """Return the rounded weight."""
        return self._layers.weight_of(self._layer)

    def of_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rounded input."""
        return self._layers.rounded_input(x)

    def use_rounded_weight(
        self, module: torch.nn.Module, inputs: tuple[object, ...]
    ) -> tuple[object, ...]:
        """Put the rounded weight where the layer's forward pass finds it before the parameter of
        the same name, which stays registered, and round the layer's input."""
        if not self._layer.is_frozen:
            module.__dict__[self._layer.attribute] = self.weight()
        first, *others = inputs
        assert isinstance(first, torch.Tensor)
        return (self.of_input(first), *others)


class _StraightThrough(torch.autograd.Function):
    """Returns `rounded`, and passes the gradient on to `x`."""

    @staticmethod
    def forward(ctx, x, rounded):
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class PolicyFormats:
    """Applies the number formats of a plan to the policy: the trainer's format to its layers, the
    engines' format to the weights that are sent to them."""

    def __init__(self, table: WeightTable, plan: Plan, recipe: Recipe, *, folder: Path) -> None:
        """`table` is the policy's, `folder` the model's. Raises FitError if a format applies to
        none of its weights."""
        self._config = read_config(folder)
        self._single = with_single_experts(table)
        self.table = self._single if plan.engine_format else table
        """Table of the weights that engines are sent."""
        self._plan = plan
        self._frozen = recipe.train.lora.is_on
        """True if the weights were rounded once and for all."""
        layouts, exempt = (plan.trainer, plan.engines), recipe.train.exempt
        self._of_trainer = quantised(table, plan.trainer_format, layouts, exempt)
        self._of_engines = (
            self._of_trainer
            if plan.engine_format == plan.trainer_format
            else quantised(table, plan.engine_format, layouts, exempt)
        )

    def round_layers(
        self, model: GPTModel, weights: Sequence[LocalWeight], *, mesh: Mesh
    ) -> QuantisedLayers | None:
        """Make the model multiply by rounded weights. Return None if the trainer has no format."""
        form = self._plan.trainer_format
        if form is None:
            return None
        layers = QuantisedLayers(
            model,
            weights,
            self._single,
            self._of_trainer,
            scheme_of(form, self._config).codec,
            mesh=mesh,
            inputs=INPUT_CODECS.get(form) if self._plan.quantises_inputs else None,
        )
        if self._frozen:
            layers.freeze()
        return layers

    @property
    def blocks(self) -> Mapping[str, tuple[int, int]] | None:
        """Return name -> (rows, columns) that share a scale, for each matrix that is rounded for
        the engines; None if the numbers of a piece depend on the rest of the matrix."""
        scheme, choices = self._sent()
        if scheme is None:
            return {}
        if scheme.codec.needs_largest:
            return None
        rows, columns = scheme.codec.block
        return {name: (rows, columns) for name, each in choices.items() if each.form is not None}

    def _sent(self) -> tuple[Scheme | None, Mapping[str, Choice]]:
        """Return the format in which each weight is sent to the engines."""
        trainer, engines = self._plan.trainer_format, self._plan.engine_format
        if engines is not None:
            return scheme_of(engines, self._config), self._of_engines
        if trainer is not None and not self._frozen:
            return scheme_of(trainer, self._config), self._of_trainer
        return None, {}

    def shards_for_engines(self, buckets: Iterable[Shards]) -> Iterator[Shards]:
        """Yield shards in the engines' format. Each piece is rounded separately, so its size must
        be a multiple of `blocks`, or the whole matrix."""
        scheme, choices = self._sent()
        for bucket in buckets:
            if scheme is None:
                yield bucket
            elif self._plan.engine_format is None:
                yield [rounded_shard(shard, choices, scheme) for shard in bucket]
            else:
                yield [each for shard in bucket for each in stored_shards(shard, choices, scheme)]

    def for_engines(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yield the buckets of the whole model in the engines' format, under the names of
        `table`."""
        scheme, choices = self._sent()
        for bucket in buckets:
            if scheme is None:
                yield bucket
            elif self._plan.engine_format is not None:
                yield list(stored(bucket, choices, scheme, plain=lambda _, same: same))
            else:
                yield list(rounded(bucket, choices, scheme))
