"""An environment of verifiers with a second seat that is not trained."""

import verifiers.v1 as vf

__all__ = ["Duo", "DuoEnv"]


class DuoTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 4)


class Duo(vf.Taskset[DuoTask, vf.TasksetConfig]):
    def load(self):
        yield DuoTask(vf.TaskData(prompt="Say something."), self.config.task)


class DuoConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class DuoEnv(vf.Env[DuoConfig]):
    async def setup(self, agents):
        agents.critic.trainable = False

    async def run(self, task, agents):
        await agents.solver.run(task)
        await agents.critic.run(task)
