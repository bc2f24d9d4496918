"""Every option of the engine is a command line's, too, by one definition; and a resumed run keeps to it."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import tyro

from engines.config import EngineConfig
from experiments.config import RolloutConfig, parse
from experiments.generate import GenerateConfig
from experiments.training_checks import as_json, check_same_run
from tests.worlds import refused_by

GIVEN: dict[str, tuple[list[str], Any]] = {
    "dtype": (["dtype", "bfloat16"], "bfloat16"),
    "block_size": (["block-size", "32"], 32),
    "kv_cache_bytes": (["kv-cache-mib", "auto"], "auto"),
    "memory_utilization": (["memory-utilization", "0.25"], 0.25),
    "max_num_seqs": (["max-num-seqs", "7"], 7),
    "max_num_batched_tokens": (["max-num-batched-tokens", "70"], 70),
    "prefill_chunk_size": (["prefill-chunk-size", "5"], 5),
    "max_model_len": (["max-model-len", "99"], 99),
    "kernels": (["kernels", "native"], "native"),
    "attention": (["attention", "native"], "native"),
    "preemption": (["preemption", "swap"], "swap"),
    "priority_margin": (["priority-margin", "inf"], float("inf")),
    "exchange": (["exchange", "all_gather"], "all_gather"),
    "kv_host_bytes": (["kv-host-mib", "3"], 3 * 2**20),
    "kv_disk_bytes": (["kv-disk-mib", "5"], 5 * 2**20),
    "drafter": (["drafter", "grouped_suffix"], "grouped_suffix"),
    "max_draft_tokens": (["max-draft-tokens", "3"], 3),
    "draft_lengths": (["draft-lengths", "fixed"], "fixed"),
    "draft_mode": (["draft-mode", "strict"], "strict"),
    "draft_paths": (["draft-paths", "2"], 2),
    "draft_history_bytes": (["draft-history-mib", "3"], 3 * 2**20),
    "draft_tree_bytes": (["draft-tree-mib", "2"], 2 * 2**20),
    "kv_disk_folder": (["kv-disk-folder", "/kv"], "/kv"),
}
"""A value that is not the default, and how it is given."""
SWITCHES = {name: value for name, value in asdict(EngineConfig()).items() if isinstance(value, bool)}
for switch, is_on in SWITCHES.items():
    GIVEN[switch] = ([("no-" if is_on else "") + switch.replace("_", "-")], not is_on)


OF_MODEL: dict[str, tuple[list[str], Any]] = {
    "drafter": (["drafter", "model"], "model"),
    "draft_model": (["draft-model", "/draft"], "/draft"),
    "draft_noise": (["draft-noise", "own"], "own"),
}
"""Those that exclude some of the others."""


def arguments(prefix: str, given: dict[str, tuple[list[str], Any]] = GIVEN) -> list[str]:
    return [word for (name, *value), _ in given.values() for word in (f"--{prefix}{name}", *value)]


def test_each_is_reachable() -> None:
    expected = {name: value for name, (_, value) in GIVEN.items()}
    assert {*expected, *OF_MODEL} == {field.name for field in fields(EngineConfig)} - {"seed"}
    assert all(value != getattr(EngineConfig(), name) for name, value in expected.items())
    trained = parse([*arguments("rollout."), "--seed", "3"])
    assert asdict(trained.rollout.engine_config(trained.seed)) == {**asdict(EngineConfig()), **expected, "seed": 3}
    assert trained.trainer.dtype == "float32", "another option"
    generated = tyro.cli(GenerateConfig, args=["model", *arguments("")])
    assert asdict(generated.engine) == {**asdict(EngineConfig()), **expected, "seed": 0}
    generated = tyro.cli(GenerateConfig, args=["model", *arguments("", OF_MODEL)])
    expected = {name: value for name, (_, value) in OF_MODEL.items()}
    assert asdict(generated.engine) == {**asdict(EngineConfig()), **expected}


def test_each_is_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        tyro.cli(GenerateConfig, args=["--help"])
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(EngineConfig))).body
    assert isinstance(definition, ast.ClassDef)
    explained = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            explained[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    del explained["seed"]
    assert set(explained) == {*GIVEN, *OF_MODEL}
    for name, ((option, *_), _) in (GIVEN | OF_MODEL).items():
        assert f"--{option}" in told and explained[name] in told


def test_defaults_are_the_engines() -> None:
    assert asdict(tyro.cli(GenerateConfig, args=["model"]).engine) == asdict(EngineConfig())
    assert asdict(parse([]).rollout.engine) == asdict(EngineConfig(kv_cache_bytes=256 * 2**20))
    assert RolloutConfig().engine_config(0, deterministic=True).preemption == "recompute"


def test_many_sequences_raise_the_budget_unless_one_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--rollout.max-num-seqs", "5000"]).rollout.engine.max_num_batched_tokens == 5000
    with pytest.raises(SystemExit):
        parse(["--rollout.max-num-seqs", "5000", "--rollout.max-num-batched-tokens", "4999"])
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "EngineConfig.max_num_batched_tokens=4999: must be at least max_num_seqs=5000" in told


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("kv-disk-mib", "1.5", "'1.5': give a whole number of MiB"),
        ("kv-disk-mib", "None", "'None': give a whole number of MiB"),
        ("kv-host-mib", "much", "'much': give a whole number of MiB, or None"),
        ("kv-cache-mib", "None", "'None': give a whole number of MiB, or auto"),
        ("kv-disk-mib", "-1", "EngineConfig.kv_disk_bytes=-1048576: must be an integer of at least 0"),
    ],
)
def test_sizes_that_are_none(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([f"--rollout.{option}", value])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_resumed_run_keeps_to_them(tmp_path: Path) -> None:
    same = ["--runs", str(tmp_path), "--name", "a", "--rollout.block-size", "32"]
    (tmp_path / "a").mkdir()
    written = as_json(parse(same))
    (tmp_path / "a/config.json").write_text(json.dumps(written))
    assert written["rollout"]["block_size"] == 32 and written["rollout"]["kv_cache_mib"] == 256
    assert not {"seed", "engine"} & {*written["rollout"]}
    check_same_run(parse([*same, "--resume"]))
    with pytest.raises(ValueError, match=r"resume: rollout\.attention=sdpa now, auto in .*config.json; go on with"):
        check_same_run(parse([*same, "--resume", "--rollout.attention", "sdpa"]))


def test_micro_batches_of_a_device_are_kept_by_a_resumed_run(tmp_path: Path) -> None:
    """Where nobody gives them. Another size rounds sums otherwise."""
    config = parse(["--runs", str(tmp_path), "--name", "a"])
    (tmp_path / "a").mkdir()
    cpu, cuda = (replace(config, trainer=config.trainer.on(device)) for device in ("cpu", "cuda"))
    (tmp_path / "a/config.json").write_text(json.dumps(as_json(cpu)))
    check_same_run(cpu)
    with pytest.raises(ValueError, match=r"resume: trainer\.micro_batch_tokens=16384 now, 1024 in .*config.json"):
        check_same_run(cuda)
    given = replace(config.trainer, micro_batch_tokens=77)
    assert given.on("cpu") == given.on("cuda") == given


def test_a_run_may_go_on_with_another_dispatch(tmp_path: Path) -> None:
    """It changes no token, and a chunk's length is given with that of Seer only."""
    seer, static = ["--dispatch", "seer", "--chunk-tokens", "16"], ["--dispatch", "static"]
    same = ["--runs", str(tmp_path), "--name", "a"]
    (tmp_path / "a").mkdir()
    for before, after in ((seer, static), (static, seer)):
        (tmp_path / "a/config.json").write_text(json.dumps(as_json(parse([*same, *before]))))
        check_same_run(parse([*same, *after, "--resume"]))


