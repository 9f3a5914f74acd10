"""Worlds of trainer ranks, each started once for all tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.megatron import mtp_models, world
from tests.backends.megatron.draft_cases import draft_cases
from tests.backends.megatron.layouts import (
    ADAMW,
    ADAMW_KEYS,
    ADAMW_LAYOUTS,
    ALGORITHM_EXAMPLES,
    ALGORITHM_LAYOUTS,
    FOUR,
    MUON,
    MUON_KEYS,
    MUON_LAYOUTS,
    ONE,
    PACKED,
    PACKED_EXAMPLES,
    ROUTED,
    TOKEN_ROWS,
    TWO,
)
from tests.backends.megatron.lora_cases import KINDS, LORA, RANK, SHARED
from tests.backends.megatron.memory_cases import MEMORY
from tests.backends.megatron.mtp_cases import MTP, TRAINED
from tests.backends.megatron.saving_cases import saving_cases
from tests.backends.megatron.shared_cases import SHARING
from tests.backends.megatron.snapshot_cases import snapshot_cases
from tests.backends.megatron.tiny_models import MODELS, make_model
from tests.backends.megatron.told_cases import told_cases
from tests.backends.megatron.turns_cases import turns_cases


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> Hugging Face folder."""
    root = tmp_path_factory.mktemp("models")
    return {name: str(make_model(root / name, name)) for name in MODELS}


BY_MUON = {"optimizer": {"rule": "muon"}}


