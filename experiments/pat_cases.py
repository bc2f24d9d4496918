"""What `pat.py` rolls out: batches of long-tailed lengths on eight named GPUs, or on this machine; and what decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from engines.coordination.policies import LayoutPolicy
from engines.parallel.layout import Layout, nested_layout, nested_on_hosts
from experiments.comparison.rollouts import Variant, Workload
from research.pat.controller import Estimator, PatController, PatOptions
from research.pat.deployment import Deployment
from research.pat.hindsight import PlayedPlan
from research.pat.lifetimes import Lifetime
from research.pat.lookahead import make_plan
from research.pat.per_host import PerHost
from research.pat.profile import deployment_of
from research.simulator.pace import ProfilePace
from research.workloads.lengths import LogNormalLengths
from research.workloads.shapes import DecoderShape

CaseName = Literal["a40-8b-2048", "a40-8b-512", "h100-14b-512", "h100-8b-128", "uniform"]
BLOCK_SIZE = 4
HISTORY = 2048
"""Lengths of earlier sequences that the controller knows; they are drawn by another seed."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences that are rolled out at once. Lengths are in tokens here."""

    lengths: tuple[int, ...]
    """What each sequence will generate; the policies do not know it."""
    history: tuple[int, ...]
    """The same of earlier sequences."""
    longest: int
    num_prompt_tokens: int

    @property
    def max_model_len(self) -> int:
        return self.num_prompt_tokens + self.longest

    @property
    def lifetimes(self) -> list[Lifetime]:
        """The history: sequences as long as the longest were cut there."""
        return [(length, length >= self.longest) for length in self.history]

    @property
    def contexts(self) -> np.ndarray:
        return np.full(len(self.lengths), float(self.num_prompt_tokens))

    def workload(self, prompts: list[list[int]] | None = None) -> Workload:
        groups = [[one] for one in self.lengths]
        return Workload.forced(groups, num_prompt_tokens=self.num_prompt_tokens, most=self.longest, prompts=prompts)


def long_tailed(
    count: int, *, median: float, longest: int, sigma: float = 0.884, seed: int, num_prompt_tokens: int = 2
) -> Batch:
    """PAT's spread of lengths (Fig. 3b); with `sigma=0` all lengths are equal."""
    draw = LogNormalLengths(median=median, sigma=sigma, cap=longest).draw
    return Batch(
        lengths=tuple(draw(count, seed)),
        history=tuple(draw(HISTORY, seed + 1000)),
        longest=longest,
        num_prompt_tokens=num_prompt_tokens,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch on GPUs of one kind; lengths in tokens of the profile."""

    name: CaseName | Literal[""] = ""
    workload: str = ""
    """Whether it is one of the paper's (§5: batches of 128, Fig. 3b's lengths)."""
    gpus: str
    """As in the names of latency profiles."""
    batch: int
    median: float
    cap: int
    sigma: float = 0.884
    scale: float = 1.0
    """Seconds here per second of the profile with which 8 processes on 2 cores can follow."""
    token_scale: int = 64
    """Tokens of the profile per token here."""
    num_prompt_tokens: int = 2
    """Tokens here, as `block_size`."""
    block_size: int = BLOCK_SIZE

    @property
    def title(self) -> str:
        return f"{self.name}: {self.workload}"

    def draw(self, seed: int, shrink: int = 1) -> Batch:
        return long_tailed(
            max(1, self.batch // shrink),
            median=self.median / self.token_scale,
            longest=self.cap // self.token_scale,
            sigma=self.sigma,
            seed=seed,
            num_prompt_tokens=self.num_prompt_tokens,
        )

    def pace(self, scale: float = 1.0) -> ProfilePace:
        return ProfilePace.of(f"{self.gpus}-tp1", scale=self.scale * scale, token_scale=self.token_scale)

    def num_kv_tokens(self, num_ranks: int) -> dict[int, int]:
        """Tokens here that a replica's KV cache holds, by the TP sizes in which a sequence of any length fits."""
        longest = self.num_prompt_tokens + self.cap // self.token_scale + self.block_size
        return {size: count for size, count in self.pace().num_kv_tokens(longest).items() if num_ranks % size == 0}

    def deployment(self, pace: ProfilePace, num_ranks: int, max_num_seqs: int, max_model_len: int) -> Deployment:
        """A rank's KV pool stays as it is in the narrowest replicas while the TP size changes."""
        sizes = self.num_kv_tokens(num_ranks)
        of_rank = min(sizes.values()) // min(sizes)
        return deployment_of(
            pace,
            num_ranks=num_ranks,
            num_kv_tokens={size: size * of_rank for size in sizes},
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            goes_back=True,
        )


