"""The main job: determinism, kill and resume, algorithms, tasks, ZeRO 3, and one clear error.

Under torchrun where that has a part in it, else on ranks that start sooner.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import signal
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import launch
from experiments.config import parse
from experiments.run_folder import lock_folder
from experiments.training_checks import MAY_CHANGE
from tests.test_docs import FILES
from tests.worlds import ROOT, Python, get_ready, refused_by, run_main, run_python, start_ranks

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SCRIPT = str(ROOT / "experiments/train.py")
DRAFTS = ["--rollout.drafter", "grouped_suffix", "--rollout.draft-lengths", "fixed"]
PAT = ["--layout-policy", "pat", "--pat-profile"]
SMALL = [
    "--steps", "5", "--save-every", "2", "--eval-every", "2", "--eval-problems", "8", "--eval-samples", "2",
    "--rollout.prompts-per-step", "4", "--rollout.group-size", "4", "--rollout.max-tokens", "24",
    "--rollout.kv-cache-mib", "8", "--mini-batch-size", "8", "--learning-rate", "1e-3", "--wandb", "off",
    "--no-figures",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(text_model: str) -> Path:
    return Path(text_model)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward that a random model varies in, so that there is something to learn from."""
    path = tmp_path_factory.mktemp("reward") / "vowels.py"
    body = "return [float(sum(map(ord, c)) % 3 > 0) for c in completions]"
    path.write_text(f"def score(prompts, completions):\n    {body}\n")
    return f"{path}:score"


def small(model: Path, runs: Path, *arguments: str) -> list[str]:
    return ["--model", str(model), "--runs", str(runs), *SMALL, *arguments]


def command(*arguments: Any) -> list[str]:
    return [*TORCHRUN, "--", SCRIPT, *small(*arguments)]


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}


