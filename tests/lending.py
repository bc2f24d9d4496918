"""A server that lends, in this process, for tests: real models, pages, HTTP, and policies that a test chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engines import LLM
from engines.config import EngineConfig, ModelConfig, longest_sequence
from engines.fleet.borrowing import Agreement
from engines.kvcache.page_storage import Pages, PageStorage
from engines.kvcache.pages import PagePool, PageShare, page_bytes_for
from engines.memory.plan import kv_block_bytes
from engines.parallel.collectives import SingleRank
from engines.parallel.layout import ReplicaSpec
from engines.replica.engine import LocalEngine
from engines.serving.coserve import CoServing, CoServingLimits, Neighbour
from engines.serving.lending import Lender
from engines.serving.tenant import Tenant
from research.rose.memory import ServingFirst, SharingOptions
from tests.engines.test_coserving import Anytime
from tests.serving import Running, serving, until


class Lending:
    """A server, its lender, and their pages."""

    def __init__(
        self,
        served: str,
        lent: str,
        *,
        num_pages: int = 200,
        dtype: Any = "float64",
        admission: Any = None,
        memory: Any = None,
        lease_s: float = 10.0,
        stall_s: float = 2.0,
    ) -> None:
        model, self._config = ModelConfig.from_pretrained(lent), EngineConfig(dtype=dtype, max_num_seqs=4)
        self._made: list[Pages] = []

        def make(served_model: ModelConfig, config: EngineConfig, device: torch.device) -> Pages:
            blocks = [(served_model, config), (model, self._config)]
            sizes = [(size := kv_block_bytes(*one, 1), size // (2 * one[0].num_layers)) for one in blocks]
            storage, pool = PageStorage(num_pages, page_bytes_for(sizes), device), PagePool(num_pages)
            self._made.append(Pages(storage=storage, pool=pool, owner="serving", budget=num_pages))
            return self._made[0]

        self.llm = LLM(served, dtype="float64", pages=make)
        max_model_len = longest_sequence(self._config, model)
        self.engine = LocalEngine(
            *(model, self._config), spec=ReplicaSpec(id=0, ranks=(0,)), max_tp_size=1, tensor_parallel=SingleRank(),
            max_model_len=max_model_len, device=torch.device("cpu"), detokenize=None,
            pages=Pages(
                storage=self._made[0].storage, pool=self._made[0].pool, owner="rollout", budget=0, lease_s=lease_s
            ),
        )  # fmt: skip
        self.coserving = CoServing(
            serving=Neighbour(replica=self.llm.replica, pages=share_of(self.llm._engine)),
            rollout=Neighbour(replica=self.engine.replica, pages=share_of(self.engine)),
            admission=admission or Anytime(),
            memory=memory or ServingFirst(SharingOptions(window_s=1.0)),
            seconds=lambda output: 0.001,
            limits=CoServingLimits(stall_s=stall_s),
        )
        agreement = Agreement(
            *(),
            model=model,
            dtype=dtype,
            block_size=self._config.block_size,
            max_model_len=max_model_len,
            batch_invariant=False,
            tokenizer="",
        )
        self.lender = Lender(Tenant(self.engine, self.coserving), agreement, stall_s=stall_s)
        self.running: Running

    def check_all_is_back(self) -> None:
        """The loan is over, soon at the latest; no page is the rollout's, and the weights take no memory."""
        until(lambda: not self.lender.is_lent, "the loan has ended")
        for engine in (self.engine, self.llm._engine):
            share_of(engine).check_integrity()
        assert share_of(self.engine).num_pages == 0 == share_of(self.engine).pool.budget("rollout")
        assert not self.engine.has_weights and not self.engine.decoder.parameters.embedding.untyped_storage().size()


def share_of(engine: LocalEngine) -> PageShare:
    assert engine.share is not None
    return engine.share


@contextmanager
def lending(served: str, lent: str, *, api_key: str | None = None, **options: Any) -> Iterator[Lending]:
    one = Lending(served, lent, **options)
    with serving(one.llm, api_key=api_key, lender=one.lender) as one.running:
        yield one
