"""Worlds of trainer ranks, each started once for all tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.megatron import cases, world
from tests.backends.megatron.memory_cases import MEMORY

TOKEN_ROWS = [
    [5, 9, 100, 3, 77, 42, 8],
    [1, 130],
    [17, 4, 4, 90, 12, 60, 61, 62, 63, 64, 65, 2],
    [7, 7, 7],
]


def _layout_case(
    name: str,
    model: str,
    *,
    replay: bool = False,
    train: dict | None = None,
    objective: str = "policy",
    **layout: object,
) -> dict:
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
ONE = [
    _layout_case("dense", "dense"),
    _layout_case("tied", "tied"),
    _layout_case("moe", "moe"),
    _layout_case("moe-r3", "moe", replay=True),
    _layout_case("sandwich", "sandwich"),
    _layout_case("glm", "glm"),
    _layout_case("oss", "oss"),
    _layout_case("delta", "delta", train=_CALM),
    _layout_case("gemma4", "gemma4", train=_CALM),
    _layout_case("nemotron", "nemotron"),
    _layout_case("latent", "latent"),
    _layout_case("sparse", "sparse"),
    _layout_case("toy", "dense", objective=TOY),
]
TWO = [
    _layout_case("dense tp2", "dense", tp=2),
    _layout_case(
        "dense tp2 sp recompute", "dense", tp=2, sequence_parallel=True, train={"recompute": "full"}
    ),
    _layout_case("dense pp2", "dense", pp=2),
    _layout_case("dense dp2", "dense", dp=2),
    _layout_case("dense cp2", "dense", cp=2),
    _layout_case("tied pp2 uneven", "tied", pp=2),
    _layout_case("tied tp2", "tied", tp=2),
    _layout_case("moe ep2", "moe", ep=2, dp=2),
    _layout_case("moe tp2 sp ep2", "moe", tp=2, ep=2, sequence_parallel=True),
    _layout_case("moe-r3 ep2", "moe", replay=True, ep=2, dp=2),
    _layout_case("moe-r3 pp2", "moe", replay=True, pp=2),
    _layout_case(
        "moe-r3 tp2 sp recompute",
        "moe",
        replay=True,
        tp=2,
        etp=2,
        sequence_parallel=True,
        train={"recompute": "full"},
    ),
    _layout_case("sandwich tp2", "sandwich", tp=2),
    _layout_case(
        "sandwich tp2 sp recompute",
        "sandwich",
        tp=2,
        sequence_parallel=True,
        train={"recompute": "full"},
    ),
    _layout_case("glm tp2 sp ep2", "glm", tp=2, ep=2, sequence_parallel=True),
    _layout_case("glm pp2", "glm", pp=2),
    _layout_case("oss tp2 sp etp2", "oss", tp=2, etp=2, sequence_parallel=True),
    _layout_case("oss tp2 sp ep2", "oss", tp=2, ep=2, sequence_parallel=True),
    _layout_case("oss cp2 ep2", "oss", cp=2, ep=2),
    _layout_case("delta tp2", "delta", train=_CALM, tp=2),
    _layout_case("delta pp2 uneven", "delta", train=_CALM, pp=2),
    _layout_case("delta cp2 recompute", "delta", cp=2, train={**_CALM, "recompute": "full"}),
    _layout_case("gemma4 tp2 sp ep2", "gemma4", train=_CALM, tp=2, ep=2, sequence_parallel=True),
    _layout_case(
        "gemma4 pp2 uneven recompute", "gemma4", train={**_CALM, "recompute": "full"}, pp=2
    ),
    _layout_case(
        "nemotron tp2 sp ep2 recompute",
        "nemotron",
        tp=2,
        ep=2,
        sequence_parallel=True,
        train={"recompute": "full"},
    ),
    _layout_case("nemotron pp2 uneven", "nemotron", pp=2),
    _layout_case("latent tp2 sp ep2", "latent", tp=2, ep=2, sequence_parallel=True),
    _layout_case("latent cp2 ep2", "latent", cp=2, ep=2),
    _layout_case(
        "sparse tp2 sp etp2 recompute",
        "sparse",
        tp=2,
        etp=2,
        sequence_parallel=True,
        train={"recompute": "full"},
    ),
    _layout_case("sparse pp2 uneven", "sparse", pp=2),
    _layout_case("toy tp2", "dense", objective=TOY, tp=2),
    _layout_case("toy pp2", "dense", objective=TOY, pp=2),
    _layout_case("toy dp2", "dense", objective=TOY, dp=2),
    _layout_case("toy cp2", "dense", objective=TOY, cp=2),
]
FOUR = [
    _layout_case("dense tp2 pp2", "dense", tp=2, pp=2),
    _layout_case("dense tp2 dp2 sp", "dense", tp=2, dp=2, sequence_parallel=True),
    _layout_case("moe ep2 pp2", "moe", ep=2, pp=2, dp=2),
    _layout_case("moe-r3 ep2 cp2", "moe", replay=True, ep=2, cp=2, dp=2),
    _layout_case("toy cp2 dp2", "dense", objective=TOY, cp=2, dp=2),
]
PACKED = {
    "one": {"packed": {}},
    "two": {"packed dp2": {"dp": 2}, "packed cp2": {"cp": 2}, "packed tp2": {"tp": 2}},
    "four": {"packed cp2 dp2": {"cp": 2, "dp": 2}, "packed cp2 pp2": {"cp": 2, "pp": 2}},
}
"""Layouts under which PackedTokens is held against plain loops, by world."""
PACKED_EXAMPLES = 25
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
ADAMW_LAYOUTS = {
    "one": {"adamw": {}, "adamw host": {"offload_optimizer": True}},
    "two": {"adamw tp2": {"tp": 2}, "adamw dp2": {"dp": 2}},
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> Hugging Face folder."""
    root = tmp_path_factory.mktemp("models")
    return {name: str(cases.make_model(root / name, name)) for name in cases.MODELS}