class Worlds:
    """Results of each world's cases, run when they are first asked for."""

    def __init__(self, models: dict[str, str], root: Path) -> None:
        self.models, self.root = models, root
        self._results: dict[str, world.Results] = {}
        self._saves: dict[str, tuple[str, str]] = {}
        """Folder of a checkpoint -> (world, case) that writes it."""

    def checkpoint(self, name: str) -> str:
        """Where the case that saves under `name` has written."""
        self._make(self._folder(name))
        return self._folder(name)

    def get(self, which: str) -> world.Results:
        """Of one rank, of two or four; again and back: of one rank that goes on with what one, or
        four, have saved."""
        if which not in self._results:
            size = {"one": 1, "again": 1, "two": 2, "four": 4, "back": 1}[which]
            cases = getattr(self, f"_{which}")()
            for case in cases:
                if saves := case.get("save"):
                    self._saves[saves] = (which, case["name"])
            self._results[which] = world.run_world(
                size, cases, self.root / which, lambda case: self._make(case.get("load"))
            )
        return self._results[which]

    def _make(self, checkpoint: str | None) -> None:
        """Run the case that saves it."""
        if not checkpoint:
            return
        for which in ("one", "four"):
            self.get(which)
        which, name = self._saves[checkpoint]
        self.get(which)[name]

    def _folder(self, name: str) -> str:
        return str(self.root / "checkpoints" / name)

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
                "indexer": case.indexer,
                "train": TRAINED if case.model.startswith("mtp") else case.train,
            }
            for case in MEMORY[which]
        ]

    def stepped(self, rule: str, name: str) -> str:
        """Where the case of plain steps of AdamW or Muon writes its weights."""
        return str(self.root / f"{rule}-{name.replace(' ', '-')}.safetensors")

    def _adamw(self, which: str) -> list[dict]:
        rules = (
            ("adamw", ADAMW["steps"], ADAMW_KEYS, ADAMW_LAYOUTS),
            ("muon", MUON["steps"], MUON_KEYS, MUON_LAYOUTS),
        )
        return [
            {
                "name": f"{rule} {name}",
                "call": "adamw_steps",
                "model": self.models[name.split()[0]],
                "layout": layout,
                "steps": steps,
                "optimizer": keys,
                "save": self.stepped(rule, name),
            }
            for rule, steps, keys, layouts in rules
            for name, layout in layouts[which].items()
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
        ] + [
            {
                "name": "steps bf16 fused",
                "call": "plain_steps",
                "model": self.models["moe"],
                "layout": {"ep": 2, "dp": 2},
                "precision": "bf16",
                "fused": True,
            }
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
        train: dict | None = None,
        precision: str = "fp32",
    ) -> dict:
        return {
            "name": name,
            "call": "train_and_save",
            "model": self.models[model],
            "layout": layout,
            "first": first,
            "last": last,
            "save": self._folder(save) if save else "",
            "load": self._folder(load) if load else "",
            "train": train,
            "precision": precision,
        }

    def _adapters_go_on(self) -> list[dict]:
        sp = {"tp": 2, "ep": 2, "sequence_parallel": True}
        return [
            self._saving("lora moe tp2 rest", "moe", sp, 3, 4, load="lora3", train=RANK),
            self._saving("lora moe pp2 rest", "moe", {"pp": 2}, 3, 4, load="lora3", train=RANK),
            self._saving("shared moe tp2 rest", "moe", sp, 3, 4, load="shared3", train=SHARED),
        ]

    def _mtp_saved(self) -> list[dict]:
        return [
            self._saving("mtp four", "mtp", {}, 0, 4, train=TRAINED),
            self._saving("mtp three", "mtp", {}, 0, 3, save="mtp3", train=TRAINED),
            *(
                {"name": name, "call": call, "model": self.models[model], "layout": {}}
                for name, call, model in (
                    *((f"ahead {model}", "next_logprobs", model) for model in mtp_models.MODELS),
                    ("mtp cut", "trunk_differs", "mtp"),
                    ("mtp rows", "packed_and_single", "mtp"),
                )
            ),
        ]

    def _drafts(self, which: str) -> list[dict]:
        policy, draft = self.models["dense"], self.models["llama"]
        folder = Path(self._folder("drafts"))
        return draft_cases(which, policy=policy, draft=draft, folder=folder)

    def _mtp_goes_on(self) -> list[dict]:
        sp = {"tp": 2, "ep": 2, "sequence_parallel": True}
        return [
            self._saving("mtp tp2 rest", "mtp", sp, 3, 4, load="mtp3", train=TRAINED),
            self._saving("mtp pp2 rest", "mtp", {"pp": 2}, 3, 4, load="mtp3", train=TRAINED),
        ]

    def _merged(self) -> list[dict]:
        return [
            {
                "name": f"merged-{kind}",
                "call": "adapter_and_merged",
                "model": self.models[kind.removesuffix("-shared")],
                "layout": {},
                "folder": self._folder(f"merged-{kind}"),
                "experts": "shared_outer" if kind.endswith("-shared") else "each",
            }
            for kind in KINDS
        ]

    def _algorithms(self, which: str) -> list[dict]:
        return [
            {
                "name": name,
                "call": "algorithms_measured",
                "model": self.models["dense"],
                "layout": layout,
                "examples": ALGORITHM_EXAMPLES,
            }
            for name, layout in ALGORITHM_LAYOUTS[which].items()
        ]

    def _shared(self) -> list[dict]:
        (whole,) = self._algorithms("one")
        return [
            {**whole, "name": "algorithms shared", "shares_prompts": True},
            *(
                {
                    "name": f"shared prompts {model}",
                    "call": "shared_prompts",
                    "model": self.models[model],
                    "layout": {},
                }
                for model in SHARING
            ),
        ]

    def _packed(self, which: str) -> list[dict]:
        return [
            *told_cases(which, model=self.models["dense"]),
            *(
                {
                    "name": name,
                    "call": "packed_tokens_differ",
                    "model": self.models["dense"],
                    "layout": layout,
                    "examples": PACKED_EXAMPLES,
                }
                for name, layout in PACKED[which].items()
            ),
        ]

    def _one(self) -> list[dict]:
        plain = {"layout": {}}
        return [
            *self._layouts(ONE),
            *self._memory("one"),
            *self._packed("one"),
            *self._algorithms("one"),
            *self._shared(),
            *self._adamw("one"),
            *self._layouts(LORA["one"]),
            *self._merged(),
            *self._layouts(MTP["one"]),
            *self._mtp_saved(),
            *self._drafts("one"),
            self._saving("lora four", "moe", {}, 0, 4, train=RANK),
            self._saving("lora three", "moe", {}, 0, 3, save="lora3", train=RANK),
            self._saving("shared four", "moe", {}, 0, 4, train=SHARED),
            self._saving("shared three", "moe", {}, 0, 3, save="shared3", train=SHARED),
            self._saving("dense six", "dense", {}, 0, 6),
            self._saving("dense three", "dense", {}, 0, 3, save="dense3"),
            self._saving("moe six", "moe", {}, 0, 6),
            self._saving("moe three", "moe", {}, 0, 3, save="moe3"),
            self._saving("muon six", "moe", {}, 0, 6, train=BY_MUON),
            self._saving("muon three", "moe", {}, 0, 3, save="muon3", train=BY_MUON),
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
            {
                "name": "random states",
                "call": "random_states_return",
                "model": self.models["dense"],
                "folder": self._folder("random-states"),
                **plain,
            },
            {
                "name": "lora dropout",
                "call": "dropout_steps",
                "model": self.models["dense"],
                **plain,
            },
            *(
                {
                    "name": f"routing {name}",
                    "call": "routing_effect",
                    "model": self.models[name],
                    **plain,
                }
                for name in ROUTED
            ),
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
        return [
            self._saving("dense rest", "dense", {}, 3, 6, load="dense3"),
            self._saving("moe rest", "moe", {}, 3, 6, load="moe3"),
            self._saving("muon rest", "moe", {}, 3, 6, load="muon3", train=BY_MUON),
            self._saving("dense bf16", "dense", {}, 3, 4, load="dense3", precision="bf16"),
        ]

    def _two(self) -> list[dict]:
        return [
            *self._layouts(TWO),
            *self._layouts(LORA["two"]),
            *self._adapters_go_on(),
            *self._layouts(MTP["two"]),
            *self._mtp_goes_on(),
            *self._drafts("two"),
            *self._memory("two"),
            *self._packed("two"),
            *self._algorithms("two"),
            *self._adamw("two"),
            *self._host_steps(),
            *snapshot_cases(self.models),
            *turns_cases(self.models, self._folder),
            *saving_cases(self.models, self._folder),
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
            *self._algorithms("four"),
            self._saving("dense wide three", "dense", {"tp": 2, "dp": 2}, 0, 3, save="wide3"),
            self._saving(
                "moe wide three", "moe", {"ep": 2, "pp": 2, "dp": 2}, 0, 3, save="moewide3"
            ),
        ]

    def _back(self) -> list[dict]:
        return [
            self._saving("dense wide rest", "dense", {}, 3, 4, load="wide3"),
            self._saving("moe wide rest", "moe", {}, 3, 4, load="moewide3"),
        ]


@pytest.fixture(scope="session")
def worlds(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """Shared by all tests of this room."""
    return Worlds(models, tmp_path_factory.mktemp("worlds"))