def train(*arguments: Any) -> dict[str, Any]:
    return run_main("train", small(*arguments), num_ranks=2)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """metrics.jsonl without times, and without what tells a resumed run from another."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing_s/", "perf/throughput", "perf/rollout_tokens_per_second", "rollout/num_journaled")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(model: Path, runs: Path, reward: str) -> Path:
    result = train(model, runs, "--name", "whole", "--deterministic", "--reward", reward, "--figures")
    assert result["steps"] == 5
    return Path(result["run_dir"])


def test_the_run_folder_holds_what_a_user_wants(uninterrupted: Path, reward: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pandas = pytest.importorskip("pandas")
    frame = pandas.read_json(uninterrupted / "metrics.jsonl", lines=True)
    assert frame["training/global_step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert frame["val-core/pass@1"].notna().tolist() == [True, False, True, False, True, True]
    for column in ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "critic/rewards/mean", "rollout_corr/kl"):
        assert frame[column][1:].notna().all()
    assert frame["actor/grad_norm"].max() > 0, "nothing was learned from"
    # A random model is never right, whatever the reward that it is trained on says.
    assert frame["val-core/pass@1"].dropna().eq(0).all() and frame["critic/rewards/mean"][1:].gt(0).all()
    assert {path.name for path in (uninterrupted / "figures").iterdir()} == {
        "reward.png", "phases.png", "response_length.png", "live_batch.png", "timeline.png",
    }  # fmt: skip
    assert len(pandas.read_json(uninterrupted / "samples.jsonl", lines=True)) == 5 * 4
    steps = pandas.read_json(uninterrupted / "rollout_steps.jsonl", lines=True)
    trace = json.loads((uninterrupted / "timeline.json").read_text())["traceEvents"]
    assert set(steps["replica_id"]) == {0, 1} and set(steps["training/global_step"]) == {1, 2, 3, 4, 5}
    times_s = [event["ts"] / 1e6 for event in trace if event["ph"] == "X"]
    assert times_s == pytest.approx(steps[steps["training/global_step"] == 5]["start"].tolist(), abs=1e-6)
    config = json.loads((uninterrupted / "config.json").read_text())
    assert config["deterministic"] is True
    own = Path(reward.removesuffix(":score"))
    assert [path.name for path in (uninterrupted / "code").iterdir()] == [f"reward-{own.name}"]
    assert (uninterrupted / "code" / f"reward-{own.name}").read_text() == own.read_text()
    assert config["trainer"]["micro_batch_tokens"] == (16384 if torch.cuda.is_available() else 1024)
    checkpoints = uninterrupted / "checkpoints"
    assert sorted(os.listdir(checkpoints)) == ["latest", "step-4", "step-5"]
    AutoModelForCausalLM.from_pretrained(checkpoints / "step-5/huggingface")
    AutoTokenizer.from_pretrained(checkpoints / "step-5/huggingface")


def test_weights_by_a_relay_are_the_same_bits(model: Path, runs: Path, reward: str, uninterrupted: Path) -> None:
    """Also of a run that is resumed, and where each rank has a part of each parameter and each shard another one."""
    relay = ["--deterministic", "--reward", reward, "--weights", "relay"]
    train(model, runs, "--name", "relay", *relay, "--steps", "2")
    train(model, runs, "--name", "relay", *relay, "--resume")
    parts = ["--zero-stage", "3", "--tensor-parallel-size", "2", "--steps", "2"]
    train(model, runs, "--name", "relayed parts", *relay, *parts)
    train(model, runs, "--name", "direct parts", *relay[:3], *parts)
    for name, other in (("relay", uninterrupted), ("relayed parts", runs / "direct parts")):
        rows, plain = metrics_of(runs / name), metrics_of(other)
        counts = [[row.pop(key) for key in [*row] if key.startswith("relay/")] for row in rows]
        assert rows == plain[: len(rows)]
        assert all(len(one) == 5 and one[0] > 0 for one in counts[1:])


def test_two_runs_are_bit_identical(model: Path, runs: Path, reward: str, uninterrupted: Path) -> None:
    train(model, runs, "--name", "again", "--deterministic", "--reward", reward)
    assert metrics_of(runs / "again") == metrics_of(uninterrupted)


def test_however_it_is_dispatched_a_step_samples_the_same_tokens(model: Path, runs: Path, reward: str) -> None:
    """Data parallel, tensor parallel, on demand, in chunks, by a user's own policy, and where a rank only drafts;
    the last four with rewards beside the rollout."""
    digests, rewards = set(), set()
    small = ["--rollout.drafter", "model", "--rollout.draft-model", str(model)]
    own = runs / "own.py"
    own.write_text("from engines.coordination.policies import OnDemand\n\nclass Mine(OnDemand):\n    pass\n")
    for name, arguments in {
        "dp": ["--deterministic"],
        "tp": ["--deterministic", "--tensor-parallel-size", "2"],
        "on-demand": ["--dispatch", "on-demand"],
        "seer": ["--dispatch", "seer", "--chunk-tokens", "16"],
        "own": ["--dispatch", f"{own}:Mine"],
        "draft ranks": ["--speculation", "specactor", *small],
    }.items():
        result = train(
            model, runs, "--name", name, *arguments, "--reward", reward, "--steps", "1", "--rollout.dtype", "float64"
        )
        folder = Path(result["run_dir"])
        digests.add(json.loads((folder / "lengths.jsonl").read_text().splitlines()[0])["digest"])
        step = json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])
        rewards.add(step["critic/rewards/mean"])
        assert name not in ("dp", "tp") or step["timing_s/reward_overlapped"] == 0
    assert len(digests) == len(rewards) == 1


def test_rollouts_change_their_tensor_parallel_size(model: Path, tmp_path: Path) -> None:
    """By the profile up to 12 sequences are faster on two ranks, and more on one each; a switch takes no time."""
    path = tmp_path / "profile.json"
    least = ["--batches", "1", "--contexts", "8", "--steps", "1", "--turns", "1", "--prefill-tokens", "0"]
    least += ["--dtype", "float64"]
    least += ["--kv-cache-mib", "32", "--max-num-seqs", "16", "--max-model-len", "128", "--switch-tokens", "0"]
    run_main("pat_profile", ["--model", str(model), "--output", str(path), *least], num_ranks=2)
    engine = ["--rollout.max-num-seqs", "16", "--rollout.max-tokens", "200", "--rollout.kv-cache-mib", "32"]
    engine += ["--rollout.dtype", "float64"]
    run = small(model, tmp_path, *engine, "--name", "pat", "--steps", "2", "--eval-every", "2", *PAT, str(path))
    assert "error: --layout-policy='pat': one rank has only one layout" in refused_by("train", run)
    assert "error: profile: its points of TP size 1 reach 16 sequences" in refused_by("train", run, num_ranks=2)
    # Refused before the embedded model is warm-started.
    other = small(Path("tiny"), tmp_path / "runs", *engine, *PAT, str(path))
    assert "error: profile: is of model." in refused_by("train", other, num_ranks=2)
    assert not (tmp_path / "runs/models").exists()
    profile = json.loads(path.read_text())
    seconds = {1: lambda batch: 1.0, 2: lambda batch: 0.08 * batch}
    points = [(size, batch, tokens) for size in (1, 2) for batch in (1, 16) for tokens in (1, 8192)]
    profile["decodes"] = [(size, batch, tokens, seconds[size](batch)) for size, batch, tokens in points]
    profile["switches"] = [(1, 2, 1, 0.0), (2, 1, 1, 0.0)]
    path.write_text(json.dumps(profile))
    folder = Path(run_main("train", run, num_ranks=2)["run_dir"])
    decisions = [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]
    for step, row in enumerate(metrics_of(folder)[1:], 1):
        taken = [one for one in decisions if one["training/global_step"] == step and one["chosen"] != one["tp_size"]]
        assert row["rollout/num_switches"] == len(taken) >= 1
        assert row["rollout/first_tp_size"] == 1, "it has gone back between the rollouts"
        assert row["rollout/last_tp_size"] == taken[-1]["chosen"] == 2
        assert all(one["seconds"] < one["kept_seconds"] for one in taken)
    steps = [json.loads(line) for line in (folder / "rollout_steps.jsonl").read_text().splitlines()]
    for number in (1, 2):
        mine = [step for step in steps if step["training/global_step"] == number]
        # A rank that is held up may take no step of its own before the switch.
        replicas = {(step["tp_size"], step["replica_id"]) for step in mine}
        assert {(2, 0)} < replicas <= {(1, 0), (1, 1), (2, 0)}
        # A decision to widen comes between the steps of the narrow replicas and those of the wide one, on one clock.
        wide = min(step["start"] for step in mine if step["tp_size"] == 2)
        (now,) = [one["now"] for one in decisions if one["training/global_step"] == number and one["chosen"] == 2]
        assert 0 < min(step["start"] for step in mine) < now < wide
    # In chunks and with drafts: the same tokens, by more than one TP size.
    options = ["--name", "all", "--steps", "1", "--eval-every", "0", "--dispatch", "seer", "--chunk-tokens", "16"]
    options += ["--rollout.drafter", "grouped_suffix", "--rollout.draft-lengths", "fixed"]
    other = Path(run_main("train", small(model, tmp_path, *engine, *options, *PAT, str(path)), num_ranks=2)["run_dir"])
    (first, *_), (again,) = ((one / "lengths.jsonl").read_text().splitlines() for one in (folder, other))
    assert json.loads(first)["digest"] == json.loads(again)["digest"]
    # Each dispatch and each decision about the layout: the chunks of a sequence follow one another to its end.
    rows = [json.loads(line) for line in (other / "decisions.jsonl").read_text().splitlines()]
    dispatched = [row for row in rows if "sequence_id" in row]
    assert any("tp_size" in row for row in rows) and all(row["training/global_step"] == 1 for row in rows)
    took = json.loads((other / "metrics.jsonl").read_text().splitlines()[-1])["timing_s/gen"]
    assert all(0 < row["now"] < took + 1 and row["chunk_tokens"] <= 16 for row in dispatched)
    lengths = dict.fromkeys((tuple(row["sequence_id"]) for row in dispatched), 0)
    assert len(lengths) == 16 and len(dispatched) > 16
    assert len({row["group_id"] for row in dispatched}) == 4 and {row["replica_id"] for row in dispatched} == {0, 1}
    for row in dispatched:
        id_ = tuple(row["sequence_id"])
        assert lengths[id_] <= row["num_generated"], "a chunk begins where the one before has ended"
        lengths[id_] = row["num_generated"]
    for id_, length in lengths.items():
        (last, *_) = (row for row in reversed(dispatched) if tuple(row["sequence_id"]) == id_)
        assert last["estimate"] >= length, "what has been seen of a group is the least that is expected of it"
    assert max(lengths.values()) > 0
    row = metrics_of(other)[-1]
    assert row["rollout/num_switches"] >= 1 and row["rollout/num_imported"] > 0 and row["rollout/num_drafted"] > 0
    # Replicas of the sizes that Algorithm 2 chooses for the lengths of the rollout before: the first one has none. Two
    # ranks together are now faster with any batch.
    fast = {1: lambda batch: 1.0, 2: lambda batch: 0.01 * batch}
    profile["decodes"] = [(size, batch, tokens, fast[size](batch)) for size, batch, tokens in points]
    wide = tmp_path / "wide.json"
    wide.write_text(json.dumps(profile))
    options = [
        "--name",
        "heddle",
        "--steps",
        "2",
        "--eval-every",
        "0",
        "--layout-policy",
        "heddle",
        *PAT[2:],
        str(wide),
    ]
    allocated = Path(run_main("train", small(model, tmp_path, *engine, *options), num_ranks=2)["run_dir"])
    lines = (allocated / "lengths.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["digest"] == json.loads(first)["digest"]
    one, two = metrics_of(allocated)[-2:]
    assert one["rollout/num_replicas/tp1"] == 2 and two["rollout/num_replicas/tp2"] == 1
    # By the controller of the docs.
    own = FILES["widen.py"]
    (tmp_path / "widen.py").write_text(own)
    options = ["--name", "own", "--steps", "1", "--eval-every", "0"]
    options += ["--layout-policy", f"{tmp_path}/widen.py:Widen", *PAT[2:], str(path)]
    folder = Path(run_main("train", small(model, tmp_path, *engine, *options), num_ranks=2)["run_dir"])
    assert json.loads((folder / "lengths.jsonl").read_text().splitlines()[0])["digest"] == json.loads(first)["digest"]
    row = metrics_of(folder)[-1]
    assert row["rollout/first_tp_size"] == 1 and row["rollout/last_tp_size"] == 2 and row["rollout/num_switches"] == 1
    assert (folder / "code/layout_policy-widen.py").read_text() == own
    (tmp_path / "widen.py").write_text(own.replace("return self.sizes[0]", "return 3"))
    told = refused_by("train", small(model, tmp_path, *engine, *options[2:]), num_ranks=2)
    assert f"Widen of {tmp_path}/widen.py: first_tp_size gave 3; give one of [1, 2]" in told
    (tmp_path / "widen.py").write_text(own.replace("deployment, ended=()", ""))
    told = refused_by("train", small(model, tmp_path, *engine, *options[2:]), num_ranks=2)
    assert "widen.py:Widen': cannot be made with (deployment, ended=()): TypeError" in told


LINE = r"step (\d)/3 reward (\d\.\d{3}) pass@1 (\d\.\d{3}) (\d+) tokens/s ETA (\d\d:\d\d)"


def test_progress_at_80_columns(model: Path, tmp_path: Path, reward: str) -> None:
    """A bar on a terminal, which cuts nothing."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    run = [*small(model, tmp_path, "--reward", reward), "--steps", "3"]
    with open(theirs, "wb") as terminal:
        process = Python([SCRIPT, *run], terminal=terminal)
    with process:
        shown = b""
        with contextlib.suppress(OSError):  # Linux's end of a terminal
            while some := os.read(ours, 65536):
                shown += some
        assert process.wait(60) == 0
    os.close(ours)
    frames = [frame for frame in re.split(r"[\r\n]|\x1b\[A", shown.decode()) if "reward" in frame]
    assert all(re.match(rf"{LINE} \S", frame) and len(frame) <= 80 for frame in frames), frames
    rows = metrics_of(tmp_path / "arithmetic-grpo")[1:]
    told = {(int(found[1]), found[2]) for frame in frames if (found := re.match(LINE, frame))}
    assert told == {(step, f"{row['critic/rewards/mean']:.3f}") for step, row in enumerate(rows, 1)}


