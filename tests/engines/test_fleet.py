"""Replicas outside a torchrun world: how they come, what they do, and how each way to lose one is told."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engines import LLM, SamplingParams
from engines.config import EngineConfig
from engines.control import messages
from engines.control.sealing import new_token
from engines.control.transport import Server
from engines.coordination.core import RolloutCore
from engines.coordination.policies import OnDemand
from engines.coordination.requests import RequestAbort, RequestMove, SubmitSequences
from engines.coordination.views import Dispatch, ScheduleView
from engines.fleet import fleet as fleet_module
from engines.fleet import launcher as launcher_module
from engines.fleet.fleet import Fleet
from engines.fleet.launcher import ReplicaLauncher, ReplicaOrders
from engines.fleet.outside import FAILED, ORPHANED, make_engine
from engines.models.loader import checkpoint_tensors
from engines.parallel.layout import Layout, ReplicaSpec
from engines.replica.replica import StepOutput
from engines.rollout import coordinator as coordinator_module
from engines.rollout.coordinator import Coordinator, Exit
from engines.rollout.pace import ShortestStep
from engines.rollout.worker import NO_WEIGHTS, Worker
from engines.rollout.worker_core import REPORT_EVERY_S, WorkerCore
from engines.sequence import Completion, Finished, SequenceState, Work
from research.simulator.datasheets import H100, LLAMA_8B
from research.simulator.pace import ProfilePace
from tests.checkpoints import save_checkpoint
from tests.faults.leftovers import all_held, assert_nothing_left, is_alive
from tests.holding import LastWaits
from tests.pairs import QueueClient, queue_pair
from tests.proc import open_files
from tests.states import make_state
from tests.worlds import ROOT

pytestmark = pytest.mark.usefixtures("forked_replicas")

RNG = random.Random(5)
PROMPTS = [[RNG.randrange(2, 131) for _ in range(RNG.randint(1, 20))] for _ in range(8)]
PARAMS = SamplingParams(max_tokens=30)
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**20, "max_num_seqs": 4}


def states(version: int) -> list[SequenceState]:
    return [make_state(uid, prompt, PARAMS, version=version) for uid, prompt in enumerate(PROMPTS)]


def tokens_of(finished: list[Finished]) -> list[list[int]]:
    """In the order of the prompts, each once."""
    assert len(finished) == len(PROMPTS)
    return [one.completion.token_ids for one in sorted(finished, key=lambda one: one.state.key.prompt_uid)]


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def lose_patience_with_the_last(fleet: Fleet) -> None:
    """Once the last replica is lost, the fleet waits for another one for a second. Until then it has its own patience:
    a slow replica is not lost."""
    core = fleet.coordinator.core
    lose = core._attendance.lose

    def lose_one(*arguments: Any) -> None:
        if len(core._books.replicas) == 1:
            core._outbox.timeout_s = 1.0
        lose(*arguments)

    core._attendance.lose = lose_one  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def retrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for the shapes of `qwen3`."""
    directory = tmp_path_factory.mktemp("retrained")
    save_checkpoint(directory, "qwen3", seed=1)
    return directory


@pytest.fixture(scope="module")
def alone(qwen3: str, retrained: Path) -> dict[int, list[list[int]]]:
    """What one process makes of the prompts, by policy version."""
    llm = LLM(qwen3, **OPTIONS)
    tokens = {}
    for version, folder in enumerate([Path(qwen3), retrained]):
        llm.update_weights(checkpoint_tensors(folder), version)
        outputs = llm.generate(PROMPTS, PARAMS, prompt_uids=range(len(PROMPTS)))
        tokens[version] = [output.outputs[0].token_ids for output in outputs]
    return tokens


def test_phases_deaths_and_a_newcomer(qwen3: str, retrained: Path, alone: dict[int, list[list[int]]]) -> None:
    policy = LastWaits(len(PROMPTS) - 1)
    with Fleet(
        qwen3, num_replicas=2, schedule_policy=policy, pace=ShortestStep(step_s=0.05), patience_s=5.0, **OPTIONS
    ) as fleet:
        fleet.wait_for_replicas(2)
        pids = set(fleet.launcher.pids().values())
        assert all(map(is_alive, pids))
        assert tokens_of(fleet.roll_out(states(0))) == alone[0]

        published = fleet.publish(checkpoint_tensors(retrained), version=1)
        killed = []

        def kill_one(_: Finished) -> None:
            if not killed:
                killed.append(min(fleet.coordinator.standing_by))
                os.kill(fleet.launcher.pids()[killed[0]], signal.SIGKILL)

        policy.happened = lambda view: len(view.replicas) < 2
        assert tokens_of(fleet.roll_out(states(1), policy_version=1, on_finished=kill_one)) == alone[1]
        policy.happened = lambda view: True
        (lost,) = fleet.coordinator.lost
        assert lost.startswith(f"replica {killed[0]} (rank {killed[0]}): its process was killed by SIGKILL")

        assert fleet.launch().id == 2
        fleet.wait_for_replicas(2)
        assert tokens_of(fleet.roll_out(states(1), policy_version=1)) == alone[1]
        pids |= set(fleet.launcher.pids().values())
        assert published.is_dir() and published.name == "version-1"
    assert_nothing_left(pids, [published.parent])


