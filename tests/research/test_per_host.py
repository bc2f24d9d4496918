"""Hosts that switch each for itself, in the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engines.coordination.policies import LayoutPolicy
from engines.parallel.layout import nested_layout, nested_on_hosts
from experiments.comparison.rollouts import Variant
from experiments.pat_cases import Batch
from experiments.pat_sim import world
from research.pat.controller import PatController
from research.pat.per_host import PerHost
from research.simulator.cluster import SimulatedRollout
from tests.research import pat_world
from tests.research.pat_world import deployment
from tests.research.test_pat_controller import HISTORY, LENGTHS, view_of

HOSTS = [range(8), range(8, 16)]


def roll_out(lengths: list[int], hosts: list[range], sizes: list[int], policy: LayoutPolicy | None) -> SimulatedRollout:
    return pat_world.roll_out(lengths, nested_on_hosts(hosts, sizes), policy)


def per_host(hosts: list[range]) -> PerHost:
    return PerHost(hosts, [PatController(deployment(), ended=HISTORY) for _ in hosts])


def test_layouts_of_hosts() -> None:
    assert nested_on_hosts([range(4)], [2]) == nested_layout(range(4), 2)
    both = nested_on_hosts([range(4), range(4, 8)], [2, 4], epoch=3)
    assert both.epoch == 3
    assert [(one.id, one.ranks) for one in both.replicas] == [(0, (0, 2)), (1, (1, 3)), (4, (4, 5, 6, 7))]


def test_one_host_is_the_controller_itself() -> None:
    lengths = LENGTHS.draw(300, seed=0)
    alone = PatController(deployment(), ended=HISTORY)
    expected = roll_out(lengths, HOSTS[:1], [1], alone)
    done = roll_out(lengths, HOSTS[:1], [1], per_host(HOSTS[:1]))
    assert done.finish_times == expected.finish_times and len(alone.log) > 5


def test_each_host_switches_for_itself_and_no_replica_has_ranks_of_both() -> None:
    lengths = LENGTHS.draw(600, seed=0)
    done = roll_out(lengths, HOSTS, [1, 1], per_host(HOSTS))
    sizes: dict[int, list[int]] = {0: [], 1: []}
    for step in sorted(done.steps, key=lambda step: step.start):
        of_host = sizes[step.replica_id // 8]
        if not of_host or of_host[-1] != step.tp_size:
            of_host.append(step.tp_size)
    for of_host in sizes.values():
        assert of_host == sorted(set(of_host)) and len(of_host) > 1, "up only, each step in one size of its host"
    num_regroups = sum(one.action == "regroup" for one in done.decisions)
    assert num_regroups == sum(len(of_host) - 1 for of_host in sizes.values()), "never both hosts at once"
    best = min(roll_out(lengths, HOSTS, [size, size], None).makespan for size in (1, 2, 4, 8))
    assert done.makespan < best, "no static layout is as fast"


def test_a_host_without_sequences_is_left_alone() -> None:
    """A single sequence is on one host: the other one has nothing to decide."""
    policy = per_host(HOSTS)
    done = roll_out([900], HOSTS, [2, 2], policy)
    regroups = [one for one in done.decisions if one.action == "regroup"]
    assert len(regroups) <= 1 and len({step.replica_id // 8 for step in done.steps}) == 1


@pytest.mark.parametrize("lengths", [[1, 900, 900], [900, 1, 900], [1, 1, 900]])
@pytest.mark.parametrize("sizes", [[8, 8], [4, 4]])
def test_a_host_may_count_a_sequence_that_another_one_gets(lengths: list[int], sizes: list[int]) -> None:
    """Each host counts its share of those that wait, rounded up."""
    batch = Batch(lengths=tuple(lengths), history=(), longest=pat_world.CAP, num_prompt_tokens=pat_world.PROMPT)
    variant = Variant(layout=nested_on_hosts(HOSTS, sizes), num_kv_tokens=0)
    variant = replace(variant, layout_policy=lambda: per_host(HOSTS), options={"max_num_seqs": 1})
    work = batch.workload()
    assert world(pat_world.PACE, deployment()).roll_out(work, variant).lengths == work.lengths


@pytest.mark.parametrize("seed", range(2))
def test_what_a_host_sees_is_its_own(seed: int) -> None:
    lengths = LENGTHS.draw(400, seed=seed)
    policy = per_host(HOSTS)
    roll_out(lengths, HOSTS, [4, 4], policy)
    first = [controller.log[0] for controller in policy._controllers]
    assert np.isclose(sum(one.num_unfinished for one in first), 400, atol=2), "together they see all, once"


def test_a_host_without_a_replica_is_not_asked() -> None:
    """As while all of its ranks are away, or busy in another role."""
    view = view_of([700] * 3, size=2)
    policy = per_host([range(8, 16), range(8)])
    change = policy.decide(replace(view, replicas={}, num_waiting=3))
    assert change is not None and {rank for spec in change.layout.replicas for rank in spec.ranks} == {*range(8)}
    assert not policy._controllers[0].log and len(policy._controllers[1].log) == 1
