"""`train.py --environment`: trajectories under torchrun, deterministic, killed and resumed, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from algos.publish import publish_directory
from algos.tasks.gsm8k import Gsm8kTask
from algos.warmstart import new_model, tokenizer_of, warm_start
from algos.warmstart_config import WarmStartConfig
from experiments.config import parse
from experiments.heddle_options import HeddleConfig
from experiments.length_predictions import predictor_trunk
from experiments.training_checks import prepare_model, recipe_of
from tests.test_docs import FILES
from tests.worlds import ROOT, refused_by, run_main, run_world

SMALL = [
    "--steps", "3", "--save-every", "1", "--eval-every", "0", "--wandb", "off", "--learning-rate", "1e-3",
    "--rollout.prompts-per-step", "4", "--rollout.group-size", "4", "--rollout.max-tokens", "240",
    "--rollout.max-turns", "3", "--rollout.kv-cache-mib", "8", "--environment-limits.workers", "2",
    "--no-figures",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environments")
    for name in ("guessing.py", "my_tools.py"):
        (folder / name).write_text(FILES[name])
    (folder / "echo.py").write_text(
        "class Echo:\n"
        "    def reset(self, answer, **columns):\n"
        "        self.score = 0.0\n"
        "        return answer + '?'\n"
        "    def step(self, text):\n"
        "        self.score += sum(map(ord, text)) % 3\n"
        "        return None if len(text) % 5 == 0 else f'{len(text)}>'\n"
        "    def get_reward(self):\n"
        "        return self.score\n"
    )
    return folder


def train(folder: Path, model: str, name: str, *arguments: str) -> Path:
    options = ["--model", model, "--runs", str(folder), "--name", name, *SMALL, *arguments]
    result = run_main("train", options, num_ranks=2)
    assert result["turns_mean"] > 1 and result["tool_seconds"] > 0 and result["prefix_hit_rate"] > 0.9
    return Path(result["run_dir"])


def digests(run: Path) -> list[str]:
    return [json.loads(line)["digest"] for line in (run / "lengths.jsonl").read_text().splitlines()]


def test_deterministic_runs_and_a_resumed_one_have_the_same_tokens(folder: Path, text_model: str) -> None:
    environment = ["--environment", f"{folder}/echo.py:Echo", "--deterministic"]
    whole = train(folder, text_model, "whole", *environment, "--figures")
    part = train(folder, text_model, "part", *environment, "--steps", "1")
    assert digests(part) == digests(whole)[:1]
    config = json.loads((part / "config.json").read_text())
    (part / "config.json").write_text(json.dumps(config | {"steps": 3}))
    assert digests(train(folder, text_model, "part", *environment, "--resume")) == digests(whole)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(row["num_turns/mean"] > 1 and row["environment/num_raised"] == 0 for row in rows)
    assert all(row["timing_s/agent_loop/generate_sequences/mean"] > 0 for row in rows)
    events = json.loads((whole / "timeline.json").read_text())["traceEvents"]
    assert {"tool", "queue", "replica 0", "replica 1"} <= {event["name"] for event in events if event["pid"] == 1}
    assert (whole / "figures" / "turns.png").stat().st_size > 5000
    assert any(row["actor/grad_norm"] > 0 for row in rows)
    (*_, sample) = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert sample["parts"][0] == {"observed": True, "text": sample["answer"] + "?"}
    assert [part["observed"] for part in sample["parts"][:2]] == [True, False]
    assert list((whole / "code").glob("environment-echo.py"))


def test_on_demand_and_heddle_have_the_same_tokens(folder: Path, text_model: str) -> None:
    """In the first step, where all have the same weights to the last bit. In the second one lengths are predicted,
    for the page's policy, too, which waits for the answers here, as the page says."""
    environment = ["--environment", f"{folder}/echo.py:Echo", "--rollout.dtype", "float64", "--steps", "1"]
    code = (ROOT / "docs/heddle.md").read_text().rpartition("```python\n")[2].partition("```")[0]
    (folder / "mine.py").write_text(
        f"{code}\n\n"
        "class Patient(LongestFirst):\n"
        "    def next(self, view):\n"
        "        is_known = all(one.answered_turns >= 0 for one in view.waiting.values())\n"
        "        return super().next(view) if is_known else None\n"
    )
    one = train(folder, text_model, "static", *environment, "--dispatch", "static")
    other = train(folder, text_model, "on-demand", *environment, "--dispatch", "on-demand")
    mine = ["--dispatch", f"{folder}/mine.py:Patient", "--predict-lengths", "--steps", "2"]
    own = train(folder, text_model, "own", *environment, *mine)
    heddle = train(folder, text_model, "heddle", *environment, "--dispatch", "heddle", "--steps", "2")
    assert digests(one) == digests(other) == digests(heddle)[:1] == digests(own)[:1]
    for run in (own, heddle):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert not [name for name in rows[0] if name.startswith("predictor/pearson")]
        assert -1 <= rows[1]["predictor/pearson/0"] <= 1 and rows[1]["predictor/mae/0"] > 0
        assert ("rollout/num_migrations" in rows[1]) == (run is heddle)
        assert (run / "length_predictor").is_dir()
        decisions = [json.loads(line) for line in (run / "decisions.jsonl").read_text().splitlines()]
        assert {row["training/global_step"] for row in decisions} == {1, 2}
        assert {row["training/global_step"] for row in decisions if row["estimate"] is not None} == {2}


