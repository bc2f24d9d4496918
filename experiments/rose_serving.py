"""A serving process that lends: two models of other architectures on one pool of pages, in this process."""

from __future__ import annotations

import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from engines.config import EngineConfig, ModelConfig
from engines.control import messages as m
from engines.fleet.borrowing import Agreement
from engines.kvcache.page_storage import Pages, PageStorage
from engines.kvcache.pages import PagePool, page_bytes_for
from engines.memory.plan import kv_block_bytes
from engines.models.loader import checkpoint_tensors
from engines.models.tokenizer import tokenizer_digest
from engines.parallel.collectives import SingleRank
from engines.parallel.layout import ReplicaSpec
from engines.replica.engine import LocalEngine
from engines.replica.replica import Replica, StepOutput
from engines.rollout.generation import make_states
from engines.rollout.pace import Pace
from engines.sequence import SamplingParams, SequenceId, SequenceState, Work
from engines.serving.coserve import CoServing, CoServingLimits, Lent, Neighbour, Turn
from engines.serving.engine_thread import EngineThread, Event, Failed, Job, Tokens
from engines.serving.lending import Lender
from engines.serving.policies import AdmissionPolicy, MemoryPolicy
from engines.serving.tenant import Tenant
from research.workloads.arrivals import Arrival

SPEC = ReplicaSpec(id=0, ranks=(0,))
SERVING_SLOTS = 64
"""Most sequences of a serving pass."""
_LOOK_S = 0.005
"""Longest time between two looks at the rollout."""
LONGEST_S = 120.0
"""A run that takes longer has gone wrong."""


@dataclass(frozen=True, kw_only=True)
class Models:
    """The two models, and how each steps."""

    serving: Path
    rollout: Path
    dtype: str = "float64"
    num_pages: int
    serving_tokens: int = 256
    """Most tokens of a serving pass."""
    rollout_tokens: int
    """Most tokens of a rollout's pass: the paper's chunks of 512, shortened."""
    rollout_seqs: int
    max_model_len: int
    lease_s: float | None = 10.0
    """Of the rollout's pages."""
    pace: Pace | None
    """Of both; None for this machine's own speed."""


@dataclass(frozen=True, kw_only=True)
class Lending:
    """What decides in a run. Without it nothing is lent."""

    admission: AdmissionPolicy
    memory: MemoryPolicy
    serving_share: float = 1.0
    """Of the pool, the part that the serving model may hold: less than all in a static split."""
    stall_s: float = 2.0
    phase_s: float = 60.0
    """Length of a phase of rollouts, at whose begin the budget is made anew."""
    prompt_tokens: int
    new_tokens: Callable[[int], int]
    """Length of a rollout's response, by its number."""


