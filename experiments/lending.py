"""What serve.py lends to rollouts: a second model, asleep, that shares the memory and the time of the served one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engines.config import EngineConfig, ModelConfig, longest_sequence
from engines.constraints import Count, NonNegative, Positive, Seconds, Share, check_fields
from engines.fleet.borrowing import Agreement
from engines.replica.replica import StepOutput
from engines.serving.policies import MemoryView
from research.rose.activation import MeanUse
from research.rose.admission import DualSLO, QueueDebt, ServingTimes
from research.rose.memory import ServingFirst, SharingOptions

if TYPE_CHECKING:
    import torch

    from engines import LLM
    from engines.kvcache.page_storage import Pages
    from engines.replica.engine import LocalEngine
    from engines.serving.lending import Lender

_MARGIN = 0.1
"""Share that is added to what passes took at the start."""
_OBSERVE_S = 1.0
_QUEUE_SHARE = 0.5
"""Of the TTFT SLO, what steps of a rollout may take in all while requests are queued."""


@dataclass(frozen=True, kw_only=True)
class LendingOptions:
    """Lend idle memory and time to rollouts of another model (ROSE); see docs/serving.md."""

    rollout_model: Path | None = None
    """Folder of a checkpoint with the shapes of the model that jobs train, or a name of the hub; its weights are only
    loaded to measure. Without it nothing is lent."""
    rollout_seqs: Count = 16
    """Most sequences of a rollout in one forward pass."""
    rollout_chunk: Count = 512
    """Most tokens of a rollout in one forward pass: the serving model may have to wait for one."""
    rollout_max_model_len: Count | None = None
    """Longest sequence of a rollout; must be the job's."""
    ttft_slo_ms: Positive = 500.0
    """From a request's arrival to its first token: a rollout steps only in the slack that this leaves."""
    tpot_slo_ms: Positive = 150.0
    """The same between two tokens of a sequence."""
    headroom: Share = 0.2
    """Share of the KV memory that stays free for serving."""
    lease_s: NonNegative = 10.0
    """Seconds for which a rollout keeps KV that no sequence uses."""
    rollout_stall_s: Seconds = 2.0
    """Seconds without progress after which a sequence of a rollout leaves, to go on elsewhere."""

    def __post_init__(self) -> None:
        check_fields(self, "")


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of a model's passes, by what this process has measured: rows that decode with 256 tokens of context each,
    and one prompt of `chunk_tokens`. Longer contexts take longer."""

    rows: Callable[[int], float]
    chunk_tokens: int
    chunk_s: float

    @staticmethod
    def measure(engine: LocalEngine) -> PassTimes:
        """The engine has weights."""
        from engines.replica.scratch import Scratch

        config = engine.config
        num_tokens = min(config.max_num_batched_tokens, engine.hosted.max_model_len)
        scratch = Scratch.like(engine.kv, num_tokens, engine.decoder, engine.tensor_parallel)
        if scratch is None:
            raise ValueError("lending: no memory is left to measure a pass in; lower --kv-cache-mib")
        seconds = scratch.measure(1, num_tokens, num_tokens, draws=True, repeats=3)
        engine.row_times(config.max_num_seqs)  # all that is asked for later, while there are weights
        return PassTimes(rows=engine.row_times, chunk_tokens=num_tokens, chunk_s=seconds)

    def decode(self, batch: int, num_context_tokens: int = 0) -> float:
        return max(self.rows(1), self.rows(batch)) if batch else 0.0

    def prefill(self, num_tokens: int) -> float:
        full, rest = divmod(num_tokens, self.chunk_tokens)
        one, share = self.rows(1), rest / self.chunk_tokens
        return full * self.chunk_s + (one + share * max(0.0, self.chunk_s - one) if rest else 0.0)

    def step(self, output: StepOutput) -> float:
        """At least what it takes: the weights are counted twice where prompts and decodes share a pass."""
        num_decodes = min(output.num_sampled, output.num_tokens)
        return (1 + _MARGIN) * (self.decode(num_decodes) + self.prefill(output.num_tokens - num_decodes))


class WatchedMemory(ServingFirst):
    """Also keeps how much serving uses on average, by which jobs choose the idlest server."""

    def __init__(self, options: SharingOptions) -> None:
        super().__init__(options)
        self._mean = MeanUse()
        self._last = (-_OBSERVE_S, 0.0)

    def observe(self, view: MemoryView) -> None:
        super().observe(view)
        if view.now - self._last[0] >= _OBSERVE_S:
            self._last = view.now, view.num_serving / view.num_pages
            self._mean.observe(*self._last)

    def kv_use(self) -> float:
        return self._mean.mean(self._last[0])


class SharedMemory:
    """The pages of both models; `pages` is for the served one's `LLM`."""

    def __init__(self, options: LendingOptions) -> None:
        """Reads what the rollout's model is. Raises FileNotFoundError or ValueError if it is none."""
        from engines.adapter_config import checkpoint_folder
        from engines.models.tokenizer import load_tokenizer, with_end_token

        assert options.rollout_model is not None
        self._options = options
        self._folder = checkpoint_folder(options.rollout_model, "rollout_model")
        model = ModelConfig.from_pretrained(self._folder, "rollout_model")
        self._tokenizer = load_tokenizer(self._folder, model)
        self._model = with_end_token(model, self._tokenizer)
        self._config: EngineConfig
        self._pages: Pages

    def pages(self, model: ModelConfig, config: EngineConfig, device: torch.device) -> Pages:
        """Makes the pages, of a size for both models, in the memory that the served one's KV cache would have."""
        from engines.kvcache.page_storage import Pages, PageStorage
        from engines.kvcache.pages import PagePool, page_bytes_for
        from engines.memory.plan import kv_block_bytes

        options = self._options
        self._config = replace(
            *(config,), max_num_seqs=options.rollout_seqs, max_model_len=options.rollout_max_model_len,
            max_num_batched_tokens=max(options.rollout_chunk, options.rollout_seqs), prefill_chunk_size=None,
            drafter="none", draft_model=None, draft_noise="target", draft_lengths="adaptive", draft_paths=1,
            draft_history_bytes=0, preemption="recompute", kv_disk_bytes=0, kv_disk_folder=None,
        )  # fmt: skip
        longest_sequence(self._config, self._model)  # raises, if the model cannot
        blocks = [
            (size := kv_block_bytes(one, how, 1), size // (2 * one.num_layers))
            for one, how in ((model, config), (self._model, self._config))
        ]
        page_bytes = page_bytes_for(blocks)
        assert config.kv_cache_bytes != "auto"
        num_pages = config.kv_cache_bytes // page_bytes
        if num_pages < 2:
            raise ValueError(
                f"kv_cache_bytes={config.kv_cache_bytes}: is no two pages of {page_bytes} bytes, which hold whole "
                f"blocks of both models; give more, or lower block_size"
            )
        self._config = replace(self._config, kv_cache_bytes=num_pages * page_bytes)
        storage, pool = PageStorage(num_pages, page_bytes, device), PagePool(num_pages)
        self._pages = Pages(storage=storage, pool=pool, owner="serving", budget=num_pages)
        return self._pages

    def lender(self, llm: LLM) -> Lender:
        """Makes the rollout's model beside the served one, measures both, and puts the former to sleep. Raises
        ValueError without room for it, or for an SLO that cannot be kept."""
        from engines.models.loader import checkpoint_tensors
        from engines.models.tokenizer import tokenizer_digest
        from engines.serving.coserve import CoServing, CoServingLimits, Neighbour
        from engines.serving.lending import Lender
        from engines.serving.tenant import Tenant

        options, engine, served = self._options, self._engine(llm.device), llm._engine
        engine.load(checkpoint_tensors(self._folder), version=0)
        serving, rollout = PassTimes.measure(served), PassTimes.measure(engine)
        self._check_slos(serving, rollout)
        memory = WatchedMemory(SharingOptions(headroom=options.headroom))
        ttft_s = options.ttft_slo_ms / 1000
        dual = DualSLO(
            times=ServingTimes(
                prefill_s=serving.prefill,
                decode_s=serving.decode,
                chunk_tokens=llm.config.max_num_batched_tokens,
                max_num_seqs=llm.config.max_num_seqs,
                margin=_MARGIN,
            ),
            ttft_s=ttft_s,
            tpot_s=options.tpot_slo_ms / 1000,
            form="cumulative",
        )
        assert served.share is not None and engine.share is not None
        coserving = CoServing(
            serving=Neighbour(replica=llm.replica, pages=served.share),
            rollout=Neighbour(replica=engine.replica, pages=engine.share),
            admission=QueueDebt(dual, _QUEUE_SHARE * ttft_s),
            memory=memory,
            seconds=rollout.step,
            limits=CoServingLimits(stall_s=options.rollout_stall_s),
        )
        agreement = Agreement(
            model=self._model,
            dtype=self._config.dtype,
            block_size=self._config.block_size,
            max_model_len=longest_sequence(self._config, self._model),
            batch_invariant=self._config.batch_invariant,
            tokenizer=tokenizer_digest(self._tokenizer),
        )
        tenant = Tenant(engine, coserving)
        return Lender(tenant, agreement, stall_s=options.rollout_stall_s, kv_use=memory.kv_use)

    def _engine(self, device: torch.device) -> LocalEngine:
        from engines.memory.free_memory import FreeMemory, free_memory
        from engines.memory.plan import MIB, mib
        from engines.models.tokenizer import detokenizer
        from engines.parallel.collectives import SingleRank
        from engines.parallel.layout import ReplicaSpec
        from engines.replica.capacity import Capacity
        from engines.replica.engine import LocalEngine

        free = FreeMemory.agree(SingleRank(), mine := free_memory(device))
        capacity = Capacity(model=self._model, config=self._config, device=device, free=free)
        plan = replace(capacity.plan(1), kv_cache=0)  # the pages are there already
        if mine.free is not None and plan.total > mine.free:
            raise ValueError(
                f"rollout_model={str(self._folder)!r}: needs {mib(plan.total)} MiB beside the served model and its KV "
                f"memory: {plan.parts()}; available: {mine.free // MIB} MiB. Lower --kv-cache-mib, or --rollout-seqs"
            )
        return LocalEngine(
            *(self._model, self._config), spec=ReplicaSpec(id=0, ranks=(0,)), max_tp_size=1,
            tensor_parallel=SingleRank(), max_model_len=longest_sequence(self._config, self._model), device=device,
            detokenize=detokenizer(self._tokenizer),
            pages=replace(self._pages, owner="rollout", budget=0, lease_s=self._options.lease_s),
        )  # fmt: skip

    def _check_slos(self, serving: PassTimes, rollout: PassTimes) -> None:
        """Prints what was measured. Raises ValueError for an SLO that serving alone misses, or a rollout's step."""
        one, first, chunk = (1000 * seconds for seconds in (serving.decode(1), serving.prefill(1), rollout.chunk_s))
        print(
            f"lending: measured here: serving decodes one token in {one:.1f} ms, computes {serving.chunk_tokens} of a "
            f"prompt in {1000 * serving.chunk_s:.1f} ms; a rollout decodes in {1000 * rollout.decode(1):.1f} ms, and "
            f"computes {rollout.chunk_tokens} in {chunk:.1f} ms",
            *(f"memory: {self._pages.pool.num_pages} pages of {self._pages.storage.page_bytes} bytes",),
            sep="\n", file=sys.stderr, flush=True,
        )  # fmt: skip
        options = self._options
        for name, slo, least in (("ttft", options.ttft_slo_ms, first), ("tpot", options.tpot_slo_ms, one)):
            if slo < least:
                raise ValueError(
                    f"{name}_slo_ms={slo:g}: the served model alone takes {least:.1f} ms for one token here; give more"
                )
        if options.ttft_slo_ms < first + chunk:
            raise ValueError(
                f"rollout_chunk={options.rollout_chunk}: takes {chunk:.1f} ms here, and a request that comes meanwhile "
                f"waits so long: with ttft_slo_ms={options.ttft_slo_ms:g} it would be late; give fewer tokens"
            )
