"""Plays episodes of an environment of verifiers. It runs in the virtual environment of that
package; the agent `verifiers` of miles sends it requests over its pipes (`miles_serving`)."""

import asyncio
import itertools
import json
import os

import httpx
import miles_serving
import verifiers.v1 as vf
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.clients.base import DEFAULT_LIMITS
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    load_environment,
    resolve_env_config,
)

CERTIFICATES = httpx.create_ssl_context()
eval_client.build_async_httpx = lambda config: httpx.AsyncClient(
    timeout=httpx.Timeout(**config.timeout.model_dump()), limits=DEFAULT_LIMITS, verify=CERTIFICATES
)
"""verifiers makes a client for each episode, which reads all certificates each time: 40 ms."""
CHAT = "miles_chat"
DEFAULT_HARNESS = "bash"
"""Harness that verifiers uses if a taskset has none: a program in a container."""
KEY_VARIABLE = "MILES_SESSION_API_KEY_{}"
"""verifiers reads keys from variables, and hides those with API_KEY in their name from programs."""


class EpisodeRunner:
    """One environment, and the episodes that are played in it."""

    def __init__(self):
        self.environment = self._living = None
        self._end, self._ready = asyncio.Event(), None
        self._numbers, self._tasks = itertools.count(), None

    async def start(self, environment, arguments, options, max_turns):
        """Load the environment. `arguments`: of the taskset; `options`: the rest of `[env]`."""
        config = _config(environment, arguments, options, max_turns)
        self.environment = load_environment(resolve_env_config(config))
        self._ready = asyncio.get_running_loop().create_future()
        self._living = asyncio.create_task(self._live())
        await self._ready
        return {"seats": list(agent_config_fields(self.environment.config))}

    async def tasks(self, count):
        """Return the first `count` tasks as rows of a data file."""
        loaded = await asyncio.to_thread(
            lambda: list(itertools.islice(self.environment.taskset, count))
        )
        return [_row(task) for task in loaded]

    async def play(self, task, base_url, api_key, model):
        """Play one episode. `task`: a row's label, which is the data of a task or its number."""
        variable = KEY_VARIABLE.format(next(self._numbers))
        os.environ[variable] = api_key
        try:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = vf.ModelContext(client=client, model=model, sampling=vf.SamplingConfig())
            (slot,) = self.environment.slots(await self._task(task))
            episode = await self.environment.run_slot(slot, context)
        finally:
            os.environ.pop(variable, None)
        return _outcome(episode, base_url)

    async def close(self):
        self._end.set()
        if self._living is not None:
            await self._living

    async def _live(self):
        """Start and end what the environment serves in the same task."""
        try:
            async with self.environment.serving():
                self._ready.set_result(None)
                await self._end.wait()
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _task(self, label):
        taskset = self.environment.taskset
        data = json.loads(label)
        if isinstance(data, int):
            numbered = await asyncio.to_thread(
                lambda: next(itertools.islice(iter(taskset), data, None), None)
            )
            if numbered is None:
                raise ValueError(f"the environment has no task {data}")
            return numbered
        kind = type(taskset).task_type()
        return kind(kind.data_type().model_validate(data), taskset.config.task)


def _config(environment, arguments, options, max_turns):
    """Return verifiers' `[env]`. Unless the options say otherwise, each seat uses our harness and
    runs on this machine."""
    config = {**options, "taskset": {"id": environment, **arguments}}
    seats = agent_config_fields(env_config_type(environment, config.get("id", ""))())
    for name, seat in seats.items():
        said = dict(config.get(name) or {})
        said.setdefault("runtime", {"type": "subprocess"})
        brings_none = default_harness_id(environment) == DEFAULT_HARNESS
        if "harness" not in said and seat.harness is None and brings_none:
            said["harness"] = {"id": CHAT}
        if seat.max_turns is None:
            said.setdefault("max_turns", max_turns)
        config[name] = said
    return config


def _row(task):
    data = task.data
    said = data.prompt or data.name or f"Task {data.idx}"
    if isinstance(said, str):
        said = [vf.UserMessage(content=said)]
    messages = [message_to_wire(message) for message in said]
    if data.system_prompt:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    label = data.model_dump_json(exclude_none=True, exclude_defaults=True)
    return {"prompt": messages, "label": label}


def _outcome(episode, base_url):
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        lines = [f"{error.type}: {error.message}\n{error.traceback or ''}" for error in errors]
        raise RuntimeError("the episode failed\n" + "\n".join(lines)[-3000:])
    for trace in episode.traces:
        client = trace.agent.config.client
        if not trace.agent.trainable and client is not None and client.base_url == base_url:
            raise RuntimeError(
                f"the seat `{trace.agent.name}` must not be trained, but the trained policy "
                "played it; set `client` and `model` of another model for it in "
                "`rollout.verifiers.options`"
            )
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not traces:
        raise RuntimeError("the environment has no trained seat")
    figures = {}
    for trace in traces:
        named = {**trace.metrics, **{k: r and r.score for k, r in trace.rewards.items()}}
        for name, value in named.items():
            if value is not None:
                figures.setdefault(name, []).append(float(value))
    return {
        "text": traces[-1].last_reply,
        "reward": sum(trace.reward for trace in traces) / len(traces),
        "is_cut": any(trace.is_truncated for trace in traces),
        "figures": {name: sum(values) / len(values) for name, values in figures.items()},
    }


if __name__ == "__main__":
    miles_serving.serve(EpisodeRunner())