@dataclass(kw_only=True)
class Run:
    """What happened. Times are in seconds."""

    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)
    """Between two tokens, by request."""
    serving_s: float = 0.0
    """In which the serving model stepped."""
    busy_s: float = 0.0
    """As `serving_s`, with what passes between two steps while there is work."""
    paced_s: float = 0.0
    """What the steps should have taken by their pace."""
    num_late: int = 0
    """Steps that took longer than their pace."""
    num_steps: int = 0
    served: list[str] = field(default_factory=list)
    """A digest of each request's tokens."""
    rolled: dict[int, str] = field(default_factory=dict)
    """The same of the rollout's sequences that have ended, by their number."""
    lent: Lent = field(default_factory=Lent)
    pages: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Time, and pages: in use by the serving model, held by the rollout, and its budget."""


def digest(tokens: list[int]) -> str:
    return hashlib.blake2b(repr(tokens).encode(), digest_size=8).hexdigest()


class ServingProcess:
    """Both engines; each `run` starts with empty caches."""

    def __init__(self, models: Models) -> None:
        self.models = models
        sizes = [ModelConfig.from_pretrained(folder) for folder in (models.serving, models.rollout)]
        common: dict[str, Any] = {"dtype": models.dtype, "block_size": 16, "max_model_len": models.max_model_len}
        configs = [
            EngineConfig(**common, max_num_seqs=SERVING_SLOTS, max_num_batched_tokens=models.serving_tokens),
            EngineConfig(
                **common,
                max_num_seqs=models.rollout_seqs,
                max_num_batched_tokens=models.rollout_tokens + models.rollout_seqs,
                prefill_chunk_size=models.rollout_tokens,
            ),
        ]
        self._vocab_size = min(size.vocab_size for size in sizes)
        blocks = [kv_block_bytes(size, config, 1) for size, config in zip(sizes, configs, strict=True)]
        units = [block // (2 * size.num_layers) for block, size in zip(blocks, sizes, strict=True)]
        device = torch.device("cpu")
        self._storage = PageStorage(models.num_pages, page_bytes_for(zip(blocks, units, strict=True)), device)
        self._pool = PagePool(models.num_pages)
        self.serving, self.rollout = (
            self._engine(name, size, config, folder, device)
            for name, size, config, folder in zip(
                ("serving", "rollout"), sizes, configs, (models.serving, models.rollout), strict=True
            )
        )

    def _engine(
        self, name: str, size: ModelConfig, config: EngineConfig, folder: Path, device: torch.device
    ) -> LocalEngine:
        lease_s = self.models.lease_s if name == "rollout" else None
        budget = self.models.num_pages
        pages = Pages(storage=self._storage, pool=self._pool, owner=name, budget=budget, lease_s=lease_s)
        engine = LocalEngine(
            size,
            config,
            spec=SPEC,
            max_tp_size=1,
            tensor_parallel=SingleRank(),
            max_model_len=self.models.max_model_len,
            device=device,
            detokenize=None,
            pages=pages,
        )
        engine.load(checkpoint_tensors(folder), 0)
        return engine

    def run(
        self, arrivals: list[Arrival], lending: Lending | None, *, seed: int, seconds: float = 0.0, num_rolled: int = 0
    ) -> Run:
        """Serves the requests, whose prompts are drawn by `seed`, until all have ended, `seconds` have passed, and
        `num_rolled` sequences of the rollout have ended. Raises RuntimeError for a request that fails, and where there
        is no end."""
        run, tenant = Run(), self._tenant(lending)
        clients = _Clients(arrivals, seed, self._vocab_size)
        with self._thread(run, tenant, clients, seed) as thread:
            rollout = None if tenant is None or lending is None else _Rollout(tenant, lending, self._vocab_size)
            start = time.monotonic()
            while not (
                clients.num_ended == len(arrivals)
                and time.monotonic() - start >= seconds
                and (rollout is None or len(rollout.ended) >= num_rolled)
            ):
                if time.monotonic() - start > LONGEST_S:
                    raise RuntimeError(f"{len(arrivals) - clients.num_ended} requests, or the rollout, have no end")
                clients.send(thread, start)
                if rollout is not None and tenant is not None:
                    rollout.go_on()
                    run.pages.append((time.monotonic() - start, *self._pages(), tenant.budget))
                clients.wait(start)
            run.seconds = time.monotonic() - start
        clients.sum_up(run)
        if rollout is not None:
            rollout.sum_up(run)
        self._empty()
        return run

    def lend(
        self,
        arrivals: list[Arrival],
        lending: Lending,
        *,
        seed: int,
        begin: Callable[[Lender], float],
        goes_on: Callable[[], bool],
    ) -> Run:
        """Serves the requests of which the time comes while `goes_on`, beside whoever borrows it. `begin` returns when
        time is 0, by this process's monotonic clock."""
        run, tenant = Run(), self._tenant(lending)
        assert tenant is not None
        lender = Lender(tenant, self._agreement(), stall_s=lending.stall_s)
        clients = _Clients(arrivals, seed, self._vocab_size)
        try:
            with self._thread(run, tenant, clients, seed) as thread:
                start = begin(lender)
                while (is_on := goes_on()) or clients.num_ended < clients.num_sent:
                    if is_on:
                        clients.send(thread, start)
                    clients.wait(start)
                run.seconds = time.monotonic() - start
        finally:
            lender.close()
        clients.sum_up(run)
        run.lent = tenant.lent
        self._empty()
        return run

    def _agreement(self) -> Agreement:
        return Agreement(
            model=ModelConfig.from_pretrained(self.models.rollout),
            dtype=self.rollout.config.dtype,
            block_size=self.rollout.config.block_size,
            max_model_len=self.models.max_model_len,
            batch_invariant=False,
            tokenizer=tokenizer_digest(None),
            is_paced=self.models.pace is not None,
        )

    @contextmanager
    def _thread(self, run: Run, tenant: Tenant | None, clients: _Clients, seed: int) -> Iterator[EngineThread]:
        """The engine's thread, while it runs."""
        pace = self.models.pace
        thread = EngineThread(
            self.serving.replica,
            run_seed=seed,
            tell=clients.tell,
            beside=_Watch(self.serving.replica, tenant, run, pace),
            pace=None if pace is None else lambda output: pace.step(SPEC, output),
        )
        thread.start()
        try:
            yield thread
        finally:
            thread.stop()

    def _tenant(self, lending: Lending | None) -> Tenant | None:
        models = self.models
        assert self.serving.share is not None and self.rollout.share is not None
        whole = self._pool.num_pages
        self.serving.share.set_budget(whole if lending is None else int(lending.serving_share * whole))
        if lending is None:
            return None
        pace = models.pace
        row_times = self.rollout.row_times
        coserving = CoServing(
            serving=Neighbour(replica=self.serving.replica, pages=self.serving.share),
            rollout=Neighbour(replica=self.rollout.replica, pages=self.rollout.share),
            admission=lending.admission,
            memory=lending.memory,
            limits=CoServingLimits(stall_s=lending.stall_s),
            seconds=lambda output: row_times(output.num_tokens) if pace is None else pace.step(SPEC, output),
        )
        return Tenant(self.rollout, coserving, pace=pace)

    def _pages(self) -> tuple[int, int]:
        assert self.serving.share is not None and self.rollout.share is not None
        return self.serving.share.num_used_pages, self.rollout.share.num_pages

    def _empty(self) -> None:
        for engine in (self.serving, self.rollout):
            assert engine.share is not None
            engine.replica.clear()
            engine.share.reclaim(self._pool.num_pages)
            engine.share.check_integrity()
        assert self._pool.num_free == self._pool.num_pages, "a page was not given back"


