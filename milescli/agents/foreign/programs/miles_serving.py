"""The package's end of the pipes: reads requests as lines of JSON, handles each in a task of its
own, and writes the results. Imports the standard library alone, because it runs in the virtual
environments of other packages, where miles is not installed. `host.py` of miles is the other end.

Requests:  [3, "call", ["play", {...}]], [3, "cancel", null], [3, "ping", null]
Replies:   [3, "value", ...] or [3, "error", "ValueError: ..."]
"""

import asyncio
import json
import os
import sys
import threading
import traceback

CLOSE_TIMEOUT_S = 20.0
"""Time for the cancelled tasks and the handler to clean up."""
LINE_BYTES = 1 << 28
NUM_FRAMES = 3
"""Number of innermost frames of a traceback in an error."""


def serve(handler):
    """Serve requests until standard input ends. The public async methods of `handler` are the
    requests, called with parameters by name; its async `close`, if there is one, comes last."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not look like a reply
    requests = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # and what is begun there must not read requests
    asyncio.run(_serve(handler, requests, replies))
    # threads that the package left behind must not keep the process
    sys.stderr.flush()
    os._exit(0)


async def _serve(handler, requests, replies):
    loop, lines, tasks = asyncio.get_running_loop(), asyncio.Queue(), {}

    def read():
        line = True
        while line:
            line = requests.readline(LINE_BYTES)
            loop.call_soon_threadsafe(lines.put_nowait, line)

    def send(reply):
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()

    async def handled(number, method, params):
        try:
            if method.startswith("_") or method == "close":
                raise ValueError(f"there is no request {method}")
            reply = [number, "value", await getattr(handler, method)(**params)]
            json.dumps(reply, allow_nan=False)
        except asyncio.CancelledError:
            return
        except BaseException as error:
            reply = [number, "error", _error_of(error, is_start=method == "start")]
        send(reply)

    threading.Thread(target=read, daemon=True).start()
    while line := await lines.get():
        number, kind, value = json.loads(line)
        if kind == "cancel":
            if number in tasks:
                tasks[number].cancel()
        elif kind == "ping":
            send([number, "value", None])
        else:
            tasks[number] = loop.create_task(handled(number, *value))
            tasks[number].add_done_callback(lambda _, number=number: tasks.pop(number, None))
    await _end(handler, list(tasks.values()))


def _error_of(error, *, is_start):
    """Return one line with its place if `start` failed, else the last frames of the traceback."""
    if is_start:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    lines = traceback.format_exception(error, limit=-NUM_FRAMES, chain=False)
    return "".join(lines)[-4000:]


async def _end(handler, tasks):
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
    if hasattr(handler, "close"):
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await handler.close()
        except BaseException:
            traceback.print_exc()
