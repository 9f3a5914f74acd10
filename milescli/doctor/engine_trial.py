"""Tests a real engine and a real trainer: the engine responds, equally for equal seeds; the trainer
computes the same log-probs; a step changes the weights, and the engine receives them bit for bit
and uses them. Run by `trials`."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from milescli.core.errors import MilesError
from milescli.core.types import EngineAddress, WeightVersion
from milescli.doctor.finding import REPORT, Finding, fail, failed, ok
from milescli.doctor.tiny_trainer import publish_exactly, score, start_trainer, take_step
from milescli.recipe.model import ScratchModel
from milescli.rollout.base import Completion, GenerateRequest, RolloutEngine

if TYPE_CHECKING:
    from milescli.backends.megatron.worker import TrainerRank
    from milescli.backends.sglang.launch.spec import EngineSpec

RESPONSE_TOKENS = 8
MODEL = ScratchModel(num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1, ffn_hidden_size=64)
PROMPT_IDS = list(range(10, 26))
MODEL_VARIABLE = "MILES_TRIAL_MODEL"
"""Environment variable with the folder of a model to test instead of the tiny one."""
REQUEST = GenerateRequest(prompt_ids=PROMPT_IDS, max_new_tokens=RESPONSE_TOKENS, seed=7)


def try_engine(folder: Path, kind: Literal["cuda", "rocm", "cpu"]) -> list[Finding]:
    """Return the findings `engine`, `trainer`, `agreement` and `weights`, without those that were
    not reached. The model is tiny, or that of the folder in MODEL_VARIABLE. On a CPU the trainer
    starts while the engine is still importing; elsewhere after the engine, which first measures the
    free memory of the device."""
    from milescli.backends.sglang.launch.command import own_environment
    from milescli.backends.sglang.launch.servable import cpu_family
    from milescli.backends.sglang.launch.server import EngineServer
    from milescli.backends.sglang.launch.spec import EngineSpec
    from milescli.backends.sglang.launch.warm import WarmProcess
    from milescli.models import load_facts
    from milescli.models.scratch import make_model
    from milescli.platform.ports import free_ports

    given = os.environ.get(MODEL_VARIABLE)
    spec = EngineSpec(
        model_dir=Path(given) if given else folder / "model",
        tokenizer_dir=None,
        device_kind=kind,
        precision="fp32" if kind == "cpu" else "bf16",
        port=free_ports(1)[0],
        log_path=folder / "engine.log",
        max_running_requests=4,
        max_total_tokens=4096,
        memory_fraction=0.3,
        context_length=512,
    )
    with ExitStack() as cleanup:
        if not given:
            make_model(MODEL, spec.model_dir, seed=0)
        family = cpu_family(load_facts(spec.model_dir)) if kind == "cpu" else None
        if family is not None:
            warm = WarmProcess()
            warm.start({**os.environ, **own_environment(spec, family, quantised=False)})
            cleanup.callback(warm.stop)
            spec = replace(spec, warm=warm.listen(folder))
        trainer = start_trainer(spec.model_dir, kind) if kind == "cpu" else None
        if trainer is not None:
            cleanup.callback(trainer.close)
        engine = EngineServer(spec)
        engine.start()
        cleanup.callback(engine.stop)
        seconds = engine.wait_ready(300.0)
        return asyncio.run(_exercise_engine(spec, trainer, start_s=seconds))


async def _exercise_engine(
    spec: EngineSpec, trainer: TrainerRank | None, *, start_s: float
) -> list[Finding]:
    """Exercise an engine that is ready. Starts and closes a trainer if none is given."""
    from milescli.backends.sglang.client.fleet import SglangFleet

    address = EngineAddress(name="engine 0", url=spec.url, log_path=spec.log_path)
    fleet = SglangFleet(engines=[address], response_timeout_s=120.0)
    started = None
    try:
        responded, completion = await check_response(fleet, start_s=start_s)
        if trainer is None:
            trainer = started = await asyncio.to_thread(
                start_trainer, spec.model_dir, spec.device_kind
            )
        return responded + await exercise(fleet, trainer, completion, url=spec.url)
    finally:
        if started is not None:
            await asyncio.to_thread(started.close)
        await fleet.close()


async def check_response(
    engine: RolloutEngine, *, start_s: float
) -> tuple[list[Finding], Completion]:
    """Check that the engine responds, and equally for equal seeds. Return the findings and the
    response."""
    first, second = await engine.generate(REQUEST), await engine.generate(REQUEST)
    if first.response_ids != second.response_ids:
        why = (
            f"the same seed produced {first.response_ids} and {second.response_ids}: a resumed "
            "run could not be exact"
        )
        return fail("engine", "the engine is not deterministic", why=why, fix=REPORT), first
    return ok(
        "engine",
        f"SGLang was ready after {start_s:.0f} s, responded, and is deterministic for equal seeds",
    ), first


async def exercise(
    engine: RolloutEngine, trainer: TrainerRank, completion: Completion, *, url: str
) -> list[Finding]:
    """Let the trainer score the response, take a step and publish, and then score the engine's next
    response."""
    findings = await _agreement_findings(
        "agreement", "with the weights of the folder", trainer, completion
    )
    try:
        findings += ok(
            "trainer",
            f"Megatron-Core completed a step: {await asyncio.to_thread(take_step, trainer)}",
        )
    except MilesError as error:
        findings += failed("trainer", error)
    await engine.pause()
    try:
        await asyncio.to_thread(publish_exactly, trainer, url)
    except MilesError as error:
        return findings + failed("weights", error)
    await engine.resume(WeightVersion(1))
    later = await engine.generate(REQUEST)
    if later.response_ids == completion.response_ids and later.logprobs == completion.logprobs:
        why = "its response and all log-probs are unchanged after every weight was changed"
        return findings + fail("weights", "the engine ignores new weights", why=why, fix=REPORT)
    agreed = await _agreement_findings("weights", "after a publish", trainer, later)
    arrived = (
        "the trainer's new weights arrived over the tensor channel, bit-identical, and the "
        "engine uses them"
    )
    return findings + (agreed if agreed[0].fix else ok("weights", arrived))


async def _agreement_findings(
    check: str, when: str, trainer: TrainerRank, completion: Completion
) -> list[Finding]:
    ours, rounded = [
        await asyncio.to_thread(
            score, trainer, PROMPT_IDS, completion.response_ids, with_other_rounding=otherwise
        )
        for otherwise in (False, True)
    ]
    return judge_agreement(
        check,
        when,
        completion.logprobs,
        trainer=ours,
        rounded=rounded,
        has_experts=trainer.facts.num_experts > 0,
    )


def judge_agreement(
    check: str,
    when: str,
    engine: Sequence[float] | array[float],
    *,
    trainer: Sequence[float],
    rounded: Sequence[float],
    has_experts: bool = False,
) -> list[Finding]:
    """Compare [tokens] log-probs of the same response, as `train.agreement.judge` takes them; they
    may differ by as much as a run allows before its first step."""
    # torch comes with it, for which the warm process would wait
    from milescli.train.agreement import Agreement, judge

    given = (np.asarray(each) for each in (engine, trainer, rounded))
    verdict = judge(*given, has_experts=has_experts)
    if verdict.agreement is not Agreement.WRONG:
        return ok(
            check,
            f"engine and trainer agree on {verdict.gap.num_tokens} tokens {when}: log-probs "
            f"differ by at most {verdict.gap.max:.0e}",
        )
    return fail(
        check,
        f"engine and trainer disagree {when}",
        why=f"{verdict.text}: one of them computes something different",
        fix=REPORT,
    )
