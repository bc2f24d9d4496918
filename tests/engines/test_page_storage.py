"""Two models' KV in the pages of one memory: nobody writes or reads another one's page, and tokens stay the same.

Pages that no model has, and the scratch page, are filled with NaN between steps: whoever reads them is found out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import LLM
from engines.config import EngineConfig, ModelConfig
from engines.kvcache.page_storage import Pages, PageStorage
from engines.kvcache.paged import PagedKVCache, fill_kv, read_kv
from engines.kvcache.pages import PagePool, PageShare, page_bytes_for
from engines.models.loader import checkpoint_tensors
from engines.parallel.collectives import SingleRank
from engines.parallel.layout import ReplicaSpec
from engines.replica.engine import LocalEngine
from engines.sequence import Completion, SequenceId, SequenceState, Work
from tests.checkpoints import save_checkpoint
from tests.engines.test_drafts import ScriptedDrafter, check, options_of
from tests.engines.test_drafts import make_states as draft_states
from tests.engines.test_kv_store import make_store

CPU = torch.device("cpu")
BLOCK = {"qwen3": 2 * 2 * 16 * 2 * 16 * 8, "qwen2": 2 * 3 * 16 * 1 * 12 * 8}
"""Bytes of a block of 16 tokens."""
PAGE_BYTES = 61_440
"""Three blocks of the one and six of the other model, and for both a rest that is lost."""
MAX_LEN = 100


# -- the memory


def random_cache(pages: Pages, dtype: torch.dtype, *, layers: int, size: int, heads: int, dim: int) -> PagedKVCache:
    return PagedKVCache(
        num_layers=layers, num_blocks=0, block_size=size, num_kv_heads=heads, head_dim=dim, dtype=dtype, device=CPU,
        pages=pages,
    )  # fmt: skip


def test_no_page_is_written_by_two() -> None:
    """Every holder's tokens have a pattern of their own, which is there whenever it is read."""
    rng, pool = random.Random(3), PagePool(9)
    storage = PageStorage(9, 4_080, CPU)
    storage.memory.fill_(255)
    caches = {
        "a": random_cache(
            Pages(storage=storage, pool=pool, owner="a", budget=6, lease_s=2.0),
            torch.float64, layers=3, size=5, heads=2, dim=3,
        ),
        "b": random_cache(
            Pages(storage=storage, pool=pool, owner="b", budget=6, lease_s=2.0),
            torch.bfloat16, layers=2, size=4, heads=1, dim=6,
        ),
    }  # fmt: skip
    shares = {owner: kv.pages.share for owner, kv in caches.items() if kv.pages is not None}
    assert [shares[owner].blocks.most_blocks for owner in "ab"] == [6 * 2, 6 * 21]
    patterns: dict[tuple[str, int], torch.Tensor] = {}
    had: dict[str, set[int]] = {"a": set(), "b": set()}
    passed_on = 0
    for now in range(1_500):
        owner, holder = rng.choice("ab"), rng.randrange(4)
        kv, share = caches[owner], shares[owner]
        blocks, key = share.blocks, (owner, holder)
        operation = rng.choice(["grow", "grow", "release", "copy", "expire", "reclaim"])
        if operation == "grow":
            pages = {*share.pages}
            old = patterns.get(key)
            known = 0 if old is None else old.shape[2]
            num_tokens = known + rng.randint(1, 12)
            if blocks.can_grow(holder, num_tokens):
                blocks.grow(holder, num_tokens)
                new = {*share.pages} - pages
                passed_on += len(new & had["ab".replace(owner, "")])
                had[owner] |= new
                *_, heads, dim = kv.keys[0].shape
                noise = torch.randn(len(kv.keys), 2, num_tokens - known, heads, dim).to(kv.keys[0].dtype)
                fill_kv(kv, blocks.table(holder), num_tokens, noise, first=known, start=known)
                patterns[key] = noise if old is None else torch.cat((old, noise), dim=2)
        elif operation == "copy" and key in patterns:
            table = blocks.table(holder)
            if blocks.can_grow("copy", blocks.block_size):
                (copy,) = blocks.grow("copy", blocks.block_size)
                kv.copy_blocks([table[0]], [copy])
                count = min(blocks.block_size, patterns[key].shape[2])
                copied = torch.stack([*read_kv(kv, [copy], count)])
                assert torch.equal(copied, patterns[key][:, :, :count])
                blocks.release("copy")
        elif operation == "release":
            blocks.release(holder)
            patterns.pop(key, None)
        elif operation == "expire":
            share.expire(now)
        elif operation == "reclaim":
            share.reclaim(1)
        for tensor in (*kv.keys, *kv.values):
            tensor[kv.scratch_block] = torch.nan
        for (name, one), pattern in patterns.items():
            found = torch.stack([*read_kv(caches[name], shares[name].blocks.table(one), pattern.shape[2])])
            assert torch.equal(found, pattern)
        for name, one_cache in caches.items():
            mine = one_cache.physical([*range(one_cache.num_blocks)])
            per_page = one_cache.num_blocks // 9
            for page in shares[name].pages:  # what was never written since the lease is zero, not NaN
                rows = mine[page * per_page : (page + 1) * per_page]
                assert all(torch.isfinite(tensor[rows]).all() for tensor in (*one_cache.keys, *one_cache.values))
    assert passed_on > 10, "pages have gone from model to model too rarely to test anything"


