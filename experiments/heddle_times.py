"""What passes take on a run's own replicas, as Heddle's planner needs it. Measured, not assumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engines.coordination.views import ReplicaView
from engines.parallel.layout import ReplicaSpec
from experiments import launch
from research.heddle.interference import server_of
from research.heddle.placement import Server
from research.heddle.policy import Costs
from research.pat.deployment import Deployment
from research.pat.predictor import StepPredictor

if TYPE_CHECKING:
    from engines import LLM

COPY_BYTES_PER_S = 2e9
"""At which stored KV is read from another process of this host, at least."""


@dataclass(kw_only=True)
class PassTimes:
    """Of one run. Before `measure` it knows nothing, and nothing is placed."""

    steps: dict[int, StepPredictor] = field(default_factory=dict)
    """By TP size."""
    num_prompt_tokens: int = 0
    kv_bytes_per_token: int = 0
    num_kv_tokens: dict[int, int] = field(default_factory=dict)
    max_num_seqs: int = 1
    max_model_len: int = 1

    def measure(self, llm: LLM, num_sequences: int) -> None:
        """Times passes of the present replicas; all ranks call it together, while nothing runs. A pass is timed by its
        rows alone: what a longer context adds is not known."""
        sizes = [2**power for power in range(max(1, num_sequences.bit_length()) + 1)]
        engine = llm._engine
        mine = engine.spec.tp_size, engine.num_kv_tokens, [engine.row_times(rows) for rows in sizes]
        for tp_size, num_kv_tokens, times in launch.gather(llm._world, mine, tuple[int, int, list[float]]):
            points = [(rows, rows * context, s) for rows, s in zip(sizes, times, strict=True) for context in (1, 4096)]
            self.steps[tp_size], self.num_kv_tokens[tp_size] = StepPredictor(points), num_kv_tokens
        self.max_num_seqs, self.max_model_len = llm.config.max_num_seqs, llm.max_model_len
        self.kv_bytes_per_token = llm.model_config.kv_bytes_per_token(engine.decoder.dtype.itemsize)

    @property
    def deployment(self) -> Deployment:
        return Deployment(
            num_ranks=1,
            steps=self.steps,
            num_kv_tokens=self.num_kv_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            switch_seconds=lambda *_: 0.0,
        )

    def server_of(self, replica: ReplicaView, mean_length: float) -> Server:
        return server_of(self.deployment, replica.spec.tp_size, context=min(replica.num_kv_tokens, mean_length))

    @property
    def costs(self) -> Costs:
        return Costs(token_s=self._token_s, transfer_s=self._transfer_s)

    def _token_s(self, spec: ReplicaSpec, size: int) -> float:
        known = self.steps.get(spec.tp_size)
        return 0.0 if known is None else float(known.seconds(size, size))

    def _transfer_s(self, spec: ReplicaSpec, num_tokens: int) -> float:
        return num_tokens * self.kv_bytes_per_token / COPY_BYTES_PER_S
