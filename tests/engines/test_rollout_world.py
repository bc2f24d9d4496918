"""Coordinated rollouts with real processes: dispatched on demand, moved, regrouped; the tokens of one process."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import LLM, SamplingParams
from engines.coordination.policies import OnDemand
from engines.coordination.requests import RequestMove, RequestRegroup
from engines.coordination.views import LayoutChange
from engines.models.loader import checkpoint_tensors
from engines.parallel import groups as groups_module
from engines.parallel.layout import Layout, ReplicaSpec, contiguous_layout, nested_layout
from engines.parallel.owned_files import DEV_SHM
from engines.rollout.generation import make_states
from engines.sequence import Work
from tests.checkpoints import save_checkpoint
from tests.holding import Held, check_tokens, held_params, tokens_of
from tests.worlds import error_of, join, run_world, shared_files

RNG = random.Random(7)
PROMPTS = [[RNG.randrange(2, 131) for _ in range(RNG.randint(1, 30))] for _ in range(24)]
PARAMS = SamplingParams(max_tokens=48, n=2)
HELD = (0,)
HELD_PARAMS = [held_params(PARAMS), *[PARAMS] * (len(PROMPTS) - 1)]
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**21, "max_num_seqs": 5}


class Script:
    """A layout policy that goes through TP sizes, one each time that so many more sequences are delivered."""

    def __init__(self, sizes: list[int], every: int, nested: bool) -> None:
        self._sizes, self._every, self._nested = list(sizes), every, nested

    def decide(self, view: Any) -> Any:
        done = view.layout.epoch
        if done >= len(self._sizes) or view.num_delivered < self._every * (done + 1):
            return None
        make = nested_layout if self._nested else contiguous_layout
        return LayoutChange(layout=make(range(4), self._sizes[done], epoch=done + 1))


def leave_kv(model: str) -> list[Any]:
    """On a rank: its process and the files of its KV, in a world that it does not close: after an interrupt in the
    rollout, and then those of sequences that it has paused."""

    def files() -> int:
        return len(list(DEV_SHM.glob(f"curtail-{os.getuid()}-*-{os.getpid()}-*")))

    most = 0

    def stop(*_: Any) -> bool:
        nonlocal most
        most = max(most, files())
        if most > before and llm.rollout is not None and llm.rollout.coordinator is not None:
            raise KeyboardInterrupt
        return False

    options = OPTIONS | {"kv_cache_bytes": 2**17, "preemption": "swap", "max_model_len": 100}
    llm = LLM(model, world=join(), schedule=OnDemand(), hidden_stop=stop, **options)
    before = files()
    try:
        llm.generate(PROMPTS, PARAMS)
        raise AssertionError("the rollout has not been interrupted")
    except (KeyboardInterrupt, ConnectionError):
        after = files()
    global kept
    kept = LLM(model, world=join(), schedule=OnDemand(), **OPTIONS)
    for state in make_states(PROMPTS[:3], [SamplingParams(max_tokens=48)] * 3, range(3), run_seed=0, policy_step=0):
        kept.replica.submit(Work(state=state))
    kept.replica.step()
    between = files()
    works = kept.replica.pause(with_kv=True)
    assert all(work.kv is not None for work in works)
    return [os.getpid(), most - before, after - before, files() - between]


def test_kv_of_a_world_that_is_not_closed_ends_with_its_process(qwen3: str) -> None:
    ranks = run_world(leave_kv, 2, qwen3)
    for pid, _, after, paused in ranks:
        assert after == 0 and paused == 3, "after an interrupt; before the process's end"
        assert not list(DEV_SHM.glob(f"curtail-{os.getuid()}-*-{pid}-*"))
    assert ranks[0][1] >= 1


class Flip:
    """A layout policy for two ranks: once in each rollout, from TP1 to TP2 or back."""

    def __init__(self) -> None:
        self._phase = -1

    def decide(self, view: Any) -> Any:
        if view.num_delivered < 2 or view.phase == self._phase:
            return None
        self._phase = view.phase
        layout = nested_layout(range(2), 3 - view.layout.replicas[0].tp_size, epoch=view.layout.epoch + 1)
        return LayoutChange(layout=layout)


def move_at_random(llm: Any, ids: list[Any], seed: int, num_moves: int) -> Any:
    """Returns an `on_finished` that moves a few of the others whenever one ends, with their KV or without."""
    rng = random.Random(seed)
    left = num_moves
    unfinished = list(ids)

    def move(finished: Any) -> None:
        nonlocal left
        unfinished.remove(finished.state.sequence_id)
        coordinator = llm.rollout.coordinator
        for sequence_id in rng.sample(unfinished, min(6, len(unfinished))):
            left -= 1
            if left >= 0:
                target = rng.choice([spec.id for spec in coordinator.core.layout.replicas])
                coordinator.post(RequestMove(sequence_id=sequence_id, replica_id=target, with_kv=rng.random() < 0.6))

    return move


def on_any_rank(flag: Path, on_this_rank: Callable[[], int]) -> Callable[[], bool]:
    """Whether it has happened on any rank so far; the ranks share the file `flag`."""

    def happened() -> bool:
        if not flag.exists() and on_this_rank():
            flag.touch()
        return flag.exists()

    return happened


def roll_out(directory: str, cases: list[str]) -> dict[str, Any]:
    groups = join(timeout_s=120)
    results: dict[str, Any] = {}
    for case in cases:
        kind, _, family = case.partition("/")
        tp_size = 2 if "TP2" in kind else 1
        policy = None
        if "regroup" in kind:
            policy = Script([2, 4, 1], every=6, nested="contiguous" not in kind)
        held = Held(HELD, num_tokens=100)
        llm = LLM(
            f"{directory}/{family}", world=groups, tensor_parallel_size=tp_size, schedule=OnDemand(),
            layout_policy=policy, hidden_stop=held, kernels="torch" if "torch" in kind else "auto",
            prefix_caching="uncached" not in kind, **OPTIONS,
        )  # fmt: skip
        ids = [(0, uid, index) for uid in range(len(PROMPTS)) for index in range(2)]
        hook = move_at_random(llm, ids, seed=3, num_moves=400) if "moves" in kind else None
        between_hosts = len(set(groups.hosts)) > 1

        def num_moved(llm: Any = llm, between_hosts: bool = between_hosts) -> int:
            replica = llm.replica
            return replica.mover.store.num_fetched if between_hosts else replica.kv_moves.num_imported

        held.happened = lambda: True
        if "regroup" in kind:
            held.until_epoch(llm, 3)
        elif kind == "DP4 moves":
            held.happened = on_any_rank(Path(directory) / f"moved-{between_hosts}", num_moved)
        out = llm.generate(PROMPTS, HELD_PARAMS, on_finished=hook)
        results[case] = {
            "tokens": tokens_of(out),
            "epoch": llm.layout.epoch,
            "moved": num_moved(),
            "steps": len(llm.step_records),
        }
        llm.close()
    return results


def roll_out_on_two_hosts(directory: str, cases: list[str]) -> dict[str, Any]:
    """As if ranks 2 and 3 ran elsewhere: they reach the others by sockets only."""
    groups_module._host = lambda: f"host {int(os.environ['RANK']) // 2}"
    return roll_out(directory, cases)


TWO_HOSTS = ["DP4 moves/qwen3", "DP2xTP2 moves/qwen3", "DP4 regroup moves/qwen3"]
CASES = [
    "DP4/qwen3",
    "DP2xTP2/qwen2-untied-mqa",
    "DP4 moves/qwen3",
    "DP2xTP2 moves/qwen3",
    "DP2xTP2 torch moves/qwen3",
    "DP4 uncached moves/qwen3",
    "DP4 regroup/qwen3",
    "DP4 regroup moves/qwen2-untied-mqa",
    "DP4 regroup contiguous/llama2",
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("families")
    for family in {case.partition("/")[2] for case in CASES}:
        save_checkpoint(directory / family, family)
    return directory


@pytest.fixture(scope="module")
def world(checkpoints: Path) -> list[dict[str, Any]]:
    return run_world(roll_out, 4, str(checkpoints), CASES)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_process(world: list[dict[str, Any]], checkpoints: Path, case: str) -> None:
    alone = LLM(checkpoints / case.partition("/")[2], **OPTIONS).generate(PROMPTS, HELD_PARAMS)
    for rank in range(4):
        check_tokens(world[rank][case]["tokens"], tokens_of(alone), HELD)
        assert world[rank][case]["steps"] > 0
        assert world[rank][case]["epoch"] == (3 if "regroup" in case else 0)
    if case == "DP4 moves/qwen3":
        assert sum(world[rank][case]["moved"] for rank in range(4)) > 0, "no KV was moved"


def test_between_hosts_kv_moves_too(checkpoints: Path) -> None:
    alone = LLM(checkpoints / "qwen3", **OPTIONS).generate(PROMPTS, HELD_PARAMS)
    world = run_world(roll_out_on_two_hosts, 4, str(checkpoints), TWO_HOSTS)
    for case in TWO_HOSTS:
        for rank in range(4):
            check_tokens(world[rank][case]["tokens"], tokens_of(alone), HELD)
    assert sum(world[rank]["DP4 moves/qwen3"]["moved"] for rank in range(4)) > 0, "no KV came from the other host"


def fail_on_rank_0(directory: str, host_size: int) -> list[str]:
    """What this rank raises when rank 0's `on_finished` does, where `host_size` neighbouring ranks share memory; and
    when it is then asked for more."""
    groups_module._host = lambda: f"host {int(os.environ['RANK']) // host_size}"
    groups = join()
    llm = LLM(f"{directory}/qwen3", world=groups, tensor_parallel_size=2, schedule=OnDemand(), **OPTIONS)

    def fail(_: Any) -> None:
        raise ValueError("no room for the journal")

    told = [error_of(lambda: llm.generate(PROMPTS, PARAMS, on_finished=fail)) for _ in range(2)]
    llm.close()
    return told


@pytest.mark.parametrize("host_size", [4, 2])
def test_every_rank_is_told_why_the_coordinator_has_failed(checkpoints: Path, host_size: int) -> None:
    """Followers too, which only hear their leader, by shared memory or gloo: they would wait until they time out."""
    (first, again), *others = run_world(fail_on_rank_0, 4, str(checkpoints), host_size)
    assert first == "ValueError: no room for the journal"
    assert again == "RuntimeError: LLM: a rollout has failed, which ended the ranks' connections; make a new one"
    for rank, (told, refused) in enumerate(others, start=1):
        assert told.startswith("ConnectionError") and "ValueError: no room for the journal" in told, rank
        assert again.removeprefix("RuntimeError: ") in refused, rank


def roll_out_again_and_again(directory: str) -> list[dict[str, Any]]:
    """What this process holds after 10 and after 60 coordinated rollouts."""
    groups = join()
    llm = LLM(f"{directory}/qwen3", world=groups, schedule=OnDemand(), layout_policy=Flip(), **OPTIONS)
    held = []
    for iteration in range(60):
        llm.generate(PROMPTS[:4], SamplingParams(max_tokens=6))
        llm.update_weights(
            ((name, w.clone()) for name, w in checkpoint_tensors(llm._placement.source)), version=iteration + 1
        )
        if iteration in (9, 59):
            status = Path("/proc/self/status").read_text()
            kv_threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]
            held.append(
                {
                    "files": len(os.listdir("/proc/self/fd")),
                    "maps": Path("/proc/self/maps").read_text().count("/dev/shm"),
                    "threads": int(status.split("Threads:")[1].split()[0]) - len(kv_threads),
                    "kv_threads": kv_threads,
                    "segments": len(list(Path("/dev/shm").glob(f"curtail-*{os.getpid()}-*"))),
                    "kib": int(status.split("VmRSS:")[1].split()[0]),
                    "epoch": llm.layout.epoch,
                }
            )
    llm.close()
    return held


def test_fifty_rollouts_leave_nothing_behind(checkpoints: Path) -> None:
    for before, after in run_world(roll_out_again_and_again, 2, str(checkpoints)):
        assert after["epoch"] > before["epoch"], "the layout was to change under way"
        assert after["kib"] - before["kib"] < 8 * 1024
        for name in ("files", "maps", "threads", "segments"):
            assert after[name] <= before[name], name
        kinds = [name.partition("_")[0] for name in after["kv_threads"]]  # they start when they are first needed
        assert set(kinds) <= {"kv-reading", "kv-writing"} and len(set(kinds)) == len(kinds)


class Once:
    """A layout policy that gives what `make` returns, once, when two sequences of a rollout are delivered."""

    def __init__(self, make: Any) -> None:
        self._make: Any = make

    def decide(self, view: Any) -> Any:
        if self._make is None or view.num_delivered < 2:
            return None
        make, self._make = self._make, None
        return LayoutChange(layout=make(view.layout.epoch + 1))


def bad_layouts() -> dict[str, Any]:
    def of(*groups: tuple[int, ...]) -> Any:
        return lambda epoch: Layout(
            epoch=epoch, replicas=tuple(ReplicaSpec(id=9 + index, ranks=ranks) for index, ranks in enumerate(groups))
        )

    return {
        "idle": of((0,), (1,)),
        "none": of(),
        "reordered": of((1, 0), (2,)),
        "not made": of((1, 2), (0,)),
        "elsewhere": of((0,), (1,), (2,), (3,)),
        "cannot be cut": of((0, 1, 2)),
        "epoch": lambda epoch: nested_layout(range(3), 1, epoch=epoch + 5),
    }


BAD_LAYOUTS = {
    "idle": "layout: places ranks [0, 1]; give each of the 3 ranks a replica",
    "none": "layout: places ranks []; give each of the 3 ranks a replica",
    "reordered": "layout: replica 9 has ranks (1, 0), and no such group was made at start",
    "not made": "layout: replica 9 has ranks (1, 2), and no such group was made at start",
    "elsewhere": "has a rank outside the world",
    "cannot be cut": "tensor_parallel_size=3: does not divide the model's num_heads=4",
    "epoch": "Layout.epoch=6: the next is 1",
}


def give_bad_layouts(directory: str) -> dict[str, Any]:
    two = Layout(epoch=1, replicas=(ReplicaSpec(id=5, ranks=(0, 1)), ReplicaSpec(id=2, ranks=(2,))))
    groups = join([nested_layout(range(3), 1), two, (0, 1, 2)])
    results: dict[str, Any] = {}
    for name, make in bad_layouts().items():
        llm = LLM(
            f"{directory}/qwen3", world=groups, schedule=OnDemand(), layout_policy=Once(make), **OPTIONS
        )  # fmt: skip
        error = error_of(lambda llm=llm: llm.generate(PROMPTS, PARAMS))
        out = llm.generate(PROMPTS, PARAMS, prompt_uids=range(len(PROMPTS)))
        results[name] = {"error": error, "tokens": [[c.token_ids for c in o.outputs] for o in out]}
        llm.close()
    llm = LLM(f"{directory}/qwen3", world=groups, schedule=OnDemand(), **OPTIONS)
    makers = list(bad_layouts().values())

    def post(_: Any) -> None:
        if makers:
            llm.rollout.coordinator.post(RequestRegroup(layout=makers.pop(0)(1)))

    out = llm.generate(PROMPTS, PARAMS, on_finished=post)
    results["posted"] = {
        "refused": llm.rollout.coordinator.refused if groups.world.rank == 0 else [],
        "tokens": [[c.token_ids for c in o.outputs] for o in out],
        "epoch": llm.layout.epoch,
    }
    llm.close()
    llm = LLM(f"{directory}/qwen3", world=groups, schedule=OnDemand(), layout_policy=Once(lambda _: two), **OPTIONS)
    llm.generate(PROMPTS, PARAMS)
    results["layout"] = str(llm.layout.replicas)
    llm.close()
    return results


def test_layouts_that_cannot_be_had_are_refused_before_anyone_regroups(checkpoints: Path) -> None:
    alone = LLM(checkpoints / "qwen3", **OPTIONS).generate(PROMPTS, PARAMS)
    tokens = [[c.token_ids for c in o.outputs] for o in alone]
    world = run_world(give_bad_layouts, 3, str(checkpoints))
    for result in world:
        for name, message in BAD_LAYOUTS.items():
            told = f"ValueError: layout_policy Once of {__file__}: decide gave a layout that cannot be had: "
            assert result[name]["error"].startswith(told)
            assert message in result[name]["error"]
            assert result[name]["tokens"] == tokens, "the next rollout is sound"
        assert result["posted"]["tokens"] == tokens
        assert result["posted"]["epoch"] == 0
        assert "ranks=(0, 1)" in result["layout"], "rank 2, which the regroup left alone, knows of it too"
        assert result["layout"] == world[0]["layout"]
    for refused, message in zip(world[0]["posted"]["refused"], BAD_LAYOUTS.values(), strict=True):
        assert message in refused


def roll_out_from_tp2_to_tp1(directory: str) -> dict[str, Any]:
    groups = join()
    policy = Once(lambda epoch: nested_layout(range(2), 1, epoch=epoch))
    options = {**OPTIONS, "kv_cache_bytes": 64 * 2 * 2 * 2 * 16 * 8}
    llm = LLM(
        f"{directory}/qwen3", world=groups, tensor_parallel_size=2, schedule=OnDemand(), layout_policy=policy, **options
    )
    params = SamplingParams(max_tokens=30)

    def refuse() -> str:
        return error_of(lambda: llm.generate([[6] * 60], params))

    sizes, errors = [llm._engine.num_kv_tokens], [refuse()]
    out = llm.generate(PROMPTS, params, prompt_uids=range(len(PROMPTS)))
    sizes.append(llm._engine.num_kv_tokens)
    errors.append(refuse())
    llm.close()
    return {"sizes": sizes, "errors": errors, "tokens": [[c.token_ids for c in o.outputs] for o in out]}


def test_what_is_taken_does_not_depend_on_the_layout_of_the_moment(checkpoints: Path) -> None:
    alone = LLM(checkpoints / "qwen3", **OPTIONS)
    out = alone.generate(PROMPTS, SamplingParams(max_tokens=30), prompt_uids=range(len(PROMPTS)))
    for result in run_world(roll_out_from_tp2_to_tp1, 2, str(checkpoints)):
        assert result["sizes"] == [128, 64], "the layout was to change, and its capacity"
        for error in result["errors"]:
            told = "ValueError: prompts[0]: 60 tokens with max_tokens=30 can reach 90 tokens, the KV cache holds 64"
            assert told in error
        assert result["tokens"] == [[c.token_ids for c in o.outputs] for o in out]


def fail_in_a_world_of_its_own(directory: str) -> dict[str, Any]:
    options = {"tensor_parallel_size": 2, **OPTIONS}
    llm = LLM(f"{directory}/qwen3", **options)
    during = shared_files()
    llm.close()
    after = shared_files()
    with pytest.raises(ValueError, match="one block of 16 tokens takes") as error:  # kept, and with it all its frames
        LLM(f"{directory}/qwen3", **options | {"kv_cache_bytes": 8})
    assert error.value.__traceback__ is not None
    return {"files": [during, after, shared_files()]}


def test_a_constructor_that_fails_gives_back_the_groups_that_it_has_made(checkpoints: Path) -> None:
    for result in run_world(fail_in_a_world_of_its_own, 2, str(checkpoints)):
        during, after, after_failure = result["files"]
        assert during > 0, "there was to be shared memory"
        assert [after, after_failure] == [0, 0]


def update_badly(directory: str) -> dict[str, list[str]]:
    groups = join()
    name = "model.layers.0.self_attn.q_proj.weight"

    def stream(shape: tuple[int, ...] | None = None, *, breaks: bool = False, unknown: bool = False) -> Any:
        for key, tensor in checkpoint_tensors(f"{directory}/qwen3"):
            if key == name and breaks:
                raise OSError("the disk is gone")
            if key == name and unknown:
                yield "model.nothing", tensor
            yield key, torch.full(shape, 7.0) if key == name and shape else tensor

    last = groups.world.rank == 1
    results = {}
    for kind, policy in (("kept", Once(None)), ("not kept", None)):
        llm = LLM(f"{directory}/qwen3", world=groups, schedule=OnDemand(), layout_policy=policy, **OPTIONS)
        good = llm.checksum()
        errors = []
        for weights in (
            stream((7, 9)), stream((1,)), stream(unknown=True), stream(breaks=last), stream((7, 9) if last else None),
        ):  # fmt: skip
            errors.append(error_of(lambda llm=llm, weights=weights: llm.update_weights(weights, version=1)))
            errors.append(error_of(lambda llm=llm: llm.generate([[5]])))
        errors.append(str(llm.update_weights(stream(), version=1) == good))
        errors.append(error_of(lambda llm=llm: llm.generate([[5]])))
        results[kind] = errors
        llm.close()
    return results


def test_an_update_that_fails_anywhere_fails_everywhere(checkpoints: Path) -> None:
    first, second = run_world(update_badly, 2, str(checkpoints))
    for rank, results in enumerate((first, second)):
        for kind, errors in results.items():
            assert "ValueError: weights: 'model.layers.0.self_attn.q_proj.weight' has shape [7, 9]" in errors[0]
            assert "ValueError: weights: 'model.layers.0.self_attn.q_proj.weight' has shape [1]," in errors[2]
            assert "ValueError: weights: 'model.nothing' is no parameter" in errors[4]
            broken, misshapen = "OSError: the disk is gone", "ValueError: weights: 'model.layers.0.self_attn.q_proj"
            if rank == 0:
                prefix = "RuntimeError: update_weights: failed on ranks [1]; on rank 1: "
                broken, misshapen = prefix + broken, prefix + misshapen
            assert errors[6] == broken
            assert errors[8].startswith(misshapen)
            for error in errors[1:10:2]:
                assert "no weights; call update_weights() first" in error
            assert errors[10:] == ["True", ""], kind
