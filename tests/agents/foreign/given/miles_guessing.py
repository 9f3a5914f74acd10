"""An environment of verifiers of many turns, without an end to its tasks: guess the number."""

import verifiers.v1 as vf

__all__ = ["GuessEnv", "Guessing"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    pass


class Guessing(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield GuessTask(GuessData(prompt="Guess.", number=number % 8), self.config.task)
            number += 1


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment, guesses = await interaction.turn(), 1
            while not segment.terminated and segment.last_reply != str(task.data.number):
                segment, guesses = await interaction.turn("No. Again."), guesses + 1
            if not segment.terminated:
                interaction.trace.record_reward("guessed", 1.0 / guesses)
        interaction.trace.record_metric("guesses", float(guesses))
