"""How much longer tokens take in company: F of Heddle's Eq. 2 by a group's size, and by simulation. Torch-free.

The paper says that F depends on the size alone (§5.1), and that it comes from a simulation of the lengths (§5.2). Both
are here. Both leave out prefills and tools, which take little beside hundreds of decode steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from research.heddle.placement import GroupSeconds, Lengths, Server
from research.pat.deployment import Deployment
from research.pat.predictor import StepPredictor


@dataclass(frozen=True, eq=False)
class SizeInterference:
    """F(s) = t(min(s, b_max)) / t(1) * max(1, s / b_max): all s run at once, or in turns if there is no room."""

    factors: NDArray[np.float64]
    """t(b) / t(1) for b from 1 to b_max, the most that run at once."""

    def __call__(self, sizes: ArrayLike) -> NDArray[np.float64]:
        sizes, most = np.asarray(sizes), len(self.factors)
        return self.factors[np.minimum(sizes, most) - 1] * np.maximum(1.0, sizes / most)


def server_of(deployment: Deployment, tp_size: int, *, context: float, num_prompt_tokens: int = 0) -> Server:
    """A replica of this TP size, with F at a mean `context` of tokens. Raises ValueError if that does not fit."""
    room = deployment.num_kv_tokens[tp_size]
    most = min(deployment.max_num_seqs, int(room // max(1.0, context)))
    if most < 1:
        raise ValueError(f"context={context}: a replica of TP size {tp_size} holds {room} tokens; give fewer")
    batches = np.arange(1, most + 1)
    seconds = np.maximum.accumulate(deployment.steps[tp_size].seconds(batches, batches * context))
    return Server(
        tp_size=tp_size,
        token_s=float(seconds[0]),
        interference=SizeInterference(seconds / seconds[0]),
        longest=min(room, deployment.max_model_len) - num_prompt_tokens,
    )


@dataclass(frozen=True, eq=False)
class GroupSimulation:
    """A replica in fluid time: sequences of a batch grow evenly until one ends or the KV cache is full.

    The longest run first. When the cache is full, the shortest running one waits, and goes on where it was: what its KV
    then takes to read or to compute again is left out.
    """

    base_s: NDArray[np.float64]
    token_s: NDArray[np.float64]
    """A step of b sequences with c tokens of context takes base_s[b] + token_s[b] * c seconds."""
    num_kv_tokens: int
    num_prompt_tokens: int = 0
    """Of each trajectory; observed tokens are left out."""

    @staticmethod
    def of(deployment: Deployment, tp_size: int, num_prompt_tokens: int = 0) -> GroupSimulation:
        room = deployment.num_kv_tokens[tp_size]
        base, slope = _lines(deployment.steps[tp_size], deployment.max_num_seqs, room)
        return GroupSimulation(base, slope, room, num_prompt_tokens)

    def seconds(self, lengths: Lengths, counts: Sequence[int] | None = None) -> float:
        """Of a group with these lengths, in descending order; inf if the cache cannot hold the longest. `counts`: how
        many trajectories each of them stands for, which run and wait together."""
        if not len(lengths) or lengths[0] + self.num_prompt_tokens > self.num_kv_tokens:
            return math.inf if len(lengths) else 0.0
        most, room, time = len(self.base_s) - 1, float(self.num_kv_tokens), 0.0
        weights = [1] * len(lengths) if counts is None else counts
        level = used = 0.0  # tokens that a sequence has now that has run from the start; KV in use
        batch = 0
        waiting = [(place, float(length), 0.0) for place, length in enumerate(lengths)][::-1]
        running: dict[int, tuple[float, float]] = {}
        """By place: the level at which it will end, and the level at which it had no token."""
        stack: list[int] = []
        ends: list[tuple[float, int]] = []
        while waiting or running:
            while waiting and (not running or batch + weights[waiting[-1][0]] <= most):
                place, left, done = waiting[-1]
                weight = weights[place]
                if running and used + weight * (self.num_prompt_tokens + done + 1) + batch > room:
                    break
                waiting.pop()
                used += weight * (self.num_prompt_tokens + done)
                batch += weight
                running[place] = level + left, level - done
                stack.append(place)
                heapq.heappush(ends, (level + left, place))
            while ends[0][1] not in running or running[ends[0][1]][0] != ends[0][0]:
                heapq.heappop(ends)
            at_once = min(batch, most)
            space = math.inf if len(running) == 1 else max(0.0, room - used) / batch
            grown = min(ends[0][0] - level, space)
            time += grown * (self.base_s[at_once] + self.token_s[at_once] * (used + grown * batch / 2))
            level, used = level + grown, used + grown * batch
            if level >= ends[0][0] - 1e-9:
                place = heapq.heappop(ends)[1]
                _, start = running.pop(place)
            else:
                while stack[-1] not in running:
                    stack.pop()
                end, start = running.pop(place := stack.pop())
                waiting.append((place, end - level, level - start))
            used -= weights[place] * (self.num_prompt_tokens + level - start)
            batch -= weights[place]
        return time


MOST = 32
"""Trajectories that a simulation has one by one; of more, the shorter ones stand for their neighbours."""


def simulated(simulations: Mapping[int, GroupSimulation], most: int = MOST) -> GroupSeconds:
    """The cost of a group by the simulation of the replica's TP size. A plan simulates hundreds of groups, on the
    thread that dispatches: so of large ones only the longest are simulated one by one, and the others in blocks (§5.2:
    "aggregate short trajectories")."""

    def seconds(server: Server, group: Lengths) -> float:
        one = simulations[server.tp_size]
        if len(group) <= most:
            return one.seconds(group)
        alone = most // 2
        blocks = np.array_split(group[alone:], most - alone)
        values = np.concatenate([group[:alone], [block.mean() for block in blocks]])
        return one.seconds(values, [1] * alone + [len(block) for block in blocks])

    return seconds


def _lines(steps: StepPredictor, most: int, room: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each batch the line through its seconds with a context of 8 tokens each and with a full cache."""
    batches = np.arange(most + 1)
    few = 8.0 * batches
    start, end = steps.seconds(batches, few), steps.seconds(batches, np.maximum(few + 1, room))
    slope = (end - start) / (np.maximum(few + 1, room) - few)
    return start - slope * few, slope
