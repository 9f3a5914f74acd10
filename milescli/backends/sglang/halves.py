"""DeepSeek's two first projections of a layer are one weight in SGLang, which joins them only where
one order brings both. Ours come in buckets; one may end between them, and SGLang then drops both
without a word. Installed by the plug-in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

_QUERY, _KEY_VALUE = ".q_a_proj.", ".kv_a_proj_with_mqa."


def install() -> None:
    """In orders that update weights, the half that comes first waits for the other."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    for order in ("update_weights_from_tensor", "update_weights_from_distributed"):
        setattr(WeightUpdater, order, _with_pairs(getattr(WeightUpdater, order)))


def _with_pairs(ordinary):
    def update(self, *arguments, **settings):
        _pair_weights_of(self.get_model())
        return ordinary(self, *arguments, **settings)

    return update


def _pair_weights_of(model: torch.nn.Module) -> None:
    """Once per model: SGLang's own loading of the start goes through whole folders and needs
    nothing."""
    if "load_weights" in model.__dict__ or not any(
        "fused_qkv_a_proj_with_mqa" in name for name, _ in model.named_parameters()
    ):
        return
    load, waiting = model.load_weights, {}
    model.load_weights = lambda weights, *arguments, **settings: load(
        in_pairs(weights, waiting), *arguments, **settings
    )


def in_pairs(
    weights: Iterable[tuple[str, torch.Tensor]], waiting: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, with halves held back in `waiting` (by name; copies, since the sender uses its
    memory again) until the other half is there too."""
    for name, tensor in weights:
        other = _other_half(name)
        if other is None:
            yield name, tensor
        elif other in waiting:
            yield other, waiting.pop(other)
            yield name, tensor
        else:
            waiting[name] = tensor.clone()


def _other_half(name: str) -> str | None:
    if _QUERY in name:
        return name.replace(_QUERY, _KEY_VALUE)
    if _KEY_VALUE in name:
        return name.replace(_KEY_VALUE, _QUERY)
    return None
