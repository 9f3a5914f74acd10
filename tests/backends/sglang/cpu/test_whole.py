"""Weights that nobody loaded are named."""

from __future__ import annotations

import torch

from milescli.backends.sglang.cpu.whole import mark, unfilled


def test_what_was_not_loaded_whole_is_named():
    model = torch.nn.ModuleDict(
        {
            "loaded": torch.nn.Linear(3, 4),
            "part": torch.nn.Linear(3, 4),
            "left": torch.nn.Linear(3, 4),
        }
    )
    mark(model)
    with torch.no_grad():
        for parameter in model["loaded"].parameters():
            parameter.zero_()
        model["part"].weight[:3] = 1.0
        model["part"].bias.zero_()
    assert unfilled(model) == ["part.weight", "left.weight", "left.bias"]
