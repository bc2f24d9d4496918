"""The same tokens over every layout: one process, data parallel, tensor parallel, both; nested and contiguous.

In float64, with real processes, for fewer KV heads than ranks, tied and untied embeddings, and a vocabulary of 131,
which no number of ranks divides.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import LLM, SamplingParams
from engines.coordination.policies import OnDemand
from engines.parallel.layout import Layout, ReplicaSpec, contiguous_layout, nested_layout
from tests.checkpoints import save_checkpoint
from tests.worlds import ROOT, error_of, join, run_world, start_ranks

RNG = random.Random(5)
PROMPTS = [[RNG.randrange(2, 131) for _ in range(RNG.randint(1, 30))] for _ in range(12)]
PARAMS = [SamplingParams(max_tokens=24, n=2)] * 11 + [SamplingParams(max_tokens=24, temperature=0.0)]
FAMILIES = ("qwen3", "qwen2-untied-mqa", "llama2", "llama-biases")
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**22, "max_num_batched_tokens": 64, "max_num_seqs": 9}
WORLDS = {
    2: {"DP2": ("nested", 1), "TP2": ("nested", 2)},
    4: {
        "DP4": ("nested", 1),
        "DP2xTP2 nested": ("nested", 2),
        "DP2xTP2 contiguous": ("contiguous", 2),
        "TP4": ("nested", 4),
    },
}
TRANSPORTS = {"gloo": FAMILIES[:2], "shared memory": FAMILIES}
"""And the families that go over it: what a family does differently, it does before and behind the transport."""
CASES = [
    (size, name, transport, family)
    for size in WORLDS
    for name in WORLDS[size]
    for transport, families in TRANSPORTS.items()
    for family in families
]


def roll_out(llm: LLM) -> dict[str, Any]:
    outputs = llm.generate(PROMPTS, PARAMS)
    return {
        "tokens": [[c.token_ids for c in output.outputs] for output in outputs],
        "logprobs": [value for output in outputs for c in output.outputs for value in c.logprobs],
        "checksum": format(llm.checksum(), "x"),
    }


def roll_out_over_layouts(directory: str, wanted: dict[str, list[Any]]) -> dict[str, Any]:
    make = {"nested": nested_layout, "contiguous": contiguous_layout}
    layouts = {
        name: make[kind](range(int(os.environ["WORLD_SIZE"])), tp_size) for name, (kind, tp_size) in wanted.items()
    }
    results: dict[str, Any] = {}
    for transport, families in TRANSPORTS.items():
        groups = join(layouts.values(), timeout_s=120, transport=transport)
        for family in families:
            for name, layout in layouts.items():
                llm = LLM(f"{directory}/{family}", world=groups, layout=layout, **OPTIONS)
                results[f"{family}/{name}/{transport}"] = roll_out(llm)
        groups.close()
    return results


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        save_checkpoint(directory / family, family)
    return directory


@pytest.fixture(scope="module")
def worlds(checkpoints: Path) -> dict[int, list[dict[str, Any]]]:
    return {
        size: run_world(roll_out_over_layouts, size, str(checkpoints), {k: list(v) for k, v in wanted.items()})
        for size, wanted in WORLDS.items()
    }


@pytest.fixture(scope="module")
def alone(checkpoints: Path) -> dict[str, dict[str, Any]]:
    return {family: roll_out(LLM(checkpoints / family, **OPTIONS)) for family in FAMILIES}


@pytest.mark.parametrize(("size", "name", "transport", "family"), CASES)
def test_tokens_are_those_of_one_process(
    worlds: dict[int, list[dict[str, Any]]], alone: dict[str, dict[str, Any]], size: int, name: str, transport: str,
    family: str,
) -> None:  # fmt: skip
    for rank in range(size):
        mine = worlds[size][rank][f"{family}/{name}/{transport}"]
        assert mine["tokens"] == alone[family]["tokens"]
        assert mine["checksum"] == alone[family]["checksum"]
        assert mine["logprobs"] == pytest.approx(alone[family]["logprobs"], rel=1e-9, abs=1e-9)


def test_the_comparison_is_worth_something(alone: dict[str, dict[str, Any]]) -> None:
    everything = [str(result["tokens"]) for result in alone.values()]
    assert len(set(everything)) == len(FAMILIES)
    assert all(len(tokens) > 3 for result in alone.values() for tokens in result["tokens"][-1])


def refuse(directory: str) -> list[str]:
    groups = join([nested_layout(range(2), 2)])
    one_rank = Layout(epoch=0, replicas=(ReplicaSpec(id=0, ranks=(0,)),))
    return [
        error_of(lambda: LLM(f"{directory}/qwen3", world=groups, tensor_parallel_size=3)),
        error_of(lambda: LLM(f"{directory}/qwen3", world=groups, layout=one_rank)),
        error_of(lambda: LLM(f"{directory}/odd", world=groups, tensor_parallel_size=2)),
    ]


def test_sizes_that_do_not_divide_are_refused_on_every_rank(checkpoints: Path) -> None:
    odd = shutil.copytree(checkpoints / "qwen3", checkpoints / "odd")
    raw = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**raw, "num_attention_heads": 3, "num_key_value_heads": 3}))
    for messages in run_world(refuse, 2, str(checkpoints)):
        assert "tensor_parallel_size=3: does not divide the 2 ranks" in messages[0]
        assert "layout: places ranks [0]" in messages[1]
        assert "num_heads=3" in messages[2]


PLAIN_LINES = """
from engines import LLM, SamplingParams
llm = LLM({model!r}, tensor_parallel_size=2, dtype="float64", kv_cache_bytes=2**24)
outputs = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=20, n=2, ignore_eos=True))
print([[one.token_ids for one in output.outputs] for output in outputs], flush=True)
"""
ON_DEMAND = """
from engines import LLM, SamplingParams
from engines.coordination.policies import OnDemand
for _ in range(2):
    llm = LLM({model!r}, schedule=OnDemand(), dtype="float64", kv_cache_bytes=2**24)
    outputs = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=20, n=2, ignore_eos=True))
    assert len(llm.layout.replicas) == 2
    llm.close()
