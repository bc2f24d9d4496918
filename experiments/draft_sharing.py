"""What replicas gain from each other's drafts (`drafting.py --parts server`): live.

Two processes, each an engine that generates half of each group's samples, and a draft server in a third one, which is
killed in the middle of a rollout and started again. In float64, where no rounding changes a draw.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from engines.config import DrafterName, EngineConfig, ModelConfig
from engines.control.sealing import new_token
from engines.models.loader import checkpoint_tensors
from engines.models.tokenizer import encode_prompt, load_tokenizer
from engines.parallel.collectives import SingleRank
from engines.parallel.layout import ReplicaSpec
from engines.replica.engine import LocalEngine
from engines.rollout.generation import make_states
from engines.sequence import SamplingParams, Work
from engines.speculation.client import DraftClient, DraftTimes
from engines.speculation.mirror import Grown
from engines.speculation.server import DraftServer
from experiments.comparison.turns import short

APPEND_TOKENS, FETCH_S = (1, 16, 64), (0.02, 0.1, 0.5)
NUM_REPLICAS, GROUP, AT_A_TIME = 2, 16, 4
WITH, KILLED, WITHOUT = "with server", "server killed", "without server"
_POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Order:
    """One rollout of a replica."""

    number: int
    """Number of the rollout: in each one the groups have other ids on the server, and draw the same tokens."""
    drafter: DrafterName = "grouped_suffix"
    address: str | None = None
    """Address of the draft server; None without one."""
    times: DraftTimes = field(default_factory=DraftTimes)


class Step(NamedTuple):
    start: float
    seconds: float
    num_running: int
    num_accepted: int
    num_ended: int
    """Sequences of the replica that had ended before this step."""


class Rolled(NamedTuple):
    """What one replica did in a rollout."""

    steps: list[Step]
    tokens: dict[tuple[int, int], list[int]]
    """(prompt, sample) -> the tokens that it generated."""
    heard: list[float]
    """Times at which tokens of the other replica arrived."""


class _Client(DraftClient):
    """Notes when tokens of the other replica arrive."""

    def __init__(self, order: Order, token: bytes, heard: list[float]) -> None:
        assert order.address is not None
        super().__init__(order.address, token, order.times)
        self._heard = heard

    def take(self) -> list[Grown]:
        grown = super().take()
        if grown:
            self._heard.append(time.monotonic())
        return grown


class _Replica:
    """One replica, in its own process."""

    def __init__(self, folder: Path, texts: list[str], index: int, seed: int, token: bytes, num_ended: Any) -> None:
        """`num_ended` is shared: of each replica, the sequences that have ended."""
        torch.set_num_threads(1)
        self._folder, self._index, self._seed, self._token, self._num_ended = folder, index, seed, token, num_ended
        self._model = ModelConfig.from_pretrained(folder)
        tokenizer = load_tokenizer(folder, self._model)
        self._prompts = [encode_prompt(tokenizer, text, "prompt") for text in texts]

    def obey(self, order: Order) -> Rolled:
        rolled = Rolled([], {}, [])
        with ExitStack() as stack:
            engine = self._engine(order, rolled.heard, stack)
            self._submit(engine, order.number)
            self._roll_out(engine, rolled)
        return rolled

    def _engine(self, order: Order, heard: list[float], stack: ExitStack) -> LocalEngine:
        client = None
        if order.address is not None:
            client = stack.enter_context(closing(_Client(order, self._token, heard)))
        engine = LocalEngine(
            self._model,
            EngineConfig(
                dtype="float64",
                kv_cache_bytes=2**26,
                max_num_seqs=AT_A_TIME,
                drafter=order.drafter,
                draft_lengths="adaptive" if order.drafter == "none" else "fixed",
            ),
            spec=ReplicaSpec(id=self._index, ranks=(self._index,)),
            max_tp_size=1,
            tensor_parallel=SingleRank(),
            max_model_len=512,
            device=torch.device("cpu"),
            detokenize=None,
            connect_drafts=lambda _: client,
        )
        engine.load(checkpoint_tensors(self._folder), version=0)
        return engine

    def _submit(self, engine: LocalEngine, number: int) -> None:
        """The first sample of a few prompts, then their second one, and so on; then those of the next prompts."""
        count = len(self._prompts)
        params = [SamplingParams(max_tokens=320, n=GROUP)] * count
        states = make_states(self._prompts, params, range(count), run_seed=self._seed, policy_step=0)
        for state in sorted(states, key=lambda one: (one.group_id // AT_A_TIME, one.key.sample_index)):
            if state.key.sample_index * NUM_REPLICAS // GROUP == self._index:
                engine.replica.submit(Work(state=replace(state, group_id=number * count + state.group_id)))

    def _roll_out(self, engine: LocalEngine, rolled: Rolled) -> None:
        while engine.replica.has_work:
            start, num_ended = time.monotonic(), len(rolled.tokens)
            output = engine.replica.step()
            seconds = time.monotonic() - start
            rolled.steps.append(Step(start, seconds, output.num_running, output.num_accepted, num_ended))
            for one in output.finished:
                rolled.tokens[one.state.key.prompt_uid, one.state.key.sample_index] = one.completion.token_ids
            self._num_ended[self._index] = len(rolled.tokens)


def _run_replica(pipe: Connection, *arguments: Any) -> None:
    """Obeys the orders that come through the pipe, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the process that then closes the pipe
    replica = _Replica(*arguments)
    with suppress(EOFError, BrokenPipeError):
        while True:
            pipe.send(replica.obey(pipe.recv()))