def test_a_page_size_for_several_models() -> None:
    """The smallest with little waste, against all sizes one by one."""
    rng = random.Random(2)
    for _ in range(50):
        units = [16 * rng.randint(1, 12) for _ in range(rng.randint(1, 3))]
        blocks = [(2 * rng.randint(1, 6) * unit, unit) for unit in units]
        page = page_bytes_for(blocks, most_waste=0.1)
        fits = [
            (max(size % block for block, _ in blocks) / size, size)
            for size in range(max(blocks)[0] // 16 * 16, 64 * max(blocks)[0] + 16 * 12**3, 16)
            if not any(size % unit for _, unit in blocks)
        ]
        good = [size for waste, size in fits if waste <= 0.1]
        assert page == (min(good) if good and min(good) <= 64 * max(blocks)[0] else min(fits)[1])
    mib = 2**20
    assert page_bytes_for([(2 * mib, 2**15)]) == 2 * mib
    assert page_bytes_for([(2 * mib, 2**15), (7 * 2**16, 2**13)]) == 4 * mib, "two blocks, and nine"


def test_pages_of_a_wrong_size_are_refused() -> None:
    storage, pool = PageStorage(2, 1_000, CPU), PagePool(2)
    pages = Pages(storage=storage, pool=pool, owner="a", budget=2)
    for dim in (3, 500):
        with pytest.raises(ValueError, match=r"page_bytes=1000: must be a multiple of .* for the model of 'a'"):
            random_cache(pages, torch.bfloat16, layers=1, size=1, heads=1, dim=dim)


# -- engines


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen2")
    save_checkpoint(folder, "qwen2-untied-mqa", num_hidden_layers=3)
    return str(folder)


def make_engine(model: str, pages: Pages | None, folder: Path | None = None, **options: Any) -> LocalEngine:
    defaults = {"dtype": "float64", "kv_cache_bytes": 2**24, "max_model_len": MAX_LEN, "preemption": "recompute"}
    engine = LocalEngine(
        ModelConfig.from_pretrained(model),
        EngineConfig(**{**defaults, **options}),
        spec=ReplicaSpec(id=0, ranks=(0,)),
        max_tp_size=1,
        tensor_parallel=SingleRank(),
        max_model_len=MAX_LEN,
        device=CPU,
        detokenize=None,
        kv_store=None if folder is None else make_store(folder, 2**24),
        pages=pages,
    )
    engine.load(checkpoint_tensors(model), 0)
    return engine


class Pool:
    """A pool, its memory, and the engines on it."""

    def __init__(self, num_pages: int = 12) -> None:
        self.pool, self.storage = PagePool(num_pages), PageStorage(num_pages, PAGE_BYTES, CPU)
        self.engines: list[LocalEngine] = []
        self.done: list[dict[SequenceId, Completion]] = []
        self.poison()

    def pages(self, owner: str, budget: int, lease_s: float | None = None) -> Pages:
        return Pages(storage=self.storage, pool=self.pool, owner=owner, budget=budget, lease_s=lease_s)

    def share(self, index: int) -> PageShare:
        share = self.engines[index].share
        assert share is not None
        return share

    def add(self, engine: LocalEngine, states: list[SequenceState]) -> None:
        self.engines.append(engine)
        self.done.append({})
        for state in states:
            engine.replica.submit(Work(state=state))

    def poison(self) -> None:
        held = {page for index in range(len(self.engines)) for page in self.share(index).pages}
        for page in {*range(self.storage.num_pages + 1)} - held:
            self.storage.memory[page] = 255

    def step(self, index: int) -> None:
        output = self.engines[index].replica.step()
        self.done[index] |= {one.state.sequence_id: one.completion for one in output.finished}
        self.share(index).check_integrity()
        self.poison()

    def finish(self, between: Callable[[int], object] = lambda step: None) -> None:
        step = 0
        while any(engine.replica.has_work for engine in self.engines):
            for index, engine in enumerate(self.engines):
                if engine.replica.has_work:
                    self.step(index)
            step += 1
            between(step)
        for index, engine in enumerate(self.engines):
            assert self.share(index).num_used_pages == 0
            engine.mover.close()


def finish(engine: LocalEngine, states: list[SequenceState]) -> dict[SequenceId, Completion]:
    for state in states:
        engine.replica.submit(Work(state=state))
    return run(engine)


def run(engine: LocalEngine) -> dict[SequenceId, Completion]:
    done: dict[SequenceId, Completion] = {}
    while engine.replica.has_work:
        done |= {one.state.sequence_id: one.completion for one in engine.replica.step().finished}
    return done


@cache
def plain(model: str) -> dict[SequenceId, Completion]:
    return finish(make_engine(model, None), draft_states())


TIGHT, AMPLE = 3, 40
SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix cache": {"prefix_caching": False},
    "prefill chunks": {"prefill_chunk_size": 7, "max_num_batched_tokens": 20, "max_num_seqs": 9},
    "preemption": {"budget": TIGHT},
    "swap": {"budget": TIGHT, "preemption": "swap"},
    "drafts": {"drafter": "ngram", "draft_lengths": "fixed"},
    "drafts, preemption": {"drafter": "ngram", "draft_lengths": "fixed", "budget": TIGHT},
    "paths": options_of("paths"),
    "paths, preemption": {**options_of("paths"), "budget": TIGHT},
}  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "native", "padded"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_the_same_tokens(qwen3: str, tmp_path: Path, switch: str, attention: str) -> None:
    options = {"attention": attention.replace("padded", "sdpa"), **SWITCHES[switch]}
    pool, budget = Pool(AMPLE), options.pop("budget", AMPLE)
    engine = make_engine(qwen3, pool.pages("a", budget), tmp_path, **options)
    assert engine.num_kv_tokens == budget * 3 * 16 and engine.kv.bytes_per_token * 16 == BLOCK["qwen3"]
    if attention == "padded":
        engine.hosted.runner.pad_decodes()
    if switch.startswith("paths"):
        truth = {one.sequence_id: one.tokens for one in draft_states()}
        truth = {key: tokens + plain(qwen3)[key].token_ids for key, tokens in truth.items()}
        engine.replica.drafter = ScriptedDrafter("paths", truth)
    copied, copy_blocks = [], engine.kv.copy_blocks

    def copying(sources: list[int], targets: list[int]) -> None:
        copied.append(targets)
        copy_blocks(sources, targets)

    engine.kv.copy_blocks = copying  # type: ignore[method-assign]
    pool.add(engine, draft_states())
    pool.finish()
    check(pool.done[0], plain(qwen3))
    scheduler, moves = engine.replica.scheduler, engine.replica.kv_moves
    assert (scheduler.num_preemptions > 2) == (budget == TIGHT)
    assert (moves.num_swapped_in > 2) == (switch == "swap")
    assert (len(copied) > 2) == switch.startswith("paths")
    assert (scheduler.num_shared_tokens > 0) == (switch != "no prefix cache")


