"""Tiny models of every family, with odd shapes, as config.json has them; and what must be true of
each. One module per group of families holds its CASES; `ALL` is all of them."""

from __future__ import annotations

import importlib

GROUPS = ("qwen3", "plain", "latent", "hybrid", "windowed", "mamba", "vision", "newer")
"""Modules `tests.families.<group>_cases`."""

ROWS = [
    [5, 9, 100, 3, 77, 42, 8],
    [1, 2],
    [17, 4, 4, 90, 12, 60, 61, 62, 63, 64, 65, 2, 33, 34, 35, 36, 37, 38, 39, 40],
]
"""Token ids; every vocabulary has more than 101."""


class Case:
    """One tiny model."""

    def __init__(
        self,
        config: dict,
        *,
        layouts: tuple[dict, ...] = ({"tp": 2, "sequence_parallel": True}, {"pp": 2}),
        logits: bool = True,
        made_by_transformers: bool = True,
        why: str = "",
    ) -> None:
        """`config`: config.json. `layouts`: of two ranks, under which every tensor must come out
        bit for bit as it went in. `logits`: Megatron's are compared with transformers'; else `why`
        they cannot be. `made_by_transformers`: the folder is saved by transformers' own class, so
        that the names are its own; else from the table (a family that it lacks, or a form of the
        names that it does not write)."""
        self.config, self.layouts, self.logits = config, layouts, logits
        self.made_by_transformers, self.why = made_by_transformers, why


def collect() -> dict[str, Case]:
    """Name -> case, over all groups that are there."""
    cases: dict[str, Case] = {}
    for group in GROUPS:
        try:
            module = importlib.import_module(f"tests.families.{group}_cases")
        except ModuleNotFoundError:
            continue
        overlap = cases.keys() & module.CASES.keys()
        assert not overlap, overlap
        cases |= module.CASES
    return cases


ALL = collect()


def _with(name: str, **fields: object) -> Case:
    return Case({**ALL[name].config, **fields})


SERVED_TOO = {
    "hy-v3-first": _with("hy-v3", mlp_layer_types=["dense", "sparse", "sparse"]),
    "glm4-moe-lite-first": _with("glm4-moe-lite", mlp_layer_types=["dense", "sparse", "sparse"]),
    "qwen3-next-everywhere": _with("qwen3-next", mlp_only_layers=[]),
}
"""Where SGLang wants layers without experts elsewhere than the cases of these families have them;
for engines alone."""
