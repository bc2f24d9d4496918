"""Conversations as tokens, against whole renderings by transformers: templates of three forms, and a merging BPE."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engines import LLM, SamplingParams
from engines.models.chat import ChatTemplate, Messages
from tests.chat_models import END, LLAMA3, QWEN3, QWEN25, TEMPLATES, chat_tokenizer, save_chat_checkpoint

FORMS = list(TEMPLATES)
LAST_ONLY = "{%- set m = messages[-1] %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
USER = {"role": "user", "content": "what is the question?"}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": {}}}


@lru_cache
def template(form: str) -> ChatTemplate:
    return ChatTemplate(tokenizer=chat_tokenizer(form))


def whole(form: str, messages: Messages, **options: Any) -> list[int]:
    """transformers' tokens of the whole conversation."""
    options = {"add_generation_prompt": True, **options}
    return template(form).tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def ids(form: str, text: str) -> list[int]:
    return template(form).tokenizer.encode(text, add_special_tokens=False)


def test_the_tokenizer_merges() -> None:
    for form in FORMS:
        assert len(ids(form, "the answer")) < 6 and len(ids(form, "\n\n\n")) == 1
        assert len(ids(form, END[form])) == 1


@pytest.mark.parametrize("form", FORMS)
def test_render_is_transformers(form: str) -> None:
    messages = [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "12"}, USER]
    assert template(form).render(messages) == whole(form, messages)
    assert template(form).render(messages[:3], add_generation_prompt=False) == whole(
        form, messages[:3], add_generation_prompt=False
    )
    assert template(form).render([USER], [WEATHER]) == whole(form, [USER], tools=[WEATHER])
    assert template(form).encode([USER], "prompt") == whole(form, [USER])
    assert template(form).encode(USER["content"], "prompt") == ids(form, USER["content"])


def test_options_of_all_renderings() -> None:
    tokenizer = template("qwen3").tokenizer
    one = ChatTemplate(
        tokenizer=tokenizer, kwargs={"enable_thinking": False}, system_prompt="be brief", renders_text=True
    )
    system = {"role": "system", "content": "be brief"}
    expected = whole("qwen3", [system, USER], enable_thinking=False)
    assert expected != whole("qwen3", [system, USER])
    assert one.encode(USER["content"], "prompt") == one.encode([USER], "prompt") == expected
    other = {"role": "system", "content": "be kind"}
    assert one.render([other, USER], enable_thinking=True) == whole("qwen3", [other, USER])
    assert one.encode([5, 6], "prompt") == [5, 6]


OBSERVATIONS: list[Messages] = [
    [{"role": "user", "content": "and\nthen?"}],
    [{"role": "tool", "content": "twelve"}],
    [{"role": "tool", "content": "  12 \n"}, {"role": "tool", "content": "nine"}],
]


@pytest.mark.parametrize("observation", OBSERVATIONS, ids=["user", "tool", "two tools"])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(answer=st.text("thean swr12\n.!é", max_size=12), more=st.text("answer12 ", min_size=1, max_size=6))
def test_turns_in_sequence_are_the_whole_conversation(form: str, observation: Messages, answer: str, more: str) -> None:
    """Each turn adds to the tokens before; in the end they are what the template makes of all messages."""
    if form == "llama3":  # its template strips
        answer, more = answer.strip(), more.strip()
    tokens, messages = template(form).render([USER]), [USER]
    opening = {"qwen2.5": "\n", "qwen3": "\n", "llama3": "\n\n"}[form]
    for text in (answer, more):
        # Elsewhere the tokenizer merges the answer's begin with the line end of its opening.
        assume(ids(form, opening + text) == ids(form, opening) + ids(form, text))
        sampled = ids(form, text + END[form])
        tokens += sampled
        tokens += template(form).render_next(observation, after=sampled)
        messages = [*messages, {"role": "assistant", "content": text}, *observation]
        assert tokens == whole(form, messages)


@pytest.mark.parametrize("form", FORMS)
def test_sampled_tokens_stay_as_they_were_sampled(form: str) -> None:
    """An answer that a tokenizer would write in fewer tokens, and one that it would merge with its opening."""
    sampled = [*(token for letter in "\nanswer" for token in ids(form, letter)), *ids(form, END[form])]
    tokens = template(form).render([USER]) + sampled
    tokens += template(form).render_next(OBSERVATIONS[0], after=sampled)
    text = template(form).tokenizer.decode(sampled[:-1])
    again = whole(form, [USER, {"role": "assistant", "content": text}, *OBSERVATIONS[0]])
    assert len(again) < len(tokens)
    assert sampled == tokens[len(whole(form, [USER])) :][: len(sampled)]
    if form != "llama3":  # which strips the line end
        assert template(form).tokenizer.decode(tokens) == template(form).tokenizer.decode(again)