class _Watch:
    """A `Beside` that also notes what the serving model does."""

    def __init__(self, replica: Replica, tenant: Tenant | None, run: Run, pace: Pace | None) -> None:
        self._replica, self._tenant, self._run, self._pace = replica, tenant, run, pace
        self._ended: float | None = None
        """When the last step ended, if work was left then."""

    @property
    def has_work(self) -> bool:
        return self._tenant is not None and self._tenant.has_work

    def attach(self, wake: Callable[[], None]) -> None:
        if self._tenant is not None:
            self._tenant.attach(wake)

    def alone(self) -> AbstractContextManager[object]:
        return nullcontext() if self._tenant is None else self._tenant.alone()

    def next(self) -> Turn | None:
        if self._tenant is not None:
            return self._tenant.next()
        return "serving" if self._replica.has_work else None

    def step(self) -> bool:
        assert self._tenant is not None
        return self._tenant.step()

    def arrived(self, state: SequenceState, at: float) -> None:
        if self._tenant is not None:
            self._tenant.arrived(state, at)

    def left(self, sequence_id: SequenceId) -> None:
        if self._tenant is not None:
            self._tenant.left(sequence_id)

    def served(self, output: StepOutput, start: float) -> None:
        now, run = time.monotonic(), self._run
        run.serving_s += now - start
        run.busy_s += now - (start if self._ended is None else self._ended)
        run.num_steps += 1
        if self._pace is not None:
            paced_s = self._pace.step(SPEC, output)
            run.paced_s += paced_s
            run.num_late += now - start > 1.1 * paced_s + 1e-3
        self._ended = now if self._replica.has_work else None
        if self._tenant is not None:
            self._tenant.served(output, start)

    def stop(self, reason: str) -> None:
        if self._tenant is not None:
            self._tenant.stop(reason)


