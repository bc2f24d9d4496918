"""The core of a live rollout is a function of its events: a fresh one gives the same commands at the same times."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from typing import Any

import pytest

from engines import LLM, SamplingParams
from engines.coordination.core import RolloutCore
from engines.coordination.policies import OnDemand
from engines.coordination.requests import RequestMove
from engines.coordination.views import LayoutChange
from engines.fleet import fleet as fleet_module
from engines.fleet.fleet import Fleet
from engines.parallel.layout import Layout, nested_layout
from engines.rollout import world
from engines.rollout.pace import ShortestStep
from research.simulator.replay import play, recording
from tests.environments import Local
from tests.holding import LastWaits
from tests.states import make_state
from tests.worlds import join, run_world

pytestmark = pytest.mark.usefixtures("forked_replicas")

PROMPTS = [[uid + 2] * 12 for uid in range(20)]
PARAMS = [SamplingParams(max_tokens=10 + 4 * uid, ignore_eos=True) for uid in range(len(PROMPTS))]
IN_TURNS = [replace(params, stop_token_ids=tuple(range(0, 256, 5))) for params in PARAMS]
OPTIONS: dict[str, Any] = {"kv_cache_bytes": 2**19, "max_num_seqs": 4}


class Regroups:
    """A layout policy: 1 -> 2 -> 4 -> 1, one each time that five more sequences are delivered."""

    def decide(self, view: Any) -> LayoutChange | None:
        done = view.layout.epoch
        if done == 3 or view.num_delivered < 5 * (done + 1):
            return None
        return LayoutChange(layout=nested_layout(range(4), (2, 4, 1)[done], epoch=done + 1))


class Slow:
    """A `Pace`: each step takes at least 4 ms, and each move of KV 2 ms."""

    def step(self, *_: object) -> float:
        return 0.004

    def transfer(self, spec: object, num_tokens: int, path: str) -> float:
        return 0.002 if num_tokens else 0.0

    def switch(self, *_: object) -> float:
        return 0.05

    def draft(self, *_: object) -> float:
        return 0.0


def roll_out(model: str, text_model: str) -> dict[str, Any]:
    """On rank 0 a log, for rollouts on demand with random moves, with regroups beside them, and of trajectories."""
    groups = join(timeout_s=120)
    logs: dict[str, Any] = {}
    for name, policy in (("moves", None), ("moves and regroups", Regroups()), ("turns", None)):
        folder, params = (text_model, IN_TURNS) if name == "turns" else (model, PARAMS)
        with recording(world):
            llm = LLM(folder, world=groups, schedule=OnDemand(), layout_policy=policy, pace=Slow(), **OPTIONS)
        assert llm.rollout is not None
        coordinator, rng = llm.rollout.coordinator, random.Random(name)

        left = {(0, uid, 0) for uid in range(len(PROMPTS))}

        def move(finished: Any, llm: LLM = llm, rng: random.Random = rng, left: set[Any] = left) -> None:
            assert llm.rollout is not None and llm.rollout.coordinator is not None
            coordinator = llm.rollout.coordinator
            left.discard(finished.state.sequence_id)
            for id_ in rng.sample(sorted(left), min(3, len(left))):
                target = rng.choice(coordinator.core.layout.replicas).id
                coordinator.post(RequestMove(sequence_id=id_, replica_id=target, with_kv=rng.random() < 0.6))

        with Local(delay_s=0.02) as environments:
            environment = environments if name == "turns" else None
            llm.generate(PROMPTS, params, prompt_uids=range(len(PROMPTS)), on_finished=move, environment=environment)
        if coordinator is not None:
            logs[name] = coordinator.core.log
        llm.close()
    return logs


@pytest.fixture(scope="module")
def logs(qwen3: str, text_model: str) -> dict[str, Any]:
    first, *_ = run_world(roll_out, 4, qwen3, text_model)
    return first  # type: ignore[no-any-return]


def test_paced_rollouts_with_moves_and_regroups(logs: dict[str, Any]) -> None:
    for name, log in logs.items():
        policy = Regroups() if "regroups" in name else None

        def make_core(policy: Regroups | None = policy) -> RolloutCore:
            return RolloutCore(
                layout=nested_layout(range(4), 1),
                world_size=4,
                schedule_policy=OnDemand(),
                layout_policy=policy,
                timeout_s=120,
            )

        kinds = {kind for _, kind, _, _ in log}
        assert kinds >= {b"message", b"BeginPhase", b"SubmitSequences", b"RequestMove", b"RequestEndPhase"}
        assert any(b"PauseSequences" in one for _, _, _, outputs in log for one in outputs)
        if name == "turns":
            turns = sum(one.startswith(b"TurnEnded") for _, _, _, outputs in log for one in outputs)
            assert b"AnswerTurns" in kinds and turns > len(PROMPTS)
        assert play(log, make_core) > 50


def until_one_is_lost() -> LastWaits:
    return LastWaits(len(PROMPTS) - 1, lambda view: len(view.replicas) < 2)


def test_a_replica_outside_that_is_killed(qwen3: str) -> None:
    options = {**OPTIONS, "schedule_policy": until_one_is_lost(), "pace": ShortestStep(step_s=0.02)}
    with recording(fleet_module), Fleet(qwen3, num_replicas=2, patience_s=5.0, **options) as fleet:
        killed: list[int] = []

        def kill_one(_: Any) -> None:
            if not killed:
                killed.append(min(fleet.coordinator.standing_by))
                os.kill(fleet.launcher.pids()[killed[0]], signal.SIGKILL)

        fleet.wait_for_replicas(2)
        states = [make_state(uid, PROMPTS[uid], params) for uid, params in enumerate(PARAMS)]
        assert len(fleet.roll_out(states, on_finished=kill_one)) == len(PROMPTS)
        timeout_s, log = fleet.coordinator._timeout_s, fleet.coordinator.core.log  # type: ignore[attr-defined]
        (lost,) = fleet.coordinator.lost
    assert lost.startswith(f"replica {killed[0]} ")

    def make_core() -> RolloutCore:
        layout = Layout(epoch=0, replicas=())
        return RolloutCore(layout=layout, world_size=0, schedule_policy=until_one_is_lost(), timeout_s=timeout_s)

    assert play(log, make_core) > 30


def test_a_log_that_was_changed_does_not_play(logs: dict[str, Any]) -> None:
    log = list(logs["moves"])
    place = next(index for index, (_, _, _, outputs) in enumerate(log) if len(outputs) > 1)
    now, kind, content, outputs = log[place]
    log[place] = (now, kind, content, outputs[1:])
    with pytest.raises(AssertionError, match="after"):
        play(log, lambda: RolloutCore(layout=nested_layout(range(4), 1), world_size=4, schedule_policy=OnDemand()))
