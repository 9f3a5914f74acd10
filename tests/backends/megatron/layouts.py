"""The layouts under which each world trains, and the numbers that cases and tests share."""

from __future__ import annotations

TOKEN_ROWS = [
    [5, 9, 100, 3, 77, 42, 8],
    [1, 130],
    [17, 4, 4, 90, 12, 60, 61, 62, 63, 64, 65, 2],
    [7, 7, 7],
]


def layout_case(
    name: str,
    model: str,
    *,
    replay: bool = False,
    train: dict | None = None,
    objective: str = "policy",
    **layout: object,
) -> dict:
    """Of `cases.train_steps`."""
    return {
        "name": name,
        "call": "train_steps",
        "model": model,
        "layout": layout,
        "replay": replay,
        "train": train,
        "objective": objective,
    }


TOY = "tests.backends.megatron.toy_objective:Toy"
_CALM = {"optimizer": {"eps": 0.1}}
"""Steps that magnify rounding less, for a model whose embeddings are scaled."""
REPLAYED = ("glm", "oss", "nemotron", "latent", "v4")
"""Beside `moe` and `next`: layers without experts first or in between, groups, biases, shared
experts, latent ones."""
ROUTED = ("moe", "next", *REPLAYED)
CLOSER = {"moe": 4.0, "glm": 3.0, "oss": 8.0, "latent": 5.0}
"""By how many times replay lowers the largest difference of log-probs that a rounding of every
weight makes (seen: 4.4, 3.3, 9.2, 6.1). Of the others few tokens are near a choice."""
ONE = [
    layout_case("dense", "dense"),
    layout_case("tied", "tied"),
    layout_case("moe", "moe"),
    layout_case("moe-r3", "moe", replay=True),
    *(layout_case(f"{name}-r3", name, replay=True) for name in REPLAYED),
    layout_case("next", "next", train=_CALM),
    layout_case("sandwich", "sandwich"),
    layout_case("glm", "glm"),
    layout_case("oss", "oss"),
    layout_case("delta", "delta", train=_CALM),
    layout_case("gemma4", "gemma4", train=_CALM),
    layout_case("nemotron", "nemotron"),
    layout_case("latent", "latent"),
    layout_case("minimax", "minimax"),
    layout_case("sparse", "sparse"),
    layout_case("v4", "v4"),
    layout_case("next-r3", "next", replay=True, train=_CALM),
    layout_case("toy", "dense", objective=TOY),
]
TWO = [
    layout_case("dense tp2", "dense", tp=2),
    layout_case(
        "dense tp2 sp recompute", "dense", tp=2, sequence_parallel=True, train={"recompute": "full"}
    ),
    layout_case("dense pp2", "dense", pp=2),
    layout_case("dense dp2", "dense", dp=2),
    layout_case("dense cp2", "dense", cp=2),
    layout_case("tied pp2 uneven", "tied", pp=2),
    layout_case("tied tp2", "tied", tp=2),
    layout_case("moe ep2", "moe", ep=2, dp=2),
    layout_case("moe tp2 sp ep2", "moe", tp=2, ep=2, sequence_parallel=True),
    layout_case("moe-r3 ep2", "moe", replay=True, ep=2, dp=2),
    layout_case("moe-r3 pp2", "moe", replay=True, pp=2),
    layout_case(
        "moe-r3 tp2 sp recompute",
        "moe",
        replay=True,
        tp=2,
        etp=2,
        sequence_parallel=True,
        train={"recompute": "full"},
    ),
    layout_case("glm-r3 tp2 sp ep2", "glm", replay=True, tp=2, ep=2, sequence_parallel=True),
    layout_case("oss-r3 cp2 ep2", "oss", replay=True, cp=2, ep=2),
    layout_case(
        "nemotron-r3 pp2 uneven recompute",
        "nemotron",
        replay=True,
        pp=2,
        train={"recompute": "full"},
    ),
    layout_case("latent-r3 pp2 uneven", "latent", replay=True, pp=2),
    layout_case(
        "next-r3 pp2 uneven recompute",
        "next",
        replay=True,
        pp=2,
        train={**_CALM, "recompute": "full"},
    ),
    layout_case("sandwich tp2", "sandwich", tp=2),
    layout_case(
        "sandwich tp2 sp recompute",
        "sandwich",
        tp=2,
        sequence_parallel=True,
        train={"recompute": "full"},
    ),
    layout_case("glm tp2 sp ep2", "glm", tp=2, ep=2, sequence_parallel=True),
    layout_case("glm pp2", "glm", pp=2),
    layout_case("oss tp2 sp etp2", "oss", tp=2, etp=2, sequence_parallel=True),
    layout_case("oss tp2 sp ep2", "oss", tp=2, ep=2, sequence_parallel=True),
    layout_case("oss cp2 ep2", "oss", cp=2, ep=2),
    layout_case("delta tp2", "delta", train=_CALM, tp=2),
    layout_case("delta pp2 uneven", "delta", train=_CALM, pp=2),
    layout_case("delta cp2 recompute", "delta", cp=2, train={**_CALM, "recompute": "full"}),
    layout_case("gemma4 tp2 sp ep2", "gemma4", train=_CALM, tp=2, ep=2, sequence_parallel=True),
    layout_case(
        "gemma4 pp2 uneven recompute", "gemma4", train={**_CALM, "recompute": "full"}, pp=2
    ),
    layout_case(
        "nemotron tp2 sp ep2 recompute",
        "nemotron",
        tp=2,
        ep=2,
        sequence_parallel=True,
        train={"recompute": "full"},
    ),
    layout_case("nemotron pp2 uneven", "nemotron", pp=2),
    layout_case("minimax tp2 sp etp2", "minimax", tp=2, etp=2, sequence_parallel=True),
    layout_case("latent tp2 sp ep2", "latent", tp=2, ep=2, sequence_parallel=True),
    layout_case("latent cp2 ep2", "latent", cp=2, ep=2),
    layout_case(
        "sparse tp2 sp etp2 recompute",
        "sparse",
        tp=2,
        etp=2,
        sequence_parallel=True,
        train={"recompute": "full"},
    ),
    layout_case("sparse pp2 uneven", "sparse", pp=2),
    layout_case("v4 tp2 sp ep2", "v4", tp=2, ep=2, sequence_parallel=True),
    layout_case(
        "v4 tp2 sp etp2 recompute",
        "v4",
        tp=2,
        etp=2,
        sequence_parallel=True,
        train={"recompute": "full"},
    ),
    layout_case("v4 pp2 uneven recompute", "v4", pp=2, train={"recompute": "full"}),
    layout_case("v4 ep2", "v4", ep=2, dp=2),
    layout_case("v4-r3 pp2 uneven", "v4", replay=True, pp=2),
    layout_case("toy tp2", "dense", objective=TOY, tp=2),
    layout_case("toy pp2", "dense", objective=TOY, pp=2),
    layout_case("toy dp2", "dense", objective=TOY, dp=2),
    layout_case("toy cp2", "dense", objective=TOY, cp=2),
]
FOUR = [
    layout_case("dense tp2 pp2", "dense", tp=2, pp=2),
    layout_case("dense tp2 dp2 sp", "dense", tp=2, dp=2, sequence_parallel=True),
    layout_case("moe ep2 pp2", "moe", ep=2, pp=2, dp=2),
    layout_case("moe-r3 ep2 cp2", "moe", replay=True, ep=2, cp=2, dp=2),
    layout_case("toy cp2 dp2", "dense", objective=TOY, cp=2, dp=2),
]
PACKED = {
    "one": {"packed": {}},
    "two": {"packed dp2": {"dp": 2}, "packed cp2": {"cp": 2}, "packed tp2": {"tp": 2}},
    "four": {"packed cp2 dp2": {"cp": 2, "dp": 2}, "packed cp2 pp2": {"cp": 2, "pp": 2}},
}
"""Layouts under which PackedTokens is held against plain loops, by world."""
PACKED_EXAMPLES = 25
ALGORITHM_LAYOUTS = {
    "one": {"algorithms": {}},
    "two": {
        "algorithms dp2": {"dp": 2},
        "algorithms cp2": {"cp": 2},
        "algorithms tp2 sp": {"tp": 2, "sequence_parallel": True},
        "algorithms pp2": {"pp": 2},
    },
    "four": {"algorithms cp2 dp2": {"cp": 2, "dp": 2}},
}
"""Layouts under which every algorithm is held against one process that cuts nothing."""
ALGORITHM_EXAMPLES = 4
ADAMW = {
    "lr": 1e-2,
    "weight_decay": 0.1,
    "eps": 1e-3,
    "betas": [0.9, 0.98],
    "clip_grad": 1.0,
    "steps": [
        [[5, 9, 100, 3, 77, 42, 8], [17, 4, 4, 90, 12, 60]],
        [[7, 7, 7, 30], [1, 130, 20]],
        [[61, 62, 63, 64, 65, 2], [9, 100, 5, 6]],
    ],
}
"""Three updates, also done by plain PyTorch."""
ADAMW_KEYS = {
    **{key: ADAMW[key] for key in ("lr", "eps", "weight_decay", "clip_grad")},
    **dict(zip(("beta1", "beta2"), ADAMW["betas"], strict=True)),
}
"""The same as keys of `train.optimizer`."""
ADAMW_LAYOUTS = {
    "one": {"dense": {}, "dense host": {"offload_optimizer": True}, "v4": {}},
    "two": {
        "dense tp2": {"tp": 2},
        "dense dp2": {"dp": 2},
        "v4 tp2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    },
}
"""World -> model and name of the layout -> layout."""
MUON = {
    **ADAMW,
    "muon": 0.8,
    "steps": [
        [[(place * place * (row + 3) + 7 * step) % 131 for place in range(60)] for row in range(8)]
        for step in range(2)
    ],
}
"""Gradients of fewer tokens than a matrix has rows have a null space, in which an orthogonal
matrix is a matter of roundings."""
MUON_KEYS = {**ADAMW_KEYS, "rule": "muon", "muon_momentum": MUON["muon"]}
MUON_LAYOUTS = {
    "one": {"dense": {}, "moe": {}},
    "two": {
        "dense tp2": {"tp": 2},
        "dense dp2": {"dp": 2},
        "moe ep2": {"ep": 2, "dp": 2},
        "moe etp2": {"tp": 2, "etp": 2, "sequence_parallel": True},
    },
}
"""The same with Muon."""
