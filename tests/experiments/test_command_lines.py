"""The other entry points as a user starts them: their last line of stdout is JSON, their errors one line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro

from experiments import config
from experiments.config import parse
from experiments.generate import GenerateConfig
from experiments.run_folder import replace_text
from tests.worlds import ROOT, refused_by, run_python


def start(script: str, *arguments: str, stdin: str = "", ranks: int = 0) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"] if ranks else []
    return run_python([*torchrun, str(ROOT / "experiments" / script), *arguments], stdin=stdin)


def lines(done: subprocess.CompletedProcess[str]) -> list[Any]:
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_options_of_training_are_in_groups(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Each option that tyro has, once, with its explanation, in the group where a reader looks for it."""
    monkeypatch.setenv("COLUMNS", "80")
    algo = ["--algo", "dapo", "--task", "jsonl"]
    with pytest.raises(SystemExit) as ended:
        parse([*algo, "--help"])
    shown = capsys.readouterr().out
    monkeypatch.setattr(config, "print_help", lambda kind, *_, **__: tyro.cli(kind, args=["--help"]))
    with pytest.raises(SystemExit):
        parse([*algo, "--help"])
    plain = capsys.readouterr().out
    option = r"^[ │] --(\w[\w.-]*)"
    assert sorted(re.findall(option, shown, re.M)) == sorted(re.findall(option, plain, re.M)) != []
    assert ended.value.code is None and "-" * 20 not in shown and max(map(len, shown.splitlines()[1:])) <= 80
    groups = re.split(r"^(\w+)\n-+\n", shown, flags=re.M)
    found = dict(zip(groups[1::2], (re.findall(option, text, re.M) for text in groups[2::2]), strict=True))
    assert [*found] == ["run", "data", "model", "rollout", "optimiser", "algorithm", "wandb"]
    for group, names in {
        "run": ["name", "steps", "seed", "eval-every"],
        "data": ["task", "data", "answer-column", "reward", "system-prompt"],
        "model": ["model", "lora-rank"],
        "rollout": ["rollout.max-tokens", "dispatch", "chunk-tokens", "pat.margin", "rollout.drafter"],
        "optimiser": ["learning-rate", "zero-stage"],
        "algorithm": ["algo", "ratio-clip-high", "overlong-factor"],
        "wandb": ["wandb", "wandb-group"],
    }.items():
        assert {*names} <= {*found[group]}, group


HEAVY = {"torch", "transformers", "deepspeed", "wandb", "matplotlib", "peft", "datasets", "huggingface_hub"}
COMMANDS = {
    str(path.relative_to(ROOT / "experiments"))
    for path in (ROOT / "experiments").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
} - {"bench/vllm_peer.py"}  # which a bench starts, with options as JSON


@pytest.mark.parametrize(
    ("script", "argument", "code"),
    [(script, "--help", 0) for script in sorted(COMMANDS)] + [("train.py", "--no-such-option", 2)],
)
def test_help_and_a_typo_wait_for_no_heavy_import(script: str, argument: str, code: int) -> None:
    """Modules that `--help` shows import torch for type checkers only, or where they use it."""
    command = [sys.executable, "-X", "importtime", str(ROOT / "experiments" / script), argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == code and "tyro" in imported
    assert not imported & HEAVY


STDIN = '{"prompt": "1+2=", "id": 7}\n\n"5\u2028+6="\n{"prompt_token_ids": [49, 43]}\n'


def test_generate_is_the_same_from_arguments_stdin_and_two_ranks(text_model: str, tmp_path: Path) -> None:
    options = ["--n", "3", "--max-tokens", "20", "--kv-cache-mib", "8"]
    one = lines(start("generate.py", text_model, *options, stdin=STDIN))
    ranks = start("generate.py", text_model, *options, stdin=STDIN, ranks=2)
    two = lines(ranks)
    told = re.findall(r"engine: attention \w+, kernels \w+, float32 on \w+\nmemory: ", ranks.stderr)
    assert len(told) == 1
    for mine, theirs in zip(one[:-1], two[:-1], strict=True):
        assert mine.pop("logprobs") == pytest.approx(theirs.pop("logprobs"), abs=1e-4)
        assert mine == theirs
    assert [(row.get("id"), row["index"]) for row in one[:-1]] == [
        (7, 0), (7, 1), (7, 2), (None, 0), (None, 1), (None, 2), (None, 0), (None, 1), (None, 2),
    ]  # fmt: skip
    assert one[-1]["completions"] == 9 and one[-1]["tokens"] == sum(len(row["token_ids"]) for row in one[:-1])
    output = tmp_path / "out.jsonl"
    (last,) = lines(start("generate.py", text_model, "1+2=", "5\u2028+6=", *options, "--output", str(output)))
    assert last["output"] == str(output)
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["token_ids"] for row in written] == [row["token_ids"] for row in one[:6]]
    assert all(
        row.keys() | {"id", "logprobs"} == mine.keys() | {"id", "logprobs"}
        for row, mine in zip(written, one[:6], strict=True)
    )


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["--temperature", "0"], "", "stdin: holds no prompts"),
        ([], '"fine"\n{"text": 3}\n', "stdin:2: needs `prompt`"),
        ([], '"fine"\n{"prompt": \n', "stdin:2: not valid JSON"),
        ([], "[" * 100_000, "stdin:1: not valid JSON"),
        ([], '{"prompt_token_ids": []}\n', "stdin:1: needs `prompt`"),
        ([], '{"prompt": "\\ud800"}\n', "stdin:1: `prompt` holds half a surrogate pair"),
        (["x", "--output", "/tmp"], "", "is a folder"),
        (["x", "--output", "/nowhere/out.jsonl"], "", "there is no folder '/nowhere'"),
        (["x", "--output", "/sys/out.jsonl"], "", "'/sys/out.jsonl.partial' cannot be written"),
        (["x", "--output", "/dev/null"], "", "is no file to replace at the end; redirect stdout instead"),
        (["x", "--output", "/proc/out.jsonl"], "", "is no file to replace at the end; redirect stdout instead"),
        (["--input", __file__, "--output", __file__], "", "is the input"),
        (["x", "--output", "/tmp/no such.jsonl", "--resume"], "", "there is no '/tmp/no such.jsonl.partial'"),
        (["x", "--resume"], "", "resume: without --output nothing was kept"),
        (["--input", "/nowhere.jsonl"], "", "/nowhere.jsonl"),
        (["fine", "x" * 600], "", "error: prompts[1]: prompt: 600 tokens leave no room in max_model_len=512"),
    ],
)
def test_generate_refuses_in_one_line(text_model: str, arguments: list[str], stdin: str, message: str) -> None:
    told = refused_by("generate", [text_model, *arguments], stdin=stdin)
    assert message in told
    assert ("engine: " in told) == ("prompts[1]" in message), "only what needs the model waits for it"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"model": "n" * 300}, "model='n*': File name too long"),
        ({"input": "n" * 300}, "input='n*': File name too long"),
        ({"output": "n" * 300}, "output='n*': File name too long"),
        ({"output": "n" * 247}, r"output='n*': File name too long \('.*/\.n*\.partial'\)"),
        ({"output": "n" * 246}, ""),
        ({"output": "loop"}, "output='loop': Too many levels of symbolic links"),
    ],
    ids=["model", "input", "output", "partial", "longest", "loop"],
)
def test_generate_refuses_names_that_no_file_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    options = {"model": Path("model"), **{name: Path(value) for name, value in given.items()}}
    with pytest.raises(ValueError, match=f"^{error}") if error else contextlib.nullcontext():
        GenerateConfig(**options)  # type: ignore[arg-type]
    replace_text(Path("n" * 246), "")  # a name that fits


