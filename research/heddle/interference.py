"""How much longer tokens take in company: F of Heddle's Eq. 2 by a group's size, and by simulation. Torch-free.

The paper says that F depends on the size alone (§5.1), and that it comes from a simulation of the lengths (§5.2). Both
are here. Both leave out prefills and tools, which take little beside hundreds of decode steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from research.heddle.placement import Interference, Lengths, Server, printed_seconds
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

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory that the cache can hold."""
        return self.num_kv_tokens - self.num_prompt_tokens

    def seconds(self, left: Lengths, done: Lengths | None = None, weights: Sequence[float] | None = None) -> float:
        """Of a group whose trajectories have these tokens to come, in descending order of priority; inf if the cache
        cannot hold the longest. `done`: tokens that they have already, by default none. `weights`: for how many each of
        them stands, which run and wait together; with parts, they are on this replica for that share of their time."""
        if not len(left):
            return 0.0
        done = np.zeros(len(left)) if done is None else done
        if (left + done).max() > self.longest:
            return math.inf
        most, room, time = len(self.base_s) - 1, float(self.num_kv_tokens), 0.0
        weights = [1.0] * len(left) if weights is None else weights
        level = used = batch = 0.0  # tokens of a sequence that has run from the start; KV in use; running sequences
        waiting = [*zip(range(len(left)), left.tolist(), done.tolist(), strict=True)][::-1]
        running: dict[int, tuple[float, float]] = {}
        """By place: the level at which it will end, and the level at which it had no token."""
        stack: list[int] = []
        ends: list[tuple[float, int]] = []
        while waiting or running:
            while waiting and (not running or batch + weights[waiting[-1][0]] <= most):
                place, to_come, has = waiting[-1]
                weight = weights[place]
                if running and used + weight * (self.num_prompt_tokens + has + 1) + batch > room:
                    break
                waiting.pop()
                used += weight * (self.num_prompt_tokens + has)
                batch += weight
                running[place] = level + to_come, level - has
                stack.append(place)
                heapq.heappush(ends, (level + to_come, place))
            while ends[0][1] not in running or running[ends[0][1]][0] != ends[0][0]:
                heapq.heappop(ends)
            at_once = max(1, min(math.ceil(batch - 1e-9), most))
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
GroupSeconds = Callable[[Server, Lengths, Lengths, float], float]
"""Of tokens to come and tokens that there are, in descending order of priority, on a replica on which they are for a
share of their time."""


def printed(server: Server, left: Lengths, done: Lengths, share: float) -> float:
    """Eq. 2: F of the size."""
    return printed_seconds(replace(server, interference=partial(_of_share, server.interference, share)), left, done)


def _of_share(interference: Interference, share: float, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    return interference(np.maximum(1, np.ceil(share * sizes).astype(int)))


def simulated(simulations: Mapping[int, GroupSimulation], most: int = MOST) -> GroupSeconds:
    """The cost of a group by the simulation of the replica's TP size. A plan simulates hundreds of groups, on the
    thread that dispatches: so of large ones only the longest are simulated one by one, and the others in blocks of
    neighbours (§5.2: "aggregate short trajectories")."""

    def seconds(server: Server, left: Lengths, done: Lengths, share: float) -> float:
        one = simulations[server.tp_size]
        if len(left) <= most:
            return one.seconds(left, done, [share] * len(left))
        alone = np.sort(np.argpartition(left, -(most // 2))[-(most // 2) :])
        others = np.array_split(np.delete(np.arange(len(left)), alone), most - len(alone))
        blocks = sorted([*([place] for place in alone.tolist()), *(block.tolist() for block in others)])
        return one.seconds(
            np.array([left[block].mean() for block in blocks]),
            np.array([done[block].mean() for block in blocks]),
            [share * len(block) for block in blocks],
        )

    return seconds


def _lines(steps: StepPredictor, most: int, room: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each batch the line through its seconds with a context of 8 tokens each and with a full cache."""
    batches = np.arange(most + 1)
    few = 8.0 * batches
    start, end = steps.seconds(batches, few), steps.seconds(batches, np.maximum(few + 1, room))
    slope = (end - start) / (np.maximum(few + 1, room) - few)
    return start - slope * few, slope
