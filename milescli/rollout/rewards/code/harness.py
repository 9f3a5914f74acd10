"""Runs the steps of a test in the sandbox, for the reward `code`: executes the response, then calls
functions or evaluates expressions and prints each value; or judges asserts, without the response. A
run never imports this file: its text is sent.

Files beside it: `solution.py` (the response, if there is one), `steps.json`: {mark, limit_s,
steps}. A step is {do: statements}, {value: expression}, {call: name, args}, or {judge: expression,
values}. No expected value is among the steps of a response. Values are printed one a line: mark,
number of the step, JSON as `encode` makes it."""

import collections.abc
import contextlib
import itertools
import json
import os
import signal
import sys

MAX_ITEMS = 100_000
PRELUDE = """
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random
import re, string, sys, typing
from typing import *
from collections import *
from itertools import *
from functools import *
from heapq import *
from bisect import *
from math import *
from operator import *
from string import *
from copy import copy, deepcopy
from builtins import *
"""
"""What LeetCode and LiveCodeBench import before a solution; the built-in functions win."""
PROVIDED = {}
"""Names that the prelude defines: they must not stand in for a function that a response lacks."""


def encode(value):
    """Encode plain values as JSON that preserves their types. Raises TypeError for other values."""
    if value is None or isinstance(value, bool | str):
        return value if type(value) in (bool, str, type(None)) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": list(value)}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, collections.abc.Mapping):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for kind, name in ((tuple, "tuple"), (frozenset, "frozenset"), (collections.abc.Set, "set")):
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    if hasattr(value, "tolist"):  # of numpy
        return encode(value.tolist())
    if isinstance(value, collections.abc.Iterator | collections.deque | range):
        return [encode(item) for item in itertools.islice(value, MAX_ITEMS)]
    raise TypeError(f"no plain value: {type(value)}")


def decode(value):
    """Invert `encode`. Raises ValueError, TypeError for other input."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, items),) = value.items()
    if name == "dict":
        return {decode(key): decode(item) for key, item in items}
    makers = {"tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes}
    if name == "complex":
        return complex(*items)
    return makers[name](items if name == "bytes" else map(decode, items))


def main():
    """Run the steps of `steps.json` and print their values, as the module describes."""
    with open("steps.json", encoding="utf-8") as file:
        job = json.load(file)
    scope = {"__name__": "solution"}

    def raise_timeout(*_):
        raise TimeoutError("it took too long")

    signal.signal(signal.SIGALRM, raise_timeout)
    if os.path.exists("solution.py"):
        with open("solution.py", encoding="utf-8") as file:
            text = file.read()
        signal.setitimer(signal.ITIMER_REAL, job["limit_s"])
        if "class Solution" in text or any("call" in step for step in job["steps"]):
            exec(PRELUDE, scope)
            PROVIDED.update(scope)
        with contextlib.suppress(SystemExit, EOFError):  # of a main program below the functions
            exec(compile(text, "solution.py", "exec", dont_inherit=True), scope)
    for number, step in enumerate(job["steps"]):
        signal.setitimer(signal.ITIMER_REAL, job["limit_s"])
        try:
            result = json.dumps(encode(_run_step(step, scope)))
        except Exception as error:
            sys.stderr.write(f"step {number}: {type(error).__name__}: {error}\n"[:500])
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.flush()
        line = f"\n{job['mark']} {number} {result}\n".encode()
        while line:
            line = line[os.write(1, line) :]


def _run_step(step, scope):
    if "do" in step:
        exec(compile(step["do"], "test", "exec", dont_inherit=True), scope)
        return None
    if "call" in step:
        owner = scope.get("Solution")
        function = scope.get(step["call"])
        if function is None or function is PROVIDED.get(step["call"]):
            function = getattr(owner(), step["call"])
        return function(*step["args"])
    if "judge" in step:
        for name, value in step["values"].items():
            scope[name] = decode(value)
        return bool(eval(compile(step["judge"], "test", "eval", dont_inherit=True), scope))
    return eval(compile(step["value"], "test", "eval", dont_inherit=True), scope)


if __name__ == "__main__":
    main()
