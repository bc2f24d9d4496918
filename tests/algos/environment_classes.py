"""Environments and tools that behave, and some that misbehave, for test_environments.py and test_tools.py."""

import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from engines.rollout.environment import Observation
from tests.algos.reward_functions import start_daemon
from tests.environments import Echo

MEETING = None


class Adds:
    """Adds up the numbers of its turns; `end` ends it."""

    def reset(self, start, question=None):
        self.total = start
        return f"start {start}" if start else None

    def step(self, text):
        if text == "end":
            return None
        if text == "done":
            return Observation(text="over", done=True)
        if text == "tool":
            return Observation(text="of a tool", role="tool")
        self.total += int(text)
        return str(self.total)

    def get_reward(self):
        return self.total / 2


class Text(str):
    pass


class Misbehaves:
    """Writes what its objects get to the file `log`, whose lines are an object's name, process, and text."""

    def reset(self, log, reward=1.0, **columns):
        self.name, self.log, self.reward, self.num_turns = uuid.uuid4().hex, log, reward, 0
        self.note("reset")

    def note(self, text):
        with open(self.log, "a") as file:
            print(self.name, os.getpid(), text, file=file)

    def step(self, text):
        self.note(text)
        self.num_turns += 1
        return self.do(text) or f"{self.num_turns} {text}"

    def do(self, text):
        what, _, value = text.partition("=")
        if what == "raise":
            raise KeyError("no such thing")
        if what == "raise a surrogate":
            raise KeyError("\ud800")
        if what == "sys.exit":
            sys.exit(3)
        if what == "return":
            surrogate = "a\ud800"
            values = [5, ["text"], b"text", surrogate, "x" * 1001, lambda: None]
            wrong = [Observation(text=5), Observation(text="a", done=1), Observation(text="a", role="system")]
            return [*values, *wrong, Observation(text=surrogate)][int(value)]
        if what == "str subclass":
            return Text(value)
        if what == "Observation of str subclasses":
            return Observation(text=Text(value), role=Text("tool"))
        if what == "os._exit":
            os._exit(3)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "segfault":
            ctypes.string_at(0)
        if what == "close":
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            time.sleep(1000)
        if what == "garbage":
            for fd in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    socket.socket(fileno=os.dup(fd)).sendall(b"\xff" * 100)
            time.sleep(1000)
        if what == "hang":
            time.sleep(1000)
        if what == "hang hard":  # never gives the interpreter lock back
            9**9**9
        if what == "hang deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            while True:
                pass
        if what in ("fork", "fork and hang"):
            child = subprocess.Popen(["sleep", "1000"])
            self.note(f"child {child.pid}")
            self.note(f"child {start_daemon('sleep', '1000')}")
            if what == "fork and hang":
                time.sleep(1000)
        if what == "fork itself":
            if os.fork() == 0:
                return "from the child"
            return f"its status is {os.wait()[1]}"
        if what == "flood":
            for _ in range(1000):
                os.write(1, b"flood" * 200 + b"\n")
        if what == "memory":
            return str(len(bytearray(1 << 30)))
        if what == "wait for":
            while not os.path.exists(value):
                time.sleep(0.01)
        return None

    def get_reward(self):
        if self.reward == "raise":
            raise KeyError("no reward")
        if self.reward == "hang":
            time.sleep(1000)
        return float(self.reward) if self.reward in ("nan", "inf") else self.reward

    def close(self):
        self.note("close")


class Together(Misbehaves):
    """Async: `meet` waits until as many others have come as it says."""

    async def step(self, text):
        global MEETING
        self.note(text)
        self.num_turns += 1
        what, _, value = text.partition("=")
        if what == "meet":
            MEETING = MEETING or asyncio.Barrier(int(value))
            await MEETING.wait()
        if what == "sleep":
            await asyncio.sleep(1000)
        while what == "gate" and not os.path.exists(value):
            await asyncio.sleep(0.01)
        while what == "stubborn":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)
        return self.do(text) or f"{self.num_turns} {text}"

    async def close(self):
        await asyncio.sleep(0)
        self.note("close")


class Looks:
    """Looks at what its process may do."""

    def reset(self):
        return json.dumps({"cwd": os.getcwd(), "environ": dict(os.environ), "files": os.listdir(), "pid": os.getpid()})

    def step(self, text):
        what, _, value = text.partition("=")
        try:
            if what == "write":
                Path(value).write_text("x")
            if what == "remove":
                os.remove(value)
            if what == "connect":
                socket.create_connection(("127.0.0.1", int(value)), timeout=20).close()
            if what == "signal":
                os.kill(int(value), 0)
            if what == "read stdin":
                return repr(sys.stdin.read())
            if what == "big file":
                with open("big", "wb") as file:
                    for _ in range(int(value)):
                        file.write(bytes(1 << 20))
        except OSError as error:
            return type(error).__name__
        return "ok"


class NoStep:
    def reset(self):
        return None

    _private = 1


class NoReset:
    def step(self, text):
        return None


def multiply(a: int, b: int) -> int:
    """
    Multiplies.

    Args:
        a: One number
        b: Another one
    """
    return a * b


async def slow_add(a: int, b: int = 1) -> int:
    """
    Adds.

    Args:
        a: One number
        b: Another one
    """
    await asyncio.sleep(0.001)
    return a + b


def fails(how: str) -> str:
    """
    Fails.

    Args:
        how: In which way
    """
    if how == "exit":
        sys.exit(1)
    raise KeyError(how)


def untyped(a):
    return a


class Incrementer:
    """As TRL's documentation has it."""

    def __init__(self):
        self.counter = 0

    def reset(self, start=0, **columns):
        self.counter = start
        return f"The counter is at {start}."

    def increment(self, step: int) -> int:
        """
        Increments the counter.

        Args:
            step: By how much

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter

    def get_reward(self):
        return float(self.counter)

    def _hidden(self):
        return 1


class MortalEcho(Echo):
    """Kills its process at each fourth call of all objects that have the folder `marks`, once."""

    def reset(self, marks, **columns):
        self.marks = marks
        return super().reset(**columns)

    def step(self, text):
        mark = Path(self.marks, hashlib.sha256(f"{self.texts} {text}".encode()).hexdigest())
        if int(mark.name, 16) % 4 == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(text)
