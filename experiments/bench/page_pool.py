"""A step of a model whose KV lies in the pages of a pool, beside the same model with a KV cache of its own.

    python experiments/bench/page_pool.py
    python experiments/bench/page_pool.py --shape 0.8m --threads 2 --turns 15

In a turn the engines get the same new prompts, compute them in one step, and decode; their steps alternate one by one.
`pool_overhead` is the largest ratio of the pool's seconds to the other's, each a median over steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.config import Attention, DType, EngineConfig, ModelConfig
from engines.constraints import Count, Counts
from engines.sequence import Work
from experiments import launch
from experiments.bench import harness
from experiments.bench.models import Shape, checkpoint, random_sequence
from experiments.comparison.turns import interleave, make_row, timed

if TYPE_CHECKING:
    from engines.replica.engine import LocalEngine


@dataclass(frozen=True, kw_only=True)
class PagePoolBench(harness.BenchConfig):
    """Time steps with and without a pool of pages."""

    shape: Shape = "25m"
    """A name in research/workloads/shapes.py."""
    batches: Counts = (1, 8, 32)
    """Sequences in a step."""
    prompt: Count = 128
    """Tokens of a prompt."""
    steps: Count = 32
    """Decode steps in a turn."""
    blocks_per_page: Count = 16
    """Blocks of 16 tokens in a page."""
    dtype: DType = "float32"
    """Of weights and activations."""
    attention: Attention = "auto"
    """The attention backend."""
    threads: Count = 1
    """torch threads."""

    @property
    def num_blocks(self) -> int:
        """Blocks of a KV cache: what two turns of the largest batch take."""
        return 2 * max(self.batches) * -(-(self.prompt + self.steps + 1) // 16)


def measure(config: PagePoolBench) -> dict[str, Any]:
    import torch

    launch.share_cores()
    torch.set_num_threads(config.threads)
    with checkpoint(config.shape, max_positions=config.prompt + config.steps + 1, dtype=config.dtype) as folder:
        own = itertools.cycle([_engine(folder, config, in_pages=False) for _ in range(2)])
        pool = _engine(folder, config, in_pages=True)
        engines = [next(own), next(own), pool]
        # The baseline steps twice where the pool steps once: two engines of their own take turns at it.
        variants = {"own": lambda: _step(next(own)), "pool": lambda: _step(pool)}
        rows, uids = [], itertools.count()
        for batch in config.batches:
            seconds: dict[str, dict[str, list[float]]] = {"prefill": {}, "decode": {}}
            for turn in range(1 + config.turns):
                _submit(engines, config, [next(uids) for _ in range(batch)])
                for kind, num_steps in (("prefill", 1), ("decode", config.steps)):
                    for name, some in interleave(variants, num_steps, warm_up=False).items():
                        seconds[kind].setdefault(name, []).extend(some if turn else ())
            rows += [make_row(f"{kind}, batch {batch}", of_variants) for kind, of_variants in seconds.items()]
    return {"rows": rows, "pool_overhead": max(row["ratios"]["pool"] for row in rows)}


def _submit(engines: Items[LocalEngine], config: PagePoolBench, uids: Items[int]) -> None:
    for engine in engines:
        assert not engine.replica.has_work
        for uid in uids:
            state = random_sequence(uid, num_tokens=config.prompt, length=config.steps + 1)
            engine.replica.submit(Work(state=state))


def _step(engine: LocalEngine) -> float:
    return timed(engine.replica.step)[0]


def _engine(folder: str, config: PagePoolBench, *, in_pages: bool) -> LocalEngine:
    import torch

    from engines.kvcache.page_storage import Pages, PageStorage
    from engines.kvcache.pages import PagePool
    from engines.memory.plan import kv_block_bytes
    from engines.models.loader import checkpoint_tensors
    from engines.parallel.collectives import SingleRank
    from engines.parallel.layout import ReplicaSpec
    from engines.replica.engine import LocalEngine

    model = ModelConfig.from_pretrained(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = EngineConfig(
        dtype=config.dtype, attention=config.attention, max_num_seqs=max(config.batches),
        max_num_batched_tokens=max(config.batches) * config.prompt,
    )  # fmt: skip
    block_bytes = kv_block_bytes(model, options, 1)
    num_pages = -(-config.num_blocks // config.blocks_per_page)
    pages = None
    if in_pages:
        storage = PageStorage(num_pages, config.blocks_per_page * block_bytes, device)
        pages = Pages(storage=storage, pool=PagePool(num_pages), owner="model", budget=num_pages)
    engine = LocalEngine(
        model,
        EngineConfig(**{**vars(options), "kv_cache_bytes": num_pages * config.blocks_per_page * block_bytes}),
        spec=ReplicaSpec(id=0, ranks=(0,)),
        max_tp_size=1,
        tensor_parallel=SingleRank(),
        max_model_len=config.prompt + config.steps + 1,
        device=device,
        detokenize=None,
        pages=pages,
    )
    engine.load(checkpoint_tensors(folder), 0)
    return engine


if __name__ == "__main__":
    harness.run(PagePoolBench, measure)