class _Clients:
    """They send requests when these arrive, and note when tokens come."""

    def __init__(self, arrivals: list[Arrival], seed: int, vocab_size: int) -> None:
        rng = random.Random(seed)
        self._waiting = deque(
            (one, [rng.randrange(2, vocab_size) for _ in range(one.num_prompt_tokens)]) for one in arrivals
        )
        self._news: SimpleQueue[tuple[float, list[tuple[Job, Event]]]] = SimpleQueue()
        self._jobs: list[Job] = []
        self._times: dict[Job, list[float]] = {}
        self._tokens: dict[Job, list[int]] = {}
        self.num_sent = self.num_ended = 0

    def tell(self, events: list[tuple[Job, Event]]) -> None:
        self._news.put((time.monotonic(), events))

    def send(self, thread: EngineThread, start: float) -> None:
        """Sends those that are due."""
        while self._waiting and time.monotonic() - start >= self._waiting[0][0].time_s:
            one, prompt = self._waiting.popleft()
            params = SamplingParams(max_tokens=one.num_generated_tokens, ignore_eos=True, seed=len(self._jobs))
            job = Job(prompts=[prompt], params=[params], streams=True, arrived=start + one.time_s)
            self._jobs.append(job)
            self._times[job], self._tokens[job] = [], []
            self.num_sent += 1
            thread.submit(job)

    def wait(self, start: float) -> None:
        """Waits for news, or until the next request is due; notes what has come."""
        due = self._waiting[0][0].time_s + start - time.monotonic() if self._waiting else _LOOK_S
        try:
            at, events = self._news.get(timeout=max(0.0, min(_LOOK_S, due)))
        except Empty:
            return
        for job, event in events:
            if isinstance(event, Failed):
                raise RuntimeError(f"a request has failed: {event.reason}")
            if isinstance(event, Tokens):
                self._times[job] += [at] * len(event.token_ids)
                self._tokens[job] += event.token_ids
                self.num_ended += event.completion is not None

    def sum_up(self, run: Run) -> None:
        for job in self._jobs:
            times = self._times[job]
            run.ttft.append(times[0] - job.arrived)
            run.gaps.append([after - before for before, after in pairwise(times)])
            run.served.append(digest(self._tokens[job]))


class _Rollout:
    """A rollout without an end: sequences that leave come back, and new ones follow those that have ended."""

    def __init__(self, tenant: Tenant, lending: Lending, vocab_size: int) -> None:
        self._tenant, self._lending = tenant, lending
        tenant.lend(SPEC, max_kv_tokens=tenant.engine.hosted.max_model_len)
        self._vocab_size = vocab_size
        self._num_begun = 0
        self._began = time.monotonic()
        self._seq = 0
        self.ended: dict[int, str] = {}
        self._submit([self._new() for _ in range(tenant.engine.config.max_num_seqs)])

    def _new(self) -> Work:
        number, self._num_begun = self._num_begun, self._num_begun + 1
        rng = random.Random(number)
        prompt = [rng.randrange(2, self._vocab_size) for _ in range(self._lending.prompt_tokens)]
        params = SamplingParams(max_tokens=self._lending.new_tokens(number), ignore_eos=True)
        (state,) = make_states([prompt], [params], [number], run_seed=1, policy_step=0)
        return Work(state=state)

    def _submit(self, works: list[Work]) -> None:
        if works:
            self._seq += 1
            phase = int((time.monotonic() - self._began) / self._lending.phase_s)
            self._tenant.obey(
                m.SubmitWork(replica_id=0, rank=0, phase=phase, epoch=0, seq=self._seq, works=tuple(works))
            )

    def go_on(self) -> None:
        works: list[Work] = []
        for event in self._tenant.take_events():
            if isinstance(event, m.SequencesReleased):
                works += event.works
            elif isinstance(event, m.SequencesFinished):
                for one in event.finished:
                    self.ended[one.state.key.prompt_uid] = digest(one.completion.token_ids)
                    works.append(self._new())
        self._submit(works)

    def sum_up(self, run: Run) -> None:
        run.rolled = self.ended
        run.lent = self._tenant.lent
