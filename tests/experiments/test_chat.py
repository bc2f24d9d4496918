"""generate.py and train.py with chat models: what is rendered, what a resumed run compares, and clear errors."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest

from algos.tasks.arithmetic import ArithmeticTask
from engines import LLM, SamplingParams
from experiments.chat_options import ChatOptions
from experiments.engine_options import EngineOptions
from experiments.generate import GenerateConfig
from experiments.generation import _request
from tests.chat_models import QWEN3, save_chat_checkpoint
from tests.worlds import refused_by, run_main

USER = {"role": "user", "content": "what is the question?"}
SYSTEM = {"role": "system", "content": "be brief"}
QUIET = {"enable_thinking": False}
SHORT = ["--n", "2", "--max-tokens", "8", "--dtype", "float64", "--kv-cache-mib", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_chat_checkpoint(folder, "qwen3")
    return folder


def completions(path: Path) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("asked", [False, True], ids=["as they are", "asked"])
def test_rows_are_rendered(model: Path, tmp_path: Path, asked: bool) -> None:
    rows = [{"messages": [USER], "id": 7}, {"prompt": "the answer"}, {"prompt_token_ids": [5, 6]}, "the question"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--system-prompt", "be brief", "--chat-template-kwargs", json.dumps(QUIET)] if asked else []
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    run_main("generate", [str(model), *files, *SHORT, *options], num_ranks=2 if asked else 1)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines[0]["messages"] == [USER] and lines[0]["id"] == 7 and lines[2]["prompt"] == "the answer"
    llm, params = LLM(model, dtype="float64"), SamplingParams(max_tokens=8, n=2)
    render = llm.tokenizer.apply_chat_template
    if asked:
        told = [[SYSTEM, {"role": "user", "content": text}] for text in (USER["content"], "the answer", "the question")]
        chats = [render(one, tokenize=True, return_dict=False, add_generation_prompt=True, **QUIET) for one in told]
        prompts = [chats[0], chats[1], [5, 6], chats[2]]
    else:
        first = render([USER], tokenize=True, return_dict=False, add_generation_prompt=True)
        prompts = [first, "the answer", [5, 6], "the question"]
    expected = [one.token_ids for output in llm.generate(prompts, params) for one in output.outputs]
    assert completions(tmp_path / "out.jsonl") == expected


def test_arguments_are_a_users_messages(model: Path, tmp_path: Path) -> None:
    for name, options in (("text", []), ("chat", ["--chat"])):
        output = ["--output", str(tmp_path / name)]
        run_main("generate", [str(model), USER["content"], *SHORT, *output, *options])
    llm, params = LLM(model, dtype="float64"), SamplingParams(max_tokens=8, n=2)
    chat = [one.token_ids for one in llm.chat([USER], params, prompt_uids=[0])[0].outputs]
    assert completions(tmp_path / "chat") == chat != completions(tmp_path / "text")


def test_a_resumed_run_has_the_same_chat_options(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    options = [str(model), "what?", *SHORT, "--output", str(output)]
    run_main("generate", [*options, "--system-prompt", "be kind"])
    line = json.loads(output.read_text().splitlines()[0]) | {"prompt_index": 0}
    sampling = SamplingParams(max_tokens=8, n=2)
    conversation = ChatOptions(system_prompt="be kind")
    config = GenerateConfig(
        model=model,
        prompts=("what?",),
        conversation=conversation,
        sampling=sampling,
        engine=EngineOptions(dtype="float64"),
    )
    request = json.dumps({"generate": _request(config, [{"prompt": "what?"}])})
    (tmp_path / "out.jsonl.partial").write_text(f"{request}\n{json.dumps(line)}\n")
    told = refused_by("generate", [*options, "--system-prompt", "be brief", "--resume"])
    assert "resume: system_prompt='be brief' now, 'be kind' in" in told


BAD_ROWS = {
    '{"messages": [{"role": "user"}]}': "`messages`: message 0 (user) needs `content`, a text",
    '{"messages": [{"content": "a"}]}': "`messages`: message 0 needs a `role`",
    '{"messages": "a"}': "`messages`: must be a list of messages",
    '{"messages": []}': "`messages`: must be a list of messages",
    '{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}': "drops message 0",
}


@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_row_that_cannot_be_rendered_is_named_before_the_weights_are_read(tmp_path: Path, row: str) -> None:
    save_chat_checkpoint(
        tmp_path / "model", "qwen3", QWEN3.replace("{%- else %}\n", "{%- elif message.role == 'user' %}\n")
    )
    (tmp_path / "model/model.safetensors").unlink()
    rows = tmp_path / "in.jsonl"
    rows.write_text(json.dumps({"messages": [USER]}) + f"\n\n{row}\n")
    told = refused_by("generate", [str(tmp_path / "model"), "--input", str(rows)], num_ranks=2)
    assert told.count("error") == 1 and f"error: {rows}:3: " in told and BAD_ROWS[row] in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--chat-template-kwargs", "enable_thinking=false"], "is no JSON"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs=[1]: must be a dictionary"),
        (["--chat-template-kwargs", '{"tokenize": false}'], "'tokenize' is no argument for a template"),
    ],
)
def test_bad_arguments_of_the_template(model: Path, options: list[str], told: str) -> None:
    for script, first in (("generate", [str(model), "hi"]), ("train", ["--model", str(model)])):
        assert told in refused_by(script, [*first, *options])


SMALL = [
    "--steps", "1", "--eval-problems", "4", "--eval-samples", "1", "--mini-batch-size", "8", "--wandb", "off",
    "--rollout.prompts-per-step", "4", "--rollout.group-size", "2", "--rollout.max-tokens", "8",
    "--rollout.kv-cache-mib", "8", "--no-figures",
]  # fmt: skip


def test_training_renders_text_when_asked(model: Path, tmp_path: Path) -> None:
    tokenizer = LLM(model).tokenizer
    texts = [ArithmeticTask(seed=0).train_problem(index).prompt for index in range(4)]
    chats = [[SYSTEM, {"role": "user", "content": text}] for text in texts]
    rendered = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in chats]
    options = ["--model", str(model), "--runs", str(tmp_path), *SMALL]
    for name, more, prompts in (
        ("text", [], [tokenizer.encode(text) for text in texts]),
        ("chat", ["--system-prompt", "be brief"], rendered),
    ):
        run_main("train", [*options, "--name", name, *more], num_ranks=2)
        row = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        assert row["prompt_length/mean"] == statistics.fmean(map(len, prompts))
    assert (tmp_path / "chat/checkpoints/step-1/huggingface/chat_template.jinja").is_file()
    told = refused_by("train", [*options, "--name", "chat", "--resume", "--system-prompt", "be kind"], num_ranks=2)
    assert "resume: conversation.system_prompt=be kind now, be brief in" in told


@pytest.mark.parametrize("name", ["no template", "broken", "embedded"])
def test_training_without_a_template_ends_before_any_model_is_made(
    text_model: str, model: Path, tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(text_model if name == "no template" else model, tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    (folder / "chat_template.jinja").write_text("{{- messages[0].parts[0] }}") if name == "broken" else None
    source = "tiny" if name == "embedded" else str(folder)
    told = refused_by("train", ["--model", source, "--runs", str(tmp_path / "runs"), *SMALL, "--chat"], num_ranks=2)
    fix = "chat template cannot render it" if name == "broken" else "no chat template; give text, or a chat model"
    assert f"error: problem 0: the model's {fix}" in told or f"error: problem 0: the model has {fix}" in told
    assert not [*(tmp_path / "runs").iterdir()]
