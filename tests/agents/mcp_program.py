"""An MCP server for the tests, by the package's own classes: `python mcp_program.py [PORT]`."""

from __future__ import annotations

import asyncio
import ctypes
import io
import os
import signal
import subprocess
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from PIL import Image as Pillow

PDEATHSIG = 1
server = MCPServer("of the tests", log_level="ERROR")


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two
    numbers."""
    return a + b


@server.tool()
def pid() -> int:
    """Tell the number of its process."""
    return os.getpid()


@server.tool()
def begin() -> int:
    """Start a process, and tell its number."""
    return subprocess.Popen(["sleep", "300"]).pid


@server.tool()
def variable(key: str) -> str:
    """Tell what the environment says."""
    return os.environ.get(key, "nothing")


@server.tool()
def picture() -> list[str | Image]:
    """Draw."""
    Pillow.new("RGB", (4, 4)).save(file := io.BytesIO(), format="PNG")
    return ["a cat", Image(data=file.getvalue(), format="png")]


@server.tool()
async def sleep(seconds: float) -> str:
    """Take a while."""
    await asyncio.sleep(seconds)
    return "up"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)  # else it outlives tests that are killed
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run(transport="stdio")