@pytest.mark.parametrize("attention", ["sdpa", "native"])
@pytest.mark.parametrize("seed", range(2))
def test_two_models_in_one_pool(qwen3: str, qwen2: str, tmp_path: Path, seed: int, attention: str) -> None:
    """Their budgets exceed the pool together, and change; pages expire and are taken back in between, and
    a third owner takes some."""
    pool, rng = Pool(8), random.Random(seed)
    for model in (qwen3, qwen2):
        engine = make_engine(
            model, pool.pages(model, 6, lease_s=2.0), attention=attention, prefill_chunk_size=9, max_num_seqs=4
        )
        pool.add(engine, draft_states())
    had: list[set[int]] = [set(), set()]
    pool.pool.join("a third", budget=2)
    third: list[int] = []

    def between(step: int) -> None:
        for index in range(2):
            share = pool.share(index)
            had[index] |= {*share.pages}
            share.expire(step)
            if rng.random() < 0.2:
                share.reclaim(1)
            if rng.random() < 0.1:
                share.set_budget(rng.randint(3, 6))
        if third and rng.random() < 0.7:
            pool.pool.give_back("a third", [third.pop(rng.randrange(len(third)))])
        else:
            third.extend(pool.pool.lease("a third", min(1, pool.pool.room("a third"))))
        pool.poison()

    pool.finish(between)
    for done, model in zip(pool.done, (qwen3, qwen2), strict=True):
        check(done, plain(model))
    assert len(had[0] & had[1]) > 3, "too few pages were of both models"