def test_chunks_need_sequences_of_a_block() -> None:
    refusal = refused_by("train", ["--dispatch", "seer", "--rollout.max-tokens", "8"])
    assert (
        "--rollout.max-tokens=8: --dispatch seer divides into chunks of at least a block of KV, which has 16" in refusal
    )


def test_a_run_of_before_an_option_goes_on(tmp_path: Path) -> None:
    """Its folder does not name it: the default held."""
    same = ["--runs", str(tmp_path), "--name", "a", "--algo", "dapo", "--rollout.kv-cache-mib", "8"]
    (tmp_path / "a").mkdir()
    written = as_json(parse(same))
    for name in ("attention", "block_size", "memory_utilization"):
        del written["rollout"][name]
    del written["rank_timeout_s"], written["trainer"]["zero_stage"]
    (tmp_path / "a/config.json").write_text(json.dumps(written))
    check_same_run(parse([*same, "--resume"]))
    with pytest.raises(ValueError, match=r"resume: rollout\.attention=sdpa now, auto in .*config.json; go on with"):
        check_same_run(parse([*same, "--resume", "--rollout.attention", "sdpa"]))
    with pytest.raises(ValueError, match=r"resume: rollout\.kv_cache_mib=9 now, 8 in .*config.json; go on with"):
        check_same_run(parse([*same, "--resume", "--rollout.kv-cache-mib", "9"]))
