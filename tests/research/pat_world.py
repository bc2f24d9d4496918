"""Eight simulated A40 on which tests roll PAT's batches out."""

from __future__ import annotations

from collections.abc import Sequence

from engines.coordination.policies import LayoutPolicy
from engines.parallel.layout import Layout
from experiments.comparison.rollouts import Variant
from experiments.pat_cases import Batch
from experiments.pat_sim import world
from research.pat.deployment import Deployment
from research.pat.profile import deployment_of
from research.simulator.cluster import SimulatedRollout
from research.simulator.latency import profile
from research.simulator.pace import ProfilePace

NUM_RANKS, CAP, PROMPT = 8, 1500, 16
A40 = {size: profile(f"a40-8b-tp{size}") for size in (1, 2, 4, 8)}
PACE = ProfilePace(device=A40[1].device, shape=A40[1].shape, restart_s=0.1)
"""Lengths are a twentieth of what they are in the paper, and so is what a switch takes."""
KV_TOKENS = {size: one.kv_tokens_capacity() for size, one in A40.items()}


def deployment(max_model_len: int = 8192) -> Deployment:
    return deployment_of(
        PACE, num_ranks=NUM_RANKS, num_kv_tokens=KV_TOKENS, max_num_seqs=256, max_model_len=max_model_len
    )


def roll_out(
    lengths: Sequence[int], layout: Layout, policy: LayoutPolicy | None = None, *, prompt: int = PROMPT
) -> SimulatedRollout:
    batch = Batch(lengths=tuple(lengths), history=(), longest=CAP, num_prompt_tokens=prompt)
    variant = Variant(layout=layout, num_kv_tokens=0, layout_policy=lambda: policy)
    work = batch.workload()
    cluster, _ = world(PACE, deployment()).start(work, variant)
    done = cluster.roll_out(work.states())
    assert {id_[1]: length for id_, length in done.lengths.items()} == dict(enumerate(lengths))
    cluster.check_integrity()
    return done
