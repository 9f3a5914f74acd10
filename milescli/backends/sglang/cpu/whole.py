"""No engine serves what was never loaded: a parameter that SGLang makes and the folder does not
fill ends the engine at its start.

SGLang allocates weights without setting them and skips names that it does not know; what the two
sides do not both have would be whatever lay in memory.
"""

from __future__ import annotations

import torch


def install() -> None:
    """Around the loading of a folder, at the start and from disk later."""
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.model_loader.loader import DefaultModelLoader

    assert weight_updater.DefaultModelLoader is DefaultModelLoader
    load = DefaultModelLoader.load_weights_only

    def load_whole(model, weights, target_device):
        mark(model)
        load(model, weights, target_device)
        is_mtp = type(model).__module__.endswith(("_nextn", "_mtp"))
        shared = _SHARED if is_mtp else ()
        if missing := [name for name in unfilled(model) if name not in shared]:
            shown = ", ".join(missing[:3]) + (
                f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            )
            raise SystemExit(f"miles: the folder does not fill what SGLang's model has: {shown}")

    DefaultModelLoader.load_weights_only = staticmethod(load_whole)


_SHARED = ("model.embed_tokens.weight", "lm_head.weight")
"""Which an MTP layer takes of the model, after its own are loaded."""


@torch.no_grad()
def mark(model: torch.nn.Module) -> None:
    """Every weight is NaN until it is loaded."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.fill_(float("nan"))


@torch.no_grad()
def unfilled(model: torch.nn.Module) -> list[str]:
    """Names of parameters of which something is still NaN. Padding that SGLang adds it fills
    itself."""
    return [
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and weight.isnan().any()
    ]