def test_progress_in_a_log(model: Path, tmp_path: Path, reward: str) -> None:
    """A line for each step, and no bar."""
    run = [*small(model, tmp_path, "--reward", reward), "--steps", "3"]
    done = run_python([SCRIPT, *run])
    assert done.returncode == 0 and "\r" not in done.stderr, done.stderr[-3000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert [re.fullmatch(LINE, line)[1] for line in lines] == ["1", "2", "3"]  # type: ignore[index]


def wait_until(moment: Callable[[], bool], process: Python) -> None:
    deadline = time.monotonic() + 200
    while not moment():
        assert process.poll() is None and time.monotonic() < deadline, process.stderr[-3000:]
        time.sleep(0.001)  # the moment may be short


def kill(arguments: list[str], rank: int, moment: Callable[[], bool]) -> None:
    """Kills a rank at the moment, and then the other, as what has started them would."""
    with start_ranks(arguments, 2) as ranks:
        wait_until(moment, ranks[rank])
        ranks[rank].kill()


HELD = """
import time
from experiments import launch, train
from experiments.run_folder import RunFolder

write_digests = RunFolder._write_digests

def hold(self, partial):
    if partial.name == ".step-4.partial":
        time.sleep(600)
    write_digests(self, partial)

RunFolder._write_digests = hold
launch.run(train.main)
"""
"""The command, which does not publish the checkpoint of step 4: it is killed before."""


def rolling_out_step_four(folder: Path) -> bool:
    """At its first completion: the policy that samples step 4 has learned three steps."""
    # As bytes: a line that is still being written may end within a character.
    return any(b'"policy_step":3' in path.read_bytes() for path in (folder / "journal").glob("*.jsonl"))


def writing_checkpoint_four(folder: Path) -> bool:
    path = folder / "checkpoints/.step-4.partial"
    return path.is_dir() and any(path.iterdir())


@pytest.mark.parametrize(("rank", "moment"), [(1, rolling_out_step_four), (0, writing_checkpoint_four)])
def test_killed_and_resumed(model: Path, runs: Path, reward: str, uninterrupted: Path, rank: int, moment: Any) -> None:
    name = moment.__name__
    arguments = ["--name", name, "--deterministic", "--reward", reward]
    folder = runs / name
    kill(["-c", HELD, *small(model, runs, *arguments)], rank, lambda: moment(folder))
    assert (folder / "checkpoints/latest").read_text() == "step-2"
    # A kill can also tear a line in two; the resumed run drops it.
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"training/global_step": 4, "act')
    changed = small(model, runs, *arguments, "--resume", "--learning-rate", "0.5")
    assert "resume: trainer.learning_rate=0.5 now, " in refused_by("train", changed, num_ranks=2)
    result = train(model, runs, *arguments, "--resume")
    assert result["steps"] == 5
    assert metrics_of(folder) == metrics_of(uninterrupted)
    # What was sampled since the resume point is not sampled again; of a cut rollout, a rank's whole share or none.
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [row["rollout/num_journaled"] for row in rows[1:]]
    assert found[:3] == [0, 0, 16] and found[3] in (0, 8, 16) and found[4] == 0
    assert rank == 1 or found[3] == 16
    # Nor is there a speed of what a killed run has sampled in a time that nobody knows.
    for row, line in zip(rows[1:], (folder / "lengths.jsonl").read_text().splitlines(), strict=True):
        assert ("perf/throughput" in row) == (row["rollout/num_journaled"] == 0)
        if "perf/throughput" in row:
            sampled = row["perf/rollout_tokens_per_second"] * row["timing_s/gen"]
            assert sampled == pytest.approx(sum(json.loads(line)["lengths"]))
            assert row["perf/throughput"] * row["timing_s/step"] * 2 == pytest.approx(sampled)
    assert [path.stat().st_size for path in (folder / "journal").iterdir()] == [0, 0]
    for file in ("lengths.jsonl", "samples.jsonl"):
        assert (folder / file).read_text() == (uninterrupted / file).read_text()
    rows = [json.loads(line) for line in (folder / "rollout_steps.jsonl").read_text().splitlines()]
    numbers = [row["training/global_step"] for row in rows]
    assert numbers == sorted(numbers) and {1, 2, 5} <= set(numbers)


def test_completions_that_drafts_copy_from_survive_a_resume(
    model: Path, runs: Path, tmp_path: Path, reward: str
) -> None:
    data = tmp_path / "few.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(7)))
    always = ["--task", "jsonl", "--data", str(data), "--reward", reward, "--deterministic", *DRAFTS]
    always += ["--rollout.draft-history-mib", "1"]
    train(model, runs, "--name", "history", *always)
    train(model, runs, "--name", "history-cut", *always, "--steps", "2")
    assert (runs / "history-cut/checkpoints/step-2/draft_history.msgpack").stat().st_size > 1000
    train(model, runs, "--name", "history-cut", *always, "--resume")
    rows = metrics_of(runs / "history")
    assert metrics_of(runs / "history-cut") == rows
    assert "rollout/tokens_per_step/new" in rows[1] and "rollout/tokens_per_step/new" not in rows[4]
    assert any(name.startswith("rollout/tokens_per_step/age_") for name in rows[3]), "the first one behind the resume"


def test_the_docs_list_what_may_change_on_resume() -> None:
    text = (ROOT / "docs/training.md").read_text()
    (listed,) = re.findall(r"Exceptions\s+are (.*?)\. ", text, re.DOTALL)
    assert {*re.findall(r"`--([a-z-]+)`", listed)} == {name.replace("_", "-") for name in MAY_CHANGE} - {"resume"}


def processes_with(mark: str) -> list[int]:
    """Those whose environment holds it; one may end while they are looked through."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def signalled(process: Python, number: int, mark: str, moment: Callable[[], bool]) -> tuple[int, str]:
    """The exit code and the stderr of a command that gets the signal at the moment, as from a terminal."""
    with process:
        try:
            wait_until(moment, process)
            assert len(processes_with(mark)) >= 4, "ranks, their rewards"
            os.killpg(process.pid, number)
            code = process.wait(60)
            wait_until_none_has(mark)
        finally:
            for pid in processes_with(mark):
                os.kill(pid, signal.SIGKILL)
        return code, process.stderr


def wait_until_none_has(mark: str) -> None:
    """A reward's process ends when it sees that its rank has."""
    deadline = time.monotonic() + 60
    while processes_with(mark):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.01)


