import json
import multiprocessing
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from algos.publish import publish_directory
from algos.tasks.arithmetic import ArithmeticTask, solution
from algos.tasks.jsonl import JsonlTask
from algos.tasks.task import Part, Problem
from algos.tokenizer import EOS_TOKEN_ID, PAD_TOKEN_ID, byte_tokenizer
from algos.warmstart import _accumulate_gradients, demonstrate, new_model, tokenizer_of, train, warm_start
from algos.warmstart_config import MODEL_SIZES, WarmStartConfig
from engines import LLM, SamplingParams
from engines.models.chat import ChatTemplate
from tests.environments import Echo, Local
from tests.worlds import run_python

SMALL = WarmStartConfig(size="draft-1l", steps=3, batch_size=4, task=ArithmeticTask(seed=1, max_digits=4))


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A task whose only problem has this demonstration."""

    reward = None
    parts: list[Part]
    prompt: str = "go"

    def train_problem(self, index: int) -> Problem:
        return Problem(uid=index, prompt=self.prompt)

    def held_out_problems(self, count: int) -> list[Problem]:
        return []

    def demonstration(self, problem: Problem) -> list[Part]:
        return self.parts


@dataclass(frozen=True, kw_only=True)
class Varied(Shown):
    """The same with fields that JSON has no type for."""

    words: tuple[str, ...] = ("a", "b")
    file: Path = Path("words.txt")
    sizes: frozenset[int] = frozenset((0, 8))


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    """File names to bytes and time of change."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}


def test_the_loss_falls():
    config = replace(SMALL, steps=60, batch_size=16, task=ArithmeticTask(seed=1, max_digits=1))
    _, untrained = train(replace(config, steps=1))
    _, trained = train(config)
    assert 4 < untrained < 7  # about ln(264) = 5.6
    assert trained < 0.5 * untrained


@pytest.mark.parametrize(
    ("size", "millions"), [("tiny", 0.82), ("tiny-chat", 0.82), ("draft-2l", 0.12), ("draft-1l", 0.07)]
)
def test_sizes(size, millions):
    assert set(MODEL_SIZES) == {"tiny", "tiny-chat", "draft-2l", "draft-1l"}
    model = new_model(size, seed=0)
    assert model.num_parameters() == pytest.approx(millions * 1e6, rel=0.1)
    assert model.config.head_dim == 32 and model.dtype == torch.float32 and model.config.tie_word_embeddings


def test_the_directory_is_a_hugging_face_checkpoint(tmp_path):
    directory = warm_start(tmp_path / "deep" / "model", SMALL)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in directory.iterdir()}
    for config in (json.loads((directory / "config.json").read_text()), model.generation_config.to_dict()):
        assert (config["eos_token_id"], config["pad_token_id"]) == (EOS_TOKEN_ID, PAD_TOKEN_ID)
    assert tokenizer.eos_token_id == EOS_TOKEN_ID and model.config.vocab_size == 264
    trained, _ = train(SMALL)
    for name, parameter in trained.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name


