"""Updates of a quantised model, in every engine: what SGLang derives of the weights is made again
after the last bucket. Installed by the plug-in; `channels.py` says when the last one was sent.

After it has read a folder, SGLang lets each quantised layer process what was loaded: repack it,
swizzle or requantise scales, multiply them. Its orders that update weights load and do no more, so
that a layer would go on with old scales, or has no parameter left that can be loaded. Here the
first bucket of an update puts the parameters back that the folder's tensors were loaded into, and
the order after the last one processes them again. What was captured in a graph keeps its place in
memory. The order of the calls is tested; no accelerator has run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module, Parameter

LOADED_FORMAT = "miles_loaded"
"""`load_format` of the order after the last bucket; its payload is [(order, None)]."""
NEVER_SENT = ("input_scale", ".k_scale", ".v_scale", "g_idx", "g_idx_sort_indices")
"""Endings of the names of parameters that SGLang sets itself where nobody sends them: scales of
activations and caches, and the order of columns."""
_SCALE = ".weight_scale_inv"
_FUSED = (
    ("q_proj", "qkv_proj", "q"),
    ("k_proj", "qkv_proj", "k"),
    ("v_proj", "qkv_proj", "v"),
    ("gate_proj", "gate_up_proj", 0),
    ("up_proj", "gate_up_proj", 1),
)
"""Part -> what it is fused into, and how its loader knows the part."""
_UPDATES = ("update_weights_from_tensor", "update_weights_from_distributed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """Holds a parameter as it was before anything was processed."""

    parameter: Parameter
    kind: tuple[torch.Size, torch.dtype]
    attributes: dict[str, object]
    """Its loader among them, and marks by which SGLang knows scales that it has requantised: it
    would neither load them rightly nor requantise them again."""

    def restore_attributes(self) -> None:
        """Remove marks that processing left."""
        vars(self.parameter).clear()
        vars(self.parameter).update(self.attributes)


@dataclass(slots=True, kw_only=True)
class _Layer:
    """Holds what one quantised layer is loaded into, and what was made of it."""

    module: Module
    loaded: dict[str, _Loaded]
    """Loaded tensors by name."""
    processed: dict[str, torch.Tensor] = field(default_factory=dict)
    """name -> memory of what stood in its place until the update began"""

    @property
    def device(self) -> torch.device:
        """Return the device of what was processed last."""
        return next(iter(self.module.parameters(recurse=False))).device


_layers: WeakKeyDictionary[Module, list[_Layer]] = WeakKeyDictionary()
_open: WeakKeyDictionary[Module, bool] = WeakKeyDictionary()
"""Models of which an update has begun and not ended."""


def install() -> None:
    """Let updates of quantised models begin and end rightly. /update_weights_from_tensor
    understands LOADED_FORMAT; on any other model it does nothing."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.postprocess_weights = staticmethod(
        noting(DefaultModelLoader.postprocess_weights)
    )
    DefaultModelLoader.load_weights_only = staticmethod(
        _with_scales(DefaultModelLoader.load_weights_only)
    )
    for name in (*_UPDATES, "update_weights_from_disk"):
        setattr(WeightUpdater, name, _after_begin(getattr(WeightUpdater, name)))
    update = WeightUpdater.update_weights_from_tensor

    def update_or_end(self, named_tensors, load_format=None):
        if load_format != LOADED_FORMAT:
            return update(self, named_tensors, load_format)
        model = self.get_model()
        if _open.get(model):
            DefaultModelLoader.postprocess_weights(model, torch.device(self.device))
        return True, "the weights are in use"

    WeightUpdater.update_weights_from_tensor = update_or_end


def _after_begin(ordinary):
    def update(self, *arguments, **settings):
        begin(self.get_model())
        return ordinary(self, *arguments, **settings)

    return update