def test_all_are_lost_and_one_comes(qwen3: str, alone: dict[int, list[list[int]]]) -> None:
    with Fleet(qwen3, num_replicas=1, pace=ShortestStep(step_s=0.05), **OPTIONS) as fleet:
        fleet.wait_for_replicas(1)

        def replace(_: Finished) -> None:
            if not fleet.coordinator.lost and len(fleet.launcher.pids()) == 1:
                os.kill(fleet.launcher.pids()[0], signal.SIGKILL)
                fleet.launch()

        assert tokens_of(fleet.roll_out(states(0), on_finished=replace)) == alone[0]
        assert len(fleet.coordinator.lost) == 1


def test_all_are_lost_and_none_comes(qwen3: str) -> None:
    with Fleet(qwen3, num_replicas=2, pace=ShortestStep(step_s=0.2), timeout_s=15.0, **OPTIONS) as fleet:
        fleet.wait_for_replicas(2)
        lose_patience_with_the_last(fleet)

        def kill_all() -> None:
            for pid in fleet.launcher.pids().values():
                os.kill(pid, signal.SIGKILL)

        # In the second or third of many steps: what is to be lost cannot have ended before.
        killer = threading.Timer(0.5, kill_all)
        killer.start()
        with pytest.raises(RuntimeError, match="waited for to add a replica, as none is left") as error:
            fleet.roll_out(states(0))
        killer.join()
        for replica_id in range(2):
            assert f"lost before: replica {replica_id} (rank {replica_id}): its process was killed" in str(error.value)


