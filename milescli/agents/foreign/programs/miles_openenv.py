"""Resets and steps environments of OpenEnv over its own client. It runs in the virtual environment
of that package; the environment `openenv` of miles sends it requests over its pipes
(`miles_serving`)."""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request

import miles_serving
from openenv.core.generic_client import GenericEnvClient

READY_TIMEOUT_S = 110.0
"""Time until a server that is started here must be ready."""
TAIL_BYTES = 1000
"""Bytes of the server's last output that an error shows if it ends too early."""
LAST_WORDS_S = 1.0
MESSAGE_TIMEOUT_S = 3600.0
"""Timeout of one message; the caller has its own bound."""
SEPARATE_FIELDS = ("done", "reward", "metadata")
"""Fields that are returned separately and do not belong to the observation text."""
TYPES_OF_TOOLS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of actions that call tools; they have no field for plain text."""


class Sessions:
    """Holds the sessions of one server."""

    def __init__(self):
        self._url = self._server = self._action = self._observation = None
        self._numbers, self._open, self._tail = itertools.count(), {}, b""

    async def start(self, url, server, action, observation):
        """Connect to the running server `url`, or start the app `server` (`module:app`) here.
        `action`, `observation`: names of the fields to use, or None."""
        self._url = url or await self._begun(server)
        schema = await asyncio.to_thread(_fetched, f"{self._url}/schema")
        self._action = action or _only_text(schema.get("action") or {})
        self._observation = observation
        return {"url": self._url, "action": self._action}

    async def reset(self, session, seed, options):
        """Start an episode in a session, which is an environment on the server. Opens a new one if
        `session` is None, or belongs to an earlier process."""
        if session not in self._open:
            session = f"{os.getpid()}-{next(self._numbers)}"
            client = GenericEnvClient(base_url=self._url, message_timeout_s=MESSAGE_TIMEOUT_S)
            self._open[session] = await client.__aenter__()
        step = self._step_of(await self._open[session].reset(seed=seed, **options))
        return {"session": session, "observation": step["observation"]}

    async def step(self, session, text):
        if session not in self._open:
            raise RuntimeError("the session was lost with its process")
        try:
            action = self._action_of(text)
        except ValueError as error:
            return {"unclear": str(error)}
        return self._step_of(await self._open[session].step(action))

    async def end(self, session):
        client = self._open.pop(session, None)
        if client is not None:
            await client.close()

    async def close(self):
        await asyncio.gather(*map(self.end, list(self._open)), return_exceptions=True)
        if self._server is not None:
            self._server.terminate()

    async def _begun(self, server):
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        number = listener.fileno()
        command = [sys.executable, "-m", "uvicorn", server, "--fd", str(number)]
        self._server = subprocess.Popen(
            [*command, "--log-level", "warning"],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        printed = threading.Thread(target=self._keep_tail, args=(self._server.stderr,), daemon=True)
        printed.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                if self._server.poll() is not None:
                    await asyncio.to_thread(printed.join, LAST_WORDS_S)
                    printed_last = self._tail.decode("utf-8", "replace").strip()
                    code = self._server.returncode
                    raise RuntimeError(f"{server} ended with exit code {code}: {printed_last}")
                try:
                    await asyncio.to_thread(_fetched, f"{url}/health")
                    return url
                except (OSError, ValueError):
                    await asyncio.sleep(0.1)

    def _keep_tail(self, pipe):
        while piece := pipe.read1():
            self._tail = (self._tail + piece)[-TAIL_BYTES:]
            os.write(2, piece)

    def _action_of(self, text):
        """Take a JSON object as the action itself, and other text as its only text field."""
        said = text.strip()
        if said.startswith("```") and said.endswith("```") and "\n" in said:
            said = said.split("\n", 1)[1].removesuffix("```").strip()
        try:
            action = json.loads(said)
        except ValueError:
            action = None
        if isinstance(action, dict):
            return action
        if self._action is None:
            raise ValueError("an action of this environment must be a JSON object")
        return {self._action: text.strip()}

    def _step_of(self, result):
        observation = {k: v for k, v in result.observation.items() if k not in SEPARATE_FIELDS}
        if self._observation is not None:
            observation = observation[self._observation]
        elif len(observation) == 1:
            (observation,) = observation.values()
        if not isinstance(observation, str):
            observation = json.dumps(observation, ensure_ascii=False)
        return {
            "observation": observation,
            "reward": float(result.reward or 0.0),
            "ended": bool(result.done),
        }


def _only_text(schema):
    """Return the field that plain text can fill; None if an action must be a JSON object."""
    if schema.get("title") in TYPES_OF_TOOLS:
        return None
    fields = {k: v for k, v in (schema.get("properties") or {}).items() if k != "metadata"}
    required = [name for name in schema.get("required") or [] if name in fields]
    if len(required) == 1 and fields[required[0]].get("type") == "string":
        return required[0]
    texts = [name for name, field in fields.items() if field.get("type") == "string"]
    return texts[0] if len(texts) == 1 and len(fields) == 1 else None


def _fetched(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


if __name__ == "__main__":
    miles_serving.serve(Sessions())
