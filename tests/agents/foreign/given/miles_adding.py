"""An environment of verifiers with a tool, which is served for all episodes."""

import verifiers.v1 as vf

__all__ = ["Adding"]


class AddTools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class AddData(vf.TaskData):
    answer: int


class AddTask(vf.Task[AddData]):
    @vf.reward
    async def is_right(self, task, trace) -> float:
        return float(trace.last_reply == str(task.answer))

    @vf.metric
    async def told(self, trace) -> float:
        return float(trace.tool_messages[0].content)


class Adding(vf.Taskset[AddTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [AddTools(vf.SharedToolsetConfig())]

    def load(self):
        for number in range(4):
            data = AddData(prompt=f"What is {number} + 1?", answer=number + 1)
            yield AddTask(data, self.config.task)


if __name__ == "__main__":
    AddTools.run()