@pytest.mark.parametrize("name", ["/dev/stdout", "/proc/self/fd/1", "own.jsonl", "linked.jsonl"])
def test_generate_never_renames_over_what_stdout_goes_to(tmp_path: Path, name: str) -> None:
    own = tmp_path / "own.jsonl"
    (tmp_path / "linked.jsonl").symlink_to("/dev/stdout")
    with open(own, "w") as stdout:
        before = os.fstat(stdout.fileno()).st_ino
        command = [sys.executable, str(ROOT / "experiments/generate.py"), "no model", "x", "--output", tmp_path / name]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)
    told = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2 and "is no file to replace at the end; redirect stdout instead" in told
    assert own.stat().st_ino == before and not own.read_bytes()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_generate_reads_a_pipe(text_model: str, tmp_path: Path, num_ranks: int) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["bash", "-c", f"printf '\"1+2=\"\\n{{}}' > {pipe}"]) as writer:
        try:
            told = refused_by("generate", [text_model, "--input", str(pipe)], num_ranks)
        finally:
            writer.kill()
    assert f"error: {pipe}:2: needs `prompt`" in told


@pytest.mark.parametrize(
    ("closed", "error"),
    [
        ("<&-", "stdin: is closed; give prompts as arguments, or --input"),
        ("x >&-", "error: stdout is closed; redirect it, if only to /dev/null"),
        ("x 2>&-", "error: stderr is closed; redirect it, if only to /dev/null"),
        ("x >&- 2>&-", ""),
    ],
)
def test_a_closed_stream_is_one_error_at_the_start(closed: str, error: str) -> None:
    command = f"exec {sys.executable} {ROOT}/experiments/generate.py 'no model' {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert error in " ".join((done.stdout + done.stderr).replace("│", " ").split())


def test_generate_names_the_checkpoint_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-7/huggingface").mkdir(parents=True)
    (tmp_path / "checkpoints/latest").write_text("step-7")
    for given in ("", "checkpoints/step-7"):
        told = refused_by("generate", [str(tmp_path / given), "x"])
        assert f"give '{tmp_path}/checkpoints/step-7/huggingface'" in told


def test_generate_by_another_engine_is_the_same(text_model: str) -> None:
    sampling = ["--n", "3", "--max-tokens", "20", "--dtype", "float64"]
    engine = [
        "--attention", "sdpa", "--kernels", "torch", "--block-size", "8", "--no-prefix-caching", "--kv-cache-mib", "1",
        "--max-num-seqs", "2", "--max-num-batched-tokens", "7", "--prefill-chunk-size", "3", "--preemption", "swap",
    ]  # fmt: skip
    plain = start("generate.py", text_model, "1+2=", "5+6+7=", *sampling)
    other = start("generate.py", text_model, "1+2=", "5+6+7=", *sampling, *engine)
    assert "engine: attention sdpa, kernels torch, float64 on cpu" in other.stderr
    tokens = [[row["token_ids"] for row in lines(done)[:-1]] for done in (plain, other)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 6


def test_one_error_under_torchrun(text_model: str) -> None:
    done = start("generate.py", text_model, "1+2=", "--attention", "flash_attn", ranks=2)
    assert done.returncode != 0
    told = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    assert told[-2].startswith("error: --attention='flash_attn': takes bfloat16, not dtype='float32'; use")
    assert sum("error: " in line for line in told) == 1


def test_one_error_of_two_ranks(text_model: str) -> None:
    """Of rank 0 alone, which opens the output; the other one waits for it."""
    told = refused_by("generate", [text_model, "1+2=", "--output", "/sys/out.jsonl"], num_ranks=2)
    assert "error: --output='/sys/out.jsonl': '/sys/out.jsonl.partial' cannot be written" in told
    assert told.count("error: ") == 1