def _run_server(pipe: Connection, token: bytes) -> None:
    """Serves at the port that comes through the pipe, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError), closing(DraftServer(token, port=pipe.recv())) as server:
        pipe.send(server.address)
        pipe.recv()


class Processes:
    """Two replicas, and two servers that wait for a port: the second one replaces the first. `close` ends them all."""

    def __init__(self, folder: Path, texts: list[str], seed: int) -> None:
        self._context, self._numbers = multiprocessing.get_context("spawn"), itertools.count()
        self._num_ended, self._num_sequences = self._context.RawArray("q", NUM_REPLICAS), len(texts) * GROUP
        self._started: list[tuple[BaseProcess, Connection]] = []
        token = new_token()
        self._servers = [self._start(_run_server, token) for _ in range(2)]
        rest = (seed, token, self._num_ended)
        self._replicas = [self._start(_run_replica, folder, texts, one, *rest) for one in range(NUM_REPLICAS)]

    def _start(self, target: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=target, args=(there, *arguments), daemon=True)
        process.start()
        there.close()  # so that `recv` raises EOFError when the process has ended
        self._started.append((process, here))
        return process, here

    def serve(self, number: int, port: int = 0) -> str:
        """Makes server `number` listen; returns its address."""
        _, pipe = self._servers[number]
        pipe.send(port)
        return str(pipe.recv())

    def kill_server(self) -> None:
        process, _ = self._servers[0]
        process.kill()
        process.join()

    def wait_for(self, share: float) -> None:
        """Returns when this share of the rollout's sequences has ended."""
        while sum(self._num_ended) < share * self._num_sequences:
            if not all(process.is_alive() for process, _ in self._replicas):
                raise RuntimeError("a replica's process has ended; its error is above")
            time.sleep(_POLL_S)

    def roll_out(self, meanwhile: Callable[[], None] = lambda: None, **order: Any) -> list[Rolled]:
        """Returns what each replica did; `order`: fields of `Order`."""
        self._num_ended[:] = [0] * NUM_REPLICAS
        number, pipes = next(self._numbers), [pipe for _, pipe in self._replicas]
        for pipe in pipes:
            pipe.send(Order(number=number, **order))
        meanwhile()
        return [pipe.recv() for pipe in pipes]

    def close(self) -> None:
        for process, pipe in self._started:
            process.kill()
            process.join()
            pipe.close()


