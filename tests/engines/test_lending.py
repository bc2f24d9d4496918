"""A process that lends memory and time: tokens of both models, and how each way to end a loan gives all back."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from engines import LLM, SamplingParams
from engines.control.transport import Client
from engines.coordination.policies import OnDemand
from engines.coordination.views import Dispatch, ScheduleView
from engines.fleet.fleet import Fleet
from engines.models.loader import checkpoint_tensors
from engines.parallel.layout import ReplicaSpec
from engines.rollout.pace import ShortestStep
from tests.checkpoints import save_checkpoint
from tests.engines.test_coserving import RandomCuts, Sometimes
from tests.engines.test_fleet import OPTIONS, PARAMS, PROMPTS, states, tokens_of
from tests.lending import Lending, lending
from tests.serving import until
from tests.stopping import stopped
from tests.worlds import ROOT, Python

pytestmark = pytest.mark.usefixtures("forked_replicas")

LONGEST_S = 30.0


@pytest.fixture(scope="module")
def folders(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The weights of each version."""
    made = {0: Path(qwen3)}
    for version in (1, 2):
        made[version] = tmp_path_factory.mktemp(f"version-{version}")
        save_checkpoint(made[version], "qwen3", seed=version)
    return made


def plain(folders: dict[int, Path], dtype: Any) -> dict[int, list[list[int]]]:
    tokens = {}
    for version, folder in folders.items():
        llm = LLM(folder, load=False, **OPTIONS | {"dtype": dtype})
        llm.update_weights(checkpoint_tensors(folder), version)
        outputs = llm.generate(PROMPTS, PARAMS, prompt_uids=range(len(PROMPTS)))
        tokens[version] = [one.outputs[0].token_ids for one in outputs]
        llm.close()
    return tokens


@pytest.fixture(scope="module")
def alone(folders: dict[int, Path]) -> dict[int, list[list[int]]]:
    return plain(folders, "float64")


@pytest.fixture(scope="module")
def served(text_model: str) -> list[list[int]]:
    """What requests with the seeds 0 to 9 get."""
    llm = LLM(text_model, dtype="float64")
    params = [SamplingParams(seed=seed, max_tokens=40) for seed in range(10)]
    return [llm.generate(["12+34="], one)[0].outputs[0].token_ids for one in params]


