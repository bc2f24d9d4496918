"""The same workload and variants in every world: live, paced and simulated."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from algos.tokenizer import byte_tokenizer
from engines.parallel.layout import nested_layout
from engines.sequence import SamplingParams
from experiments.bench.models import checkpoint, random_prompts
from experiments.comparison.real import RealWorld, clock
from experiments.comparison.rollouts import Rollout, Variant, Workload, hidden_lengths
from experiments.comparison.simulated import SimulatedWorld
from experiments.validation_cells import InChunks, Widen
from research.simulator.latency import profile
from research.simulator.pace import ProfilePace
from research.workloads.trajectories import Turn
from tests.worlds import join, run_world

LENGTHS = hidden_lengths([[9, 60], [4, 82], [75, 41], [17, 58]])
NAMES = ("plain", "chunks", "regroup")
TURNS = [
    [[Turn(num_generated=9, tool_s=0.05, num_observed=30), Turn(num_generated=20)], [Turn(num_generated=40)]],
    [[*[Turn(num_generated=7, tool_s=0.02, num_observed=1)] * 4, Turn(num_generated=1)], [Turn(num_generated=55)]],
]


def variants() -> dict[str, Variant]:
    """`regroup` begins with the first step, when all sequences have most of their tokens to come."""
    plain = Variant(layout=nested_layout(range(2), 1), num_kv_tokens=200)
    chunks = Variant(layout=plain.layout, num_kv_tokens=200, schedule=InChunks)
    regroup = Variant(layout=plain.layout, num_kv_tokens=200, layout_policy=lambda: Widen(3 * len(LENGTHS), 2))
    return dict(zip(NAMES, (plain, chunks, regroup), strict=True))


def test_a_clock_is_one_thread_that_calls_nothing_before_its_time() -> None:
    called, start = queue.SimpleQueue[tuple[int, float]](), time.monotonic()
    with clock() as later:
        for number in reversed(range(100)):
            later(0.002 * number, lambda number=number: called.put((number, time.monotonic() - start)))  # type: ignore[misc]
        later(1000.0, lambda: called.put((-1, 0.0)))
        threads = [one.name for one in threading.enumerate()].count("tools")
        done = [called.get(timeout=60) for _ in range(100)]
    assert threads == 1 and not any(one.name == "tools" for one in threading.enumerate())
    assert sorted(number for number, _ in done) == [*range(100)] and called.empty()
    assert all(seconds >= 0.002 * number for number, seconds in done)


def roll_out_everywhere() -> list[Any]:
    groups = join([nested_layout(range(2), size, epoch=size - 1) for size in (1, 2)])
    one = profile("h100-8b-tp1")
    pace = ProfilePace(device=one.device, shape=one.shape, token_scale=16, restart_s=0.05)
    params = SamplingParams(max_tokens=100, ignore_eos=True, n=2)
    work = Workload(prompts=random_prompts(4, 16), params=params, lengths=LENGTHS)
    options = {"dtype": "float64", "max_num_seqs": 3, "max_model_len": 128, "block_size": 4}
    with checkpoint("0.8m", max_positions=128, dtype="float64", world=groups.world) as model:
        worlds: list[RealWorld | SimulatedWorld] = [
            RealWorld(model=model, groups=groups, pace=None, options=options),
            RealWorld(model=model, groups=groups, pace=pace, options=options),
            SimulatedWorld(pace=pace, options=options),
        ]
        plain = [
            [world.tier, [facts(world.roll_out(work, variant)) for variant in variants().values()]] for world in worlds
        ]
        if not groups.world.rank:
            byte_tokenizer().save_pretrained(Path(model))
        groups.world.barrier()
        turns = Workload.of_trajectories(TURNS, num_prompt_tokens=16, most=100, prompts=random_prompts(2, 16))
        some = [variants()[name] for name in ("plain", "chunks")]
        return [plain, [[facts(world.roll_out(turns, variant)) for variant in some] for world in worlds]]


def facts(run: Rollout) -> dict[str, Any]:
    return {
        "digest": run.digest,
        "lengths": sorted(run.lengths.items()),
        "ends": run.ends,
        "seconds": run.seconds,
        "tail_seconds": run.tail_seconds if run.ends else 0.0,
        "tokens_per_step": run.tokens_per_step,
        "switches": run.switches,
        "way_back_s": run.way_back_s,
        "sizes": sorted({step.tp_size for step in run.steps}),
        "starts": [step.start for step in run.steps],
        "last_end": max(step.start + step.seconds for step in run.steps),
        "tools": [(span.sequence_id, span.seconds) for span in run.turns if span.kind == "tool"],
        "turns": [span.kind for span in run.turns],
    }


@pytest.fixture(scope="module")
def worlds() -> list[Any]:
    return run_world(roll_out_everywhere, 2)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def found(worlds: list[Any]) -> dict[str, dict[str, dict[str, Any]]]:
    return {tier: dict(zip(NAMES, some, strict=True)) for tier, some in worlds[0]}


def test_each_world_names_its_tier(found: dict[str, Any]) -> None:
    assert list(found) == ["live", "paced", "sim"]


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_does_the_same_in_every_world(found: dict[str, Any], name: str) -> None:
    runs = {tier: some[name] for tier, some in found.items()}
    assert runs["live"]["digest"] == runs["paced"]["digest"] == found["live"]["plain"]["digest"]
    assert runs["sim"]["digest"] == ""
    for run in runs.values():
        assert [(tuple(id_), length) for id_, length in run["lengths"]] == sorted(LENGTHS.items())
        assert len(run["ends"]) == len(LENGTHS) and run["ends"] == sorted(run["ends"])
        assert 0 < run["tail_seconds"] == run["ends"][-1] - run["ends"][6] and run["tokens_per_step"] == 1
        assert run["seconds"] == pytest.approx(run["last_end"] - min(run["starts"]) + run["way_back_s"], rel=1e-9)
        assert run["ends"][-1] > max(run["starts"]), "heard after its last step, and on a busy machine far later"
        regroups = name == "regroup"
        assert run["sizes"] == ([1, 2] if regroups else [1])
        assert len(run["switches"]) == regroups and (run["way_back_s"] > 0) == regroups
        assert all(min(run["starts"]) < start < start + took < max(run["starts"]) for start, took in run["switches"])


def test_the_pace_rules_paced_and_simulated_times(found: dict[str, Any]) -> None:
    """A paced rollout takes no less than its steps do, which the simulation adds up; its A/A is no test."""
    assert found["paced"]["plain"]["seconds"] > 0.99 * found["sim"]["plain"]["seconds"] - 0.05


def test_trajectories_have_the_same_turns_in_every_world(worlds: list[Any]) -> None:
    (live, live_chunks), (paced, paced_chunks), simulated = worlds[1]
    assert live["digest"] == live_chunks["digest"] == paced["digest"] == paced_chunks["digest"]
    lengths = [[sum(turn.num_generated for turn in turns) for turns in group] for group in TURNS]
    for run in (live, live_chunks, paced, paced_chunks, *simulated):
        assert [(tuple(id_), length) for id_, length in run["lengths"]] == sorted(hidden_lengths(lengths).items())
        assert len(run["ends"]) == 4 and {*run["turns"]} - {"move"} == {"queue", "replica", "tool"}
        for id_, turns in hidden_lengths(TURNS).items():
            # Before the first turn and behind the last one there is no tool to wait for.
            _, *seconds, _ = [seconds for one, seconds in run["tools"] if tuple(one) == id_]
            assert len(seconds) == len(turns) - 1
            assert all(took > turn.tool_s - 1e-3 for took, turn in zip(seconds, turns, strict=False))
