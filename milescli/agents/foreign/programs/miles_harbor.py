"""Runs trials of harbor's tasks. It runs in the virtual environment of that package; the agent
`harbor` of miles sends it requests over its pipes (`miles_serving`)."""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("HARBOR_TELEMETRY", "0")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched

import miles_serving
from harbor.agents.factory import AgentFactory
from harbor.environments.factory import EnvironmentFactory
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TrialConfig
from harbor.models.trial.config import TaskConfig as TaskPlace
from harbor.trial.trial import Trial
from harbor.utils.import_path import import_class

REWARD = "reward"
"""Name of the reward if a verifier returns a single number."""
TOO_LONG = ("AgentTimeoutError",)
"""Exceptions of a trial that count as truncated; the trial is scored anyway."""


class Trials:
    """Runs trials of the tasks in one folder."""

    def __init__(self):
        self._tasks, self._agent, self._environment = [], {}, {}
        self._reward = None
        self._folder = Path(tempfile.mkdtemp(prefix="miles-harbor-"))

    async def start(self, tasks, agent, environment, agent_options, environment_options, reward):
        """Load the tasks and check the settings. `tasks`: a folder with one task, or with a folder
        for each; `agent`, `environment`: harbor's names, or `module:Class`; `agent_options`,
        `environment_options`: further fields of harbor's own settings; `reward`: name of the
        verifier's number to use, or None."""
        root = Path(tasks).expanduser().resolve()
        places = [root, *sorted(root.iterdir())] if root.is_dir() else []
        self._tasks = [place for place in places if Task.is_valid_dir(place)]
        if not self._tasks:
            raise FileNotFoundError(
                f"{root} does not contain a harbor task (a folder with a task.toml)"
            )
        self._agent = {"name": agent, **agent_options}
        AgentFactory.get_agent_class_from_config(AgentConfig(**self._agent))
        is_path = ":" in environment
        if is_path:
            import_class(environment, label="environment")
        kind = {"import_path": environment} if is_path else {"type": EnvironmentType(environment)}
        self._environment = {**kind, **environment_options}
        EnvironmentConfig(**self._environment)
        # is there a container engine, or a key of who has one?
        await asyncio.to_thread(
            EnvironmentFactory.run_preflight, kind.get("type"), kind.get("import_path")
        )
        self._reward = reward
        return {"tasks": len(self._tasks)}

    async def tasks(self, count):
        """Return the first `count` tasks as rows of a data file."""
        return [_row(place) for place in self._tasks[:count]]

    async def play(self, task, base_url, api_key, model):
        """Run one trial. `task`: the name of a task's folder."""
        place = next((place for place in self._tasks if place.name == task), None)
        if place is None:
            raise ValueError(
                f"there is no task {task!r}; one that exists is {self._tasks[0].name!r}"
            )
        session = {"OPENAI_API_KEY": api_key, "OPENAI_BASE_URL": base_url}
        agent = {"model_name": f"openai/{model}", **self._agent}
        agent["env"] = {**session, **agent.get("env", {})}
        config = TrialConfig(
            task=TaskPlace(path=place),
            trials_dir=self._folder,
            agent=AgentConfig(**agent),
            environment=EnvironmentConfig(**self._environment),
        )
        trial = await Trial.create(config)
        try:
            return self._outcome(await trial.run())
        finally:
            folder = self._folder / config.trial_name
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def close(self):
        shutil.rmtree(self._folder, ignore_errors=True)

    def _outcome(self, result):
        failure = result.exception_info
        is_cut = failure is not None and failure.exception_type in TOO_LONG
        if failure is not None and not is_cut:
            trace = failure.exception_traceback[-3000:]
            raise RuntimeError(f"the trial failed: {failure.exception_message}\n{trace}")
        verified = result.verifier_result
        rewards = dict((verified.rewards if verified is not None else None) or {})
        name = self._reward or (REWARD if REWARD in rewards else next(iter(rewards), None))
        if name not in rewards or (self._reward is None and name != REWARD and len(rewards) > 1):
            raise RuntimeError(
                f"the verifier returned {rewards}: it is unclear which one is the reward"
            )
        return {
            "text": "",
            "reward": float(rewards[name]),
            "is_cut": is_cut,
            "figures": {f"verifier_{key}": float(value) for key, value in rewards.items()},
        }


def _row(place):
    task = Task(place)
    return {"prompt": task.instruction or task.name, "label": place.name}


if __name__ == "__main__":
    miles_serving.serve(Trials())