class Together(OnDemand):
    """Dispatches nothing before some replicas accept sequences at the same time."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__()
        self._num_replicas, self._since = num_replicas, 0.0
        self.has_begun = False

    def next(self, view: ScheduleView) -> Dispatch | None:
        if view.entered and not self.has_begun:
            self._since = view.now
        if sum(one.accepts for one in view.replicas.values()) >= self._num_replicas:
            self.has_begun = True
        dispatch = super().next(view)  # notes who has entered
        return dispatch if self.has_begun or view.now > self._since + LONGEST_S else None


class Losing(Together):
    """Kills what runs a borrowed replica when it has sequences; the last sequence waits until it is lost."""

    def __init__(self, kill: Any) -> None:
        super().__init__(2)
        self._kill, self.borrowed, self.num_lost, self.num_kept = kill, -1, 0, 0

    def next(self, view: ScheduleView) -> Dispatch | None:
        borrowed = view.replicas.get(self.borrowed)
        if borrowed is not None and borrowed.num_assigned and not self.num_lost:
            self.num_lost = borrowed.num_assigned
            self._kill()
        self.num_kept = max([self.num_kept, *(one.num_generated for one in view.waiting.values())])
        dispatch = super().next(view)
        waits = len(view.waiting) == 1 and borrowed is not None and view.now < self._since + LONGEST_S
        return None if waits else dispatch


@contextmanager
def clients(lent: Lending, served: list[list[int]]) -> Iterator[list[int]]:
    """Sends requests all the time, and compares what they get; yields the seeds of those that were answered."""
    ended, answered, wrong = threading.Event(), list[int](), list[int]()
    client = lent.running.client(timeout=60)

    def send(first: int) -> None:
        seed = first
        while not ended.is_set():
            (choice,) = client.completions.create(
                model="tiny", prompt="12+34=", seed=seed, max_tokens=40, extra_body={"return_token_ids": True}
            ).choices
            (answered if choice.token_ids == served[seed] else wrong).append(seed)  # type: ignore[attr-defined]
            seed = (seed + 1) % len(served)

    threads = [threading.Thread(target=send, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield answered
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
    assert answered and not wrong


def check_serves(lent: Lending, served: list[list[int]]) -> None:
    with clients(lent, served) as answered:
        until(lambda: len(answered) > 3, "requests are answered")


def status(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/curtail/loans", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_both_models_draw_what_they_draw_alone(
    text_model: str, folders: dict[int, Path], alone: dict[int, Any], served: list[list[int]]
) -> None:
    with lending(text_model, str(folders[0])) as lent:
        assert not status(lent.running.url)["lent"]
        lent.check_all_is_back()
        policy = Together(2)
        with (
            Fleet(folders[0], num_replicas=1, schedule_policy=policy, **OPTIONS) as fleet,
            clients(lent, served) as answered,
        ):
            borrowed = fleet.borrow(lent.running.url)
            fleet.wait_for_replicas(2)
            assert tokens_of(fleet.roll_out(states(0))) == alone[0]
            num_answered, num_steps = len(answered), lent.coserving.lent.num_steps
            assert num_steps, "the borrowed replica has run sequences"
            fleet.publish(checkpoint_tensors(folders[1]), version=1)
            policy.has_begun = False
            assert tokens_of(fleet.roll_out(states(1))) == alone[1]
            assert lent.coserving.lent.num_steps > num_steps and not fleet.coordinator.lost
            until(lambda: len(answered) > num_answered, "requests are answered")
            found = status(lent.running.url)
            assert found["lent"] and found["replica_id"] == borrowed.id and found["num_pages"] == 200
            with urllib.request.urlopen(f"{lent.running.url}/metrics", timeout=60) as answer:
                metrics = answer.read().decode()
            (counted,) = re.findall(r"^curtail_rollout_steps_total (\d+)$", metrics, re.MULTILINE)
            assert int(counted) == lent.coserving.lent.num_steps
        lent.check_all_is_back()
        assert status(lent.running.url)["last_end"] == "the job has given it back"
        check_serves(lent, served)


@pytest.mark.parametrize("seed", range(3))
def test_cuts_leases_that_end_and_stalls_change_no_token(
    text_model: str, folders: dict[int, Path], alone: dict[int, Any], served: list[list[int]], seed: int
) -> None:
    """Few pages, cuts and refusals at random: sequences leave, and go on anywhere."""
    rng = random.Random(seed)
    options = {"admission": Sometimes(rng, 0.6), "memory": RandomCuts(rng), "lease_s": 0.01, "stall_s": 0.2}
    with (
        lending(text_model, str(folders[0]), num_pages=24, **options) as lent,
        Fleet(folders[0], num_replicas=1, schedule_policy=Together(2), **OPTIONS) as fleet,
        clients(lent, served),
    ):
        fleet.borrow(lent.running.url)
        fleet.wait_for_replicas(2)
        for version in (0, 1, 2):
            fleet.publish(checkpoint_tensors(folders[version]), version)
            assert tokens_of(fleet.roll_out(states(version))) == alone[version]
        assert not fleet.coordinator.lost and lent.coserving.lent.num_cuts
    lent.check_all_is_back()


def test_weights_come_by_a_relay(text_model: str, folders: dict[int, Path], served: list[list[int]]) -> None:
    alone = plain(folders, "float32")
    options = OPTIONS | {"dtype": "float32"}
    with lending(text_model, str(folders[0]), dtype="float32") as lent, clients(lent, served):
        with Fleet(folders[0], num_replicas=0, weights="relay", **options) as fleet:
            fleet.borrow(lent.running.url)
            for version in (0, 1, 2):
                if version:
                    fleet.publish(checkpoint_tensors(folders[version]), version)
                assert tokens_of(fleet.roll_out(states(version))) == alone[version]
        lent.check_all_is_back()


@contextmanager
def server(text_model: str, lent: str) -> Iterator[tuple[Python, str]]:
    """A serving process, and its address."""
    command = [str(ROOT / "experiments/serve.py"), text_model, "--port", "0", "--dtype", "float64"]
    command += ["--kv-cache-mib", "8", "--rollout-model", lent, "--ttft-slo-ms", "60000", "--tpot-slo-ms", "60000"]
    with Python(command) as process:
        until(lambda: process.stdout.endswith("\n"), "it serves")
        yield process, process.stdout.split()[-1].removesuffix("/v1")


def test_a_serving_process_that_is_killed_loses_no_token(
    text_model: str, folders: dict[int, Path], alone: dict[int, Any]
) -> None:
    with server(text_model, str(folders[0])) as (process, url):
        policy = Losing(process.kill)
        with Fleet(folders[0], num_replicas=1, schedule_policy=policy, patience_s=60.0, **OPTIONS) as fleet:
            policy.borrowed = fleet.borrow(url).id
            fleet.wait_for_replicas(2)
            assert tokens_of(fleet.roll_out(states(0))) == alone[0]
            assert policy.num_lost and not policy.num_kept and len(fleet.coordinator.lost) == 1


JOB = """
import sys
from dataclasses import replace
from engines.fleet.fleet import Fleet
from engines.sequence import SamplingParams
from tests.engines.test_fleet import OPTIONS, states

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
with Fleet(sys.argv[1], num_replicas=0, patience_s=60.0, **OPTIONS) as fleet:
    fleet.borrow(sys.argv[2])
    fleet.roll_out([replace(one, params=LONG) for one in states(0)])
