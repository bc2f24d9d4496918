"""Functions as the tools of a chat model: an environment that reads a turn's tool calls and makes them.

Tools are typed functions with a docstring in Google's style, as TRL's and transformers' `tools=[f, ...]`, or the public
methods of a class, as TRL's `environment_factory`. A call is written as Qwen and Hermes do. The results of a turn's
calls are one observation, a line each; an error is a result, too. A turn without a call ends the trajectory.
"""

from __future__ import annotations

import inspect
import os
import re
import socket
import types
from dataclasses import dataclass, field
from typing import Any

from algos.environments.protocol import Ready
from algos.own_code import load_all
from algos.workers.messages import receive, send
from algos.workers.user_code import describe_error, run_now
from engines.decoding import DecodeError, from_json
from engines.rollout.environment import Observation

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""The end may be missing, as it is when it is the stop string of the turn."""
_NO_TOOLS = ("reset", "get_reward", "close")
_MOST_ERROR = 500


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """What stands in a tag."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def load_environment(spec: str) -> type[Any]:
    """Returns the class "file.py:Class", or one of the tools "file.py:f,g" or of a class without `step`.

    Raises the errors of the import, and `ValueError` when there is nothing of that name.
    """
    found = load_all(spec, "environment or tool")
    if len(found) == 1 and inspect.isclass(found[0]):
        return found[0] if hasattr(found[0], "step") else with_step(found[0])
    if classes := [one.__name__ for one in found if inspect.isclass(one)]:
        raise ValueError(f"{classes[0]} is a class; name one class, or functions alone")
    methods = {one.__name__: staticmethod(one) for one in found}
    return with_step(type("Tools", (), {"reset": lambda self, **columns: None, **methods}))


def with_step(kind: type[Any]) -> type[Any]:
    """Returns a class of the same methods and a `step`, which is async if one of the tools is."""
    names = [name for name, one in inspect.getmembers(kind, callable) if name[0] != "_" and name not in _NO_TOOLS]
    if not names:
        raise ValueError(f"{kind.__name__} has neither `step` nor another public method, which would be a tool")

    async def step(self: Any, text: str) -> Observation | None:
        results = [await _result(self, names, call.strip()) for call in _CALL.findall(text)]
        return Observation(text="\n".join(results), role="tool") if results else None

    def step_now(self: Any, text: str) -> Observation | None:
        return run_now(step(self, text))

    is_async = any(inspect.iscoroutinefunction(getattr(kind, name)) for name in names)
    return type(kind.__name__, (kind,), {"step": step if is_async else step_now, "tool_names": names})


async def _result(environment: Any, names: list[str], text: str) -> str:
    try:
        call: ToolCall = from_json(text.encode(), ToolCall)
    except DecodeError as error:
        return f'error: malformed tool call ({error}); write {{"name": ..., "arguments": {{...}}}} between the tags'
    if call.name not in names:
        return f"error: there is no tool {call.name!r}; there are {', '.join(names)}"
    try:
        tool = getattr(environment, call.name)
        given = tool(**call.arguments)
        return str(await given if inspect.iscoroutinefunction(tool) else given)
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"[:_MOST_ERROR]


def schemas(kind: type[Any]) -> list[dict[str, Any]]:
    """Returns the JSON schemas of an environment's tools, for the chat template. Raises `ValueError` for a function
    without types or docstring.

    A fork asks transformers, which starts threads, since the template must have none.
    """
    names: list[str] = getattr(kind, "tool_names", [])
    if not names:
        return []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if (child := os.fork()) == 0:
            try:
                send(theirs, _described(kind, names))
            finally:
                os._exit(0)
        theirs.close()
        try:
            ready = receive(ours, Ready)
        finally:
            os.waitpid(child, 0)
    if ready.error:
        raise ValueError(ready.error)
    return ready.tools


def _described(kind: type[Any], names: list[str]) -> Ready:
    from transformers.utils import get_json_schema

    tools = []
    for name in names:
        found = inspect.getattr_static(kind, name)
        method = types.MethodType(found, kind) if inspect.isfunction(found) else getattr(kind, name)
        try:
            tools.append(get_json_schema(method))
        except Exception as error:
            return Ready(error=f"tool {name!r}: {describe_error(error)}")
    return Ready(tools=tools)
