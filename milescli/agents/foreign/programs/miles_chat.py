"""Implements a harness of verifiers that chats within the process that plays: no program is started
for an episode. It requests replies of the model, calls the task's tools, and ends when the model
calls none. verifiers finds it as the harness `miles_chat`, because it is next to
`miles_verifiers.py`."""

import json
from contextlib import AsyncExitStack

import httpx
import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]
FULL = "context_length_exceeded"
OVER = "max_total_tokens"
"""verifiers' name for a trace that ends because the conversation is full."""


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        timeout = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            # loopback: nothing is encrypted, and certificates are slow to read
            http = await stack.enter_async_context(httpx.AsyncClient(verify=False, timeout=None))
            client = AsyncOpenAI(
                base_url=endpoint, api_key=secret, timeout=None, max_retries=0, http_client=http
            )
            tools, dispatch, links = [], {}, {}
            if servers:
                tools, dispatch, links = await connect_mcp({"mcpServers": servers}, stack)
            try:
                await self._chat(client, ctx.model, messages, tools, dispatch, links)
            except APIStatusError as error:
                if FULL not in str(error.body) and FULL not in error.message:
                    raise
                trace.stop(OVER)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _chat(self, client, model, messages, tools, dispatch, links):
        offered = {"tools": tools} if tools else {}
        while True:
            completion = await client.chat.completions.create(
                model=model, messages=messages, **offered
            )
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                content = await self._called(call, dispatch, links)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if not message.tool_calls:
                return

    async def _called(self, call, dispatch, links):
        name = call.function.name
        if name not in dispatch:
            return f"error: there is no tool {name!r}; the tools are {', '.join(dispatch)}"
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except ValueError as error:
            return f"error: the arguments are no JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: the arguments are a JSON object"
        return await call_mcp(links, dispatch, name, arguments)
