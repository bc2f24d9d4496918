"""generate.py that does not reach its end: interrupts, kills, a full disk, a reader that leaves; and how it goes on."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.parallel.collectives import SingleRank
from experiments.partial_output import PartialOutput
from experiments.prompts import read_prompts
from tests.checkpoints import save_text_checkpoint
from tests.worlds import ROOT, Python, refused_by, run_main, run_python, start_ranks

SCRIPT = str(ROOT / "experiments/generate.py")
NUM_PROMPTS, NUM_SAMPLES = 60, 3
# In float64 no rounding tells one batch from another: one sequence at a time, which takes a while, or all together.
OPTIONS = ["--dtype", "float64", "--n", "3", "--max-tokens", "200", "--ignore-eos", "--kv-cache-mib", "64"]
SLOW = ["--max-num-seqs", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts, and all their completions."""
    folder = tmp_path_factory.mktemp("generate")
    save_text_checkpoint(folder / "model")
    prompts = [{"prompt": f"{i}+{i}=", "id": i} for i in range(NUM_PROMPTS)]
    (folder / "in.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    run_main("generate", arguments(folder, folder / "whole.jsonl"))
    whole = [json.loads(line) for line in (folder / "whole.jsonl").read_text().splitlines()]
    assert [(row["id"], row["index"]) for row in whole] == [(i, j) for i in range(NUM_PROMPTS) for j in range(3)]
    return folder


def arguments(folder: Path, output: Path) -> list[str]:
    return [str(folder / "model"), "--input", str(folder / "in.jsonl"), "--output", str(output), *OPTIONS]


def go_on(folder: Path, output: Path, *more: str, num_ranks: int = 1) -> int:
    """How many completions the resumed run, which must end as `folder`'s run, has not had to make."""
    result = run_main("generate", [*arguments(folder, output), "--resume", *more], num_ranks)
    assert output.read_bytes() == (folder / "whole.jsonl").read_bytes()
    return int(result["resumed"])


def refused(folder: Path, output: Path, *more: str, num_ranks: int = 1) -> str:
    return refused_by("generate", [*arguments(folder, output), *more], num_ranks)


def begin(*arguments: str) -> Python:
    return Python([SCRIPT, *arguments])


def signal_when(process: Python, number: int, is_time: Callable[[], bool]) -> str:
    """Sends the process and its children a signal, as a terminal does; returns what they said on stderr."""
    with process:
        while not is_time():
            assert process.poll() is None, process.stderr[-2000:]
            time.sleep(0.01)
        assert process.poll() is None
        os.killpg(process.pid, number)
        process.wait(60)
        return process.stderr


def partial_of(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def keeps(output: Path, num_completions: int) -> Callable[[], bool]:
    path = partial_of(output)
    return lambda: path.exists() and path.read_bytes().count(b"\n") > num_completions


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_had_ended_is_kept_and_gone_on_with(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    output.write_text("of an earlier run\n")
    told = signal_when(process := begin(*arguments(folder, output), *SLOW), number, keeps(output, 7))
    num_kept = partial.read_bytes().count(b"\n") - 1
    assert 7 <= num_kept < NUM_PROMPTS * NUM_SAMPLES
    assert output.read_text() == "of an earlier run\n"
    summary = f"'{partial}' keeps {num_kept // 3} of 60 prompts ({num_kept} of 180 completions)"
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        with open(partial, "a") as file:
            file.write('{"prompt": "59+59=", "tex')  # as a kill may leave it
    else:
        assert process.returncode == 128 + number
        again = "run the same command with --resume to go on"
        assert told.splitlines()[-1] == f"interrupted: {summary} ('{output}' is of an earlier run); {again}"
        assert "Traceback" not in told

    told = refused(folder, output)
    assert "engine: " not in told, "it is refused before the model is loaded"
    assert f"{summary} of a run that ended early; add --resume to go on with it, or delete it" in told
    told = refused(folder, output, "--resume", "--temperature", "0.5")
    assert "engine: " not in told
    assert f"error: resume: temperature=0.5 now, 1.0 in '{partial}'; give the same, or delete" in told

    assert go_on(folder, output) == num_kept
    assert [*tmp_path.iterdir()] == [output]


def test_two_ranks_keep_what_both_had_ended_and_others_go_on(folder: Path, tmp_path: Path) -> None:
    """Two replicas are interrupted; one replica of two ranks goes on."""
    output = tmp_path / "out.jsonl"
    is_time = keeps(output, 20)
    with start_ranks([SCRIPT, *arguments(folder, output), *SLOW], 2) as ranks:
        while not is_time():
            assert all(rank.poll() is None for rank in ranks), ranks[0].stderr[-2000:]
            time.sleep(0.01)
        for rank in ranks:
            os.kill(rank.pid, signal.SIGINT)
        assert [rank.wait(60) for rank in ranks] == [128 + signal.SIGINT] * 2
        told = ranks[0].stderr + ranks[1].stderr
    assert told.count("interrupted: ") == 1 and "[rank" not in told
    assert f"interrupted: '{partial_of(output)}' keeps " in told
    rows = [json.loads(line) for line in partial_of(output).read_text().splitlines()[1:]]
    # Replica i mod 2 runs sequence i.
    assert {(3 * row["prompt_index"] + row["index"]) % 2 for row in rows} == {0, 1}

    assert go_on(folder, output, "--tensor-parallel-size", "2", num_ranks=2) == len(rows)
    assert [*tmp_path.iterdir()] == [output]


def test_log_probs_of_other_tokens_are_kept_too_and_drafts_are_counted(folder: Path, tmp_path: Path) -> None:
    more = ["--logprobs", "2", "--prompt-logprobs", "0", "--drafter", "ngram", "--draft-lengths", "fixed"]
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    result = run_main("generate", [*arguments(folder, whole), *more])
    assert result["num_drafted"] > 0 and result["acceptance_length"] > 1
    signal_when(begin(*arguments(folder, output), *more, *SLOW), signal.SIGINT, keeps(output, 7))
    assert run_main("generate", [*arguments(folder, output), *more, "--resume"])["resumed"] >= 7
    rows, again = ([json.loads(line) for line in path.read_text().splitlines()] for path in (whole, output))
    for row, other in zip(rows, again, strict=True):
        assert row["token_ids"] == other["token_ids"]
        for name in ("top_logprobs", "prompt_logprobs"):
            ranks = [
                [[[token, rank] for token, _, rank in entry] for entry in one.get(name, [])] for one in (row, other)
            ]
            assert ranks[0] == ranks[1]
        assert [entry[0][0] for entry in row["top_logprobs"]] == row["token_ids"]
        assert [round(entry[0][1], 6) for entry in row["top_logprobs"]] == row["logprobs"]
        assert len(row.get("prompt_logprobs", [])) == (0 if row["index"] else len(row["prompt"]) - 1)


def test_another_model_does_not_go_on(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    signal_when(begin(*arguments(folder, output), *SLOW), signal.SIGINT, keeps(output, 1))
    kept = partial_of(output).read_bytes()
    save_text_checkpoint(tmp_path / "model", num_heads=4)
    (tmp_path / "in.jsonl").write_bytes((folder / "in.jsonl").read_bytes())
    assert "error: resume: model_digest=" in refused(tmp_path, output, "--resume")
    assert partial_of(output).read_bytes() == kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_before_a_completion_ends_nothing_is_left(
    folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """While the model is loaded, or soon after: all sequences run together, so that none ends for long."""
    output = tmp_path / "out.jsonl"
    together = ["--n", "40", "--max-num-seqs", "2400", "--max-tokens", "500"]

    def is_locked() -> bool:
        path = partial_of(output)
        return path.exists() and f":{path.stat().st_ino} " in Path("/proc/locks").read_text()

    told = signal_when(process := begin(*arguments(folder, output), *together), number, is_locked)
    assert told.splitlines()[-1] == "interrupted: no completion had ended, nothing is kept"
    assert "Traceback" not in told and process.returncode == 128 + number
    assert not [*tmp_path.iterdir()]


def test_interrupted_while_it_waits_for_stdin(folder: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "stdin"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDWR)):  # a writer that writes nothing
        process = Python([SCRIPT, str(folder / "model")], stdin=pipe)

        def catches_sigterm() -> bool:
            status = Path(f"/proc/{process.pid}/status").read_text()
            (caught,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")]
            return bool(caught >> (signal.SIGTERM - 1) & 1)

        assert signal_when(process, signal.SIGTERM, catches_sigterm) == "\ninterrupted: nothing was generated\n"
    assert process.returncode == 128 + signal.SIGTERM


def test_a_full_disk_is_one_error_and_the_rest_is_kept(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    limited = "import resource, runpy, sys; del sys.argv[0]; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)"
    code = f"{limited}; runpy.run_path(sys.argv[0], run_name='__main__')"
    full = run_python(["-c", code, SCRIPT, *arguments(folder, output)])
    assert full.returncode == 2 and "Traceback" not in full.stderr
    num_kept = partial_of(output).read_bytes().count(b"\n") - 1
    assert num_kept > 3 and partial_of(output).stat().st_size == 100_000, "the last line is torn"
    (error,) = [line for line in full.stderr.splitlines() if line.startswith("error: ")]
    assert f"({num_kept} of 180 completions); make room, then run the same command with --resume" in error
    assert go_on(folder, output) == num_kept


def test_an_output_that_cannot_be_made_at_the_end_costs_nothing(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    (tmp_path / ".out.jsonl.partial").mkdir()  # where the output's text is to be written before it is renamed
    told = refused(folder, output, num_ranks=2)
    assert f"'{partial_of(output)}' keeps 60 of 60 prompts (180 of 180 completions); make room, then" in told
    assert partial_of(output).read_bytes().count(b"\n") == 181
    (tmp_path / ".out.jsonl.partial").rmdir()
    assert go_on(folder, output) == 180


def test_a_foreign_file_and_a_running_one_are_left_alone(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    partial_of(output).write_text("half a download")
    assert "which is another file" in refused(folder, output)
    assert partial_of(output).read_text() == "half a download"
    partial_of(output).unlink()

    def refused_now() -> bool:
        if not keeps(output, 0)():
            return False
        os.kill(process.pid, signal.SIGSTOP)
        told = refused(folder, output, "--resume")
        os.kill(process.pid, signal.SIGCONT)
        assert f"another run is writing '{partial_of(output)}'" in told
        return True

    signal_when(process := begin(*arguments(folder, output), *SLOW), signal.SIGINT, refused_now)


def partial_output(folder: Path, *, resume: bool = False) -> PartialOutput:
    request = {"num_prompts": 2, "n": 1}
    records = [{"prompt": "a"}, {"prompt": "b"}]
    sink = PartialOutput(folder / "out.jsonl", SingleRank(), records=records, request=request)
    sink.open(resume=resume)
    return sink


def test_a_file_that_another_run_removes_at_its_end_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run ends between this one's opening and locking; that it does so just then is made up."""
    lock, path = fcntl.flock, partial_of(tmp_path / "out.jsonl")

    def end_the_other_first(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        path.unlink()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", end_the_other_first)
    sink = partial_output(tmp_path)
    sink.begin()
    assert path.read_text() == FIRST
    with pytest.raises(ValueError, match="another run is writing"):
        partial_output(tmp_path)


def test_a_file_that_another_run_locks_first_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This run creates the file; the other one locks it before this one does."""
    lock = fcntl.flock
    winners = []

    def lock_first(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        winners.append(partial_output(tmp_path))
        winners[0].begin()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", lock_first)
    request, records = {"num_prompts": 2, "n": 1}, [{"prompt": "a"}, {"prompt": "b"}]
    loser = PartialOutput(tmp_path / "out.jsonl", SingleRank(), records=records, request=request)
    with pytest.raises(ValueError, match="another run is writing"):
        loser.open(resume=False)
    loser.close()
    assert partial_of(tmp_path / "out.jsonl").read_text() == FIRST


FIRST = '{"generate": {"num_prompts": 2, "n": 1}}\n'


@pytest.mark.parametrize(
    "first",
    [
        '{"generate": 1}',
        '{"generate": {}}',
        '{"generate": {"num_prompts": "2", "n": 1}}',
        '{"generate": ',
        '{"generate": ' + "[" * 100_000,
    ],
    ids=["type", "empty", "text", "torn", "deep"],
)
def test_a_damaged_first_line_is_no_partial_file(tmp_path: Path, first: str) -> None:
    partial_of(tmp_path / "out.jsonl").write_text(first + "\n{}\n")
    with pytest.raises(ValueError, match=r"another file \(its first line is damaged: .*; move it away, or give"):
        partial_output(tmp_path, resume=True)


@pytest.mark.parametrize(
    "damage",
    [
        {"prompt_index": 2},
        {"prompt_index": -1},
        {"index": 1},
        {"logprobs": [-1.0, float("nan")]},
        {"logprobs": [-1.0]},
        {"token_ids": [1, 2**70]},
        {"text": None},
    ],
    ids=str,
)
def test_a_damaged_line_costs_its_own_completion(tmp_path: Path, damage: dict[str, object]) -> None:
    whole = {"prompt_index": 0, "index": 0, "text": "x", "finish_reason": "stop", "token_ids": [1, 2]}
    whole["logprobs"] = [-1.0, -2.0]
    rows = [{**whole, **damage}, {**whole, "prompt_index": 1}]
    partial_of(tmp_path / "out.jsonl").write_text(FIRST + "".join(json.dumps(row) + "\n" for row in rows))
    assert [*partial_output(tmp_path, resume=True).kept] == [(1, 0)]


def test_stdout_has_each_prompt_as_it_ends_and_its_reader_may_leave(folder: Path) -> None:
    options = ["--input", str(folder / "in.jsonl"), *OPTIONS, *SLOW]
    with subprocess.Popen(
        [sys.executable, SCRIPT, str(folder / "model"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            first = [process.stdout.readline() for _ in range(NUM_SAMPLES)]
            assert process.poll() is None, "the others take a while"
            process.stdout.close()
            process.stdout = None
            told = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in told and "error" not in told
    assert first == (folder / "whole.jsonl").read_text().splitlines(keepends=True)[:NUM_SAMPLES]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt_token_ids": [49, true]}', "needs `prompt`"),
        (b'{"prompt_token_ids": "49", "prompt": "x"}', "needs `prompt`"),
        (b'"\xff"', "is not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": "x", "score": NaN}', r"not valid JSON \(NaN is no finite number\)"),
        (b'{"prompt": ""}', "`prompt` is empty; give some text"),
        (b"[" + b"1" * 10_000 + b"]", "not valid JSON"),
        (b'{"prompt": "x", "index": 7}', "the output has a field `index` of its own; rename the input's"),
        (b'{"prompt_token_ids": [49], "text": null}', "the output has a field `text` of its own"),
        (b'{"prompt": "x", "logprobs": []}', "the output has a field `logprobs` of its own"),
    ],
    ids=["bool", "type", "bytes", "deep", "nan", "empty", "digits", "index", "text", "logprobs"],
)
def test_a_line_that_cannot_be_read_is_named(line: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^in.jsonl:3: {message}"):
        read_prompts(b'"fine"\n\n' + line + b'\n"fine"\n', "in.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_token_ids": [49, 9999]}', "prompt: token id 9999 is outside the model's vocabulary"),
        (json.dumps("x" * 600), "prompt: 600 tokens leave no room"),
    ],
    ids=["id", "long"],
)
def test_a_prompt_that_the_engine_refuses_is_named(folder: Path, tmp_path: Path, line: str, message: str) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(f'"fine"\n\n{line}\n"fine"\n')
    told = refused_by("generate", [str(folder / "model"), "--input", str(path), "--output", str(output)])
    assert told.count("error") == 1 and f"error: {path}:3: {message}" in told
    assert [*tmp_path.iterdir()] == [path], "nothing is left of an output that has no line"
