"""When the planner places, and when it leaves all to least load; its estimate for agents against the simulator."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from engines.coordination.views import ReplicaView
from experiments.heddle_cases import Case, singles
from experiments.heddle_tuning import HEDDLE, LEAST_LOAD, Deployed, Tuned
from research.heddle.allocation import anneal, exhaustive, placed
from research.heddle.baselines import LeastLoad
from research.heddle.interference import GroupSimulation
from research.heddle.interference import simulated as simulated_groups
from research.heddle.placement import Server
from research.heddle.planning import Planner, priced, with_tools
from research.heddle.ranks import Expected
from research.pat.profile import deployment_of
from research.workloads.agents import AgentName, Errors
from research.workloads.trajectories import Turn
from tests.research.test_simulator import trajectories

PRINTED = Tuned(threshold=0.0, skew=32.0)


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
    planner = Planner(server_of=lambda *_: server)
    assert planner(new([100.0] * 80), keeps.replicas) is None
    tailed = np.sort(np.random.default_rng(0).lognormal(5, 1.2, 80))[::-1].tolist()
    groups = planner(new(tailed), keeps.replicas)
    assert groups is not None and sum(groups.sizes) == 80 and [*groups.sizes] == sorted(groups.sizes)
    assert sorted(groups.replica_ids) == [0, 1, 2, 3]
    unsure = replace(planner, errors=(-2.0, 0.0, 2.0))
    assert unsure(new([100.0] * 80), keeps.replicas) is None, "what is predicted says nothing then"
    anyway = replace(unsure, yields=False)(new([100.0] * 80), keeps.replicas)
    assert anyway is not None and sum(anyway.sizes) == 80


def test_trajectories_that_have_outgrown_a_small_replica() -> None:
    """In mid-rollout, on replicas of two sizes: the small ones can hold none of the longest any more."""
    keeps = Keeps()
    simulated, some = trajectories(2, keeps, [[Turn(num_generated=5)]])
    simulated.roll_out(some)
    steps = {size: GroupSimulation(np.full(65, 0.01), np.full(65, 1e-6), room) for size, room in ((1, 100), (2, 1000))}
    wide, small = keeps.replicas
    wide = msgspec.structs.replace(wide, spec=replace(wide.spec, ranks=(0, 1)))
    servers = {size: Server(size, 0.01, np.ones_like, one.longest) for size, one in steps.items()}
    cost = simulated_groups(steps)
    planner = Planner(server_of=lambda one, _: servers[one.spec.tp_size], group_seconds=cost)
    expected = [Expected(900.0, 600.0), Expected(300.0, 250.0), Expected(60.0, 0.0), Expected(50.0, 20.0)]
    placed_s, spread_s = planner.estimates(expected, [small, wide])
    assert 3.2 < placed_s < 3.3, "300 tokens of 0.01 s, and 750 to 1,000 tokens of context"
    assert 0.9 < spread_s < 3.3
    groups = replace(planner, yields=False)(expected, [small, wide])
    assert groups is not None and groups.replica_ids == (wide.spec.id, small.spec.id) and groups.sizes[0] >= 2


def test_equal_replicas_share_what_is_known_of_groups() -> None:
    keeps = Keeps()
    simulated, some = trajectories(4, keeps, [[Turn(num_generated=5)]])
    simulated.roll_out(some)
    asked: list[int] = []

    def server_of(replica: ReplicaView, mean: float) -> Server:
        asked.append(replica.spec.id)
        return Server(1, 0.01, lambda sizes: 1 + sizes / 10)

    assert Planner(server_of=server_of, yields=False)(new([80.0, 40.0, 20.0]), keeps.replicas) is not None
    assert len(asked) == 1 < len(keeps.replicas)


def new(lengths: list[float]) -> list[Expected]:
    return [Expected(length, 0.0) for length in lengths]


def deployed(name: AgentName, seed: int, num_replicas: int = 8) -> Deployed:
    """24 agents for each replica, each of which stands for four, with KV for half of them."""
    case = Case(name=name, per_gpu=24, token_scale=64, sequence_scale=4)
    groups = case.draw(num_replicas, seed)
    kv = {1: case.num_kv_tokens(num_replicas, groups)}
    return Deployed(case=case, workload=case.workload(groups), layout=singles(num_replicas), num_kv_tokens=kv)


def test_a_longest_that_just_fits_is_placed() -> None:
    """Trajectories of which some reach the longest that a KV cache can hold: all on one replica would be far slower."""
    math_ = deployed("math", 1)
    took = {name: math_.simulate(name, PRINTED, Errors(kind="oracle")).makespan_s for name in (HEDDLE, LEAST_LOAD)}
    assert max((math_.workload.lengths or {}).values()) > 0.95 * math_.groups[1].longest
    assert took[HEDDLE] < 1.1 * took[LEAST_LOAD]


@pytest.mark.parametrize(("name", "seed"), [("search", 3), ("search", 5), ("coding", 3)])
def test_estimates_against_the_simulator(name: AgentName, seed: int) -> None:
    """With true lengths. Placed within 12 %, spread by least load within 15 %; which is better is right, where they
    differ by more."""
    one, oracle = deployed(name, seed), Errors(kind="oracle")
    planner = one.planner(oracle)
    values = sorted((float(length) for length in (one.workload.lengths or {}).values()), reverse=True)
    keeps = Keeps()
    simulated, some = trajectories(8, keeps, [[Turn(num_generated=5)]])
    simulated.roll_out(some)
    placed_s, spread_s = planner.estimates(new(values), keeps.replicas)
    always = replace(planner, yields=False)
    policy = one.case.heddle(always)
    variant = one.case.variant(one.layout, 0, policy, one.workload.turns, oracle)
    world = replace(one.case.world(), num_kv_tokens=one.num_kv_tokens)
    took_placed = world.roll_out(one.workload, variant).makespan_s
    took_spread = one.simulate(LEAST_LOAD, PRINTED, oracle).makespan_s
    assert placed_s == pytest.approx(took_placed, rel=0.12)
    assert spread_s == pytest.approx(took_spread, rel=0.15)
    took = one.simulate(HEDDLE, PRINTED, oracle).makespan_s
    assert took < 1.05 * min(took_placed, took_spread)


def test_allocations_by_the_planners_estimates() -> None:
    """Algorithm 2 with them against all ten allocations of eight GPUs; on equal replicas they are the planner's own."""
    one, oracle = deployed("search", 5), Errors(kind="oracle")
    kv = {size: size * one.num_kv_tokens[1] for size in (1, 2, 4, 8)}
    one = replace(one, num_kv_tokens=kv)
    values = np.sort(np.array([*(one.workload.lengths or {}).values()], float))[::-1]
    servers = {size: one.server_at(size, float(values.mean())) for size in kv}
    for errors in (oracle, Errors()):
        planner = one.planner(errors)
        solve = priced(planner)
        best = exhaustive(values, 8, servers, solve)
        found = anneal(values, 8, servers, start=(1,) * 8, solve=solve)
        assert found.makespan <= 1.01 * best.makespan < placed((1,) * 8, values, servers, solve).makespan
    keeps = Keeps()
    simulated, some = trajectories(8, keeps, [[Turn(num_generated=5)]])
    simulated.roll_out(some)
    spread_s = one.planner(oracle).estimates(new(values.tolist()), keeps.replicas)[1]
    assert priced(one.planner(oracle))(values, [servers[1]] * 8).makespan <= spread_s * (1 + 1e-9)
    assert priced(one.planner(Errors()))(values, [servers[1]] * 8).makespan == pytest.approx(spread_s)


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
