"""An environment of verifiers of one turn: say the word."""

import verifiers.v1 as vf

__all__ = ["Words"]


class WordsConfig(vf.TasksetConfig):
    num: int = 40


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData]):
    @vf.reward
    async def says_it(self, task, trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class Words(vf.Taskset[WordTask, WordsConfig]):
    def load(self):
        for number in range(self.config.num):
            data = WordData(
                prompt=f"Say w{number}.", system_prompt="Be brief.", answer=f"w{number}"
            )
            yield WordTask(data, self.config.task)