def test_logits_that_are_not_finite_clear_their_model_s_pages_alone(qwen3: str, qwen2: str) -> None:
    pool = Pool()
    for model in (qwen3, qwen2):
        pool.add(make_engine(model, pool.pages(model, 6)), draft_states())
    for _ in range(5):
        pool.step(0)
        pool.step(1)
    norm = pool.engines[0].decoder.logical_views()["model.norm.weight"]
    kept = norm.clone()
    norm.fill_(torch.nan)
    pages, others = pool.share(0).pages, pool.share(1).pages
    before = pool.storage.memory[others].clone()
    with pytest.raises(FloatingPointError):
        pool.engines[0].replica.step()
    assert len(pages) > 2 and not pool.storage.memory[pages].any()
    assert before.any() and torch.equal(pool.storage.memory[others], before)
    norm.copy_(kept)
    pool.finish()
    for done, model in zip(pool.done, (qwen3, qwen2), strict=True):
        check(done, plain(model))


def test_an_engine_that_sleeps_gives_its_pages_back(qwen3: str, qwen2: str) -> None:
    pool = Pool()
    for model in (qwen3, qwen2):
        pool.add(make_engine(model, pool.pages(model, 6)), draft_states())
    pool.finish()
    assert pool.share(0).num_pages and pool.share(1).num_pages
    address = pool.storage.memory.data_ptr()
    pool.engines[0].sleep(weights=True)
    pool.share(0).check_integrity()
    assert pool.share(0).num_pages == 0 and pool.pool.num_free == 12 - pool.share(1).num_pages
    pool.engines[0].wake_up()
    pool.engines[0].load(checkpoint_tensors(qwen3), 1)
    assert pool.storage.memory.data_ptr() == address
    pool.poison()
    done = finish(pool.engines[0], draft_states())
    assert {key: one.token_ids for key, one in done.items()} == {
        key: one.token_ids for key, one in plain(qwen3).items()
    }


def test_a_sequence_may_be_as_long_as_the_largest_budget(qwen3: str) -> None:
    pool = Pool()
    engine = make_engine(qwen3, pool.pages("a", 0))
    share, (state, *_) = pool_share(engine), draft_states()
    with pytest.raises(ValueError, match="the KV cache holds 0"):
        engine.replica.submit(Work(state=state))
    share.set_budget(3)
    engine.replica.submit(Work(state=state))
    share.set_budget(0)
    assert engine.num_kv_tokens == 3 * 3 * 16
    assert engine.replica.step().num_tokens == 0, "it waits for pages"
    share.set_budget(2)
    assert run(engine)[state.sequence_id].token_ids == plain(qwen3)[state.sequence_id].token_ids


def pool_share(engine: LocalEngine) -> PageShare:
    assert engine.share is not None
    return engine.share


def test_what_pages_cannot_do_is_refused(qwen3: str) -> None:
    pool = Pool()
    with pytest.raises(ValueError, match=r"EngineConfig.drafter='model': cannot draft"):
        make_engine(qwen3, pool.pages("a", 2), drafter="model", draft_model=qwen3)
    engine = make_engine(qwen3, pool.pages("a", 2))
    with pytest.raises(ValueError, match="a KV cache in pages cannot be regrouped"):
        engine.regroup(None, SingleRank(), {})  # type: ignore[arg-type]
    assert make_engine(qwen3, None).share is None and LLM(qwen3, kv_cache_bytes=2**23)._engine.share is None
