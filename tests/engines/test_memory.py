"""What the engine is planned to take: against what it takes, what is free, and what is asked."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import LLM, SamplingParams
from engines.config import EngineConfig, ModelConfig
from engines.memory.free_memory import FreeMemory
from engines.memory.host_memory import free_host_bytes
from engines.memory.plan import MIB, MemoryPlan
from engines.models.parameters import logical_shapes
from engines.parallel.layout import Layout, ReplicaSpec, nested_layout
from engines.replica.capacity import Capacity
from tests.checkpoints import FAMILIES, save_checkpoint
from tests.worlds import error_of, run_world

MID_SIZE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


@pytest.fixture(scope="module")
def mid_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mid-size")
    (folder / "config.json").write_text(json.dumps(MID_SIZE))
    return folder


def capacity(model: ModelConfig, free: dict[str, int | None], names: tuple[str, ...], **options: Any) -> Capacity:
    return Capacity(
        model=model,
        config=EngineConfig(**options),
        device=torch.device("cpu"),
        free=FreeMemory(names=names, num_bytes=free),
        max_tp_size=2,
    )


# -- the plan against what is taken


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_counted_to_the_byte(family: str, dtype: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, family)
    llm = LLM(tmp_path, load=False, dtype=dtype)
    assert llm.memory.weights == sum(tensor.nbytes for tensor in llm._engine.decoder.parameters.tensors())


def test_the_kv_cache_is_counted_to_the_byte(qwen3: str) -> None:
    llm = LLM(qwen3, kv_cache_bytes=2**20 + 777)
    scratch = llm._engine.kv.scratch_block
    caches = (*llm._engine.kv.keys, *llm._engine.kv.values)
    assert llm.memory.kv_cache == sum(cache[:scratch].nbytes for cache in caches)
    assert llm.memory.num_kv_tokens == llm._engine.num_kv_tokens
    assert f"{llm.memory.num_kv_tokens // 256} sequences of max_model_len=256" in llm.memory.summary()


def status(field: str) -> int:
    """Bytes: of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def take_memory(folder: str, lengths: list[int], max_tokens: int, options: dict[str, Any]) -> list[int]:
    """The most that this process has taken for an engine that is loaded, prefills and decodes; and what was planned."""
    torch.set_num_threads(2)
    torch.randn(64, 64) @ torch.randn(64, 64)
    before = status("VmRSS")
    llm = LLM(folder, load=False, **options)
    shapes = logical_shapes(llm.model_config)
    llm.update_weights(((name, torch.full(shape, 0.01)) for name, shape in shapes.items()), version=0)
    prompts = [[2 + (17 * i + j) % 31000 for j in range(length)] for i, length in enumerate(lengths)]
    llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return [status("VmHWM") - before, llm.memory.total]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("lengths", "options", "processor"),
    [
        ([3900], {"kernels": "torch"}, {}),
        ([240] * 15 + [33], {"kernels": "auto", "dtype": "bfloat16"}, {}),
        ([240] * 15 + [33], {"kernels": "auto", "dtype": "bfloat16"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    ],
    ids=["one long prompt", "many prompts", "many prompts without bfloat16 instructions"],
)
def test_the_plan_is_an_upper_bound_and_not_a_loose_one(
    lengths: list[int],
    options: dict[str, Any],
    processor: dict[str, str],
    mid_size: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts that fill a pass and the KV cache, then decodes, in a process of its own."""
    for name, value in processor.items():
        monkeypatch.setenv(name, value)
    options = options | {"kv_cache_bytes": 4096 * 1024 * 2, "max_num_seqs": 16, "max_num_batched_tokens": 4096}
    [[taken, planned]] = run_world(take_memory, 1, str(mid_size), lengths, 8, options, as_torchrun=False)
    assert taken <= planned, f"{taken / MIB:.0f} MiB taken, {planned / MIB:.0f} planned"
    assert planned <= 2.5 * taken, f"{taken / MIB:.0f} MiB taken, {planned / MIB:.0f} planned"


def attend_wide() -> list[int]:
    """Extra memory of attention over one long context among many short ones, and over a long prompt; the bounds."""
    from engines.attention import sdpa
    from engines.attention.batch import ForwardBatch
    from engines.memory.plan import PIECE_BYTES

    torch.set_num_threads(2)
    caches = [torch.randn(1024, 16, 2, 64) for _ in range(2)]  # 16384 tokens
    grown = []
    for past, new in (([8000] + [100] * 63, [1] * 64), ([0], [4096])):
        contexts = [a + b for a, b in zip(past, new, strict=True)]
        ends = torch.tensor([0, *new]).cumsum(0)
        ids = torch.zeros(sum(new), dtype=torch.int64)
        batch = ForwardBatch(
            tokens=ids,
            positions=ids,
            cu_seqlens_q=ends.int(),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_table=torch.randint(1024, (len(new), -(-max(contexts) // 16)), dtype=torch.int32),
            slot_mapping=ids,
            logit_rows=ids,
            seqlens_q=new,
        )
        q = torch.randn(len(ids), 16, 64)
        before = status("VmHWM")
        sdpa.attention(q, *caches, sdpa.plan(batch, 16))
        grown.append(status("VmHWM") - before)
    queries = 4096 * 16 * 64 * 4
    return [*grown, 32 * MIB + PIECE_BYTES, 7 * queries + 2 * PIECE_BYTES]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_attention_takes_no_more_for_a_wide_batch() -> None:
    """Padded to the longest, the decodes alone would gather 500 MiB; the mask of the long prompt would be 640."""
    [[decodes, prompt, most_decodes, most_prompt]] = run_world(attend_wide, 1, as_torchrun=False)
    assert decodes < most_decodes
    assert prompt < most_prompt


# -- what is free


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def host(tmp_path: Path, groups: str) -> dict[str, Path]:
    write(tmp_path / "proc", meminfo="MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  8000 kB\nHugePages_Total:  0")
    write(tmp_path / "proc" / "self", cgroup=groups)
    return {"proc": tmp_path / "proc", "cgroups": tmp_path / "cgroup"}


def test_free_memory_of_a_host(tmp_path: Path) -> None:
    assert free_host_bytes(**host(tmp_path, "0::/")) == 8000 * 1024
    assert free_host_bytes(tmp_path / "nothing", tmp_path / "nothing") is None


def test_a_control_group_s_limit_counts_and_its_file_pages_are_free(tmp_path: Path) -> None:
    places = host(tmp_path, "0::/slice/run")
    pages = "anon 1\nactive_file 70\ninactive_file 30"
    write(tmp_path / "cgroup" / "slice" / "run", memory__max="max", memory__current=900, memory__stat=pages)
    assert free_host_bytes(**places) == 8000 * 1024
    write(tmp_path / "cgroup" / "slice", memory__max=5000, memory__current=2000, memory__stat=pages)
    assert free_host_bytes(**places) == 5000 - 2000 + 100, "that of the group around it"
    write(tmp_path / "cgroup" / "slice", memory__current=6000)
    assert free_host_bytes(**places) == 0


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    places = host(tmp_path, "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/")
    files = {"memory__limit_in_bytes": 7000, "memory__usage_in_bytes": 3000}
    pages = "total_active_file 5\ntotal_inactive_file 6\nactive_file 1\ninactive_file 1"
    write(tmp_path / "cgroup" / "memory", **files, memory__stat=pages)
    assert free_host_bytes(**places) == 4011, "the name is one outside the container: its own group is the root"


def test_this_host_s(tmp_path: Path) -> None:
    free = free_host_bytes()
    assert free is None or 0 < free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# -- whether it fits


def test_what_fits_to_the_byte_is_taken_and_one_byte_less_refused(qwen3: str) -> None:
    model = ModelConfig.from_pretrained(qwen3)
    alone, options = nested_layout(range(1), 1), {"kv_cache_bytes": 100 * MIB}
    total = capacity(model, {"h": None}, ("h",), **options).plan(1).total
    capacity(model, {"h": total}, ("h",), **options).check(alone)
    capacity(model, {"h": None}, ("h",), **options).check(alone)  # not known: the allocator will tell
    with pytest.raises(ValueError, match=r"the engine needs \d+ MiB: weights 1, KV cache 100, a pass") as error:
        capacity(model, {"h": total - 1}, ("h",), **options).check(alone)
    assert re.search(rf"available: {(total - 1) // MIB} MiB. Lower kv_cache_bytes, max_num_batched", str(error.value))


def test_the_ranks_of_a_host_must_fit_together_in_each_layout(mid_size: Path) -> None:
    model = ModelConfig.from_pretrained(mid_size)
    options = {"kv_cache_bytes": 2**20}
    plans = capacity(model, {"h": None}, ("h", "h"), **options)
    halves, wholes = 2 * plans.plan(2).total, 2 * plans.plan(1).total
    assert halves < wholes
    here = capacity(model, {"h": halves}, ("h", "h"), **options)
    here.check(nested_layout(range(2), 2))
    with pytest.raises(ValueError, match=rf"the 2 ranks of h need {-(-wholes // MIB)} MiB, one of them"):
        here.check(nested_layout(range(2), 1))
    apart = capacity(model, {"h": wholes // 2, "i": halves // 2}, ("h", "i"), **options)
    with pytest.raises(ValueError, match="the engine needs"):
        apart.check(nested_layout(range(2), 1))
    capacity(model, {"h": wholes // 2, "i": wholes // 2}, ("h", "i"), **options).check(nested_layout(range(2), 1))
    mixed = Layout(epoch=0, replicas=(ReplicaSpec(id=0, ranks=(0, 1)), ReplicaSpec(id=1, ranks=(2,))))
    capacity(model, {"h": halves + wholes // 2}, ("h",) * 3, **options).check(mixed)


def test_auto_takes_what_is_left_and_no_more_than_can_be_used(mid_size: Path) -> None:
    model = ModelConfig.from_pretrained(mid_size)
    options = {"kv_cache_bytes": "auto", "memory_utilization": 0.5, "max_num_seqs": 16}

    def plan(free: int, ranks: int = 1, tp_sizes: tuple[int, ...] = (1,)) -> MemoryPlan:
        return capacity(model, {"h": free}, ("h",) * ranks, **options).with_kv_bytes(tp_sizes).plan(1)

    much, little = plan(2**40), plan(1060 * MIB)
    assert much.num_kv_tokens == 16 * 4096
    assert 0 < little.num_kv_tokens < much.num_kv_tokens
    assert 528 * MIB < little.total <= 530 * MIB
    assert plan(2120 * MIB, ranks=2) == little, "two ranks share it"
    assert plan(1060 * MIB, tp_sizes=(1, 2)) == little, "enough for both, and TP1 needs more beside the KV"
    with pytest.raises(ValueError, match=r"memory_utilization=0.5 of a rank's 100 MiB leaves no room for KV .*needs"):
        plan(100 * MIB)
    with pytest.raises(ValueError, match="kv_cache_bytes='auto': what cpu has free cannot be known"):
        capacity(model, {"h": None}, ("h",), **options).with_kv_bytes([1])


@pytest.mark.parametrize("value", [0.0, 1.5, "0.9", None])
def test_bad_utilization(value: Any) -> None:
    with pytest.raises(ValueError, match=r"EngineConfig\.memory_utilization"):
        EngineConfig(memory_utilization=value)


def test_options_without_a_limit(qwen3: str) -> None:
    """Taken where what they are for is bounded otherwise; the tokens are the same."""
    params = SamplingParams(max_tokens=20, seed=3)
    plain = LLM(qwen3, dtype="float64").generate([[5, 6]], params)
    for options in ({"kv_cache_bytes": "auto"}, {"max_num_batched_tokens": 2**60}):
        llm = LLM(qwen3, dtype="float64", **options)  # type: ignore[arg-type]
        assert llm.memory.num_kv_tokens >= 256 * 256
        assert llm.generate([[5, 6]], params) == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_bytes": 10 * 2**40}, r"KV cache 10485760, .*; available: \d+ MiB. Lower kv_cache_bytes, "),
        ({"max_num_seqs": 2**40, "max_num_batched_tokens": 2**40}, r"MiB. Lower max_num_seqs, "),
    ],
)
def test_what_cannot_fit_is_refused_at_once(options: dict[str, int], message: str, mid_size: Path) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        LLM(mid_size, load=False, **options)
    assert torch.equal(before, torch.get_rng_state())


def make_in_a_world(folder: str) -> list[str]:
    import torch.distributed as dist

    from engines.parallel.collectives import TorchGroup
    from engines.parallel.groups import GroupCache

    dist.init_process_group("gloo")
    groups = GroupCache(TorchGroup(timeout_s=60), [nested_layout(range(2), 2)], timeout_s=60)
    told = []
    for options in ({"kv_cache_bytes": 10 * 2**40}, {"kv_cache_bytes": "auto", "memory_utilization": 1e-9}):
        for size in (1, 2):
            make = lambda: LLM(folder, world=groups, tensor_parallel_size=size, load=False, **options)  # noqa: B023, E731
            told.append(error_of(make))
    llm = LLM(folder, world=groups, kv_cache_bytes="auto", memory_utilization=0.5, max_num_seqs=2, load=False)
    told.append(str(llm.config.kv_cache_bytes))
    dist.destroy_process_group()
    return told


def test_all_ranks_say_the_same(mid_size: Path) -> None:
    first, second = run_world(make_in_a_world, 2, str(mid_size))
    assert first == second
    *refused, kv_cache_bytes = first
    assert all("ValueError: EngineConfig" in error and "Lower" in error for error in refused)
    assert re.search(r"the 2 ranks of \S+ need 21\d{6} MiB, one of them 106\d{5} MiB", refused[0])
    assert int(kv_cache_bytes) == 2 * 4096 * 2 * 2 * 2 * 64 * 4, "what two sequences can fill"