def _with_scales(load):
    def load_with_scales(model, weights, target_device):
        of_llama = any(each.__module__.endswith(".models.llama") for each in type(model).__mro__)
        if of_llama and "load_weights" not in vars(model):
            model.load_weights = loading_block_scales(model)
        load(model, weights, target_device)

    return load_with_scales


def loading_block_scales(model: Module) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
    """Return `load_weights` for a model of Llama's module, loading the scales of blocks too. SGLang
    0.5.20 calls them by another name there, which no parameter has, and leaves them out."""
    ordinary = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(model.named_parameters())
        ordinary(pair for pair in weights if not _loads_scale(parameters, *pair))

    return load_weights


def _loads_scale(parameters: Mapping[str, Parameter], name: str, scale: torch.Tensor) -> bool:
    if not name.endswith(_SCALE):
        return False
    for part, fused, shard in _FUSED:
        whole = name.replace(f".{part}{_SCALE}", f".{fused}{_SCALE}")
        if whole != name and whole in parameters:
            parameters[whole].weight_loader(parameters[whole], scale, shard)
            return True
    if name in parameters:
        parameters[name].weight_loader(parameters[name], scale)
    return name in parameters


Process = Callable[[Module, torch.device], None]
"""(model, its device): lets each layer process what was loaded."""


def noting(process: Process) -> Process:
    """Return SGLang's processing of loaded weights, which notes the first time what there is to be
    loaded, and ends an update."""

    def process_and_note(model: Module, target_device: torch.device) -> None:
        layers = _layers.setdefault(model, [])
        if not layers:
            layers += quantised_layers(model)
        process(model, target_device)
        settle(model)

    return process_and_note


def quantised_layers(model: Module) -> Iterator[_Layer]:
    """Yield the layers whose weights are quantised, with their parameters as they are now."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is None or type(method).__name__.startswith("Unquantized"):
            continue
        loaded = {
            name: _Loaded(parameter=each, kind=_kind(each), attributes=dict(vars(each)))
            for name, each in module.named_parameters(recurse=False)
        }
        if loaded:
            yield _Layer(module=module, loaded=loaded)


def begin(model: Module) -> None:
    """Put the parameters of the model's quantised layers back as they were loaded the first time,
    their numbers undefined. Does nothing between the first and the last bucket of an update."""
    if _open.get(model) or not _layers.get(model):
        return
    _open[model] = True
    for layer in _layers[model]:
        stood = {name: getattr(layer.module, name, None) for name in layer.loaded}
        kinds = {name: None if each is None else _kind(each) for name, each in stood.items()}
        for owner in (layer.module.quant_method, getattr(layer.module, "scheme", None)):
            if restore := getattr(owner, "restore_weights_before_loading", None):
                restore(layer.module)
        for name, loaded in layer.loaded.items():
            parameter, (shape, dtype) = loaded.parameter, loaded.kind
            loaded.restore_attributes()
            if stood[name] is parameter and kinds[name] == loaded.kind:
                continue  # it is loaded where it is computed with
            if stood[name] is not parameter or _kind(parameter) != loaded.kind:
                if stood[name] is not None:
                    layer.processed[name] = stood[name].data
                parameter.data = torch.empty(shape, dtype=dtype, device=layer.device)
                setattr(layer.module, name, parameter)
            with torch.no_grad():  # until it is sent, and `verify` sees what is not
                parameter.fill_(float("nan") if dtype.is_floating_point else -1)


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def settle(model: Module) -> None:
    """End an update, after the layers were processed: move what they made to where the last one's
    lay, and free the memory of parameters that were replaced."""
    _open[model] = False
    for layer in _layers.get(model, ()):
        for name, loaded in layer.loaded.items():
            current = getattr(layer.module, name, None)
            place = layer.processed.pop(name, None)
            moved = place is not None and current is not None and _kind(current) == _kind(place)
            if moved and current.data_ptr() != place.data_ptr():
                place.copy_(current.data)
                current.data = place
            if current is not loaded.parameter:
                loaded.parameter.data = torch.empty(0, dtype=loaded.kind[1])
