"""Corrections to SGLang's behaviour in every engine, installed by the plug-in: weights that arrive
in halves, weights for the draft model alone, replies that wait for the device, and responses that
end in the pass in which they are aborted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

DRAFT_FORMAT = "miles_draft"
"""`load_format` of a bucket that is the draft model's; otherwise as `flattened_bucket`."""
_QUERY, _KEY_VALUE = ".q_a_proj.", ".kv_a_proj_with_mqa."


def install() -> None:
    """Put every correction in place."""
    _install_draft_weights()
    _install_pairs()
    _install_waits()
    _install_ends()


def _install_pairs() -> None:
    """Join DeepSeek's two first projections of a layer, which are one weight in SGLang. SGLang
    joins them only where one order brings both, and drops both without a word where a bucket of
    ours ends between them: in orders that update weights, the half that comes first waits for the
    other."""
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
    """Yield the weights. Holds back halves in `waiting` (by name; copies, since the sender reuses
    its memory) until the other half arrives."""
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


def _install_waits() -> None:
    """Reply to an order to load weights when they are in place, not when their copies are queued on
    the device: the sender writes its memory again. Every rank waits for its device; SGLang then
    lets the ranks wait for each other, and rank 0 replies."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    for order in ("update_weights_from_tensor", "update_weights_from_distributed"):
        setattr(WeightUpdater, order, _then_wait(getattr(WeightUpdater, order)))


def _then_wait(ordinary):
    def update(self, *arguments, **settings):
        reply = ordinary(self, *arguments, **settings)
        torch.get_device_module(self.device).synchronize()
        return reply

    return update


def _install_ends() -> None:
    """Count a response that ends by itself in the pass in which it is aborted as ended. Stock
    SGLang counts it as aborted, with all that the pass has made: a client that asks for the rest
    would continue behind its end, and where a pass makes several tokens, may get too many."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

    ordinary = Req.update_finish_state

    def update_finish_state(self, *arguments, **settings):
        given_up = self.to_finish
        if not isinstance(given_up, FINISH_ABORT) or given_up.status_code is not None:
            return ordinary(self, *arguments, **settings)  # an error, or nothing
        self.to_finish = None
        ordinary(self, *arguments, **settings)
        if not self.finished():
            self.finished_reason = given_up
        return None

    Req.update_finish_state = update_finish_state


def _install_draft_weights() -> None:
    """Let /update_weights_from_tensor understand DRAFT_FORMAT. SGLang loads what it is sent into
    model and draft model alike, or into the model alone, and both have weights of the same
    names."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    ordinary = WeightUpdater.update_weights_from_tensor

    def update_draft_or_all(self, named_tensors, load_format=None):
        if load_format != DRAFT_FORMAT:
            return ordinary(self, named_tensors, load_format)
        if not self.get_model_runner().is_draft_worker:
            return True, "the draft model's"
        return ordinary(self, named_tensors, "flattened_bucket")

    WeightUpdater.update_weights_from_tensor = update_draft_or_all