class Worlds:
    """Results of each world's cases, run when they are first asked for."""

    def __init__(self, models: dict[str, str], root: Path) -> None:
        self.models, self.root = models, root
        self._results: dict[str, dict] = {}

    def checkpoint(self, name: str) -> str:
        """Where the case that saves under `name` writes."""
        return str(self.root / "checkpoints" / name)

    def get(self, which: str) -> dict:
        """one, again, two, or four; `again` is a second process of one rank, after `one`; two and
        four come after it."""
        if which not in self._results:
            size = {"one": 1, "again": 1, "two": 2, "four": 4, "back": 1}[which]
            self._results[which] = world.run_world(
                size, getattr(self, f"_{which}")(), self.root / which
            )
        return self._results[which]

    def _layouts(self, listed: list[dict]) -> list[dict]:
        return [{**case, "model": self.models[case["model"]]} for case in listed]

    def _memory(self, which: str) -> list[dict]:
        return [
            {
                "name": case.name,
                "call": "measure_memory",
                "model": self.models[case.model],
                "layout": case.layout,
                "tokens": case.tokens,
                "precision": case.precision,
            }
            for case in MEMORY[which]
        ]

    def adamw(self, name: str) -> str:
        """Where the case of plain AdamW steps writes its weights."""
        return str(self.root / f"{name.replace(' ', '-')}.safetensors")

    def _adamw(self, which: str) -> list[dict]:
        return [
            {
                "name": name,
                "call": "adamw_steps",
                "model": self.models["dense"],
                "layout": layout,
                "steps": ADAMW["steps"],
                "optimizer": {
                    "lr": ADAMW["lr"],
                    "eps": ADAMW["eps"],
                    "weight_decay": ADAMW["weight_decay"],
                    "beta1": ADAMW["betas"][0],
                    "beta2": ADAMW["betas"][1],
                    "clip_grad": ADAMW["clip_grad"],
                },
                "save": self.adamw(name),
            }
            for name, layout in ADAMW_LAYOUTS[which].items()
        ]

    def _host_steps(self) -> list[dict]:
        """Of a model with experts, its optimizer on the device and on the host."""
        return [
            {
                "name": f"steps {precision} {'host' if on_host else 'device'}",
                "call": "plain_steps",
                "model": self.models["moe"],
                "layout": {"ep": 2, "dp": 2, "offload_optimizer": on_host},
                "precision": precision,
            }
            for precision in ("bf16", "fp32")
            for on_host in (False, True)
        ]

    def _saving(
        self,
        name: str,
        model: str,
        layout: dict,
        first: int,
        last: int,
        save: str = "",
        load: str = "",
    ) -> dict:
        return {
            "name": name,
            "call": "train_and_save",
            "model": self.models[model],
            "layout": layout,
            "first": first,
            "last": last,
            "save": self.checkpoint(save) if save else "",
            "load": self.checkpoint(load) if load else "",
        }

    def _packed(self, which: str) -> list[dict]:
        return [
            {
                "name": name,
                "call": "packed_tokens_differ",
                "model": self.models["dense"],
                "layout": layout,
                "examples": PACKED_EXAMPLES,
            }
            for name, layout in PACKED[which].items()
        ]

    def _one(self) -> list[dict]:
        plain = {"layout": {}}
        return [
            *self._layouts(ONE),
            *self._memory("one"),
            *self._packed("one"),
            *self._adamw("one"),
            self._saving("dense six", "dense", {}, 0, 6),
            self._saving("dense three", "dense", {}, 0, 3, save="dense3"),
            self._saving("moe six", "moe", {}, 0, 6),
            self._saving("moe three", "moe", {}, 0, 3, save="moe3"),
            self._saving("glm three", "glm", {}, 0, 3, save="glm3"),
            self._saving("nemotron three", "nemotron", {}, 0, 3, save="nemotron3"),
            self._saving("sparse three", "sparse", {}, 0, 3, save="sparse3"),
            {
                "name": "rows dense",
                "call": "scores_of_rows",
                "model": self.models["dense"],
                "rows": TOKEN_ROWS,
                **plain,
            },
            {
                "name": "rows moe",
                "call": "scores_of_rows",
                "model": self.models["moe"],
                "rows": TOKEN_ROWS,
                **plain,
            },
            *self._engine_differences(),
            {"name": "routing", "call": "routing_effect", "model": self.models["moe"], **plain},
        ]

    def _engine_differences(self) -> list[dict]:
        return [
            {
                "name": f"engine differences {old_logprobs} {updates}",
                "call": "engine_differences",
                "model": self.models["dense"],
                "layout": {},
                "old_logprobs": old_logprobs,
                "updates": updates,
            }
            for old_logprobs in ("trainer", "engine")
            for updates in (1, 2, 4)
        ]

    def _again(self) -> list[dict]:
        self.get("one")
        return [
            self._saving("dense rest", "dense", {}, 3, 6, load="dense3"),
            self._saving("moe rest", "moe", {}, 3, 6, load="moe3"),
        ]

    def _two(self) -> list[dict]:
        self.get("one")
        return [
            *self._layouts(TWO),
            *self._memory("two"),
            *self._packed("two"),
            *self._adamw("two"),
            *self._host_steps(),
            self._saving("dense tp2 rest", "dense", {"tp": 2}, 3, 4, load="dense3"),
            self._saving("dense pp2 rest", "dense", {"pp": 2}, 3, 4, load="dense3"),
            self._saving("dense dp2 rest", "dense", {"dp": 2}, 3, 4, load="dense3"),
            self._saving("moe ep2 rest", "moe", {"ep": 2, "dp": 2}, 3, 4, load="moe3"),
            self._saving("glm pp2 rest", "glm", {"pp": 2}, 3, 3, load="glm3"),
            self._saving(
                "nemotron tp2 rest",
                "nemotron",
                {"tp": 2, "ep": 2, "sequence_parallel": True},
                3,
                3,
                load="nemotron3",
            ),
            self._saving(
                "sparse tp2 rest",
                "sparse",
                {"tp": 2, "ep": 2, "sequence_parallel": True},
                3,
                3,
                load="sparse3",
            ),
            {
                "name": "glm bfloat16",
                "call": "published_differs",
                "model": self.models["glm"],
                "layout": {"pp": 2},
                "dtype": "bfloat16",
            },
            {
                "name": "delta bfloat16",
                "call": "save_bfloat16",
                "model": self.models["delta"],
                "layout": {"dp": 2},
                "save": self.checkpoint("delta16"),
            },
            {
                "name": "delta bfloat16 host",
                "call": "save_bfloat16",
                "model": self.models["delta"],
                "layout": {"dp": 2, "offload_optimizer": True},
                "save": self.checkpoint("delta16host"),
            },
            {
                "name": "spoiled",
                "call": "spoil_and_step",
                "model": self.models["dense"],
                "layout": {"pp": 2},
            },
        ]

    def _four(self) -> list[dict]:
        return [
            *self._layouts(FOUR),
            *self._memory("four"),
            *self._packed("four"),
            self._saving("dense wide three", "dense", {"tp": 2, "dp": 2}, 0, 3, save="wide3"),
            self._saving(
                "moe wide three", "moe", {"ep": 2, "pp": 2, "dp": 2}, 0, 3, save="moewide3"
            ),
        ]

    def _back(self) -> list[dict]:
        self.get("four")
        return [
            self._saving("dense wide rest", "dense", {}, 3, 4, load="wide3"),
            self._saving("moe wide rest", "moe", {}, 3, 4, load="moewide3"),
        ]


@pytest.fixture(scope="session")
def worlds(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """Shared by all tests of this room."""
    return Worlds(models, tmp_path_factory.mktemp("worlds"))
