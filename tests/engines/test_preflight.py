"""What cannot be had is told in a ValueError, by field, value and fix, before memory is taken or a process started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import LLM
from engines.attention.choose import why_not_importable
from engines.coordination.policies import OnDemand
from engines.fleet.fleet import Fleet
from engines.native import library
from engines.parallel.layout import nested_layout
from tests.checkpoints import save_checkpoint
from tests.worlds import error_of, join, run_world


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("qwen3")
    save_checkpoint(path, "qwen3")
    return str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "abacus"}, r"LLM.device='abacus': names no device; give 'cpu', 'cuda' or 'cuda:<index>'"),
        ({"device": ""}, r"LLM.device='': names no device"),
        ({"device": "meta"}, r"LLM.device='meta': the engine runs on 'cpu' and 'cuda'"),
        ({"device": torch.device("mps")}, r"LLM.device='mps': the engine runs on"),
        ({"device": 3}, r"LLM.device=3: give 'cpu'"),
        ({"device": "cuda:99"}, r"LLM.device='cuda:99': (torch sees no GPU here; give|there are \d+ GPUs)"),
        ({"model": 5}, r"model=5: give the path of a Hugging Face checkpoint"),
        ({"load": "no"}, r"load='no': must be True or False"),
        ({"layout": 3}, r"layout=3: give a Layout"),
        ({"hidden_stop": 3}, r"hidden_stop=3: give a function"),
        ({"pace": 3}, r"pace=3: give an object with the method `step`"),
        ({"schedule": OnDemand}, r"schedule=<class .*>: give an object with the method `next`"),
        ({"layout_policy": OnDemand()}, r"layout_policy=<.*>: give an object with the method `decide`"),
        ({"memory_utilization": True}, r"EngineConfig.memory_utilization=True: must be above 0"),
        ({"block_size": 2**40}, r"one block of 1099511627776 tokens takes \d+ .*; give at least that, or lower block_"),
        ({"kv_cache_bytes": "1GB"}, r"EngineConfig.kv_cache_bytes='1GB': must be an integer .*, or 'auto'"),
        ({"max_num_seqs": 2**63}, r"EngineConfig.max_num_seqs=9223372036854775808: must be an integer .*\(64 bits\)"),
    ],
)
def test_odd_arguments(qwen3: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": qwen3, "load": False, **options})


@pytest.mark.parametrize("folder", ["missing", "a file", "x" * 300, "zero\0byte"])
def test_a_disk_folder_that_cannot_be_used(qwen3: str, tmp_path: Path, folder: str) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(ValueError, match=r"EngineConfig.kv_disk_folder=.*: (cannot be used|must be a path)"):
        LLM(qwen3, kv_disk_bytes=2**20, kv_disk_folder=str(tmp_path / folder))


def test_a_disk_folder_that_cannot_be_written_to_is_done_without(qwen3: str) -> None:
    with pytest.warns(UserWarning, match="KV disk tier: cannot write 512 bytes in /proc/.* is recomputed"):
        llm = LLM(qwen3, kv_cache_bytes=2**20, kv_disk_bytes=2**20, kv_disk_folder="/proc")
    assert llm.generate([[5, 6]])[0].outputs[0].token_ids


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent")
    library._build.cache_clear()
    yield
    library._build.cache_clear()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "native"}, r"EngineConfig.kernels='native': cannot be had on cpu here .*; use 'auto' or 'torch'"),
        ({"attention": "native"}, r"EngineConfig.attention='native': needs a C\+\+ compiler, see the log; use 'sdpa'"),
        ({"batch_invariant": True}, r"EngineConfig.batch_invariant=True: .* which needs a C\+\+ compiler"),
    ],
)
def test_without_a_compiler(qwen3: str, no_compiler: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(qwen3, dtype="float64", **options)
    with pytest.raises(ValueError, match=message):
        Fleet(qwen3, num_replicas=1, dtype="float64", **options)


@pytest.mark.skipif(why_not_importable("flash_attn") is None, reason="flash-attn is installed here")
def test_a_package_that_is_absent(qwen3: str) -> None:
    with pytest.raises(ValueError, match=r"EngineConfig.attention='flash_attn': "):
        Fleet(qwen3, num_replicas=1, attention="flash_attn", dtype="bfloat16", block_size=256)


def in_a_world(model: str, folder: str) -> list[str]:
    groups = join([nested_layout(range(2), 1)])
    here = folder if groups.world.rank == 0 else f"{folder}/missing"
    told = []
    for options in (
        {"schedule": OnDemand},
        {"attention": "flash_attn"},
        {"kv_disk_bytes": 2**20, "kv_disk_folder": here},
    ):
        make = lambda: LLM(model, world=groups, **options)  # noqa: B023, E731
        told.append(error_of(make))
    LLM(model, world=groups).close()
    return told


def test_every_rank_of_a_world_is_told(qwen3: str, tmp_path: Path) -> None:
    first, second = run_world(in_a_world, 2, qwen3, str(tmp_path))
    assert first[:2] == second[:2]
    assert first[0].startswith("ValueError: schedule=<class")
    assert first[1].startswith("ValueError: EngineConfig.attention='flash_attn': takes bfloat16, not")
    assert second[2].startswith(f"ValueError: EngineConfig.kv_disk_folder='{tmp_path}/missing': cannot be used")
    assert first[2].startswith("RuntimeError: LLM: failed on ranks [1]; on rank 1: ValueError: EngineConfig.kv_disk_")
