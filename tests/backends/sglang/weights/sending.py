"""The weights of a tiny model, sent as a trainer of one rank sends them, and what an engine that
holds them must say. Shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from milescli.weights.base import Bucket
from tests.buckets import into_buckets

BOUND_BYTES = 40_000
"""Makes several buckets of the tiny model."""
TOKENS = [5, 77, 130, 8, 250, 33, 91, 4]


def weights(
    model: torch.nn.Module, *, scale: float = 1.0, changed: str | None = None
) -> Iterator[Bucket]:
    """Named tensors as the trainer sends them; `changed`: one weight that is off by the smallest
    step."""
    named = {name: parameter.detach() * scale for name, parameter in model.named_parameters()}
    if changed is not None:
        off = named[changed].clone()
        off.view(-1)[5] = torch.nextafter(off.view(-1)[5], torch.tensor(9.0))
        named[changed] = off
    return into_buckets(iter(named.items()), BOUND_BYTES)


def expected_scores(model: torch.nn.Module, scale: float) -> torch.Tensor:
    """[len(TOKENS) - 1] log-probs of TOKENS by transformers, with the weights times `scale`."""
    scaled = {name: parameter.detach() * scale for name, parameter in model.named_parameters()}
    with torch.no_grad():
        output = torch.func.functional_call(model, scaled, (torch.tensor([TOKENS]),))
    logprobs = output.logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0].double()