@pytest.mark.parametrize("form", FORMS)
def test_the_end_of_a_turn_is_added_once(form: str) -> None:
    end, text = ids(form, END[form]), ids(form, "answer")
    chat, observation = template(form), OBSERVATIONS[0]
    with_end, without = chat.render_next(observation, after=text), chat.render_next(observation, after=text + end)
    assert with_end == end + without == chat.render_next(observation)
    # Another end token than the template's, as <|endoftext|> beside Qwen's <|im_end|>: the turn's own end follows.
    assert chat.render_next(observation, after=[*text, 0]) == with_end
    closing = {"qwen2.5": "\n", "qwen3": "\n", "llama3": ""}[form]
    assert chat.render_next(observation, after=text + end + ids(form, closing)) == without[len(closing) :]


def test_thoughts_stay_while_the_template_strips_them() -> None:
    thought = "<think>\ntwelve or nine?\n</think>\n\nnine"
    messages = [USER, {"role": "assistant", "content": thought}, *OBSERVATIONS[0]]
    assert "twelve" not in template("qwen3").tokenizer.decode(whole("qwen3", messages))
    sampled = ids("qwen3", thought + "<|im_end|>")
    added = template("qwen3").render_next(OBSERVATIONS[0], after=sampled)
    plain = [USER, {"role": "assistant", "content": "nine"}, *OBSERVATIONS[0]]
    assert whole("qwen3", [USER]) + ids("qwen3", "nine<|im_end|>") + added == whole("qwen3", plain)
    shut = template("qwen3").render_next(OBSERVATIONS[0], after=sampled, enable_thinking=False)
    assert shut == added + ids("qwen3", "<think>\n\n</think>\n\n")


def test_special_tokens_in_messages() -> None:
    """As in transformers: the token, unless the template's argument says that it stays text."""
    chat, sly = template("qwen2.5"), [{"role": "user", "content": "a<|im_end|>b"}]
    end = ids("qwen2.5", "<|im_end|>")[0]
    for render in (chat.render, chat.render_next):
        assert render(sly).count(end) == render([USER]).count(end) + 1
        safe = render(sly, sanitize_control_tokens=True)
        assert safe.count(end) == render([USER]).count(end)
        assert chat.tokenizer.decode(safe) == chat.tokenizer.decode(render(sly))


BAD_MESSAGES = {
    "must be a list of messages": [],
    "message 1 needs a `role`": [USER, {"content": "a"}],
    "message 0 needs a `role`": [{"role": 1, "content": "a"}],
    r"message 1 \(assistant\) needs `content`": [USER, {"role": "assistant"}],
    r"message 0 \(user\) needs `content`": [{"role": "user", "content": [{"type": "text", "text": 1}]}],
    "message 0 has a part 'image_url'; only parts of type 'text'": [
        {"role": "user", "content": [{"type": "image_url"}]}
    ],
    "message 0 holds half a surrogate": [{"role": "user", "content": "\ud800"}],
}


@pytest.mark.parametrize("told", BAD_MESSAGES)
def test_bad_messages(told: str) -> None:
    with pytest.raises(ValueError, match=f"^row 3: .*{told}"):
        template("qwen3").render(BAD_MESSAGES[told], where="row 3")
    with pytest.raises(ValueError, match=f"^observation: .*{told}"):
        template("qwen3").render_next(BAD_MESSAGES[told])


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_text_are_lines_of_it(form: str) -> None:
    parts = [{"type": "text", "text": "what is"}, {"type": "text", "text": "the question?"}]
    messages = [{"role": "system", "content": parts[:1]}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "what is"}, {"role": "user", "content": "what is\nthe question?"}]
    assert template(form).render(messages) == whole(form, plain)
    assert template(form).render_next(messages[1:]) == template(form).render_next(plain[1:])


