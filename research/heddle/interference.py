"""How much longer tokens take in company: F of Heddle's Eq. 2 by a group's size, and by simulation. Torch-free.

The paper says that F depends on the size alone (§5.1), and that it comes from a simulation of the lengths (§5.2). Both
are here. Both leave out prefills and tools, which take little beside hundreds of decode steps.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from research.heddle.placement import Lengths, Server, printed_seconds
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
        them stands, which run and wait together."""
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
GroupSeconds = Callable[[Server, Lengths, Lengths], float]
"""Of tokens to come and tokens that there are, in descending order of priority, on a replica."""


SpreadSeconds = Callable[[Sequence[Server], Lengths, Lengths], float]
"""As `GroupSeconds`, of trajectories whose turns go to that replica of several on which their tokens come soonest."""


def printed_spread(servers: Sequence[Server], left: Lengths, done: Lengths) -> float:
    """By Eq. 2's F of the sizes that the replicas then have."""
    sizes, counts = np.arange(1, len(left) + 1), Counter(servers)
    seconds = {one: one.token_s * one.interference(sizes) for one in counts}
    amounts = {one: sizes * seconds[one] for one in counts}
    mean = _as_they_come(counts, seconds, amounts)[: len(left)] / sizes
    longest = max(one.longest for one in counts)
    of_size = SizeInterference(np.maximum.accumulate(mean) / mean[0])
    return printed_seconds(Server(1, float(mean[0]), of_size, longest), left, done)


def merged(groups: Sequence[GroupSimulation], context: float) -> GroupSimulation:
    """Replicas as one, on which n trajectories take what they take in the mean where each is where its tokens come
    soonest. `context`: the mean tokens of a trajectory, by which that is known."""
    counts = Counter(groups)
    sizes = {one: np.arange(1, len(one.base_s)) for one in counts}
    seconds = {one: one.base_s[1:] + one.token_s[1:] * sizes[one] * context for one in counts}
    base_s = _as_they_come(counts, seconds, {one: sizes[one] * one.base_s[1:] for one in counts})
    token_s = _as_they_come(counts, seconds, {one: sizes[one] ** 2 * one.token_s[1:] for one in counts})
    number = np.arange(1, len(base_s) + 1)
    return GroupSimulation(
        np.concatenate([base_s[:1], base_s / number]),
        np.concatenate([token_s[:1], token_s / number**2]),
        num_kv_tokens=sum(one.num_kv_tokens * count for one, count in counts.items()),
        num_prompt_tokens=groups[0].num_prompt_tokens,
    )


K = TypeVar("K")


def _as_they_come(
    counts: Mapping[K, int], seconds: Mapping[K, NDArray[np.float64]], amounts: Mapping[K, NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Of 1, 2, ... trajectories, each of which is added where `seconds`, by the size that a replica then has, are
    least: the sum of the `amounts` of all replicas, by their sizes. `counts`: replicas of each kind."""
    taken = [np.repeat(np.maximum.accumulate(seconds[one]), count) for one, count in counts.items()]
    added = [np.repeat(np.diff(amounts[one], prepend=0.0), count) for one, count in counts.items()]
    order = np.argsort(np.concatenate(taken), kind="stable")
    return np.cumsum(np.concatenate(added)[order])


def simulated(simulations: Mapping[int, GroupSimulation], most: int = MOST) -> GroupSeconds:
    """The cost of a group by the simulation of the replica's TP size. A plan simulates hundreds of groups, on the
    thread that dispatches: so of large ones only the longest are simulated one by one, and the others in blocks of
    neighbours (§5.2: "aggregate short trajectories")."""

    return lambda server, left, done: _in_blocks(simulations[server.tp_size], left, done, most)


def simulated_spread(simulations: Mapping[int, GroupSimulation], most: int = MOST) -> SpreadSeconds:
    """As `simulated`. Where tokens come soonest is known by the mean context of the first trajectories it gets."""
    known: dict[tuple[int, ...], GroupSimulation] = {}

    def seconds(servers: Sequence[Server], left: Lengths, done: Lengths) -> float:
        sizes = tuple(sorted(one.tp_size for one in servers))
        if sizes not in known:
            some = [simulations[size] for size in sizes]
            context = some[0].num_prompt_tokens + np.average(done + left / 2, weights=left)
            known[sizes] = merged(some, float(context))
        return _in_blocks(known[sizes], left, done, most)

    return seconds


def _in_blocks(one: GroupSimulation, left: Lengths, done: Lengths, most: int) -> float:
    if len(left) <= most:
        return one.seconds(left, done)
    alone = np.sort(np.argpartition(left, -(most // 2))[-(most // 2) :])
    others = np.array_split(np.delete(np.arange(len(left)), alone), most - len(alone))
    blocks = sorted([*([place] for place in alone.tolist()), *(block.tolist() for block in others)])
    return one.seconds(
        np.array([left[block].mean() for block in blocks]),
        np.array([done[block].mean() for block in blocks]),
        [float(len(block)) for block in blocks],
    )


def _lines(steps: StepPredictor, most: int, room: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each batch the line through its seconds with a context of 8 tokens each and with a full cache."""
    batches = np.arange(most + 1)
    few = 8.0 * batches
    start, end = steps.seconds(batches, few), steps.seconds(batches, np.maximum(few + 1, room))
    slope = (end - start) / (np.maximum(few + 1, room) - few)
    return start - slope * few, slope
