"""An engine replies to an order to load weights when they are in place, not when their copies are
queued on the device: what was sent from may be written again. Installed by the plug-in."""

from __future__ import annotations

import torch


def install() -> None:
    """Every rank waits for its device; SGLang then lets the ranks wait for each other, and rank 0
    replies."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    for order in ("update_weights_from_tensor", "update_weights_from_distributed"):
        setattr(WeightUpdater, order, _then_wait(getattr(WeightUpdater, order)))


def _then_wait(ordinary):
    def update(self, *arguments, **settings):
        reply = ordinary(self, *arguments, **settings)
        torch.get_device_module(self.device).synchronize()
        return reply

    return update