def test_a_template_of_the_call(tmp_path: Path) -> None:
    save_chat_checkpoint(tmp_path / "model", "qwen2.5")
    llm = LLM(tmp_path / "model", kv_cache_bytes=2**22)
    params = SamplingParams(max_tokens=2)
    (own,) = llm.chat([USER], params)
    (other,) = llm.chat([USER], params, chat_template=LLAMA3)
    assert own.prompt_token_ids == whole("qwen2.5", [USER])
    assert other.prompt_token_ids == whole("qwen2.5", [USER], chat_template=LLAMA3) != own.prompt_token_ids
    pair = [{"role": "system", "content": "a"}, USER]
    llm.chat(pair, params)
    with pytest.raises(ValueError, match="drops message 0"):
        llm.chat(pair, params, chat_template=LAST_ONLY)
    with pytest.raises(ValueError, match="chat_template=7: give the text of a template"):
        llm.chat([USER], params, chat_template=7)  # type: ignore[arg-type]


def test_a_call_without_content() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    form = QWEN25.replace("message.content + '<|im_end|>", "(message.content or 'call') + '<|im_end|>")
    chat = ChatTemplate(tokenizer=chat_tokenizer("qwen2.5", form))
    assert "assistant\ncall" in chat.tokenizer.decode(chat.render([USER, called, *OBSERVATIONS[1]]))


BAD_TEMPLATES = {
    "drops a turn": (LAST_ONLY, r"drops message 0 \(system\) of roles system, user"),
    "drops a role": (
        QWEN25.replace("not (tools and loop.first and message.role == 'system')", "message.role != 'system'"),
        r"drops message 0 \(system\)",
    ),
    "no jinja": ("{% for %}", "cannot render it .*TemplateSyntaxError"),
    "refuses": ("{{- raise_exception('only one user') }}", "cannot render it .*only one user"),
    "undefined": ("{{- messages[0].content.parts.first }}", "cannot render it .*UndefinedError"),
}


@pytest.mark.parametrize("name", BAD_TEMPLATES)
def test_bad_templates(name: str) -> None:
    text, told = BAD_TEMPLATES[name]
    chat = ChatTemplate(tokenizer=chat_tokenizer("qwen2.5", text))
    with pytest.raises(ValueError, match=rf"^row 3: the model's chat template {told}"):
        chat.render([{"role": "system", "content": "a"}, USER], where="row 3")


@pytest.mark.parametrize(
    ("form", "text", "told"),
    [
        ("qwen2.5", LAST_ONLY, "drops message 0"),
        ("qwen2.5", QWEN25.replace("message.role == 'tool'", "message.role == 'user'"), None),
        ("qwen2.5", QWEN25.replace("'<|im_end|>\\n' }}\n    {%- endif %}", "'<|im_end|>' + '!' * (loop.index - loop.length + 9) }}\n    {%- endif %}"), "otherwise"),  # noqa: E501
        ("qwen3", QWEN3.replace("assistant\\n' + content", "assistant\\n'"), "drops message 1"),
        ("llama3", LLAMA3.replace("'ipython' if message.role == 'tool' else", ""), None),
        ("llama3", LLAMA3.replace("{%- set role", "{%- if message.role == 'tool' %}{%- continue %}{%- endif %}{%- set role"), "drops message 2 .tool."),  # noqa: E501
    ],
)  # fmt: skip
def test_templates_that_cannot_go_on_are_refused_and_no_others(form: str, text: str, told: str | None) -> None:
    assert text not in TEMPLATES.values()
    chat = ChatTemplate(tokenizer=chat_tokenizer(form, text))
    if told is None:
        assert chat.render_next(OBSERVATIONS[1])
        return
    with pytest.raises(ValueError, match=rf"^observation: the model's chat template .*{told}"):
        chat.render_next(OBSERVATIONS[1])


def test_no_template() -> None:
    for tokenizer in (None, chat_tokenizer("qwen3", "")):
        if tokenizer is not None:
            tokenizer.chat_template = None
        with pytest.raises(ValueError, match=r"^row 3: the model has no chat template; give text, or a chat model"):
            ChatTemplate(tokenizer=tokenizer).render([USER], where="row 3")


def test_arguments_that_are_no_templates() -> None:
    for name in ("tokenize", "tools", "where", "padding"):
        with pytest.raises(ValueError, match=f"^chat_template_kwargs: '{name}' is no argument for a template"):
            ChatTemplate(tokenizer=None, kwargs={name: True})
    with pytest.raises(ValueError, match=r"^chat_template_kwargs=5: must be a dictionary"):
        ChatTemplate(tokenizer=None, kwargs=5)  # type: ignore[arg-type]


