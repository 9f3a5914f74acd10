"""Layouts that the field runs, as its public recipes have them: the planner must accept them as
legal and see that they fit. Facts, with no text of theirs.

mt: tokens of a microbatch on one rank; engine: devices of one; `mem`: their memory fraction; off:
Adam on the host. Where a recipe names no hardware, it is taken to be H100 with 80 GB, or H200 where
one engine's weights alone, or gradients and weights alone, are more than that. Rows whose model has
no published config here (GLM-5.2, Inkling, JoyAI, Qwen3.8, Nemotron-3-Ultra), LoRA, FSDP and
cut-down models are left out, and DeepSeek-V4."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One recipe."""

    model: str
    """Name of the file of its config.json, without .json."""
    machine: str
    tp: int
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    last: int | None = None
    first: int | None = None
    mt: int = 8192
    engine: int
    mem: float
    off: bool = False
    trainer_devices: int | None = None
    """Where trainer and engines are split; None: they take turns."""
    response: int = 8192
    prompts: tuple[int, int] = (32, 8)
    exception: str = ""
    """Why this house cannot run it as it stands; empty where it can."""
    instead: int | None = None
    """Devices of an engine with which it runs all the same."""

    @property
    def name(self) -> str:
        """For test ids."""
        return (
            f"{self.model.partition('--')[2]} {self.tp}/{self.pp}/{self.cp}/{self.ep} on "
            f"{self.machine}"
        )


_KV = (
    "tp exceeds the model's key/value heads, which Megatron-Core would repeat; the modules of "
    "this house cut whole heads"
)
_FP8 = "it is served in FP8 or INT4, and this house serves bfloat16: engines must be larger"
_DSA = (
    "sparse attention chooses among the positions of one rank: context parallelism is not there yet"
)

CAUSES = {
    _KV: "exceeds the model's 2 key/value heads",
    _FP8: "an engine of tp",
    _DSA: "sparse attention chooses among",
}
"""Exception -> what the refusal says."""

