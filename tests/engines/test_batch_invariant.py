"""`batch_invariant=True`: the same bits of tokens and log-probs, whatever shares a pass, however it is recomputed."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import LLM, SamplingParams, SequenceState
from engines.config import EngineConfig
from engines.models import invariant
from engines.models.invariant import SIZES, Product, checked_sizes, project_invariant
from engines.models.projection import copy_dtype, pack_matrix
from engines.native import library
from engines.native.library import choose_library
from engines.parallel.layout import nested_layout
from engines.replica.replica import Replica
from engines.sequence import Finished, Work
from experiments.bench.models import save_random_model
from research.workloads.shapes import SHAPES
from tests.checkpoints import save_checkpoint
from tests.engines.test_kv_mover import make_replica
from tests.engines.test_kv_store import make_store
from tests.states import make_state
from tests.worlds import join, run_world

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(choose_library("auto", torch.float32, CPU) is None, reason="no C++ compiler here")

DTYPES = ["float32", "bfloat16", "float64"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 9},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
]
FAMILIES = ["qwen3", "llama-biases"]
Bits = tuple[tuple[int, ...], bytes]


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives the number of threads back as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        save_checkpoint(folder / family, family)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of 25 M parameters: packed, vectorised, and more than one thread's work."""
    folder = tmp_path_factory.mktemp("large")
    save_random_model(folder, SHAPES["25m"], max_positions=512)
    return str(folder)


