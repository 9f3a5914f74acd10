"""For harbor, without containers: a place that runs commands over a temporary folder, and an agent
that runs what the model says as one command."""

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from openai import AsyncOpenAI

FOLDERS = ("logs/agent", "logs/verifier", "logs/artifacts", "tests", "app", "solution")
PATHS = re.compile(r"(?<![\w./-])/(logs|tests|app|solution)\b")
TIMEOUT_S = 60


class Folder(BaseEnvironment):
    @staticmethod
    def type():
        return "folder"

    @property
    def capabilities(self):
        return EnvironmentCapabilities()

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        self.root = Path(tempfile.mkdtemp(prefix="miles-place-"))
        for name in FOLDERS:
            (self.root / name).mkdir(parents=True)

    async def stop(self, delete):
        shutil.rmtree(self.root, ignore_errors=True)

    def _here(self, path):
        return self.root / str(path).lstrip("/")

    async def upload_file(self, source_path, target_path):
        self._here(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._here(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._here(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self._here(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._here(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "sh",
            "-c",
            PATHS.sub(rf"{self.root}/\1", command),
            cwd=PATHS.sub(rf"{self.root}/\1", str(cwd or "/app")),
            env={**os.environ, **(env or {})},
            stdout=pipe,
            stderr=pipe,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec or TIMEOUT_S)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)


class OneCommand(BaseAgent):
    @staticmethod
    def name():
        return "one-command"

    def version(self):
        return "1"

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        said = self._extra_env
        async with AsyncOpenAI(
            base_url=said["OPENAI_BASE_URL"], api_key=said["OPENAI_API_KEY"]
        ) as client:
            asked = [{"role": "user", "content": instruction}]
            replied = await client.chat.completions.create(model=self.model_name, messages=asked)
        await environment.exec(replied.choices[0].message.content)
