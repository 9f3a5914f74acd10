"""How good is it? Greedy (or sampled) answers to held-out prompts, scored and kept. In a run, and
of a run that has ended."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import DataError
from milescli.core.events import EvalDone
from milescli.core.types import Prompt, StopReason
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.rollout.base import Completion, GenerateRequest, RolloutEngine
from milescli.rollout.scoring import Scorer
from milescli.rollout.tokenizer import ChatTokenizer
from milescli.runtime.material import Material, scorer_of

if TYPE_CHECKING:
    from milescli.console.output import Output
    from milescli.runtime.sites import Sites


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates whatever weights the engines hold."""

    recipe: Recipe
    prompts: list[Prompt]
    engine: RolloutEngine
    scorer: Scorer
    tokenizer: ChatTokenizer
    folder: Path
    """Where answers are written; the run's `eval/`."""

    async def run(self, step: int) -> EvalDone:
        """Ask all prompts at once, score, and write `step_<n>.jsonl`."""
        began, settings = time.monotonic(), self.recipe.eval
        asked = [
            (prompt, index)
            for prompt in self.prompts
            for index in range(settings.samples_per_prompt)
        ]
        answers = await asyncio.gather(
            *(self.engine.generate(self._request(prompt, index)) for prompt, index in asked)
        )
        texts = [self.tokenizer.decode(answer.response_ids) for answer in answers]
        rewards = await asyncio.gather(
            *(
                self.scorer.score(prompt, text)
                for (prompt, _), text in zip(asked, texts, strict=True)
            )
        )
        path = self._write(step, asked, answers, texts, rewards)
        return EvalDone(
            step=step,
            accuracy=sum(rewards) / len(rewards),
            num_prompts=len(self.prompts),
            truncated_fraction=sum(a.stop_reason is StopReason.LENGTH for a in answers)
            / len(answers),
            response_tokens_mean=sum(len(a.response_ids) for a in answers) / len(answers),
            seconds=time.monotonic() - began,
            path=str(path.relative_to(self.folder.parent)),
        )

    def _request(self, prompt: Prompt, index: int) -> GenerateRequest:
        settings = self.recipe.eval
        digest = hashlib.blake2b(
            f"{self.recipe.run.seed}/eval/{prompt.index}/{index}".encode(), digest_size=4
        ).digest()
        return GenerateRequest(
            prompt_ids=prompt.token_ids,
            max_new_tokens=settings.max_response_tokens or self.recipe.rollout.max_response_tokens,
            temperature=settings.temperature,
            stop=list(self.recipe.rollout.stop),
            seed=int.from_bytes(digest, "big") >> 1,
        )

    def _write(
        self,
        step: int,
        asked: list[tuple[Prompt, int]],
        answers: list[Completion],
        texts: list[str],
        rewards: list[float],
    ) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step}.jsonl"
        lines = [
            json.dumps(
                {
                    "prompt": prompt.text,
                    "response": text,
                    "label": prompt.label,
                    "reward": reward,
                    "stop_reason": answer.stop_reason.value,
                    "prompt_ids": prompt.token_ids,
                    "response_ids": answer.response_ids,
                }
            )
            for (prompt, _), answer, text, reward in zip(
                asked, answers, texts, rewards, strict=True
            )
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


def evaluate_run(
    path: Path,
    *,
    step: int | None,
    num_prompts: int | None,
    data: Path | None,
    address: str | None,
    environ: Mapping[str, str],
    output: Output,
) -> EvalDone:
    """Evaluate a checkpoint of a run that is not running: engines alone, no trainer. Answers go to
    `eval/` of the run. `address`: of the Ray cluster, where it is another than the run's."""
    from milescli.checkpoint.run_dir import lock, open_run
    from milescli.checkpoint.store import CheckpointStore
    from milescli.conversion.unpack import unpack
    from milescli.platform.torch_wheel import require_wheel
    from milescli.recipe.load import override
    from milescli.recipe.resolved import load_resolved
    from milescli.runtime.material import prepare
    from milescli.runtime.sites import find_sites

    run = open_run(path)
    flags = {"machine.address": f"--address {address}"} if address else {}
    loaded = override(
        load_resolved(run.recipe_file), sets=[], flags=flags, only=("machine",), environ=environ
    )
    recipe = _with_data(loaded.recipe, data, num_prompts)
    found = CheckpointStore(run.checkpoints).find(step)
    plan = engines_only(Plan.from_json(run.plan_file.read_text()))
    require_wheel(plan.device_kind)
    material = prepare(recipe, run, output=output)
    sites = find_sites(loaded, output=output)
    with lock(run), TemporaryDirectory(prefix=".eval-", dir=run.path) as temporary:
        sites.require_shared(run.path)
        model_dir = Path(temporary) / "model"
        output.note(f"reading checkpoint step {found.step}")
        unpack(found.path, model_dir, model_dir=material.model_dir, read_back=False)
        output.note("starting engines")
        return _serve_and_evaluate(
            recipe=recipe,
            plan=plan,
            sites=sites,
            run=run,
            material=material,
            model_dir=model_dir,
            step=found.step,
        )


def _serve_and_evaluate(
    *,
    recipe: Recipe,
    plan: Plan,
    sites: Sites,
    run: RunDir,
    material: Material,
    model_dir: Path,
    step: int,
) -> EvalDone:
    """Start engines on a model folder, evaluate, stop them."""
    from milescli.runtime.build import Engines, engine_probe
    from milescli.runtime.session import open_session
    from milescli.runtime.supervise import StopSignals, run_watched

    log_dir = run.eval_log_dir()
    done: list[EvalDone] = []
    with open_session(
        run=run,
        log_dir=log_dir,
        recipe=recipe,
        plan=plan,
        sites=sites,
        model_dir=model_dir,
        facts=material.facts,
    ) as session:
        engines, probes = Engines(), []

        async def work() -> None:
            await session.ground.take(timeout_s=recipe.machine.start_timeout_s)
            probes.append(session.cluster.check_nodes)
            fleet = await session.builder.start_engines(engines)
            probes.extend(
                engine_probe(h, s) for h, s in zip(engines.handles, engines.specs, strict=True)
            )
            evaluator = Evaluator(
                recipe=recipe,
                prompts=material.heldout,
                engine=fleet,
                scorer=scorer_of(recipe.rollout),
                tokenizer=material.tokenizer,
                folder=run.eval_dir,
            )
            done.append(await evaluator.run(step))

        async def main() -> None:
            try:
                signals = StopSignals(on_stop=lambda: False, again=f"miles eval {run.shown}")
                await run_watched(work(), probes, signals, cause_grace_s=session.cause_grace_s)
            finally:
                await engines.stop()
                await session.ground.release()

        asyncio.run(main())
    return done[0]


def engines_only(plan: Plan) -> Plan:
    """The same engines, with the trainer's slots left out; nodes and devices are counted from 0
    again."""
    kept = [replace(slot, trainer_rank=None) for slot in plan.slots if slot.engine is not None]
    nodes = sorted({slot.node for slot in kept})
    first = {node: min(slot.device for slot in kept if slot.node == node) for node in nodes}
    slots = [
        replace(slot, node=nodes.index(slot.node), device=slot.device - first[slot.node])
        for slot in kept
    ]
    return replace(plan, slots=slots)


def _with_data(recipe: Recipe, data: Path | None, num_prompts: int | None) -> Recipe:
    changes = (
        {"data": recipe.data.model_copy(update={"eval": str(data.absolute())})} if data else {}
    )
    if num_prompts is not None:
        changes["eval"] = recipe.eval.model_copy(update={"num_prompts": num_prompts})
    recipe = recipe.model_copy(update=changes)
    if recipe.data.eval is None:
        raise DataError(
            "this run has no held-out prompts",
            why="its recipe leaves `data.eval` out",
            fix="--data FILE.jsonl",
        )
    return recipe
