"""A program behind `miles_serving` that does what a test asks of it; with the standard library
alone."""

import asyncio
import os
import subprocess
import sys
import time

import miles_serving


class Echo:
    def __init__(self):
        self.begun = None

    async def start(self, fails=False):
        print("this is no reply")
        if fails:
            raise ValueError("it was told to")
        return os.getpid()

    async def echo(self, value):
        return value

    async def late(self, value, seconds):
        await asyncio.sleep(seconds)
        return value

    async def fail(self):
        raise ZeroDivisionError("of the program")

    async def object(self):
        return object()

    async def die(self):
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)

    async def hold(self):
        time.sleep(600)

    async def child(self):
        """One in a session of its own, which its parent forgets."""
        code = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
        self.begun = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        return int(self.begun.stdout.readline())

    async def close(self):
        print("it cleaned up", file=sys.stderr, flush=True)


if __name__ == "__main__":
    miles_serving.serve(Echo())
