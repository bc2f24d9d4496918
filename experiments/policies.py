"""Policies on a command line: ours by name, a user's own as `file.py:Class`; and Seer's options. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from algos.own_code import load
from engines.constraints import Count, Fraction, WholeNumber
from engines.coordination.policies import OnDemand, PrefetchingPolicy, SchedulePolicy, Static
from engines.coordination.views import Dispatch, ScheduleView, SequenceView
from engines.sequence import SequenceId
from research.seer.baselines import Divided, RandomStatic
from research.seer.context_aware import ContextAware, ContextOptions, Order
from research.simulator.hindsight import LongestFirst

Usual = Literal["static", "on-demand", "group-static", "divided", "divided-in-turns", "seer"]
IN_CHUNKS: tuple[Usual, ...] = ("divided", "divided-in-turns", "seer")


@dataclass(frozen=True, kw_only=True)
class ChunkFields:
    """Options of policies that divide rollouts."""

    chunk_tokens: Count | None = None
    """Most tokens that a sequence generates before it comes back, with dispatch in chunks; the default is the
    command's."""
    follow_ups: WholeNumber = ContextOptions.follow_ups
    """Sequences that a replica may hold behind those for which it has room; see `ChunkOptions`."""
    spread: Fraction = ContextOptions.spread
    """Share by which the shortest chunk is shorter than the longest; see `ChunkOptions`."""
    order: Order = ContextOptions.order
    """See `ContextOptions`; "length" is Seer's Algorithm 1 as printed."""

    def chunks(self, usual: int, *, seed: int) -> ContextOptions:
        """`usual`: tokens of a chunk unless the options say it."""
        chunk_tokens = self.chunk_tokens or usual
        return ContextOptions(
            chunk_tokens=chunk_tokens, follow_ups=self.follow_ups, spread=self.spread, order=self.order, seed=seed
        )


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """A dispatch, and what its policy saw."""

    now: float
    sequence_id: SequenceId
    group_id: int
    num_generated: int
    chunk_tokens: int | None
    """Most new tokens; None: to the sequence's end."""
    replica_id: int
    num_waiting: int
    estimate: int | None
    """Tokens that the sequence is expected to generate in all, by the policy's estimate or a predictor's."""
    priority: float
    """In the replica's queue; 0 where the policy gives none."""


class Logged:
    """Asks another policy, and keeps a record of each dispatch."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self._policy = policy
        self._estimate = policy.estimate_of if isinstance(policy, ContextAware) else _predicted
        self.log: list[Dispatched] = []
        if isinstance(policy, PrefetchingPolicy):
            self.prefetch = policy.prefetch

    def next(self, view: ScheduleView) -> Dispatch | None:
        dispatch = self._policy.next(view)
        if isinstance(dispatch, Dispatch) and (sequence := view.waiting.get(dispatch.sequence_id)):
            self.log.append(
                Dispatched(
                    now=view.now,
                    sequence_id=sequence.sequence_id,
                    group_id=sequence.group_id,
                    num_generated=sequence.num_generated,
                    chunk_tokens=dispatch.max_new_tokens,
                    replica_id=dispatch.replica_id,
                    num_waiting=len(view.waiting),
                    estimate=self._estimate(sequence),
                    priority=dispatch.priority,
                )
            )
        return dispatch


def _predicted(sequence: SequenceView) -> int | None:
    return None if sequence.prediction is None else round(sequence.prediction.total)


def schedule_policy(
    option: str,
    name: str,
    chunks: ContextOptions,
    lengths: Mapping[SequenceId, int] | None = None,
    others: tuple[str, ...] = (),
) -> Callable[[], SchedulePolicy]:
    """Returns what makes the policy of a rollout. Raises ValueError, which names the `option`, for an unknown one, for
    one that needs `lengths` where there are none, and for a file without such a class. `others`: names that the option
    has, too, for the message."""
    makers: dict[str, Callable[[], SchedulePolicy]] = {
        "static": Static,
        "on-demand": OnDemand,
        "group-static": partial(RandomStatic, chunks.seed),
        "divided": partial(Divided, chunks),
        "divided-in-turns": partial(Divided, chunks, takes_turns=True),
        "seer": partial(ContextAware, chunks),
    }
    if lengths is not None:  # as simulations alone know them
        makers |= {
            "oracle": partial(ContextAware, chunks, lengths=lengths),
            "longest-first": partial(LongestFirst, lengths),
        }
    if name in makers:
        return makers[name]
    own = own_class(option, name, [*others, *makers], ("next",), "engines/coordination/policies.py")
    try:
        own()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{option}={name!r}: cannot be made without arguments: {_told(error)}") from error
    return own


def own_class(option: str, name: str, names: list[str], methods: tuple[str, ...], where: str) -> Callable[..., Any]:
    """Returns the class `file.py:Class`, whose objects have these methods, which the file `where` describes; see
    `schedule_policy`."""
    path, colon, _ = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ValueError(f"{option}={name!r}: give {', '.join(names)}, or a class of your own as FILE.py:Class")
    try:
        found = load(name, "class")
    except (Exception, SystemExit) as error:
        raise ValueError(f"{option}={name!r}: {_told(error)}") from error
    has = {*dir(found), *getattr(found, "__dataclass_fields__", ())}  # a field without a default is no attribute
    if missing := [method for method in methods if method not in has - getattr(found, "__abstractmethods__", set())]:
        raise ValueError(f"{option}={name!r}: has no method {missing[0]!r}; see {where}")
    return found


def layout_controller(option: str, name: str, names: list[str]) -> Callable[..., Any]:
    """Returns a class that is made and answers as PAT's controller; see `schedule_policy`."""
    methods = ("first_tp_size", "learn", "decide")
    return own_class(option, name, names, methods, "research/pat/controller.py")


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