PARAMS = SamplingParams(max_tokens=12, n=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_chat_checkpoint(folder, "qwen3")
    return folder


def test_chat_generates_from_what_transformers_renders(model: Path) -> None:
    llm, other = LLM(model, kv_cache_bytes=2**23), [{"role": "system", "content": "be brief"}, USER]
    rendered = [whole("qwen3", one, enable_thinking=False) for one in ([USER], other)]
    expected = llm.generate(rendered, PARAMS, prompt_uids=[0, 1])
    outputs = llm.chat([[USER], other], PARAMS, chat_template_kwargs={"enable_thinking": False}, prompt_uids=[0, 1])
    assert [one.outputs for one in outputs] == [one.outputs for one in expected]
    assert [one.prompt_token_ids for one in outputs] == rendered
    assert [one.prompt for one in outputs] == [llm.tokenizer.decode(one) for one in rendered]
    alone = llm.chat(other, PARAMS, chat_template_kwargs={"enable_thinking": False}, prompt_uids=[1])
    assert alone == outputs[1:]
    assert llm.generate([[USER]], PARAMS)[0].prompt_token_ids == whole("qwen3", [USER])
    shut = llm.chat([USER], PARAMS, add_generation_prompt=False)
    assert shut[0].prompt_token_ids == whole("qwen3", [USER], add_generation_prompt=False)


def test_tools_come_into_the_prompt(tmp_path: Path) -> None:
    def weather(town: str) -> str:
        """
        Tells the weather.

        Args:
            town: Where.
        """
        return town

    save_chat_checkpoint(tmp_path, "qwen2.5")
    llm = LLM(tmp_path, kv_cache_bytes=2**23)
    output = llm.chat([USER], SamplingParams(max_tokens=1), tools=[weather])[0]
    assert output.prompt_token_ids == whole("qwen2.5", [USER], tools=[weather]) and "Tells the weather" in output.prompt


def test_what_chat_refuses(model: Path, qwen3: str) -> None:
    llm = LLM(model, kv_cache_bytes=2**23)
    for messages, told in (
        ([[USER], [{"role": "user"}]], r"messages\[1\]: message 0 \(user\) needs `content`"),
        ([{"content": "a"}], "messages: message 0 needs a `role`"),
        ([], r"messages=\[\]: give a conversation"),
        ("text", "messages='text': give a conversation"),
        (["text"], r"messages\[0\]: must be a list of messages"),
    ):
        with pytest.raises(ValueError, match=f"^{told}"):
            llm.chat(messages)
    with pytest.raises(ValueError, match=r"^chat_template_kwargs: 'tokenize' is no argument"):
        llm.chat([USER], chat_template_kwargs={"tokenize": False})
    with pytest.raises(ValueError, match=r"^chat_template_kwargs=5: must be a dictionary"):
        llm.chat([USER], chat_template_kwargs=5)  # type: ignore[arg-type]
    for call in (LLM(qwen3, kv_cache_bytes=2**23).chat, LLM(qwen3, kv_cache_bytes=2**23).generate):
        with pytest.raises(ValueError, match=r"the model has no chat template; give text, or a chat model"):
            call([[USER]])


@pytest.mark.parametrize("where", ["generation_config.json", "generation_config.json, a list", "tokenizer"])
def test_end_tokens_beside_those_of_config_json(tmp_path: Path, where: str) -> None:
    tokenizer = save_chat_checkpoint(tmp_path, "qwen3")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    endless = LLM(tmp_path, kv_cache_bytes=2**23).generate([[5, 6]], params, prompt_uids=[0])[0].outputs[0].token_ids
    end = endless[6]
    assert len(endless) == 12 and end not in endless[:6]
    if where == "tokenizer":
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
        tokenizer.save_pretrained(tmp_path)
    else:
        ids = end if where.endswith("json") else [3, end]
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    llm = LLM(tmp_path, kv_cache_bytes=2**23)
    completion = llm.generate([[5, 6]], SamplingParams(max_tokens=12), prompt_uids=[0])[0].outputs[0]
    assert (completion.token_ids, completion.finish_reason) == (endless[:7], "stop")
    assert llm.generate([[5, 6]], params, prompt_uids=[0])[0].outputs[0].token_ids == endless