ROWS = [
    Row(model="Qwen--Qwen3-4B", machine="8xH100", tp=2, mt=9216, engine=2, mem=0.7),
    Row(model="Qwen--Qwen3-4B", machine="8xH100", tp=2, cp=4, mt=9216, engine=1, mem=0.7),
    Row(model="Qwen--Qwen3-4B", machine="8xMI350X", tp=2, mt=9216, engine=2, mem=0.7),
    Row(
        model="Qwen--Qwen3-8B", machine="6xH100", tp=2, mt=16384, engine=1, mem=0.4,
        trainer_devices=2, prompts=(16, 4),
    ),
    Row(model="Qwen--Qwen3-32B", machine="8xH100", tp=8, mt=20480, engine=8, mem=0.7, off=True),
    Row(
        model="Qwen--Qwen3-30B-A3B", machine="8xH100", tp=4, ep=8, mt=32768, engine=8, mem=0.7,
        off=True,
    ),
    Row(
        model="Qwen--Qwen3-30B-A3B", machine="2x8xH100", tp=1, cp=1, pp=4, ep=4, mt=20480,
        engine=8, mem=0.6, off=True,
    ),
    Row(
        model="Qwen--Qwen3-30B-A3B", machine="8xMI350X", tp=1, pp=2, cp=2, ep=4, mt=16384,
        engine=2, mem=0.7, off=True,
    ),
    Row(
        model="Qwen--Qwen3-235B-A22B", machine="16x8xH100", tp=4, pp=4, cp=2, ep=16, last=22,
        mt=16384, engine=32, mem=0.7, off=True,
        trainer_devices=64, prompts=(8, 8),
    ),
    Row(
        model="Qwen--Qwen3-Next-80B-A3B-Instruct", machine="4x8xH100", tp=2, pp=4, cp=2, ep=8,
        mt=8192, engine=8, mem=0.8, off=True,
    ),
    Row(model="Qwen--Qwen3.5-4B", machine="8xH100", tp=2, mt=9216, engine=1, mem=0.7),
    Row(model="Qwen--Qwen3.5-9B", machine="8xH100", tp=2, mt=9216, engine=1, mem=0.6),
    Row(model="Qwen--Qwen3.6-27B", machine="8xH100", tp=4, mt=8192, engine=1, mem=0.8, off=True),
    Row(
        model="Qwen--Qwen3.5-35B-A3B", machine="8xH100", tp=2, cp=2, ep=8, mt=8192, engine=8,
        mem=0.7, off=True, response=15360,
    ),
    Row(
        model="Qwen--Qwen3.6-35B-A3B", machine="8xH100", tp=1, ep=8, mt=8192, engine=8, mem=0.7,
        off=True, response=6144, prompts=(8, 2),
    ),
    Row(
        model="Qwen--Qwen3.5-35B-A3B", machine="8xB200", tp=2, cp=2, ep=8, mt=16384, engine=8,
        mem=0.8, off=True, response=24576,
    ),
    Row(
        model="zai-org--GLM-4.5-Air", machine="8x8xH100", tp=1, pp=4, ep=8, last=10, mt=2048,
        engine=8, mem=0.8, off=True,
        trainer_devices=32, response=1024,
    ),
    Row(
        model="zai-org--GLM-4.5", machine="8x8xH100", tp=8, pp=4, cp=2, ep=16, mt=16384, engine=32,
        mem=0.7, off=True, response=30720, prompts=(128, 8),
    ),
    Row(
        model="zai-org--GLM-4.5", machine="8x8xH100", tp=4, pp=8, cp=2, ep=8, mt=16384, engine=32,
        mem=0.7, off=True, response=30720, prompts=(128, 8),
    ),
    Row(
        model="zai-org--GLM-4.7-Flash", machine="8xH200", tp=4, ep=8, mt=32768, engine=1, mem=0.7,
        off=True,
    ),
    Row(
        model="zai-org--GLM-5", machine="32x8xH100", tp=4, pp=4, cp=2, ep=32, last=18, mt=16384,
        engine=64, mem=0.7, off=True,
        trainer_devices=128, exception=_DSA,
    ),
    Row(
        model="zai-org--GLM-5.1", machine="16x4xGB300", tp=8, pp=4, ep=16, first=18, last=20,
        mt=8192, engine=8, mem=0.7, off=True,
    ),
    Row(
        model="deepseek-ai--DeepSeek-V3", machine="16x8xH100", tp=4, pp=4, cp=4, ep=16, last=13,
        mt=2048, engine=64, mem=0.7, off=True,
        response=6144, prompts=(128, 8),
    ),
    Row(
        model="deepseek-ai--DeepSeek-V3.2", machine="16x8xH200", tp=2, pp=4, ep=16, last=13,
        mt=32768, engine=8, mem=0.8, off=True,
        trainer_devices=64, exception=_FP8, instead=16,
    ),
    Row(
        model="moonshotai--Kimi-K2-Instruct", machine="32x8xH100", tp=8, pp=8, cp=4, ep=32, last=5,
        mt=16384, engine=16, mem=0.7, off=True,
        response=30720, prompts=(128, 8), exception=_FP8, instead=64,
    ),
    Row(
        model="moonshotai--Kimi-K2.5", machine="32x8xH100", tp=8, pp=8, cp=4, ep=32, last=5,
        mt=4096, engine=16, mem=0.7, off=True,
        prompts=(128, 8), exception=_FP8, instead=64,
    ),
    Row(
        model="nvidia--NVIDIA-Nemotron-3-Nano-4B-BF16", machine="8xH100", tp=2, pp=2, mt=9216,
        engine=1, mem=0.7,
    ),
    Row(
        model="nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", machine="8xH200", tp=2, pp=2, ep=2,
        mt=1024, engine=1, mem=0.7, response=768,
    ),
    Row(
        model="nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-BF16", machine="2x8xH100", tp=4, pp=2,
        ep=8, mt=1024, engine=8, mem=0.7, off=True,
        response=768, prompts=(32, 4), exception=_KV,
    ),
    Row(
        model="openai--gpt-oss-20b", machine="8xH100", tp=8, ep=8, mt=4096, engine=4, mem=0.7,
        off=True, response=2048,
    ),
    Row(
        model="google--gemma-4-26B-A4B", machine="8xH100", tp=4, ep=8, mt=1024, engine=4, mem=0.55,
        response=768, exception=_KV,
    ),
    Row(
        model="google--gemma-4-31B-it", machine="8xH100", tp=4, mt=512, engine=4, mem=0.5,
        off=True, response=256,
    ),
    Row(model="Qwen--Qwen2.5-0.5B-Instruct", machine="8xH100", tp=1, mt=9216, engine=1, mem=0.7),
    Row(
        model="Qwen--Qwen2.5-3B-Instruct", machine="4xH100", tp=2, mt=9216, engine=2, mem=0.7,
        response=512,
    ),
]  # fmt: skip
