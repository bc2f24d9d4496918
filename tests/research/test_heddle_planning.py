"""When the planner places, and when it leaves all to least load; its estimate for agents against the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.heddle_cases import Case, singles
from research.heddle.baselines import LeastLoad
from research.heddle.interference import GroupSimulation
from research.heddle.placement import Server, aggregated
from research.heddle.planning import Planner, with_tools
from research.pat.profile import deployment_of
from research.workloads.agents import Errors
from research.workloads.trajectories import Turn
from tests.research.test_simulator import trajectories


class Keeps:
    """Keeps the replicas that a policy sees."""

    def next(self, view):
        self.replicas = [*view.replicas.values()]
        return LeastLoad().next(view)


def test_it_yields_where_lengths_are_alike_and_places_a_long_tail() -> None:
    keeps = Keeps()
    simulated, some = trajectories(4, keeps, [[Turn(num_generated=5)]])
    simulated.roll_out(some)
    server = Server(1, 0.01, lambda sizes: 1 + sizes / 10)
    planner = Planner(server_of=lambda *_: server, solve=lambda values, servers, _: aggregated(values, servers))
    assert planner([100.0] * 80, keeps.replicas) is None
    tailed = np.sort(np.random.default_rng(0).lognormal(5, 1.2, 80))[::-1].tolist()
    placed = planner(tailed, keeps.replicas)
    assert placed is not None and sum(placed.sizes) == 80 and [*placed.sizes] == sorted(placed.sizes)
    assert sorted(placed.replica_ids) == [0, 1, 2, 3]
    assert replace(planner, error=3.0)(tailed, keeps.replicas) is None, "what is predicted says nothing then"


@pytest.mark.parametrize("name", ["coding", "math"])
def test_groups_of_agents_against_the_simulator(name) -> None:
    """One replica of 14B with 64 agents: within 12 %, with KV for all and for half of them."""
    for kv_share in (1.2, 0.5):
        case = Case(name=name, token_scale=32, kv_share=kv_share)
        groups = case.draw(1, 0)[:4]
        turns = [one for group in groups for some in group for one in some]
        work, num_kv_tokens = case.workload(groups), case.num_kv_tokens(1, groups)
        oracle = Errors(kind="oracle")
        variant = case.variant(singles(1), num_kv_tokens, case.heddle(lambda *_: None), work.turns, oracle)
        took = max(case.world().roll_out(work, variant).finish_times.values())
        deployment = deployment_of(
            case.pace,
            num_ranks=1,
            num_kv_tokens={1: num_kv_tokens},
            max_num_seqs=256,
            max_model_len=case.max_model_len,
        )
        generated = sum(one.num_generated for one in turns)
        agents = with_tools(
            GroupSimulation.of(deployment, 1, case.num_prompt_tokens),
            growth=sum(one.num_generated + one.num_observed for one in turns) / generated,
            tool_s=sum(one.tool_s for one in turns) / generated,
            prefill_s=0.0,
        )
        lengths = np.sort(np.array([*work.lengths.values()], float))[::-1]
        assert agents.seconds(lengths) == pytest.approx(took, rel=0.12)
