"""Reward functions, most of them bad, that `test_rewards.py` runs in worker processes."""

import asyncio
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import msgspec


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


def returns(completions, kind):
    return {"None": None, "float": 1.0, "str": "1", "dict": {}}[kind[0]]


def log_calls(completions, log):
    """The length of each; every call is written down, and waits while there is a file `<log>.hold`."""
    with open(log[0], "a") as file:
        print(json.dumps(completions), file=file)
    while os.path.exists(log[0] + ".hold"):
        time.sleep(0.01)
    return length(None, completions)


def endless(completions):
    return (1.0 for _ in iter(int, 1))


def always_raises(completions):
    raise RuntimeError("no reward today")


def always_ends(completions):
    os._exit(3)


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
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
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
        if text.startswith("daemon"):
            with open(path, "a") as file:
                print(start_daemon("sleep", "1000"), "daemon", file=file)
            if text == "daemon, os._exit":
                os._exit(3)
            if text == "daemon, kill guard":
                os.kill(os.getppid(), signal.SIGKILL)
            while text == "daemon, stop guard often":
                os.kill(os.getppid(), signal.SIGSTOP)
            if text == "daemon, stop guard":
                os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(1000)
    return [1.0] * len(completions)


def start_daemon(*command):
    """Its process id; it has a session of its own, and its parent has ended."""
    reader, writer = os.pipe()
    if (parent := os.fork()) == 0:
        os.setsid()
        if (daemon := os.fork()) == 0:
            os.execvp(command[0], command)
        os.write(writer, str(daemon).encode())
        os._exit(0)
    os.waitpid(parent, 0)
    pid = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    return pid


def brief_daemon(completions):
    return [start_daemon("true")]


def forks(completions, how):
    """The exit status of a child that leaves the function in one of several ways."""
    if (child := os.fork()) == 0:
        return leave(completions, how[0])
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * len(completions)


async def forks_async(completions, how):
    if (child := os.fork()) == 0:
        await asyncio.sleep(0)
        return leave(completions, how[0])
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * len(completions)


def leave(completions, how):
    if how == "raise":
        raise KeyError("no such thing")
    if how.startswith("exit"):
        sys.exit(int(how.removeprefix("exit")))
    return [9.0] * len(completions)


def forges(completions):
    """Leaves an answer to another call on the worker's own connection."""
    answer = msgspec.msgpack.encode({"call": 0, "part": 0, "kind": "ok", "values": [7.0]})
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # one that the listing itself has used
            if fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, struct.pack("<Q", len(answer)) + answer)
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


async def length_async(completions):
    await asyncio.sleep(0)
    return length(None, completions)


def runs_a_loop(completions):
    return asyncio.run(length_async(completions))


def runs_its_loop(completions):
    loop = asyncio.new_event_loop()
    with contextlib.closing(loop):
        return loop.run_until_complete(length_async(completions))


def returns_an_awaitable(completions):
    return length_async(completions)


def uses_a_pool(completions, method):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method[0])) as pool:
        return list(pool.map(length_of, completions))


def length_of(text):
    return len(text)


def positional(completions, /):
    return []


def long_message(completions):
    raise ValueError("x" * 100_000)


number = 7