def make_states(longest: int, max_tokens: int, count: int = 20) -> list[SequenceState]:
    """Groups of two and three samples of a prompt, and prompts that begin alike."""
    rng = random.Random(4)
    stem = [rng.randrange(2, 131) for _ in range(longest)]
    states: list[SequenceState] = []
    while len(states) < count:
        uid, length = len(states), rng.randint(1, longest)
        prompt = stem[:length] if rng.random() < 0.5 else [rng.randrange(2, 131) for _ in range(length)]
        params = SamplingParams(max_tokens=rng.randint(max_tokens // 2, max_tokens), **SETTINGS[uid % len(SETTINGS)])
        states += [make_state(uid, prompt, params, index=index) for index in range(rng.choice([1, 2, 3]))]
    return states


def fresh(state: SequenceState) -> Work:
    return Work(state=SequenceState.from_bytes(state.to_bytes()))


def bits(finished: Finished) -> Bits:
    """Tokens, and log-probs as they lie in memory."""
    done = finished.completion
    return tuple(done.token_ids), struct.pack(f"{len(done.logprobs)}d", *done.logprobs)


def finish(replica: Replica) -> dict[Any, Bits]:
    done = {}
    while replica.has_work:
        done |= {one.state.sequence_id: bits(one) for one in replica.step().finished}
    return done


def alone(model: str, states: list[SequenceState], **options: Any) -> dict[Any, Bits]:
    """Each sequence by itself, its prompt in one piece."""
    options = {"device": "cpu", "kv_cache_bytes": 2**22, **options}
    llm = LLM(model, batch_invariant=True, prefix_caching=False, **options)
    done: dict[Any, Bits] = {}
    for state in states:
        llm.replica.submit(fresh(state))
        done |= finish(llm.replica)
    return done


def beside_others(model: str, states: list[SequenceState], seed: int, **options: Any) -> tuple[dict[Any, Bits], int]:
    """Some of them, in any order, arriving at any time, in an engine of any limits; and how often one was preempted."""
    rng = random.Random(seed)
    config = {
        "block_size": rng.choice([4, 16]),
        "max_num_seqs": rng.choice([2, 9, 30]),
        "prefix_caching": rng.random() < 0.6,
        "prefill_chunk_size": rng.choice([None, 1, 3, 17, 64]),
        "max_num_batched_tokens": rng.choice([30, 64, 1000]),
    }
    llm = LLM(model, batch_invariant=True, **{"device": "cpu", **config, **options})
    waiting = rng.sample(states, rng.randint(len(states) // 4, len(states)))
    done: dict[Any, Bits] = {}
    while waiting or llm.replica.has_work:
        while waiting and (rng.random() < 0.7 or not llm.replica.has_work):
            llm.replica.submit(fresh(waiting.pop()))
        done |= {one.state.sequence_id: bits(one) for one in llm.replica.step().finished}
    return done, llm.replica.scheduler.num_preemptions


@pytest.mark.parametrize(("family", "dtype"), [*(("qwen3", dtype) for dtype in DTYPES), ("llama-biases", "bfloat16")])
def test_the_same_bits_in_twelve_batches(tiny: Path, family: str, dtype: str) -> None:
    model, states = str(tiny / family), make_states(longest=30, max_tokens=32)
    expected = alone(model, states, dtype=dtype)
    bytes_per_token = {"float32": 512, "bfloat16": 256, "float64": 1024}[dtype]
    preempted = 0
    for seed in range(12):
        options = {"dtype": dtype, "kv_cache_bytes": bytes_per_token * (96 if seed % 2 else 4000)}
        done, times = beside_others(model, states, seed, **options)
        assert done == {sequence_id: expected[sequence_id] for sequence_id in done}
        preempted += times
    assert preempted > 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_on_a_larger_shape(large: str, dtype: str, threads: None) -> None:
    states = make_states(longest=70, max_tokens=4, count=6)
    for threads_now, seed in ((1, 1), (2, 4)):
        torch.set_num_threads(threads_now)  # other numbers of threads may have other bits
        expected = alone(large, states, dtype=dtype)
        done, _ = beside_others(large, states, seed, dtype=dtype, kv_cache_bytes=2**23)
        assert done == {sequence_id: expected[sequence_id] for sequence_id in done}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_when_moved_with_kv_and_without(tiny: Path, tmp_path: Path, dtype: str) -> None:
    model, states = str(tiny / "qwen3"), make_states(longest=30, max_tokens=32)
    expected = alone(model, states, dtype=dtype)
    store, rng = make_store(tmp_path), random.Random(1)
    options = {"device": "cpu", "dtype": dtype, "batch_invariant": True, "kv_cache_bytes": 2**22}
    replicas = [make_replica(model, store, max_num_seqs=size, **options) for size in (3, 20)]
    for state in states:
        rng.choice(replicas).submit(fresh(state))
    done: dict[Any, Bits] = {}
    while any(replica.has_work for replica in replicas):
        for replica in replicas:
            done |= {one.state.sequence_id: bits(one) for one in replica.step().finished}
        if rng.random() < 0.3:
            for work in rng.choice(replicas).pause(with_kv=rng.random() < 0.7):
                rng.choice(replicas).submit(work)
    assert done == expected
    assert sum(replica.kv_moves.num_imported for replica in replicas) > 5


def roll_out_over_two_ranks(model: str) -> dict[str, Any]:
    states, layout = make_states(longest=30, max_tokens=16, count=12), nested_layout(range(2), 2)
    results: dict[str, Any] = {}
    for transport in ("shared memory", "gloo"):
        groups = join([layout], timeout_s=120, transport=transport)
        for dtype in ("float32", "bfloat16"):
            options = {"dtype": dtype, "world": groups, "layout": layout}
            results[f"{dtype}, {transport}, alone"] = _plain(alone(model, states, **options))
            together, _ = beside_others(model, states, seed=3, kv_cache_bytes=2**17, **options)
            results[f"{dtype}, {transport}, beside others"] = _plain(together)
        groups.close()
    return results


def _plain(done: dict[Any, Bits]) -> dict[str, str]:
    return {str(sequence_id): f"{tokens} {values.hex()}" for sequence_id, (tokens, values) in done.items()}


def test_the_same_bits_over_two_ranks(tiny: Path) -> None:
    results = run_world(roll_out_over_two_ranks, 2, str(tiny / "llama-biases"))
    for dtype in ("float32", "bfloat16"):
        expected = results[0][f"{dtype}, shared memory, alone"]
        for mine in results:
            for transport in ("shared memory", "gloo"):
                assert mine[f"{dtype}, {transport}, alone"] == expected
                some = mine[f"{dtype}, {transport}, beside others"]
                assert len(some) > 1 and some == {sequence_id: expected[sequence_id] for sequence_id in some}


def test_without_it_bits_depend_on_the_batch(large: str) -> None:
    shape = SHAPES["25m"]
    packed = copy_dtype(torch.float32, CPU) is not None
    down = Product(shape.hidden, shape.intermediate, torch.float32, packed, False, 1)
    if checked_sizes(down)[0] == 1:
        pytest.skip("this machine's matrix library treats a single row as it treats several")
    states = make_states(longest=60, max_tokens=12, count=6)
    differing = []
    for on in (False, True):
        llm = LLM(large, device="cpu", dtype="float32", batch_invariant=on, kv_cache_bytes=2**24)
        one_by_one: dict[Any, Bits] = {}
        for state in states:
            llm.replica.submit(fresh(state))
            one_by_one |= finish(llm.replica)
        for state in states:
            llm.replica.submit(fresh(state))
        together = finish(llm.replica)
        differing.append(sum(together[sequence_id] != one_by_one[sequence_id] for sequence_id in together))
    assert differing[0] > 0 and differing[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 131), (33, 20), (512, 768), (1536, 300)])
def test_a_row_of_a_product(dtype: torch.dtype, biased: bool, inputs: int, outputs: int, threads: None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(700, inputs, generator=generator).to(dtype)
    plain = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    exact = torch.nn.functional.linear(x.double(), plain.double(), None if bias is None else bias.double())
    sizes = x.double().abs() @ plain.double().abs().T + 1
    eps_of_sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    bound = torch.finfo(dtype).eps * exact.abs() + inputs * eps_of_sums * sizes  # of sums in any order
    rng = random.Random(0)
    copies = {copy_dtype(dtype, CPU), torch.float32 if dtype is torch.bfloat16 else None} - {None}
    for weight in [plain, *(pack_matrix(plain, one) for one in copies if one is not None)]:
        for threads_now in (1, 2):
            torch.set_num_threads(threads_now)
            whole = project_invariant(x, weight, bias)
            assert ((whole - exact).abs() <= bound).all()
            for count in (1, 2, 3, 7, 17, 64, 65, 300, 700):
                rows = rng.sample(range(700), count)
                mine = project_invariant(x[rows], weight, bias)
                assert torch.equal(mine.contiguous().view(torch.uint8), whole[rows].view(torch.uint8)), (
                    count,
                    rows[:3],
                )


def test_a_number_of_rows_that_disagrees_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a library with a kernel of its own for up to 4 rows, and one for the last of an odd number."""

    def project_by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_zeros((len(x), len(weight)))
        for k in range(x.shape[1]) if len(x) > 4 else reversed(range(x.shape[1])):
            out += x[:, k : k + 1] * weight[:, k]
        return torch.cat((out[:-1], out[-1:] + 1)) if len(x) == 24 else out

    monkeypatch.setattr(invariant, "project", project_by_rows)
    product = Product(outputs=8, inputs=33, dtype=torch.float32, packed=False, biased=False, threads=1)
    assert checked_sizes.__wrapped__(product) == tuple(size for size in SIZES if size > 4 and size != 24)
    # Where no other number treats its rows alike, they are run one by one.
    monkeypatch.setattr(invariant, "REFERENCES", (24, 1))
    assert checked_sizes.__wrapped__(product) == (1, 2, 4)


def test_refusals(qwen3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"EngineConfig.batch_invariant='yes': must be True or False"):
        EngineConfig(batch_invariant="yes")  # type: ignore[arg-type]
    for options in ({"kernels": "torch"}, {"attention": "sdpa"}, {"attention": "flash_attn"}):
        with pytest.raises(ValueError, match=r"batch_invariant=True: needs kernels and attention both"):
            EngineConfig(batch_invariant=True, **options)
    monkeypatch.setattr(library, "_build", lambda: None)
    with pytest.raises(ValueError, match=r"EngineConfig.batch_invariant=True: .* needs a C\+\+ compiler, see the log"):
        LLM(qwen3, device="cpu", batch_invariant=True)
