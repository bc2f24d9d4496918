"""The processes of environments: `python -m algos.environments.worker`, which `workers/process.py` starts.

It is a template: it imports the user's module, without a network, in one thread, and forks a worker whenever the pool
asks. A worker's parent is its guard (`workers/guard.py`), which kills all that the worker has started; the template has
one, too. Output of user code goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import os
import shutil
import socket
import sys
import tempfile
import threading
import traceback
from typing import Any, NoReturn

from algos.environments.protocol import METHODS, Call, EnvironmentConfig, Ready, Result
from algos.environments.sandbox import landlock_version, leave_network, limit, restrict
from algos.environments.tools import load_environment, schemas
from algos.workers.guard import fork_worker, guard
from algos.workers.messages import encode, read, receive, send
from algos.workers.user_code import describe_error, end_forks, finite, keyword_arguments, run_now, start_worker
from engines.constraints import check_fields
from engines.decoding import from_json
from engines.rollout.environment import Observation
from engines.sequence import is_unicode


class Worker:
    """Makes the calls of environments of one class. Objects are known by number."""

    def __init__(self, kind: type[Any], config: EnvironmentConfig) -> None:
        self._kind, self._config, self._pid = kind, config, os.getpid()
        self._objects: dict[int, Any] = {}

    async def answer(self, call: Call) -> Result:
        """Makes a call. At its limit it is cancelled, if it is async; a sync one ends by itself, or with the worker."""
        is_async = any(_is_async(self._kind, name) for name in METHODS[call.method])
        limit = asyncio.timeout(self._config.timeout_s) if is_async else None
        try:
            with end_forks(self._pid):
                async with limit or contextlib.nullcontext():
                    given = await self._call(call)
        except BaseException as error:  # SystemExit, too: sys.exit() in a tool must not end the worker
            if limit is not None and limit.expired():
                return Result(object=call.object, failure="timed_out", error="not done in time")
            return Result(object=call.object, failure="raised", error=describe_error(error))
        try:
            return self._checked(call, given)
        except ValueError as error:
            return Result(object=call.object, failure="invalid", error=f"{call.method} returned {error}")

    async def _call(self, call: Call) -> Any:
        if call.method == "reset":
            self._objects[call.object] = self._kind()
            return await self._invoke(call.object, "reset", **call.columns)
        if call.method == "step":
            return await self._invoke(call.object, "step", call.text)
        reward = await self._invoke(call.object, "get_reward") if call.wants_reward else None
        if hasattr(self._kind, "close"):
            await self._invoke(call.object, "close")
        del self._objects[call.object]
        return reward

    async def _invoke(self, number: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
        given = getattr(self._objects[number], method)(*args, **kwargs)
        return await given if _is_async(self._kind, method) else given

    def _checked(self, call: Call, given: Any) -> Result:
        """Raises `ValueError` for what the method must not return."""
        what = f"a {type(given).__name__}"
        if call.method == "end":
            reward = finite(given)
            if call.wants_reward and reward is None:
                raise ValueError(f"{given if isinstance(given, float) else what}: must be a number from -1e30 to 1e30")
            return Result(object=call.object, reward=reward)
        if given is None:
            return Result(object=call.object, done=call.method == "step")
        if isinstance(given, str):
            given = Observation(text=given)
        if not isinstance(given, Observation):
            raise ValueError(f"{what}: must be text, an Observation, or None")
        check_fields(given)
        if not is_unicode(given.text):
            raise ValueError("half a surrogate pair, which is no text")
        if len(given.text) > self._config.max_chars:
            raise ValueError(f"{len(given.text)} characters: must be at most max_chars={self._config.max_chars}")
        text, role = str.__str__(given.text), str.__str__(given.role)  # no message holds a subclass, as NumPy's
        return Result(object=call.object, text=text, done=given.done, role=role)  # type: ignore[arg-type]

    async def serve(self, channel: socket.socket) -> None:
        """Answers calls, which run together, until the pool is gone."""
        reader, writer = await asyncio.open_unix_connection(sock=channel)

        async def answer(call: Call) -> None:
            writer.write(encode(await self.answer(call)))

        running = set()
        while True:
            task = asyncio.create_task(answer(await read(reader, Call)))
            running.add(task)
            task.add_done_callback(running.discard)

    def serve_sync(self, channel: socket.socket) -> None:
        """Answers calls one after another, outside any event loop, since a method may run one."""
        while True:
            send(channel, run_now(self.answer(receive(channel, Call))))


def describe(kind: type[Any], notes: list[str]) -> Ready:
    """Raises `ValueError` for a class that is no environment."""
    if missing := [name for name in ("reset", "step") if not callable(getattr(kind, name, None))]:
        raise ValueError(f"{kind.__name__} has no method {missing[0]}; an environment has reset and step")
    if wanted := keyword_arguments(kind)[1]:
        raise ValueError(
            f"{kind.__name__} is made without arguments, and its __init__ wants {wanted}; take them in reset"
        )
    methods = {name: _is_async(kind, name) for name in sum(METHODS.values(), ()) if hasattr(kind, name)}
    accepted, required = keyword_arguments(functools.partial(kind.reset, None))
    return Ready(accepted=accepted, required=required, methods=methods, tools=schemas(kind), notes=notes)


def _is_async(kind: type[Any], method: str) -> bool:
    return inspect.iscoroutinefunction(getattr(kind, method, None))


def run_worker(kind: type[Any], config: EnvironmentConfig, home: str, is_apart: bool, fds: list[int]) -> NoReturn:
    """In a fork of the template: becomes the guard, and forks the worker."""
    code, (channel, lifeline) = 1, (socket.socket(fileno=fd) for fd in fds)
    try:
        folder = tempfile.mkdtemp(dir=home)
        if child := fork_worker():
            channel.close()
            socket.send_fds(lifeline, [b"+"], [os.pidfd_open(os.getpid())])
            lifeline.send(bytes([guard(child, lifeline.fileno())]))
            shutil.rmtree(folder, ignore_errors=True)
        else:
            lifeline.close()
            os.register_at_fork(after_in_child=channel.close)
            enter(folder, config, is_apart)
            worker, is_async = Worker(kind, config), any(_is_async(kind, name) for name in sum(METHODS.values(), ()))
            asyncio.run(worker.serve(channel)) if is_async else worker.serve_sync(channel)
    except (EOFError, ConnectionError):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def enter(folder: str, config: EnvironmentConfig, is_apart: bool) -> None:
    """Makes `folder` this process's own, and gives up what environments shall not have."""
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder)
    tempfile.tempdir = None
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    num_processes = config.max_processes + 2 * config.workers if is_apart else None
    limit(memory_mib=config.memory_mib, file_mib=config.file_mib, num_processes=num_processes)
    if landlock_version() > 0:
        restrict([folder, *config.writable])


def main() -> None:
    sock, (spec, options) = start_worker()
    config: EnvironmentConfig = from_json(options.encode(), EnvironmentConfig)
    template, home, notes = os.getpid(), os.getcwd(), []
    try:
        if refused := "" if config.network else leave_network():
            notes.append(f"environments have the network, since the kernel refuses a namespace ({refused})")
        if landlock_version() < 1:
            notes.append("environments may write anywhere, since the kernel has no Landlock")
        with end_forks(template):
            ready = describe(kind := load_environment(spec), notes)
        if threading.active_count() > 1:  # the idle threads of native libraries bear a fork
            raise ValueError("the import starts a thread, which workers would lack; start it in reset")
    except BaseException as error:
        send(sock, Ready(error=describe_error(error)))
        return
    send(sock, ready)
    gc.collect()
    gc.freeze()  # collections in the workers would copy what they share
    while fds := socket.recv_fds(sock, 1, 2)[1]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # guards that have ended
                pass
        if os.fork() == 0:
            run_worker(kind, config, home, not (config.network or refused), fds)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    main()