def measure(folder: Path, texts: list[str], seed: int) -> dict[str, Any]:
    """The result of the part, which docs/drafting.md explains."""
    default, cells = DraftTimes(), list(itertools.product(APPEND_TOKENS, FETCH_S))
    shared: dict[tuple[int, float], list[Rolled]] = {}
    killed_at = restarted_at = 0.0
    with closing(Processes(folder, texts, seed)) as processes:
        plain, alone = processes.roll_out(drafter="none"), processes.roll_out()
        address = processes.serve(0)
        for cell in tqdm(cells, desc="draft server", unit="rollout"):
            times = replace(default, append_tokens=cell[0], fetch_s=cell[1])
            shared[cell] = processes.roll_out(address=address, times=times)

        def kill_and_restart() -> None:
            nonlocal killed_at, restarted_at
            processes.wait_for(1 / 3)
            processes.kill_server()
            killed_at = time.monotonic()
            processes.wait_for(2 / 3)
            processes.serve(1, port=int(address.rpartition(":")[2]))
            restarted_at = time.monotonic()

        killed = processes.roll_out(kill_and_restart, address=address)
    back_at = [next((one for one in rolled.heard if one > restarted_at), math.inf) for rolled in killed]
    length = {cell: acceptance(some) for cell, some in shared.items()}
    finest, at_default = length[cells[0]], length[default.append_tokens, default.fetch_s]
    runs = {WITH: shared[default.append_tokens, default.fetch_s], KILLED: killed, WITHOUT: alone}
    seconds = {name: [step.seconds for one in some for step in one.steps] for name, some in runs.items()}
    result = {
        "tokens_equal": all(tokens_of(some) == tokens_of(plain) for some in (alone, killed, *shared.values())),
        "acceptance_length": {count: {one: length[count, one] for one in FETCH_S} for count in APPEND_TOKENS},
        "acceptance_without_server": acceptance(alone),
        "lost_at_default": short(1 - at_default / finest),
        "lost_without_server": short(1 - acceptance(alone) / finest),
        "longest_step_s": {name: short(max(some)) for name, some in seconds.items()},
        "median_step_s": {name: short(statistics.median(some)) for name, some in seconds.items()},
        "acceptance_after_restart": windows(runs, killed_at, restarted_at, back_at),
        "seconds_until_back": short(max(back_at) - restarted_at) if max(back_at) < math.inf else None,
    }
    print(*(f"{name}: {value}" for name, value in result.items()), sep="\n", file=sys.stderr)
    return result


def tokens_of(rolled: list[Rolled]) -> dict[tuple[int, int], list[int]]:
    return {key: tokens for one in rolled for key, tokens in one.tokens.items()}


def acceptance(rolled: list[Rolled], spans: list[tuple[float, float]] | None = None) -> float:
    """Returns the tokens of a sequence per step; with `spans`, in the steps before which each replica had ended that
    many sequences. NaN if there is no such step."""
    spans = spans or [(0, math.inf)] * len(rolled)
    pairs = zip(rolled, spans, strict=True)
    steps = [step for one, (first, end) in pairs for step in one.steps if first <= step.num_ended < end]
    running, accepted = (sum(getattr(step, name) for step in steps) for name in ("num_running", "num_accepted"))
    return short(1 + accepted / running) if running else math.nan


def windows(
    runs: dict[str, list[Rolled]], killed_at: float, restarted_at: float, back_at: list[float]
) -> dict[str, dict[str, float | None]]:
    """Acceptance before the kill, while the server was gone, and since tokens came again; of the same sequences in
    the other runs."""
    moments = {
        "before": [(0.0, killed_at)] * NUM_REPLICAS,
        "gone": [(killed_at, restarted_at)] * NUM_REPLICAS,
        "after": [(back, math.inf) for back in back_at],
    }
    found: dict[str, dict[str, float | None]] = {}
    for window, times in moments.items():
        spans = [(ended(one, start), ended(one, end)) for one, (start, end) in zip(runs[KILLED], times, strict=True)]
        lengths = {name: acceptance(rolled, spans) for name, rolled in runs.items()}
        found[window] = {name: None if math.isnan(one) else one for name, one in lengths.items()}
    return found


def ended(rolled: Rolled, when: float) -> float:
    """Returns the number of the replica's sequences that had ended then; infinite after its last step."""
    return next((step.num_ended for step in rolled.steps if step.start >= when), math.inf)
