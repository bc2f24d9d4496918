"""Sequences with a long context that need no prefill: their KV is zeros. For benchmarks of steps, whose time does not
depend on the values in the cache."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from engines.rollout.generation import make_states
from engines.sequence import KVHandle, KVPart, SamplingParams, Work
from experiments.bench.models import random_prompts

if TYPE_CHECKING:
    from torch import Tensor

    from engines import LLM
    from engines.kvcache.store import KVContent, Tier


class BlankKV:
    """A KV store that returns zeros for every sequence."""

    def export(self, content: KVContent, layers: Iterable[Tensor]) -> KVPart | None:
        return None

    def load(self, part: KVPart, content: KVContent) -> Items[Tensor]:
        import torch

        layer = torch.zeros(content.layer_shape, dtype=getattr(torch, content.dtype))
        return [layer] * content.num_layers

    def tier_for(self, num_bytes: int) -> Tier | None:
        return None

    def drop(self, part: KVPart) -> None:
        pass


def submit_decodes(llm: LLM, *, num_sequences: int, context: int, length: int, first_uid: int = 0) -> None:
    """Submits sequences of `context` random tokens each, which generate `length` more.

    The next step computes only the last context token and samples the first new one.
    """
    from engines.replica.mover import KVMover

    mover = llm.replica.mover
    assert isinstance(mover, KVMover)
    mover.use(BlankKV(), in_background=False)
    dtype = str(llm.config.dtype)
    heads = llm.model_config.num_kv_heads
    tokens = random_prompts(num_sequences, context, llm.model_config.vocab_size, seed=first_uid)
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    blank = KVPart(first_token=0, num_tokens=context - 1, first_head=0, num_heads=heads, location="", num_bytes=0)
    uids = range(first_uid, first_uid + num_sequences)
    for state in make_states(tokens, [params] * num_sequences, uids, run_seed=0, policy_step=0):
        handle = KVHandle(
            policy_version=llm.policy_version,
            dtype=dtype,
            parts=(blank,),
        )
        llm.replica.submit(Work(state=state, kv=handle if context > 1 else None))