def interrupt(started: list[str], mark: str, moment: Callable[[], bool]) -> tuple[int, str]:
    process = Python([*started, "--ranks", "2"], env=environment() | dict([mark.split("=")]))
    return signalled(process, signal.SIGINT, mark, moment)


def end_ranks(
    started: list[str], mark: str, moment: Callable[[], bool], number: int = signal.SIGTERM
) -> tuple[int, str]:
    """As what has started them does, which gets the signal itself (test_launch.py)."""
    get_ready()  # what forks the ranks must not have the mark itself
    with pytest.MonkeyPatch.context() as given:
        given.setenv(*mark.split("="))
        with start_ranks([*started, "--ranks", "2"], 2) as ranks:
            wait_until(moment, ranks[0])
            assert processes_with(mark), "their rewards"
            for rank in ranks:
                os.kill(rank.pid, number)
            (code,) = {rank.wait(60) for rank in ranks}
            wait_until_none_has(mark)
            return code, ranks[0].stderr + ranks[1].stderr


@pytest.mark.parametrize(("end", "number"), [(interrupt, signal.SIGINT), (end_ranks, signal.SIGTERM)])
def test_interrupted_and_resumed(model: Path, tmp_path: Path, end: Any, number: int) -> None:
    """By the command that its last line names. The run has no name, and more steps than it can do until the signal."""
    folder = tmp_path / "arithmetic-grpo"
    started = [SCRIPT, *small(model, tmp_path, "--steps", "100000", "--keep-checkpoints", "1")]
    latest = folder / "checkpoints/latest"
    code, output = end(started, f"STARTED_FOR={tmp_path}", latest.exists)
    assert code == 128 + number and "Traceback" not in output
    (words,) = [line for line in output.splitlines() if line.startswith("interrupted: ")]
    point = latest.read_text()
    told, _, line = words.partition(" with: ")
    assert told == f"interrupted: go on from {point}"
    last = int(point.removeprefix("step-")) + 1
    python, script, *again = shlex.split(line)
    assert [python, script] == [sys.executable, SCRIPT]
    assert run_main("train", [*again, "--steps", str(last)], num_ranks=2)["run_dir"] == str(folder)
    assert [row["training/global_step"] for row in metrics_of(folder)] == [*range(last + 1)]