NOT_THE_PAPERS = "no workload of the paper's"
FOUR_TIMES = "the paper's lengths, 4 times its batch"
CASES = (
    Case(name="a40-8b-2048", workload=NOT_THE_PAPERS, gpus="a40-8b", batch=2048, median=500, cap=8192, scale=3.0),
    Case(name="a40-8b-512", workload=FOUR_TIMES, gpus="a40-8b", batch=512, median=2750, cap=24576, scale=2.0),
    Case(name="h100-14b-512", workload=FOUR_TIMES, gpus="h100-qwen3-14b", batch=512, median=2750, cap=16384, scale=4.0),
    Case(name="h100-8b-128", workload="as in Fig. 11a", gpus="h100-8b", batch=128, median=2750, cap=24576, scale=8.0),
    Case(name="uniform", workload=NOT_THE_PAPERS, gpus="a40-8b", batch=512, median=1e3, cap=1000, sigma=0.0, scale=4.0),
)
PACED_MODEL = DecoderShape(hidden=64, layers=2, heads=8, kv_heads=8, head_dim=8, intermediate=64, vocab=64, tied=True)


def live_batch(seed: int, shrink: int) -> Batch:
    return long_tailed(max(4, 32 // shrink), median=25.0, longest=160, seed=seed)


def live_model(hidden: int) -> DecoderShape:
    heads = hidden // 64
    return DecoderShape(
        hidden=hidden,
        layers=4,
        heads=heads,
        kv_heads=heads // 2,
        head_dim=64,
        intermediate=2 * hidden,
        vocab=512,
        tied=True,
    )


def static(num_ranks: int, tp_size: int, num_kv_tokens: int) -> Variant:
    """`num_kv_tokens`: of a replica."""
    return Variant(layout=nested_layout(range(num_ranks), tp_size), num_kv_tokens=num_kv_tokens // tp_size)


def changing(deployment: Deployment, layout: Layout, policy: Callable[[], LayoutPolicy]) -> Variant:
    """Each rank's KV pool stays as it is in the deployment's replicas with the least per rank."""
    of_rank = min(count // size for size, count in deployment.num_kv_tokens.items())
    return Variant(layout=layout, num_kv_tokens=of_rank, layout_policy=policy)


def on_each_host(
    host: Deployment,
    num_hosts: int,
    make: Callable[[], PatController],
    contexts: np.ndarray,
    longest: int,
    group_size: int = 1,
) -> Variant:
    """Controllers that `make` returns, one for each host; TP stays within a host. They also name the first layout, for
    sequences with these `contexts`, in tokens, each of which may generate `longest`; those of a group share theirs."""
    hosts = [range(number * host.num_ranks, (number + 1) * host.num_ranks) for number in range(num_hosts)]
    share = contexts[::num_hosts]
    first = make().first_tp_size(share, np.full(len(share), float(longest)), -(-group_size // num_hosts))
    layout = nested_on_hosts(hosts, [first] * num_hosts)
    return changing(host, layout, make if num_hosts == 1 else lambda: PerHost(hosts, [make() for _ in hosts]))


def controller(
    deployment: Deployment, batch: Batch, estimator: Estimator, *, with_history: bool = True
) -> PatController:
    """A controller that knows the batch's history."""
    ended = batch.lifetimes if with_history else ()
    return PatController(deployment, PatOptions(estimator=estimator), ended=ended)


def adaptive(
    deployment: Deployment, batch: Batch, estimator: Estimator = "lookahead", *, with_history: bool = True
) -> Variant:
    """PAT's controller, which also names the first layout."""
    make = partial(controller, deployment, batch, estimator, with_history=with_history)
    return on_each_host(deployment, 1, make, batch.contexts, batch.longest)


def informed(deployment: Deployment, batch: Batch, best: int) -> dict[str, Variant]:
    """The plan for the true lengths, and the best static size with rebalancing at its moments; empty if it never
    switches, since both are then static variants."""
    plan = make_plan(deployment, batch.contexts, np.array(batch.lengths, float), None)
    if len(plan.stages) == 1:
        return {}
    plans = {
        name: partial(PlayedPlan, plan, deployment, tp_size=size)
        for name, size in (("hindsight", None), ("rebalanced", best))
    }
    return {name: changing(deployment, make().layout(), make) for name, make in plans.items()}
