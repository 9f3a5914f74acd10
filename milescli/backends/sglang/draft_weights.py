"""Weights for the draft model alone. Runs inside engine ranks, installed by the plug-in; asked by
`channels`. SGLang gives what it is sent to model and draft model alike, or to the model alone, and
both have weights of the same names."""

from __future__ import annotations

DRAFT_FORMAT = "miles_draft"
"""`load_format` of a bucket that is the draft model's; otherwise as `flattened_bucket`."""


def install() -> None:
    """Let /update_weights_from_tensor understand DRAFT_FORMAT."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    ordinary = WeightUpdater.update_weights_from_tensor

    def update_draft_or_all(self, named_tensors, load_format=None):
        if load_format != DRAFT_FORMAT:
            return ordinary(self, named_tensors, load_format)
        if not self.get_model_runner().is_draft_worker:
            return True, "the draft model's"
        return ordinary(self, named_tensors, "flattened_bucket")

    WeightUpdater.update_weights_from_tensor = update_draft_or_all