def test_a_chat_model_learns_what_its_template_renders(tmp_path):
    directory = warm_start(tmp_path / "chat", replace(SMALL, size="tiny-chat"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == end == tokenizer.eos_token_id == 259
    problem = ArithmeticTask(seed=2).train_problem(0)
    messages = [{"role": "user", "content": problem.prompt}, {"role": "assistant", "content": solution(problem)}]
    tokens, num_prompt, mask = demonstrate(
        ChatTemplate(tokenizer=tokenizer, renders_text=True), ArithmeticTask(seed=2), 0
    )
    assert tokens[:num_prompt] == tokenizer.apply_chat_template(
        messages[:1], add_generation_prompt=True, return_dict=False
    )
    assert tokens + list(b"\n") == tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokens.count(end) == 2 and tokens[-1] == end and mask == [True] * (len(tokens) - num_prompt)


def test_same_config_same_weights_and_the_callers_random_state_is_kept():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    (first, loss), (again, loss_again) = train(SMALL), train(SMALL)
    (other, _) = train(replace(SMALL, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert loss == loss_again
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_cut_into_micro_batches_the_gradient_is_that_of_one_padded_batch():
    model = new_model("draft-1l", seed=0).double()
    examples = [
        demonstrate(ChatTemplate(tokenizer=byte_tokenizer()), ArithmeticTask(seed=2), index) for index in range(8)
    ]
    assert len({len(tokens) for tokens, *_ in examples}) > 2
    losses, gradients = [], []
    for max_tokens in (1, 10**6):
        losses.append(_accumulate_gradients(model, examples, 0.0, max_tokens))
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for alone, together in zip(*gradients, strict=True):
        # Hugging Face's norms and rotations round to float32.
        torch.testing.assert_close(alone, together, rtol=0, atol=1e-6)
    # And it is the mean over completion tokens, written out.
    logprobs = [
        model(torch.tensor([tokens])).logits[0].log_softmax(-1)[range(start - 1, len(tokens) - 1), tokens[start:]]
        for tokens, start, _ in examples
    ]
    assert losses[0] == pytest.approx(-torch.cat(logprobs).mean().item(), abs=1e-6)


def test_what_is_observed_is_read_and_not_learned():
    """The loss and its gradient are those of autograd over the turns' tokens alone, in full logits."""
    parts = [Part(text="ab"), Part(text="a long observation", observed=True), Part(text="c")]
    examples = [demonstrate(ChatTemplate(tokenizer=byte_tokenizer()), Shown(parts=parts), 0)]
    examples += [
        demonstrate(ChatTemplate(tokenizer=byte_tokenizer()), Shown(parts=[Part(text="?", observed=True), *parts]), 0)
    ]
    model = new_model("draft-1l", seed=0).double()
    loss = _accumulate_gradients(model, examples, 0.0)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    turns = [*b"ab", EOS_TOKEN_ID, *b"c", EOS_TOKEN_ID]
    logprobs = []
    for head in (b"go", b"go?"):
        tokens = [*head, *b"ab", EOS_TOKEN_ID, *b"a long observation", *b"c", EOS_TOKEN_ID]
        places = [len(head) + place for place in (0, 1, 2, 21, 22)]
        assert [tokens[place] for place in places] == turns
        rows = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        logprobs += [rows[place - 1, tokens[place]] for place in places]
    expected = -torch.stack(logprobs).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for ours, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", ["tiny", "tiny-chat"])
def test_a_demonstration_has_the_tokens_of_a_rollout(tmp_path, size):
    """A rollout's trajectories, written as demonstrations: texts in turns and observations, and tokens again."""
    model, tokenizer = new_model("draft-1l", seed=0), tokenizer_of(size)
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(tmp_path, kv_cache_bytes=2**22)
    llm.chat_template = template = ChatTemplate(tokenizer=tokenizer, renders_text=size == "tiny-chat")
    bias = {**dict.fromkeys(range(ord("a"), ord("k")), 30.0), tokenizer.eos_token_id: 30.0}
    params = SamplingParams(max_tokens=1000, n=4, logit_bias=bias)
    greetings = [None, "\u00fcber: "]
    with Local() as environments:
        columns = [{"greeting": greeting} for greeting in greetings]
        outputs = llm.generate(["one", "two"], params, environment=environments, columns=columns)
    num_turns = []
    for prompt, greeting, output in zip(["one", "two"], greetings, outputs, strict=True):
        for completion in output.outputs:
            assert completion.finish_reason == "stop" and completion.token_ids[-1] == tokenizer.eos_token_id
            echo, begins = Echo(), [end for _, end in completion.observed]
            echo.reset(greeting)
            parts = [] if greeting is None else [Part(text=greeting, observed=True)]
            for begin, end in zip(begins, [*(start for start, _ in completion.observed[1:]), None], strict=True):
                said = tokenizer.decode(completion.token_ids[begin:end], skip_special_tokens=True)
                answer = echo.step(said)
                parts += [Part(text=said), *([] if answer is None else [Part(text=answer.text, observed=True)])]
            example = demonstrate(template, Shown(parts=parts, prompt=prompt), 0)
            assert example.tokens == output.prompt_token_ids + completion.token_ids
            num_prompt = example.num_prompt_tokens - len(output.prompt_token_ids)
            assert [False] * num_prompt + example.loss_mask == completion.loss_mask
            num_turns.append(len(begins))
    assert max(num_turns) > 2


@pytest.mark.parametrize("parts", [[], [Part(text="a"), Part(text="b", observed=True)]])
def test_a_demonstration_ends_with_a_turn(parts):
    with pytest.raises(ValueError, match=r"demonstration of problem 0: must end with a turn"):
        demonstrate(ChatTemplate(tokenizer=byte_tokenizer()), Shown(parts=parts), 0)


def test_a_task_without_demonstrations_teaches_nothing():
    with pytest.raises(ValueError, match=r"WarmStartConfig\.task=JsonlTask\(.*a method `demonstration`"):
        WarmStartConfig(task=JsonlTask(data="mine.jsonl"))


def test_the_cache_hits_for_the_same_config_only(tmp_path):
    directory = warm_start(tmp_path / "model", SMALL)
    before = contents(directory)
    assert warm_start(directory, SMALL) == directory and contents(directory) == before
    warm_start(directory, replace(SMALL, steps=4))
    assert contents(directory)["model.safetensors"] != before["model.safetensors"]
    warm_start(directory, SMALL)
    assert contents(directory)["model.safetensors"][0] == before["model.safetensors"][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "model"]


def test_the_cache_hits_for_tasks_with_fields_of_any_type(tmp_path):
    config = replace(SMALL, steps=1, task=Varied(parts=[Part(text="a")]))
    directory = warm_start(tmp_path / "model", config)
    before = contents(directory)
    same = replace(
        config, task=replace(config.task, sizes=frozenset((8, 0)))
    )  # a set that is iterated in another order
    assert warm_start(directory, same) == directory and contents(directory) == before


def test_a_directory_of_something_else_is_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"directory=.*holds other files \(no made_with\.json\)"):
        warm_start(tmp_path, SMALL)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def write_half_then_die(target: Path) -> None:
    def write(path: Path) -> None:
        (path / "model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    publish_directory(target, {"warm_start": {}}, write)


@pytest.mark.parametrize("older", [False, True])
def test_an_attempt_killed_while_writing_changes_nothing(tmp_path, older):
    target = tmp_path / "model"
    if older:
        warm_start(target, SMALL)
        before = contents(target)
    process = multiprocessing.get_context("fork").Process(target=write_half_then_die, args=(target,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert (contents(target) == before) if older else not target.exists()
    wanted = replace(SMALL, seed=5)
    warm_start(target, wanted)
    assert AutoModelForCausalLM.from_pretrained(target).num_parameters() > 0
    # What it left beside the target is swept.
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "model"]


@pytest.mark.parametrize("text", ['{"warm_start": {"si', "[" * 100_000])
def test_a_damaged_record_is_refused_rather_than_trusted(tmp_path, text):
    target = warm_start(tmp_path / "model", SMALL)
    (target / "made_with.json").write_text(text)
    with pytest.raises(ValueError, match="holds other files"):
        warm_start(target, SMALL)


@pytest.mark.parametrize(
    "field", [{"size": "huge"}, {"steps": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"label_smoothing": 1.0}]
)
def test_a_bad_field_is_named(field):
    with pytest.raises(ValueError, match=rf"WarmStartConfig\.{next(iter(field))}="):
        WarmStartConfig(**field)


def test_the_command_line(tmp_path):
    tell = "print('yields cores:', 'watch-cores' in {one.name for one in threading.enumerate()}, file=sys.stderr)"
    run = f"import runpy, sys, threading; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__'); {tell}"
    command = ["-c", run, "experiments/make_model.py", str(tmp_path / "m"), "--size", "draft-1l"]
    command += ["--steps", "2", "--batch-size", "2", "--task.max-digits", "3", "--widen", "2"]
    done = run_python(command)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["model"] == str(tmp_path / "m-x2") and result["loss"] > 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m-x2").num_parameters() == result["num_parameters"]
    assert "warm start draft-1l" in done.stderr and "loss=" in done.stderr
    assert f"yields cores: {len(os.sched_getaffinity(0)) > 1}" in done.stderr