def test_interrupted_before_anything_is_published(model: Path, tmp_path: Path) -> None:
    started = [SCRIPT, *small(model, tmp_path, "--name", "a", "--steps", "100000", "--save-every", "100000")]
    rolled_out = (tmp_path / "a/lengths.jsonl").exists
    code, output = end_ranks(started, f"STARTED_FOR={tmp_path}", rolled_out, signal.SIGINT)
    assert code == 128 + signal.SIGINT and "Traceback" not in output
    told = f"interrupted: nothing is published yet in {tmp_path / 'a'}, so it cannot be resumed; give another --name, "
    told += "or delete the folder if no run is writing in it"
    assert output.splitlines().count(told) == 1


@pytest.mark.parametrize("what", ["damaged", "in use"])
def test_a_run_that_cannot_go_on_says_so_once(
    model: Path, tmp_path: Path, reward: str, uninterrupted: Path, what: str
) -> None:
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "whole"))
    with contextlib.ExitStack() as stack:
        if what == "damaged":
            path = next(folder.glob("checkpoints/step-5/deepspeed/*model_states.pt"))
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
            message = f"error: {path}: is missing, or not as it was published"
        else:
            stack.enter_context(lock_folder(folder))
            message = f"error: {folder}: another run is writing in it (process {os.getpid()} on "
        options = ["--name", "whole", "--deterministic", "--reward", reward, "--resume", "--steps", "6"]
        told = refused_by("train", small(model, tmp_path, *options), num_ranks=2)
    assert told.count(message) == 1 and "RuntimeError" not in told, told
    assert (folder / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()


GSM8K_LINES = [
    {"question": f"Tom has {i} apples and buys {i + 1}. How many?", "answer": f"#### {2 * i + 1}"} for i in range(40)
]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--algo", "dapo", "--max-sampling-rounds", "2", "--rollout.prompts-per-step", "8"],
        ["--task", "gsm8k", "--zero-stage", "3", *DRAFTS, "--figures"],
        ["--kl-coef", "0.05", "--num-epochs", "2", "--dtype", "bfloat16", "--rollout.dtype", "bfloat16"],
    ],
    ids=["dapo", "gsm8k-zero3", "grpo-kl-bf16"],
)
def test_three_steps_of(model: Path, runs: Path, tmp_path: Path, reward: str, arguments: list[str]) -> None:
    if "gsm8k" in arguments:
        data = tmp_path / "train.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in GSM8K_LINES))
        arguments = [*arguments, "--data", str(data)]
    else:
        arguments = [*arguments, "--reward", reward]
    result = train(model, runs, "--name", "-".join(a.strip("-") for a in arguments[:2]), *arguments, "--steps", "3")
    rows = metrics_of(Path(result["run_dir"]))
    assert [row["training/global_step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["actor/skipped_steps"] == 0 for row in rows[1:])
    if "--kl-coef" in arguments:
        assert rows[-1]["actor/kl_loss"] > 0
        assert rows[-1]["actor/num_steps"] == 4
    if "dapo" in arguments:
        assert max(row["train/num_gen_batches"] for row in rows[1:]) == 2
        folder = Path(result["run_dir"])
        steps = [json.loads(line) for line in (folder / "rollout_steps.jsonl").read_text().splitlines()]
        for number, line in enumerate((folder / "lengths.jsonl").read_text().splitlines(), 1):
            num_rows = sum(step["num_running"] for step in steps if step["training/global_step"] == number)
            assert num_rows == sum(json.loads(line)["lengths"]), "a pass gives a token to each of its sequences"
    has_drafter = "--rollout.drafter" in arguments
    assert all(("rollout/tokens_per_step" in row) == has_drafter for row in rows[1:])
    if has_drafter:
        assert all(row["rollout/num_drafted"] > 0 and row["rollout/draft_length"] >= 1 for row in rows[1:])
        assert (Path(result["run_dir"]) / "figures/drafts.png").is_file()


@pytest.mark.parametrize("algo", ["dr-grpo", "gspo", "cispo", "rloo", "reinforce++"])
def test_three_steps_by_each_algorithm(model: Path, tmp_path: Path, reward: str, algo: str) -> None:
    """With two updates in a step, so that the second one is off-policy."""
    options = ["--algo", algo, "--reward", reward, "--steps", "3", "--eval-every", "0", "--save-every", "0"]
    result = run_main("train", small(model, tmp_path, *options))
    folder = Path(result["run_dir"])
    assert folder.name == f"arithmetic-{algo}" and result["model"] is result["eval_after"] is None
    rows = metrics_of(folder)
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["actor/skipped_steps"] == 0 and row["actor/num_steps"] == 2 and row["actor/grad_norm"] > 0
        assert not [name for name in row if name.startswith("val-")]
    assert not (folder / "checkpoints").exists() and not (folder / "journal").exists()
    assert result["figures"] == [] and not (folder / "figures").exists()
    given = json.loads((folder / "config.json").read_text())["algorithm"]
    assert algo != "dr-grpo" or (given["normalise_std"], given["loss_aggregation"]) == (False, "constant-length")


class TestBadInput:
    """Refused before any expensive work."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--task", "gsm8k"], "--data STR"),
            (["--data", "x.jsonl"], "--data: is an option of --task gsm8k and --task jsonl; name"),
            (
                ["--task", "jsonl", "--sigma=1"],
                "--sigma: is an option of --task arithmetic and --task lookup; name it, or leave",
            ),
            (["--algo", "gspo", "--no-dynamic-sampling"], "--dynamic-sampling: is an option of --algo dapo; name it"),
            (["--task", "jsonl", "--data", "x.jsonl"], "task='jsonl': has no reward of its own; give --reward"),
            (["--task", "nowhere.py:Task"], "task='nowhere.py:Task': there is no file 'nowhere.py'"),
            (
                ["--task", "chess"],
                "task='chess': give arithmetic, gsm8k, jsonl, lookup, or a class of your own as FILE.py:",
            ),
            (["--mini-batch-size", "600"], "mini_batch_size=600: more than a step's 512 sequences"),
            (["--rollout.top-p", "0.9"], "rollout.top_p=0.9: must be 1.0: training does not apply it"),
            (["--rollout.temperature", "0"], "rollout.temperature=0.0"),
            (["--rollout.group-size", "1"], "rollout.group_size=1"),
            (["--algo", "ppo"], "algo='ppo': give grpo, dr-grpo, dapo, gspo, cispo, rloo, reinforce++, or a class of"),
            (["--eval-every", "-1"], "eval_every=-1: must be an integer of at least 0"),
            (["--eval-threshold", "nan"], "eval_threshold=nan: must be a finite number"),
            (["--rank-timeout-s", "nan"], "rank_timeout_s=nan: must be from 2 to 1e6 (seconds)"),
            (["--rank-timeout-s", "inf"], "rank_timeout_s=inf: must be from 2 to 1e6"),
            (["--rank-timeout-s", "1"], "rank_timeout_s=1.0: must be from 2 to 1e6"),
            (["--reward-limits.timeout-s", "inf"], "RewardConfig.timeout_s=inf"),
            (["--deterministic", "--dispatch", "on-demand"], "dispatch='on-demand': depends on timing"),
            (
                ["--deterministic", "--rollout.draft-server", "--rollout.drafter", "grouped_suffix"],
                "rollout.draft_server=True: depends on timing",
            ),
            (["--deterministic", "--rollout.preemption", "swap"], "rollout.preemption='swap': depends on how much"),
            (["--deterministic", "--rollout.drafter", "ngram"], "rollout.draft_lengths='adaptive': depends on"),
            (["--deterministic", "--rollout.kv-cache-mib", "auto"], "rollout.kv_cache_mib='auto': depends on how much"),
            (["--rollout.kv-cache-mib", "0"], "EngineConfig.kv_cache_bytes=0: must be"),
            (["--rollout.batch-invariant", "--rollout.kernels", "torch"], "EngineConfig.batch_invariant=True: needs"),
            (
                ["--layout-policy", "pat"],
                "layout_policy='pat', pat_profile=None: a layout policy gets a profile; give both",
            ),
            (
                ["--layout-policy", "tap"],
                "layout_policy='tap': give none, pat, heddle, or a class of your own as FILE.py:Class",
            ),
            (["--pat-profile", "x.json"], "layout_policy='none', pat_profile=x.json"),
            ([*PAT, "x.json"], "pat_profile='x.json': is no file; experiments/pat_profile.py makes one"),
            ([*PAT, "/tmp"], "pat_profile='/tmp': is no file"),
            ([*PAT, "x.json", "--deterministic"], "deterministic=True: does not go with layout_policy='pat'"),
            (
                [*PAT, "x.json", "--tensor-parallel-size", "2"],
                "tensor_parallel_size=2: does not go with layout_policy=",
            ),
            (["--name", "a/../../x"], "name='a/../../x': must be one folder name"),
            (["--name", ".."], "name='..': must be one folder name"),
            ([*PAT, "x.json", "--dispatch", "static"], "dispatch='static': does not go with layout_policy='pat'"),
            ([*PAT, "x.json", "--rollout.kv-cache-mib", "auto"], "rollout.kv_cache_mib='auto': does not go with"),
            (
                [*PAT, "x.json", "--dispatch", "group-static"],
                "dispatch='group-static': does not go with layout_policy=",
            ),
            (
                ["--dispatch", "psychic"],
                "dispatch='psychic': give auto, heddle, static, on-demand, group-static, divided,",
            ),
            (["--dispatch", "nowhere.py:Policy"], "dispatch='nowhere.py:Policy': there is no file 'nowhere.py'"),
            (["--dispatch", "oracle"], "dispatch='oracle': give auto, heddle, static, on-demand,"),
            (["--dispatch", "on-demand", "--chunk-tokens", "16"], "chunk_tokens=16: has no effect with --dispatch on-"),
            (["--chunk-tokens", "16"], "chunk_tokens=16: has no effect with --dispatch auto; give divided, divided-in"),
            (["--order", "length"], "order='length': has no effect with --dispatch auto; give seer, or leave it out"),
            (
                ["--dispatch", "divided", "--order", "length"],
                "order='length': has no effect with --dispatch divided; give seer, or leave it out",
            ),
            (
                ["--dispatch", "on-demand", "--spread", "0"],
                "spread=0.0: has no effect with --dispatch on-demand; give divided, divided-in-turns, seer, or",
            ),
            (["--follow-ups", "0"], "follow_ups=0: has no effect with --dispatch auto; give divided, div"),
            (["--pat.margin", "-1"], "PatOptions.margin=-1.0: must be"),
            (
                ["--pat.dwell-s", "1"],
                "pat: has no effect with --layout-policy none; give pat, or leave it out",
            ),
            (
                ["--rollout.draft-policy", "thresholds"],
                "draft_policy: EngineConfig.drafter='none' drafts nothing; give a drafter, or leave it out",
            ),
            (["--rollout.seed", "1"], "rollout.seed"),
            (["--zero-stage", "4"], "zero-stage"),
            (["--no-such-option", "1"], "no-such-option"),
            (["--rollout.long-prompts", "cut"], "rollout.long_prompts='cut': cuts to a length; give --rollout.max-pr"),
        ],
    )
    def test_command_line(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(SystemExit) as ended, launch.told_once():
            parse(arguments)
        assert ended.value.code == 2
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(SystemExit), launch.told_once():
            parse(arguments)
        assert capsys.readouterr() == ("", "")

    def test_missing_model(self) -> None:
        assert "error: --model='/nowhere': no such folder" in refused_by("train", ["--model", "/nowhere"])
        errors = refused_by("train", ["--model", "Qwen/Qwen3-0.6B"])
        assert "error: --model='Qwen/Qwen3-0.6B': there is no folder '/" in errors
        assert "; as a name of the hub it is not in the cache /" in errors
        assert "; check the folder's path, or run `hf download Qwen/Qwen3-0.6B`" in errors

    def test_what_the_engine_cannot_have(self, tmp_path: Path) -> None:
        errors = refused_by("train", ["--rollout.attention", "flash_attn", "--runs", str(tmp_path)])
        assert "error: --rollout.attention='flash_attn': takes bfloat16, not dtype='float32'; use" in errors
        assert not list(tmp_path.iterdir()), "no model was warm-started"

    def test_unreadable_data_line(self, model: Path, tmp_path: Path) -> None:
        data = tmp_path / "data.jsonl"
        data.write_text(json.dumps(GSM8K_LINES[0]) + '\n{"question": "x"\n')
        errors = refused_by("train", ["--model", str(model), "--task", "gsm8k", "--data", str(data)])
        assert f"{data}:2" in errors or f"{data}, line 2" in errors

    def test_a_taken_name(self, model: Path, uninterrupted: Path) -> None:
        errors = refused_by(
            "train", ["--model", str(model), "--runs", str(uninterrupted.parent), "--name", uninterrupted.name]
        )
        assert "exists; give another --name" in errors

    def test_runs_that_cannot_be_written(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        errors = refused_by("train", ["--model", str(model), "--runs", str(tmp_path / "file")])
        assert "cannot be written" in errors

    @pytest.mark.parametrize(
        ("broken_after", "fix"),
        [(0, "then start again: give another --name"), (1, "then go on with --name broken-1 --resume")],
    )
    def test_a_broken_reward(self, model: Path, tmp_path: Path, broken_after: int, fix: str) -> None:
        """It is told to resume only what can be resumed."""
        name = f"broken-{broken_after}"
        step = tmp_path / name / "checkpoints" / f"step-{broken_after}"
        condition = f"Path({str(step)!r}).exists()" if broken_after else "True"
        body = f"    if {condition}:\n        raise KeyError\n    return [float(len(c)) for c in completions]\n"
        (tmp_path / "reward.py").write_text(f"from pathlib import Path\ndef score(completions):\n{body}")
        more = ["--name", name, "--save-every", "1", "--reward", f"{tmp_path / 'reward.py'}:score"]
        errors = refused_by("train", small(model, tmp_path, *more))
        assert step.exists() == bool(broken_after)
        assert f"see the warnings above and mend the function; {fix}" in errors, errors[-2000:]

    def test_the_error_is_told_last_and_once(self, model: Path, tmp_path: Path) -> None:
        """Under torchrun."""
        done = run_python(command(model, tmp_path / "runs", "--rollout.max-num-seqs", "0"), env=environment())
        assert done.returncode == 1 and not list(tmp_path.glob("runs/*"))
        told = [line for line in done.stderr.splitlines() if line.strip()]
        (place,) = [place for place, line in enumerate(told) if "error: --rollout.max-num-seqs=0: must be" in line]
        after = [line for line in told[place + 1 :] if "│" not in line and "╰" not in line]  # the rest of tyro's box
        assert len(after) == 1, done.stderr[-2000:]

    @pytest.mark.parametrize(
        ("arguments", "rank", "message"),
        [
            (["--name", "none", "--resume"], 0, "error: resume: "),
            (["--reward", "{file}:score"], 1, "error (rank 1): --reward="),
        ],
        ids=["all ranks", "one rank"],
    )
    def test_an_error_leaves_no_run(
        self, model: Path, tmp_path: Path, arguments: list[str], rank: int, message: str
    ) -> None:
        file = tmp_path / "reward.py"
        file.write_text("import os\n\nassert os.environ['RANK'] == '0'\n\n\ndef score(completions): pass\n")
        run = small(model, tmp_path / "runs", *(word.format(file=file) for word in arguments))
        with pytest.raises(RuntimeError, match=f"rank {rank} ended with code 2") as error:
            run_main("train", run, num_ranks=2)
        assert str(error.value).count(message) == 1 and "Traceback" not in str(error.value)
        assert not list(tmp_path.glob("runs/*"))
