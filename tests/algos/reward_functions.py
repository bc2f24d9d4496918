"""Reward functions, most of them bad, that `test_rewards.py` runs in worker processes."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time


def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def declared(completions, answer, scale=None):
    return [float(a == c) * s for c, a, s in zip(completions, answer, scale or [1] * len(answer), strict=True)]


def sizes(completions):
    return [len(completions)] * len(completions)


def process(completions):
    return [os.getpid()] * len(completions)


def prints(completions):
    print("noise on stdout", flush=True)
    os.write(1, b"\x00" * 100)
    sys.stdin.read()
    return [1.0] * len(completions)


def values(completions):
    return [
        {
            "nan": float("nan"),
            "inf": float("inf"),
            "none": None,
            "text": "1",
            "list": [1],
            "true": True,
            "int": 2,
            "huge": 10**400,
        }[text]
        for text in completions
    ]


def miscounts(completions):
    return [1.0] * (len(completions) + ("bad" in completions))


def one_for_all(completions):
    return [1.0]


def endless(completions):
    return (1.0 for _ in iter(int, 1))


def always_raises(completions):
    raise RuntimeError("no reward today")


def always_hangs(completions):
    time.sleep(1000)


def misbehaves(completions, log):
    for text, path in zip(completions, log, strict=True):
        with open(path, "a") as file:
            print(os.getpid(), text, file=file)
        if text == "raise":
            raise KeyError("no such thing")
        if text == "sys.exit":
            sys.exit(3)
        if text == "os._exit":
            os._exit(3)
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "segfault":
            ctypes.string_at(0)
        if text == "close":
            os.closerange(3, 64)
            time.sleep(1000)
        if text == "hang":
            time.sleep(1000)
        if text == "hang hard":  # never gives the interpreter lock back
            9**9**9
        if text == "fork":
            child = subprocess.Popen(["sleep", "1000"])
            with open(path, "a") as file:
                print(child.pid, "child", file=file)
            time.sleep(1000)
    return [1.0] * len(completions)


class Meeting:
    """Calls that end only when all `num_calls` of them run at the same time."""

    waiting = 0
    event = asyncio.Event()


async def meets(completions, num_calls):
    Meeting.waiting += 1
    if Meeting.waiting == num_calls[0]:
        Meeting.event.set()
    await Meeting.event.wait()
    return [1.0] * len(completions)


async def misbehaves_async(completions):
    await asyncio.sleep(0)
    if "raise" in completions:
        raise KeyError("no such thing")
    if "hang" in completions:
        await asyncio.sleep(1000)
    if "block" in completions:
        time.sleep(1000)
    if "exit" in completions:
        os._exit(3)
    if "stubborn" in completions:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)
    return [os.getpid()] * len(completions)


def positional(completions, /):
    return []


def long_message(completions):
    raise ValueError("x" * 100_000)


number = 7