def test_replicas_keep_the_pace(qwen3: str, alone: dict[int, list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence at a time: each token that a replica reports has taken a step of at least the profile's seconds."""
    reports: list[messages.StepReported] = []

    class Recording(RolloutCore):
        def on_event(self, event: Any, now: float) -> Any:
            reports.extend([event] if isinstance(event, messages.StepReported) else [])
            return super().on_event(event, now)

    monkeypatch.setattr(fleet_module, "RolloutCore", Recording)
    pace = ProfilePace(device=H100, shape=LLAMA_8B, scale=2.0)
    shortest_s = pace.step(ReplicaSpec(id=0, ranks=(0,)), StepOutput(num_running=1, num_tokens=1, num_context_tokens=1))
    with Fleet(qwen3, num_replicas=2, pace=pace, **OPTIONS | {"max_num_seqs": 1}) as fleet:
        assert tokens_of(fleet.roll_out(states(0))) == alone[0]
    tokens = [sum(count for _, count in one.progress) for one in reports]
    assert sum(tokens) > 20
    for one, num_tokens in zip(reports, tokens, strict=True):
        assert one.seconds >= 0.999 * num_tokens * shortest_s


SMALL = OPTIONS | {"kv_cache_bytes": 2**16}
"""Room for 64 tokens."""


def changed(state: SequenceState, **fields: Any) -> SequenceState:
    return dataclasses.replace(state, **fields)


def test_bad_sequences_are_refused_before_the_phase(qwen3: str, alone: dict[int, list[list[int]]]) -> None:
    good = states(0)
    bad = {
        "states: sequence (0, 0, 0) comes more than once": [*good, good[0]],
        "states[1]: prompt: has no tokens": [good[0], changed(good[1], tokens=[], num_prompt_tokens=0)],
        "prompt: token id 999 is outside the model's vocabulary": [changed(good[0], tokens=[999], num_prompt_tokens=1)],
        "leave no room in max_model_len=100": [changed(good[0], tokens=[5] * 200, num_prompt_tokens=200)],
        "can reach 90 tokens, the KV cache holds 64": [changed(good[0], tokens=[5] * 60, num_prompt_tokens=60)],
        "sequence (0, 0, 0): is finished": [changed(good[0], tokens=[5] * 31, num_prompt_tokens=1)],
        "stop=('a',): strings need a tokenizer": [changed(good[0], params=SamplingParams(stop=("a",)))],
        "use Python's own numbers": [changed(good[0], tokens=[5.5], num_prompt_tokens=1)],
    }
    with Fleet(qwen3, num_replicas=1, max_model_len=100, **SMALL) as fleet:
        fleet.wait_for_replicas(1)
        for message, some in bad.items():
            with pytest.raises(ValueError, match=re.escape(message)):
                fleet.roll_out(some)
        with pytest.raises(ValueError, match="policy_version=-1: must be an integer of at least 0"):
            fleet.roll_out(good, policy_version=NO_WEIGHTS)
        with pytest.raises(ValueError, match="version=-1: must be"):
            fleet.publish([], version=-1)
        too_long = bad["can reach 90 tokens, the KV cache holds 64"]
        with pytest.raises(ValueError, match="can reach 90 tokens"):
            fleet.roll_out(good, on_finished=lambda _: fleet.coordinator.post(SubmitSequences(states=tuple(too_long))))
        assert tokens_of(fleet.roll_out(good)) == alone[0]
        assert fleet.coordinator.lost == []


class Faulty(OnDemand):
    """Makes an invalid dispatch when told to."""

    is_wrong = False

    def next(self, view: ScheduleView) -> Dispatch | None:
        if self.is_wrong and view.waiting:
            return Dispatch(sequence_id=(9, 9, 9), replica_id=0)
        return super().next(view)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT interrupts, also where a shell has started the tests in the background, which ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_after_an_error_the_next_rollout_works(qwen3: str, alone: dict[int, list[list[int]]]) -> None:
    policy = Faulty()
    held = []
    with Fleet(
        qwen3, num_replicas=2, schedule_policy=policy, pace=ShortestStep(step_s=0.02), **(OPTIONS | {"max_num_seqs": 2})
    ) as fleet:
        fleet.wait_for_replicas(2)
        pids = set(fleet.launcher.pids().values())

        def fail(one: Finished) -> None:
            fleet.coordinator.post(SubmitSequences(states=tuple(states(7))))
            raise ZeroDivisionError(f"after {one.state.sequence_id}")

        def interrupt(_: Finished) -> None:
            fleet.coordinator.post(RequestMove(sequence_id=states(0)[-1].sequence_id, replica_id=0))
            signal.raise_signal(signal.SIGINT)

        def mislead(_: Finished) -> None:
            policy.is_wrong = True

        def nest(_: Finished) -> None:
            fleet.roll_out(states(3))

        for hear, error, message in (
            (fail, ZeroDivisionError, "after"),
            (interrupt, KeyboardInterrupt, None),
            (mislead, RuntimeError, r"Dispatch\(sequence_id=\(9, 9, 9\)"),
            (nest, RuntimeError, "a rollout is running"),
        ):
            with pytest.raises(error, match=message):
                fleet.roll_out(states(0), on_finished=hear)
            policy.is_wrong = False
            core = fleet.coordinator.core
            assert core.phase is None and core.num_unfinished == 0
            core.check_integrity()
            assert tokens_of(fleet.roll_out(states(0))) == alone[0]
            held.append(all_held())
        abandoned = [one for one in fleet.coordinator.refused if one.endswith(": its rollout was abandoned")]
        assert [one.split(":")[0] for one in abandoned] == ["SubmitSequences", "RequestMove"]
        assert set(fleet.launcher.pids().values()) == pids and fleet.coordinator.lost == []
        wait_until(lambda: not all_held() - held[0], 60, "threads and open files of the later rollouts are gone")
    assert_nothing_left(pids)


class NoDataclass:
    """A pace without fields that could be sent."""

    def step(self, *_: object) -> float:
        return 0.0

    transfer = switch = step


def local_pace() -> ShortestStep:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Local(ShortestStep):
        pass

    return Local(step_s=1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_replicas": -1}, r"Fleet.num_replicas=-1: must be an integer of at least 0"),
        ({"block_size": 0}, r"EngineConfig.block_size=0"),
        ({"nonsense": 1}, r"Fleet: unknown option \(.*'nonsense'\); there are dtype, block_size"),
        ({"kv_cache_bytes": 8}, r"EngineConfig.kv_cache_bytes=8: one block"),
        ({"max_model_len": 10**6}, r"EngineConfig.max_model_len=1000000: the model's context"),
        ({"patience_s": 0}, r"Fleet.patience_s=0: must be"),
        ({"timeout_s": -1.0}, r"Fleet.timeout_s=-1.0: must be"),
        ({"pace": local_pace()}, r"Fleet.pace=.*Local\(step_s=1.0\): other processes cannot make it"),
        ({"num_threads": 0}, r"Fleet.num_threads=0: must be"),
        ({"kv_store_bytes": -1}, r"Fleet.kv_store_bytes=-1: must be an integer of at least 0"),
        ({"kv_store_bytes": 2**70}, r"Fleet.kv_store_bytes=\d+: must be"),
        ({"log_folder": Path("/nowhere")}, r"Fleet.log_folder='/nowhere': is no folder"),
        ({"weights_folder": Path("/nowhere")}, r"Fleet.weights_folder='/nowhere': is no folder"),
        ({"device": "abacus"}, r"Fleet.device='abacus'"),
        ({"patience_s": True}, r"Fleet.patience_s=True: must be"),
        ({"timeout_s": "60"}, r"Fleet.timeout_s='60': must be"),
        ({"pace": NoDataclass()}, r"Fleet.pace=<.*>: other processes cannot make it; give a dataclass with"),
        ({"pace": 3}, r"Fleet.pace=3: give an object with the method `step`"),
        ({"log_folder": 5}, r"Fleet.log_folder=5: must be a path"),
        ({"weights_folder": Path("/proc")}, r"Fleet.weights_folder='/proc': cannot be written to"),
        ({"model": 5}, r"model=5: give the path"),
        ({"device": "meta"}, r"Fleet.device='meta': the engine runs on 'cpu' and 'cuda'; give one of them"),
        ({"schedule_policy": OnDemand}, r"schedule_policy=<class .*OnDemand'>: give an object with the method `next`"),
        ({"attention": "triton"}, r"EngineConfig.attention='triton': computes in float32, so dtype='float64'"),
        ({"attention": "flash_attn", "dtype": "bfloat16"}, r"EngineConfig.attention='flash_attn': takes blocks of"),
        (
            {"kv_disk_bytes": 2**20, "kv_disk_folder": "/nowhere"},
            r"EngineConfig.kv_disk_folder='/nowhere': cannot be used \(No such file",
        ),
    ],
)
def test_bad_arguments_leave_nothing(
    qwen3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = all_held()
    with pytest.raises(ValueError, match=message):
        Fleet(**{"model": qwen3, "num_replicas": 1, **OPTIONS, **arguments})
    assert list(tmp_path.iterdir()) == []
    assert not all_held() - before


def test_a_broken_tokenizer_is_told_by_the_parent(qwen3: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(qwen3, model)
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="AutoTokenizer cannot read it"):
        Fleet(model, num_replicas=1, **OPTIONS)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_launch_that_fails_leaves_nothing(qwen3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "subprocess", subprocess)  # so that what is left would be this process's child
    logs, weights = tmp_path / "logs", tmp_path / "weights"
    weights.mkdir()
    (logs / "replica-1.log").mkdir(parents=True)
    before = set(threading.enumerate())
    with pytest.raises(IsADirectoryError):
        Fleet(qwen3, num_replicas=2, weights_folder=weights, log_folder=str(logs), **OPTIONS)
    assert (logs / "replica-0.log").exists(), "the first was to be launched"
    assert list(weights.iterdir()) == []
    assert not set(threading.enumerate()) - before
    assert not [name for name in open_files().values() if str(logs) in name]
    every = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    assert not [pid for pid in every if is_alive(pid) and parent_of(pid) == os.getpid()]


def test_a_publish_that_fails_leaves_what_was_published(
    qwen3: str, retrained: Path, alone: dict[int, list[list[int]]]
) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(checkpoint_tensors(qwen3))[:2]
        raise OSError("no space left")

    with Fleet(qwen3, num_replicas=1, **OPTIONS) as fleet:
        first = fleet.publish(checkpoint_tensors(retrained), version=1)
        with pytest.raises(OSError, match="no space left"):
            fleet.publish(broken(), version=1)
        assert list(first.parent.iterdir()) == [first]
        fleet.wait_for_replicas(1)
        assert tokens_of(fleet.roll_out(states(1), policy_version=1)) == alone[1]
        second = fleet.publish(checkpoint_tensors(retrained), version=1)
        assert list(first.parent.iterdir()) == [second]


def test_weights_that_do_not_fit_are_not_published(qwen3: str, alone: dict[int, list[list[int]]]) -> None:
    whole = list(checkpoint_tensors(qwen3))
    with Fleet(qwen3, num_replicas=1, **OPTIONS) as fleet:
        for weights, words in (
            ([("nonsense", torch.zeros(3))], "'nonsense' is no parameter"),
            (whole[1:], "missing; the checkpoint is not complete"),
            ([(name, tensor[:1]) for name, tensor in whole], "config.json asks for"),
        ):
            with pytest.raises(ValueError, match=words):
                fleet.publish(weights, version=1)
        with pytest.raises(ValueError, match="policy_version=1: version 0 was published last"):
            fleet.roll_out(states(1), policy_version=1)
        fleet.wait_for_replicas(1)
        assert tokens_of(fleet.roll_out(states(0))) == alone[0]


def test_what_was_published_last_is_rolled_out(qwen3: str, retrained: Path, alone: dict[int, list[list[int]]]) -> None:
    with Fleet(qwen3, num_replicas=1, **OPTIONS) as fleet:
        fleet.wait_for_replicas(1)
        fleet.publish(checkpoint_tensors(retrained), version=1)
        out = fleet.roll_out(states(1))
        assert tokens_of(out) == alone[1]
        assert {version for one in out for version in one.completion.versions} == {1}


def test_weights_of_a_killed_fleet_are_removed_by_the_next(qwen3: str, tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from engines.models.loader import checkpoint_tensors
from engines.fleet.fleet import Fleet
fleet = Fleet({qwen3!r}, num_replicas=0, weights_folder=Path({str(tmp_path)!r}))
fleet.publish(checkpoint_tensors({qwen3!r}), version=1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with Fleet(qwen3, num_replicas=0, weights_folder=tmp_path) as living:
        with Fleet(qwen3, num_replicas=0, weights_folder=tmp_path):
            assert not left.exists() and len(list(tmp_path.iterdir())) == 2
        assert len(list(tmp_path.iterdir())) == 1 and living.num_ready == 0


def test_a_rollout_keeps_the_weights_that_it_began_with(
    qwen3: str, retrained: Path, alone: dict[int, list[list[int]]]
) -> None:
    """What is published under way is for the next one, though it names the same version."""
    with Fleet(qwen3, num_replicas=1, pace=ShortestStep(step_s=0.1), **OPTIONS) as fleet:
        fleet.wait_for_replicas(1)
        first = fleet.publish(checkpoint_tensors(retrained), version=1)
        published = []

        def publish(_: Finished) -> None:
            if not published:
                published.append(fleet.publish(checkpoint_tensors(qwen3), version=1))
                os.kill(fleet.launcher.pids()[0], signal.SIGKILL)
                fleet.launch()

        assert tokens_of(fleet.roll_out(states(1), policy_version=1, on_finished=publish)) == alone[1]
        assert len(fleet.coordinator.lost) == 1, "the newcomer was to find its weights"
        assert list(first.parent.iterdir()) == published


def test_bad_weights_are_told(qwen3: str, tmp_path: Path) -> None:
    """A truncated file: the replica says so, and ends. If its end is seen before its message, its log is quoted."""
    data = (Path(qwen3) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with Fleet(qwen3, num_replicas=1, timeout_s=15.0, **OPTIONS) as fleet:
        fleet.wait_for_replicas(1)
        lose_patience_with_the_last(fleet)
        log = r"its process ended with code 1; its last output:\n(.*\n)*"
        words = rf"replica 0 \(rank 0\): ({log})?ValueError: .*not a whole safetensors file"
        with pytest.raises(RuntimeError, match=words):
            fleet.roll_out(states(0), weights_source=tmp_path)


def test_no_memory_is_told(qwen3: str) -> None:
    """By the fleet, of its replicas together; by a replica, of what is free when it is made."""
    with pytest.raises(ValueError, match=r"the 3 ranks of this host need 3\d{9} MiB, one of them 1\d{9} MiB"):
        Fleet(qwen3, num_replicas=3, **OPTIONS | {"kv_cache_bytes": 2**50})
    with Fleet(qwen3, num_replicas=0, **OPTIONS) as fleet:
        too_large = EngineConfig(**OPTIONS | {"kv_cache_bytes": 2**50})
        fleet.launcher._orders = msgspec.structs.replace(fleet.launcher._orders, config=too_large)
        fleet.launch()
        with pytest.raises(RuntimeError, match=r"0 replicas stand by.*1 wanted") as error:
            fleet.wait_for_replicas(1)
        assert "ValueError: EngineConfig: the engine needs" in str(error.value)


@contextlib.contextmanager
def launching(model: str, log_folder: Path | None = None, **orders: Any) -> Iterator[tuple[Server, ReplicaLauncher]]:
    server = Server(token := new_token())
    launcher = ReplicaLauncher(make_orders(model, address=server.address, token=token, **orders), log_folder=log_folder)
    try:
        yield server, launcher
    finally:
        launcher.close()
        server.close()


def exit_of(launcher: ReplicaLauncher, seconds: float = 10) -> Exit:
    exits: list[Exit] = []
    wait_until(lambda: bool(exits.extend(launcher.poll()) or exits), seconds, "a replica ends")
    (one,) = exits
    return one


def make_orders(model: str, **fields: Any) -> ReplicaOrders:
    rest = {"address": "", "token": b"", "kv_token": "a" * 16, "kv_store_bytes": 2**20}
    return ReplicaOrders(model=model, config=EngineConfig(**OPTIONS), **rest | fields)


def wait_for_ready(server: Server) -> messages.ReplicaReady:
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        notice = server.receive(0.1)
        if hasattr(notice, "payload"):
            event = messages.decode_event(notice.payload)
            assert isinstance(event, messages.ReplicaReady)
            return event
    raise AssertionError("no replica was ready within 30 s")


def test_launcher(qwen3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As users start it: its command line and environment are read."""
    monkeypatch.setattr(launcher_module, "subprocess", subprocess)
    with launching(qwen3, tmp_path, spec=ReplicaSpec(id=4, ranks=(4,))) as (server, launcher):
        assert launcher.launch() == ReplicaSpec(id=4, ranks=(4,))
        pid = launcher.pids()[4]
        ready = wait_for_ready(server)
        assert (ready.replica_id, ready.rank, ready.policy_version) == (4, 4, NO_WEIGHTS)
        readable = [Path(f"/proc/{pid}/{file}").read_text() for file in ("cmdline", "environ")]
        assert "engines.fleet.outside" in readable[0] and "OMP_NUM_THREADS=1" in readable[1]
        token = launcher._orders.token
        for written in (token.hex(), b64encode(token).decode()):  # a reward's code, too, may read both files
            assert all(written not in text for text in readable)
        assert os.getsid(pid) == pid
        assert launcher.poll() == []
        launcher.kill(4)
        one = exit_of(launcher)
        assert (one.replica_id, one.code) == (4, -signal.SIGKILL)
        assert launcher.poll() == [] and launcher.pids() == {}
        launcher.kill(4)  # gone already
        assert launcher.launch().id == 5, "an id came again"
        pid = launcher.pids()[5]
    assert not is_alive(pid)
    assert (tmp_path / "replica-5.log").exists()
    launcher.close()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_replicas_die_with_their_launcher(qwen3: str, tmp_path: Path, is_stopped: bool) -> None:
    """Though it is killed with -9; a stopped replica, too, which cannot see to that itself."""
    script = f"""
import time
from engines.fleet.fleet import Fleet
fleet = Fleet({qwen3!r}, num_replicas=1, weights_folder={str(tmp_path)!r}, **{OPTIONS!r})
fleet.wait_for_replicas(1)
print(fleet.launcher.pids()[0], flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_alive(pid), 10, "the replica dies with its launcher")


def test_a_replica_ends_when_its_coordinator_is_gone(qwen3: str) -> None:
    with launching(qwen3, interval_s=0.2, patience_s=2.0) as (server, launcher):
        launcher.launch()
        wait_for_ready(server)
        server.close()
        one = exit_of(launcher)
        assert one.code == ORPHANED and "the coordinator has closed" in one.log_tail


def test_a_broken_checkpoint_s_last_words(tmp_path: Path) -> None:
    with launching(str(tmp_path)) as (server, launcher):
        launcher.launch()
        one = exit_of(launcher, 30)
        assert one.code == FAILED and "no config.json there" in str(one)
        words = [notice.payload for _ in range(9) if hasattr(notice := server.receive(0.2), "payload")]
        lost = messages.decode_event(words[0])
        assert isinstance(lost, messages.ReplicaLost) and "no config.json there" in lost.reason


# --- The worker's loop, in this process


def address(seq: int, phase: int = 0) -> dict[str, int]:
    return {"replica_id": 0, "rank": 0, "phase": phase, "epoch": 0, "seq": seq}


def make_worker(model: str, client: QueueClient, *, is_outside: bool) -> Worker:
    orders = make_orders(model, kv_store_bytes=0)
    engine = make_engine(orders)

    def load_from(source: str, version: int) -> int:
        engine.load(checkpoint_tensors(source), version)
        return engine.checksum()

    return Worker(
        rank=0, client=client, layout=Layout(epoch=0, replicas=(orders.spec,)), engine=engine,
        regroup=lambda *_: None, load_from=load_from if is_outside else None,
    )  # fmt: skip


def events_at(server: Any) -> list[messages.Event]:
    events = []
    while (notice := server.receive(0.0)) is not None:
        if hasattr(notice, "payload"):
            events.append(messages.decode_event(notice.payload))
    return events


def test_a_repeated_command_is_obeyed_once(qwen3: str, alone: dict[int, list[list[int]]]) -> None:
    torch.set_num_threads(1)
    server, client = queue_pair()
    worker = make_worker(qwen3, client, is_outside=True)
    events_at(server)
    commands: list[messages.Command] = [
        messages.LoadWeights(**address(0), version=0, source=qwen3),
        messages.SubmitWork(**address(1), works=tuple(Work(state=state) for state in states(0))),
        messages.EndPhase(**address(2)),
        messages.Shutdown(**address(3)),
    ]
    for command in commands[:2] * 2:
        server.send("rank-0", messages.encode(command))
    stopper = threading.Thread(target=_end_when_done, args=(server, commands, seen := []), daemon=True)
    stopper.start()
    worker.run()
    assert not worker.is_shut_down
    worker.run()
    assert worker.is_shut_down
    stopper.join(10)
    seen += events_at(server)
    kinds = [type(event).__name__ for event in seen]
    assert kinds.count("WeightsLoaded") == kinds.count("PhaseEnded") == 1 and "WorkRejected" not in kinds
    finished = [one for event in seen if isinstance(event, messages.SequencesFinished) for one in event.finished]
    assert tokens_of(finished) == alone[0]
    assert [event.seq for event in seen] == list(range(1, len(seen) + 1))


def _end_when_done(server: Any, commands: list[messages.Command], seen: list[messages.Event]) -> None:
    deadline = time.monotonic() + 30
    while sum(len(e.finished) for e in seen if isinstance(e, messages.SequencesFinished)) < len(PROMPTS):
        if time.monotonic() > deadline:
            break
        seen += events_at(server)
        time.sleep(0.01)
    for command in (commands[2], commands[1], commands[2], commands[3]):
        server.send("rank-0", messages.encode(command))


def test_a_worker_s_rules_need_no_clock(qwen3: str) -> None:
    replica, core = LLM(qwen3, **OPTIONS).replica, WorkerCore(rank=3)
    core.take_place(epoch=2, replica_id=7, replica=replica, now=10.0)
    assert core.obey(messages.SubmitWork(**address(0, 5), works=(Work(state=states(0)[0]),)), 0.0) == []
    assert core.on_step(replica.step(), 0.25, now=10.01) == []
    (report,) = core.on_step(replica.step(), 0.5, now=10.0 + REPORT_EVERY_S)
    assert (report.replica_id, report.rank, report.phase, report.epoch, report.seq) == (7, 3, 5, 2, 0)
    assert report.seconds == 0.75 and report.progress == (((0, 0, 0), 2),)
    (paused,) = core.obey(
        messages.PauseSequences(**address(8, 5), sequence_ids=((0, 0, 0), (0, 9, 0)), with_kv=False), 0.0
    )
    assert (paused.seq, paused.acks, len(paused.works)) == (1, 8, 1) and not core.has_work


@pytest.mark.parametrize(
    "command",
    [messages.LoadWeights(**address(0), version=1, source="x"), messages.Shutdown(**address(0))],
    ids=["LoadWeights", "Shutdown"],
)
def test_what_a_world_refuses(qwen3: str, command: messages.Command) -> None:
    server, client = queue_pair()
    worker = make_worker(qwen3, client, is_outside=False)
    events_at(server)
    server.send("rank-0", messages.encode(command))
    with pytest.raises(RuntimeError, match=f"rank 0: cannot {type(command).__name__} inside a torchrun world"):
        worker.run()


# --- The coordinator's loop, with a replica that is a script


class Script:
    """Answers as a replica does; `run` is a thread's. Without a `pause_s` it holds what it gets until it is aborted."""

    def __init__(self, client: QueueClient, pause_s: float | None = None) -> None:
        self.seen: list[messages.Command] = []
        self._client, self._pause_s, self._seq = client, pause_s, 0
        self._held: dict[Any, SequenceState] = {}
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def say(self, kind: Any, phase: int = 0, **fields: Any) -> None:
        self._client.send(messages.encode(kind(**address(self._seq, phase), **fields)))
        self._seq += 1

    def end(self, state: SequenceState, reason: Any) -> Finished:
        completion = Completion(index=0, token_ids=[2], logprobs=[0.0], versions=[0], finish_reason=reason)
        return Finished(state=state, completion=completion)

    def run(self) -> None:
        self.say(messages.ReplicaReady, -1, max_num_seqs=8, num_kv_tokens=1000, block_size=4, policy_version=0)
        while (data := self._client.receive(20.0)) is not None:  # None: the coordinator has ended the phase
            command = messages.decode_command(data)
            self.seen.append(command)
            if isinstance(command, messages.SubmitWork):
                self.submit([work.state for work in command.works])
            elif isinstance(command, messages.AbortSequences):
                ended = tuple(self.end(self._held.pop(id_), "abort") for id_ in command.sequence_ids)
                self.say(messages.SequencesAborted, acks=command.seq, finished=ended)
            elif isinstance(command, messages.EndPhase):
                self.say(messages.PhaseEnded, acks=command.seq)
                return

    def submit(self, states: list[SequenceState]) -> None:
        """Finishes one after the other, with pauses between them, or holds them."""
        for state in states:
            self._held[state.sequence_id] = state
            if self._pause_s is not None:
                time.sleep(self._pause_s if self._seq > 1 else 0.0)
                self.say(messages.SequencesFinished, finished=(self.end(state, "length"),))


def make_coordinator(timeout_s: float, policy: OnDemand | None = None) -> tuple[Coordinator, QueueClient]:
    server, client = queue_pair()
    layout = Layout(epoch=0, replicas=())
    core = RolloutCore(layout=layout, world_size=0, schedule_policy=policy or OnDemand(), timeout_s=timeout_s)
    coordinator = Coordinator(core, server, num_ranks=0, timeout_s=timeout_s, drop_kv=lambda _: None)
    coordinator.add_replica(ReplicaSpec(id=0, ranks=(0,)))
    return coordinator, client


def test_a_coordinator_that_was_busy_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "AWAY_S", 0.1)
    coordinator, client = make_coordinator(timeout_s=0.5)
    # Both are away together, as when a machine sleeps; without the caller the replica is silent for less than 0.5 s.
    Script(client, 1.2)
    slept, start = [], time.monotonic()

    def sleep_once(_: Finished) -> None:
        if not slept:
            slept.append(time.sleep(1.0))

    out = coordinator.roll_out(states(0)[:2], phase=0, policy_version=0, weights_source="x", on_finished=sleep_once)
    assert len(out) == 2 and coordinator.lost == []
    # The core's clock stood meanwhile; the timeline has the clock of the steps.
    (end,) = [mark.time for mark in coordinator.marks() if mark.name == "end_phase"]
    assert 1.15 < end - start < time.monotonic() - start


def test_a_silent_replica_is_given_up() -> None:
    coordinator, client = make_coordinator(timeout_s=0.5)
    Script(client, 1.0)
    with pytest.raises(RuntimeError, match=r"as none is left(.|\n)*replica 0 \(rank 0\): it has . sequences"):
        coordinator.roll_out(states(0), phase=0, policy_version=0, weights_source="x")
    with pytest.raises(RuntimeError, match="has failed before"):
        coordinator.roll_out(states(1), phase=1, policy_version=1, weights_source="x")


def test_a_policy_s_error_is_raised_though_a_request_was_posted() -> None:
    class Slow(OnDemand):
        """Holds back until two wait, then dispatches one and makes a mistake."""

        def next(self, view: ScheduleView) -> Dispatch | None:
            if len(view.waiting) > 2:
                return None
            return Dispatch(sequence_id=(0, 0 if len(view.waiting) == 2 else 9, 0), replica_id=0)

    coordinator, client = make_coordinator(timeout_s=5.0, policy=Slow())
    script = Script(client)
    threading.Timer(0.3, coordinator.post, [RequestAbort(sequence_ids=((0, 2, 0),))]).start()
    with pytest.raises(RuntimeError, match=r"Dispatch\(sequence_id=\(0, 9, 0\).*the sequence is not waiting"):
        coordinator.roll_out(states(0)[:3], phase=0, policy_version=0, weights_source="x")
    assert coordinator.refused == [] and coordinator.core.phase is None
    script.thread.join(5)
    assert [type(one) for one in script.seen] == [messages.SubmitWork, messages.AbortSequences, messages.EndPhase]


def test_a_move_that_comes_too_late_is_refused_alone() -> None:
    coordinator, client = make_coordinator(timeout_s=5.0)
    Script(client, 0.01)

    def move(_: Finished) -> None:
        coordinator.post(RequestMove(sequence_id=states(0)[-1].sequence_id, replica_id=77))

    out = coordinator.roll_out(states(0), phase=0, policy_version=0, weights_source="x", on_finished=move)
    assert len(out) == len(PROMPTS)
    assert coordinator.refused and "RequestMove.replica_id=77" in coordinator.refused[0]