"""


class Some:
    """Admits so many steps, and none after them."""

    def __init__(self, num_steps: int) -> None:
        self.left = num_steps

    def admits(self, view: object, seconds: float) -> bool:
        self.left -= 1
        return self.left > 0


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "its connection was closed without a goodbye"), (signal.SIGSTOP, "silent for")],
)
def test_a_job_that_dies_or_hangs_ends_the_loan(
    text_model: str,
    folders: dict[int, Path],
    served: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    words: str,
) -> None:
    admission, joined = Some(20), list[Client]()

    def join(*arguments: Any, **options: Any) -> Client:
        joined.append(Client(*arguments, **options))
        return joined[0]

    monkeypatch.setattr("engines.serving.lending.Client", join)
    with (
        lending(text_model, str(folders[0]), admission=admission, stall_s=30.0) as lent,
        Python(["-c", JOB, str(folders[0]), lent.running.url]) as job,
    ):
        until(lambda: admission.left <= 0, "the rollout has begun")
        assert lent.engine.replica.num_sequences
        joined[0]._patience_s = 1.0  # until here it has the job's, in which a slow one is not lost
        if number == signal.SIGKILL:
            os.kill(job.pid, number)
        with stopped(job.pid) if number == signal.SIGSTOP else nullcontext():
            lent.check_all_is_back()
        assert words in lent.lender.status()["last_end"]
        check_serves(lent, served)


def test_a_step_of_the_rollout_that_fails_ends_the_loan(
    text_model: str, folders: dict[int, Path], alone: dict[int, Any], served: list[list[int]]
) -> None:
    """The next loan is as the first one."""

    with lending(text_model, str(folders[0])) as lent, clients(lent, served):
        run = lent.engine.replica._runner.run

        def fail(scheduled: Any) -> Any:
            raise ValueError("it failed")

        lent.engine.replica._runner.run = fail  # type: ignore[method-assign]
        policy = Together(2)
        with Fleet(folders[0], num_replicas=1, schedule_policy=policy, **OPTIONS) as fleet:
            fleet.borrow(lent.running.url)
            fleet.wait_for_replicas(2)
            assert tokens_of(fleet.roll_out(states(0))) == alone[0]
            (lost,) = fleet.coordinator.lost
            assert "it failed" in lost
            lent.check_all_is_back()
            lent.engine.replica._runner.run = run  # type: ignore[method-assign]
            policy.has_begun = False
            fleet.borrow(lent.running.url)
            fleet.wait_for_replicas(2)
            assert tokens_of(fleet.roll_out(states(0))) == alone[0] and lent.coserving.lent.num_steps
        lent.check_all_is_back()


def test_a_server_that_ends_gives_sequences_back_whole(
    text_model: str, folders: dict[int, Path], alone: dict[int, Any]
) -> None:
    admission = Some(12)
    with lending(text_model, str(folders[0]), admission=admission, stall_s=30.0) as lent:
        policy = Losing(lambda: None)
        with Fleet(folders[0], num_replicas=1, schedule_policy=policy, **OPTIONS) as fleet:
            policy.borrowed = fleet.borrow(lent.running.url).id
            fleet.wait_for_replicas(2)

            def stop() -> None:
                until(lambda: admission.left <= 0, "the rollout has begun")
                lent.running.server.stop()

            stopping = threading.Thread(target=stop)
            stopping.start()
            assert tokens_of(fleet.roll_out(states(0))) == alone[0]
            stopping.join()
            (lost,) = fleet.coordinator.lost
            assert "the server has stopped" in lost
            assert policy.num_lost and policy.num_kept, "with the tokens that they had there"
        lent.check_all_is_back()


def test_what_cannot_be_lent_is_refused_with_a_reason(
    text_model: str, folders: dict[int, Path], tmp_path: Path, alone: dict[int, Any]
) -> None:
    save_checkpoint(tmp_path, "qwen3", num_hidden_layers=3)
    with lending(text_model, str(folders[0]), api_key="secret") as lent:
        url = lent.running.url
        for model, options, words in (
            (tmp_path, {}, "model.num_layers=3: here it is 2"),
            (folders[0], {"dtype": "float32"}, "dtype='float32': here it is 'float64'"),
            (folders[0], {"block_size": 32}, "block_size=32: here it is 16"),
            (folders[0], {"max_model_len": 128}, "max_model_len=128: here it is 256"),
            (folders[0], {"timeout_s": 2.0, "patience_s": 1.0}, "timeout_s=2: sequences may wait here for 2 s"),
            (folders[0], {"pace": ShortestStep(step_s=0.1)}, "is_paced=True: here it is False"),
        ):
            with Fleet(model, num_replicas=0, **OPTIONS | options) as fleet:
                with pytest.raises(ValueError, match=re.escape(words)):
                    fleet.borrow(url, api_key="secret")
                fleet.coordinator.pump(0.0)
                assert not fleet.coordinator.outside
        with Fleet(folders[0], num_replicas=1, **OPTIONS) as fleet:
            for wrong, error, words in (
                (url, ValueError, "(401): the API key is missing or wrong"),
                ("ftp://127.0.0.1", ValueError, "must begin with http"),
                ("http://127.0.0.1:1", ConnectionError, "does not answer"),
                (f"{url}/v1", ValueError, "(404)"),
            ):
                with pytest.raises(error, match=re.escape(words)):
                    fleet.borrow(wrong, api_key=None if "401" in words else "secret")
            fleet.borrow(url, api_key="secret")
            reason = re.escape("(409): lent to another job, as its replica")
            with Fleet(folders[0], num_replicas=0, **OPTIONS) as second, pytest.raises(RuntimeError, match=reason):
                second.borrow(url, api_key="secret")
            fleet.wait_for_replicas(2)
            assert tokens_of(fleet.roll_out(states(0))) == alone[0], "of a fleet to which others were not lent"
        lent.check_all_is_back()


@pytest.mark.parametrize("seed", range(2))
def test_bodies_that_are_no_orders_change_nothing(text_model: str, folders: dict[int, Path], seed: int) -> None:
    rng = random.Random(seed)
    with lending(text_model, str(folders[0])) as lent:
        bodies = [b"", b"[]", b"{}", b"\xff", b'{"address": "ipc:///tmp/x"}', b"[" * 10_000]
        bodies += [rng.randbytes(rng.randrange(200)) for _ in range(50)]
        for body in bodies:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{lent.running.url}/curtail/loans", body, headers)
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request, timeout=60)
            assert error.value.code == 400 and msgspec.json.decode(error.value.read())["error"]["message"]
        assert not lent.lender.is_lent


def test_a_server_without_a_second_model_lends_nothing(text_model: str, folders: dict[int, Path]) -> None:
    from tests.serving import serving

    with serving(LLM(text_model, dtype="float64")) as running, Fleet(folders[0], num_replicas=0, **OPTIONS) as fleet:
        with pytest.raises(ValueError, match=r"\(404\)"):
            fleet.borrow(running.url)
        with pytest.raises(openai.NotFoundError):
            running.client().get("/curtail/loans", cast_to=object)


def test_a_loan_begins_between_two_steps_of_serving(text_model: str, folders: dict[int, Path]) -> None:
    """It looks at who waits for the serving model, and counts the pages, which a step changes."""
    with lending(text_model, str(folders[0])) as lent:
        run, steps, goes_on, has_begun = lent.llm.replica._runner.run, *(threading.Event() for _ in range(3))

        def wait(scheduled: Any) -> Any:
            steps.set()
            assert goes_on.wait(60)
            return run(scheduled)

        def begin() -> None:
            lent.lender.tenant.lend(ReplicaSpec(id=0, ranks=(0,)), max_kv_tokens=64)
            has_begun.set()

        def ask() -> None:
            lent.running.client(timeout=60).completions.create(model="tiny", prompt="12+34=", max_tokens=4)

        lent.llm.replica._runner.run = wait  # type: ignore[method-assign]
        threads = [threading.Thread(target=ask), threading.Thread(target=begin)]
        threads[0].start()
        assert steps.wait(60)
        threads[1].start()
        assert not has_begun.wait(0.3)
        goes_on.set()
        for thread in threads:
            thread.join(60)
        assert has_begun.is_set()
        lent.lender.tenant.take_back("it has ended")