@pytest.mark.parametrize(("num_tokens", "batch_size"), [(20, 16), (128, 16), (256, 8), (1500, 4)])
def test_long_demonstrations_are_learned_in_smaller_steps(tmp_path: Path, num_tokens: int, batch_size: int) -> None:
    """At most 2,048 tokens, at least 4 problems."""
    data, end = tmp_path / "gsm8k.jsonl", "#### 2"
    rows = [{"question": str(n), "answer": end.rjust(num_tokens - 2)} for n in range(2, 10)]  # and an end of sequence
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, recipe = recipe_of(parse(["--task", "gsm8k", "--data", str(data), "--prompt-template", "{question}"]))
    assert (recipe.batch_size, recipe.steps) == (batch_size, WarmStartConfig().steps)


def test_gsm8k_with_its_calculator(tmp_path: Path) -> None:
    """The model is warm-started on calls, and some of its own are right."""
    data = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"{n} and {n}?", "answer": f"<<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}"} for n in range(1, 9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--task", "gsm8k", "--data", str(data), "--calculator", "--prompt-template", "{question}"]
    task = Gsm8kTask(data=str(data), calculator=True, prompt_template="{question}", seed=1)
    config = WarmStartConfig(size="draft-1l", task=task, steps=100, batch_size=8)
    options += ["--model", str(warm_start(tmp_path / "model", config)), "--runs", str(tmp_path), *SMALL, "--steps", "1"]
    run = Path(run_main("train", options, num_ranks=2)["run_dir"])
    (row,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 0.1 < row["critic/rewards/mean"] < 1.1 and row["critic/rewards/max"] == 1.1
    assert row["environment/num_calls"] > 32 and row["train/num_groups"] > 0 and row["actor/grad_norm"] > 0
    called = [json.loads(line)["parts"] for line in (run / "samples.jsonl").read_text().splitlines()]
    assert any([part["observed"] for part in parts] == [False, True, False] for parts in called)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--environment", "nowhere.py:E"], "environment='nowhere.py:E': cannot be used"),
        (["--environment", "echo"], "environment='echo': must be"),
        (["--environment", "{}/guessing.py:Guess"], "reset wants ['number'], the task has only the columns"),
        (["--environment", "{}/echo.py:Echo", "--reward", "{}/echo.py:Echo"], "a get_reward of its own; leave one out"),
        ([], "--rollout.max-turns=3: is for trajectories; give --environment"),
        (
            ["--environment", "{}/echo.py:Echo", "--rollout.long-prompts", "cut", "--rollout.max-prompt-tokens", "9"],
            "--rollout.long-prompts='cut': what an environment observes is rendered behind a whole prompt",
        ),
        (["--environment-limits.workers", "0"], "--environment-limits.workers=0: must be"),
        (["--environment", "{}/echo.py:Echo", "--heddle.no-places"], "heddle: has no effect with --dispatch auto"),
        (
            ["--environment", "{}/echo.py:Echo", "--predict-lengths", "--heddle.no-places"],
            "heddle: has no effect with --dispatch auto",
        ),
        (
            ["--environment", "{}/echo.py:Echo", "--dispatch", "heddle", "--deterministic"],
            "dispatch='heddle': depends on timing, which --deterministic rules out",
        ),
        (
            ["--environment", "{}/echo.py:Echo", "--predict-lengths", "--deterministic"],
            "--predict-lengths=True: depends on timing, which --deterministic rules out; leave it out",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(folder: Path, text_model: str, arguments: list[str], message: str) -> None:
    options = ["--model", text_model, "--runs", str(folder), *SMALL, *(one.format(folder) for one in arguments)]
    assert message in refused_by("train", options)


def test_lengths_are_predicted_of_trajectories_only() -> None:
    with pytest.raises(ValueError, match=r"^predict_lengths=True: is for trajectories; .* leave it out"):
        replace(parse([]), predict_lengths=True)


def test_a_predictor_of_another_vocabulary_is_refused(folder: Path, text_model: str) -> None:
    other = folder / "predictor"
    new_model("tiny", 0).save_pretrained(other)
    tokenizer_of("tiny").save_pretrained(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    options = ["--model", text_model, "--runs", str(folder), *SMALL, "--environment", f"{folder}/echo.py:Echo"]
    message = refused_by("train", [*options, "--dispatch", "heddle", "--heddle.predictor", str(other)])
    assert "heddle.predictor=" in message and "give a small model with the same tokenizer" in message


def test_a_predictor_that_is_no_checkpoint_is_named_as_the_option(folder: Path) -> None:
    config = HeddleConfig(predictor=str(folder / "nowhere"))
    with pytest.raises(ValueError, match=r"heddle\.predictor='.*nowhere': holds no config\.json; give a Hugging Face"):
        predictor_trunk(config, folder)


def test_a_task_brings_its_environment_its_options_and_its_own_warm_start(folder: Path) -> None:
    """`--task lookup` alone; the model, which is not trained here, stands where its warm start would have put it."""
    name, recipe = recipe_of(parse(["--task", "lookup"]))

    def write(path: Path) -> None:
        new_model("tiny", 0).save_pretrained(path)
        tokenizer_of("tiny").save_pretrained(path)

    publish_directory(folder / "models" / name, {"warm_start": asdict(recipe)}, write)
    few = ["--rollout.prompts-per-step", "1", "--rollout.max-tokens", "60", "--eval-every", "0"]
    options = ["--task", "lookup", "--steps", "1", *few, "--runs", str(folder), "--wandb", "off", "--save-every", "0"]
    result = run_main("train", [*options, "--environment-limits.workers", "2"], num_ranks=2)
    assert (result["task"], result["steps"]) == ("lookup", 1)
    assert result["turns_mean"] >= 1 and result["tool_seconds"] > 0
    config = json.loads((Path(result["run_dir"]) / "config.json").read_text())
    assert config["environment"] == "algos.tasks.lookup:Lookup" and config["trainer"]["learning_rate"] == 5e-4
    assert (config["rollout"]["prompts_per_step"], config["rollout"]["group_size"]) == (1, 16)
    assert (Path(result["run_dir"]) / "code" / "environment-lookup.py").is_file()
    assert parse(["--task", "lookup", "--environment", "other.py:Other"]).environment == "other.py:Other"


OWN_TASK = """
from dataclasses import dataclass
from pathlib import Path
from algos.tasks.task import Part, Problem

@dataclass(frozen=True, kw_only=True)
class Own:
    reward = "algos.rewards.arithmetic:exact_answer"
    words: tuple[str, ...] = ("a", "b")
    file: Path = Path("words.txt")

    def train_problem(self, index: int) -> Problem:
        return Problem(uid=index, prompt=self.words[index % 2], columns={"answer": "1"})

    def held_out_problems(self, count: int) -> list[Problem]:
        return []

    def demonstration(self, problem: Problem) -> list[Part]:
        return [Part(text="#1")]
"""


def prepare_own(task: str, runs: str) -> list[str]:
    """In a process of its own: where the warm start has put the model, and which model a second run takes."""
    config = parse(["--task", task, "--runs", runs, "--wandb", "off"])
    name, recipe = recipe_of(config)
    made = warm_start(Path(runs) / "models" / name, replace(recipe, steps=1, batch_size=1))
    record = json.loads((made / "made_with.json").read_text())
    record["warm_start"] |= {"steps": recipe.steps, "batch_size": recipe.batch_size}  # as if it had made all steps
    (made / "made_with.json").write_text(json.dumps(record))
    return [str(made), str(prepare_model(config, 1))]


def test_a_second_run_takes_the_model_of_a_task_with_fields_of_any_type(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_TASK)
    ((made, taken),) = run_world(prepare_own, 1, f"{tmp_path / 'own.py'}:Own", str(tmp_path))
    assert taken == made


def test_what_an_embedded_model_learns(capsys: pytest.CaptureFixture[str]) -> None:
    def recipe(*arguments: str) -> tuple[str, dict[str, Any]]:
        name, recipe = recipe_of(parse([*arguments]))
        return name, asdict(recipe)

    name, lookup = recipe("--task", "lookup")
    assert name.startswith("tiny-lookup-") and lookup["task"]["seed"] == 1
    assert recipe("--task", "lookup", "--seed", "7") == (name, lookup)
    other, cut = recipe("--task", "lookup", "--max-hops", "3")
    assert other != name and cut["task"]["max_hops"] == 3
    assert recipe("--max-digits", "3") == ("tiny", asdict(WarmStartConfig()))
    assert not capsys.readouterr().err
    of_jsonl = ("--task", "jsonl", "--data", "mine.jsonl", "--answer-column", "answer")
    assert recipe(*of_jsonl) == ("tiny", asdict(WarmStartConfig()))
    assert (
        "--task jsonl has no demonstrations, so the model has learned additions; give --model"
        in capsys.readouterr().err
    )