print([[one.token_ids for one in output.outputs] for output in outputs], flush=True)
"""


def under_torchrun(script: Path) -> str:
    command = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stdout


def with_its_variables(script: Path) -> str:
    with start_ranks([str(script)], 2) as ranks:
        assert [rank.wait(120) for rank in ranks] == [0, 0], ranks[0].stderr[-3000:] + ranks[1].stderr[-3000:]
        return "".join(rank.stdout for rank in ranks)


@pytest.mark.parametrize(
    ("lines", "run"),
    [(PLAIN_LINES, under_torchrun), (ON_DEMAND, with_its_variables)],
    ids=["TP2", "DP2 on demand"],
)
def test_a_few_lines_under_torchrun_make_their_own_world(
    checkpoints: Path, tmp_path: Path, lines: str, run: Callable[[Path], str]
) -> None:
    model = str(checkpoints / "qwen3")
    (tmp_path / "script.py").write_text(lines.format(model=model))
    printed = run(tmp_path / "script.py")
    alone = LLM(model, dtype="float64", kv_cache_bytes=2**24)
    outputs = alone.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=20, n=2, ignore_eos=True))
    told = str([[one.token_ids for one in output.outputs] for output in outputs])
    assert printed.replace("\n", "") == told * 2  # two ranks' lines may mix with their ends


def roll_out_with_other_ids(directory: str) -> dict[str, Any]:
    layout = Layout(epoch=0, replicas=(ReplicaSpec(id=7, ranks=(1,)), ReplicaSpec(id=2, ranks=(0,))))
    groups = join([layout])
    result = roll_out(LLM(f"{directory}/qwen3", world=groups, layout=layout, **OPTIONS))
    return result


def test_replicas_may_have_any_ids(checkpoints: Path, alone: dict[str, dict[str, Any]]) -> None:
    for mine in run_world(roll_out_with_other_ids, 2, str(checkpoints)):
        assert mine["tokens"] == alone["qwen3"]["tokens"]


KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 8
"""Of the tiny Qwen3 in float64: keys and values, layers, KV heads, head dim, bytes."""


def fill_two_sizes(directory: str) -> list[str]:
    layout = Layout(epoch=0, replicas=(ReplicaSpec(id=0, ranks=(0, 1)), ReplicaSpec(id=1, ranks=(2,))))
    groups = join([layout])
    options = {**OPTIONS, "kv_cache_bytes": 64 * KV_BYTES_PER_TOKEN}
    llm = LLM(f"{directory}/qwen3", world=groups, layout=layout, **options)
    params = SamplingParams(max_tokens=4)
    errors = [error_of(lambda: llm.generate([[5] * 61], params)), error_of(lambda: llm.generate([[5] * 60], params))]
    errors.append(str(llm._engine.num_kv_tokens))
    options["kv_cache_bytes"] = 12 * KV_BYTES_PER_TOKEN
    errors.append(error_of(lambda: LLM(f"{directory}/qwen3", world=groups, layout=layout, **options)))
    return errors


def test_replicas_of_two_sizes_take_what_fits_in_all(checkpoints: Path) -> None:
    results = run_world(fill_two_sizes, 3, str(checkpoints))
    assert [result[2] for result in results] == ["128", "128", "64"], "the replicas were to hold unequal numbers"
    for too_long, fits, _, too_small in results:
        told = "ValueError: prompts[0]: 61 tokens with max_tokens=4 can reach 65 tokens, the KV cache holds 64"
        assert told in too_long
        assert fits == ""
        assert "ValueError: EngineConfig.kv_cache_bytes=12288: one block of 16 tokens takes 16384 bytes" in too_small


def give_ranks_unequal_options(directory: str) -> list[str]:
    groups = join()
    first = groups.world.rank == 0

    class Keep:
        def decide(self, view: Any) -> None:
            return None

    def make(**options: Any) -> str:
        name = options.pop("model", "qwen3")
        return error_of(lambda: LLM(f"{directory}/{name}", world=groups, **{**OPTIONS, **options}))

    errors = [
        make(schedule=OnDemand() if first else None),
        make(schedule=OnDemand(), layout_policy=Keep() if first else None),
        make(load=first),
        make(tensor_parallel_size=1 if first else 2),
        make(kv_cache_bytes=2**21 if first else 2**22),
        make(model="qwen3" if first else "llama2"),
        make(model="qwen3" if first else "nowhere"),
        make(block_size=16 if first else 0),
    ]
    llm = LLM(f"{directory}/qwen3", world=groups, **OPTIONS)
    errors.append(error_of(lambda: llm.generate([[5] if first else [999]])))
    return errors


def test_unequal_options_are_refused_on_every_rank(checkpoints: Path) -> None:
    first, second = run_world(give_ranks_unequal_options, 2, str(checkpoints))
    for errors in (first, second):
        assert errors[0] == "ValueError: LLM: schedule: rank 1 has False, rank 0 has True; give all ranks the same"
        assert "ValueError: LLM: layout_policy: rank 1 has False, rank 0 has True" in errors[1]
        assert "ValueError: LLM: load: rank 1 has False" in errors[2]
        assert "ValueError: LLM: layout: rank 1 has Layout(epoch=0" in errors[3]
        assert "ValueError: LLM: EngineConfig.kv_cache_bytes: rank 1 has 4194304, rank 0 has 2097152" in errors[4]
        assert "ValueError: LLM: ModelConfig." in errors[5]
    assert first[6].startswith("RuntimeError: LLM: failed on ranks [1]; on rank 1: FileNotFoundError: model=")
    assert second[6].startswith("FileNotFoundError: model=")
    assert first[7].startswith(
        "RuntimeError: LLM: failed on ranks [1]; on rank 1: ValueError: EngineConfig.block_size=0"
    )
    assert second[7].startswith("ValueError: EngineConfig.block_size=0")
    assert first[8].startswith(
        "RuntimeError: generate: failed on ranks [1]; on rank 1: ValueError: prompts[0]: token id 999"
    )
    assert second[8].startswith("ValueError: prompts[0]: token id 999")
