"""What users of vLLM type: prompts, options and names as there; what has no equivalent is refused by name."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any

import pytest

from engines import LLM, SamplingParams
from engines.vllm_options import translate

FEW = SamplingParams(max_tokens=5, temperature=0)


@pytest.fixture(scope="module")
def llm(text_model: str) -> LLM:
    return LLM(text_model, dtype="float64")


def test_prompts_in_all_forms(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("1+1=")
    forms: list[Any] = ["1+1=", {"prompt": "1+1="}, {"prompt_token_ids": ids}, [{"prompt": "1+1="}], [ids]]
    outputs = [llm.generate(form, FEW) for form in forms]
    assert all(len(one) == 1 and one[0].prompt_token_ids == ids for one in outputs)
    assert len({tuple(one[0].outputs[0].token_ids) for one in outputs}) == 1
    assert [one[0].prompt for one in outputs] == ["1+1=", "1+1=", None, "1+1=", None]
    assert outputs[0][0].finished and outputs[0][0].request_id != outputs[1][0].request_id


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"text": "a"}, r"prompts\[0\]=.*give `prompt`"),
        ([{"prompt": "a"}, {"role": "user", "content": "a"}], r"prompts\[1\]=.*LLM.chat"),
        ({"prompt": "a", "multi_modal_data": {}}, r"prompts\[0\]=.*multi_modal"),
        ([], "at least one"),
    ],
)
def test_other_prompts_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, FEW)


def test_a_repeated_call_draws_other_tokens_unless_it_has_a_seed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    first, again = (llm.generate("1+1=", params)[0].outputs[0].token_ids for _ in range(2))
    assert first != again
    first, again = (llm.generate("1+1=", replace(params, seed=3))[0].outputs[0].token_ids for _ in range(2))
    assert first == again


def test_max_tokens_none_is_up_to_the_context(llm: LLM) -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    short, long = llm.generate([[50] * 3, [50] * 40], params)
    assert [len(one.prompt_token_ids) + len(one.outputs[0].token_ids) for one in (short, long)] == [
        llm.max_model_len
    ] * 2
    with pytest.raises(ValueError, match="leave no room"):
        llm.generate([[50] * llm.max_model_len], params)


def test_top_k_0_is_off(llm: LLM) -> None:
    assert SamplingParams(top_k=0) == SamplingParams(top_k=-1)


def test_a_progress_bar_is_shown_when_asked_for(llm: LLM) -> None:
    shown = {}
    for use_tqdm in (False, True):
        with redirect_stderr(io.StringIO()) as shown[use_tqdm]:
            llm.generate(["1+1=", "2"], replace(FEW, n=2), use_tqdm=use_tqdm)
    assert shown[False].getvalue() == "" and "4/4" in shown[True].getvalue()


# -- text


def generate(llm: LLM, **options: Any) -> Any:
    (output,) = llm.generate(["hello"], SamplingParams(max_tokens=60, **options), prompt_uids=[0])
    return output.outputs[0]


def test_what_ends_a_text(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    free = generate(llm, ignore_eos=True, temperature=1.3)
    ascii_places = [i for i in range(20, 58) if free.text[:60].isascii() or free.token_ids[i] < 128]
    token = free.token_ids[ascii_places[0]]
    first = free.token_ids.index(token)
    for keep in (False, True):
        one = generate(llm, ignore_eos=True, temperature=1.3, stop_token_ids=[token], include_stop_str_in_output=keep)
        assert (one.token_ids, one.finish_reason, one.stop_reason) == (free.token_ids[: first + 1], "stop", token)
        assert one.text == tokenizer.decode(one.token_ids[: first + keep], skip_special_tokens=True)
    late = generate(llm, ignore_eos=True, temperature=1.3, stop_token_ids=[token], min_tokens=first + 2)
    assert len(late.token_ids) >= first + 2 and token not in late.token_ids[: first + 2]


def test_stop_strings_count_behind_min_tokens(llm: LLM) -> None:
    ban = {"logit_bias": {ord("a"): 1e4, ord("b"): 1e4}, "ignore_eos": True}
    free = generate(llm, **ban)
    assert set(free.text) == {"a", "b"}
    for stop in ("ab", "ba", "aab"):
        for least in (0, 1, 5, 17, 40):
            place = next(i for i in range(60) if i + len(stop) > least and free.text.startswith(stop, i))
            for keep in (False, True):
                one = generate(llm, **ban, stop=["zz", stop], min_tokens=least, include_stop_str_in_output=keep)
                assert (one.finish_reason, one.stop_reason) == ("stop", stop)
                assert len(one.token_ids) == place + len(stop)
                assert one.text == free.text[: place + keep * len(stop)]


def test_special_tokens_and_no_text(llm: LLM) -> None:
    eos = llm.model_config.eos_token_ids[0]
    bias = {"logit_bias": {eos: 1e4, ord("a"): 1e4}, "temperature": 3.0}
    both = generate(llm, **bias, ignore_eos=True, skip_special_tokens=False)
    tokenizer = llm.get_tokenizer()
    assert both.text == tokenizer.decode(both.token_ids) != tokenizer.decode(both.token_ids, skip_special_tokens=True)
    one = generate(llm, **bias, skip_special_tokens=False, include_stop_str_in_output=True)
    assert one.finish_reason == "stop" and one.stop_reason is None and one.text == tokenizer.decode(one.token_ids)
    assert generate(llm, detokenize=False).text == ""


def test_bad_words_are_not_generated(llm: LLM) -> None:
    ban = {"logit_bias": {ord("a"): 1e4, ord("b"): 1e4, ord("c"): 1e4}, "ignore_eos": True}
    free = generate(llm, **ban)
    one = generate(llm, **ban, bad_words=["ab", "cc"])
    assert "ab" in free.text and "cc" in free.text
    assert "ab" not in one.text and "cc" not in one.text and set(one.text) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of": 2}, r"SamplingParams.best_of=2: there is no such option; give n"),
        ({"guided_decoding": 1}, r"SamplingParams.guided_decoding=1.*grammar"),
        ({"max_token": 1}, r"SamplingParams.max_token=1.*there are temperature, top_k"),
        ({"logprobs": -2}, "SamplingParams.logprobs=-2: must be -1"),
        ({"logit_bias": {"53": 1}}, r"SamplingParams.logit_bias=.*a dictionary like .* keys are token ids, integers"),
        ({"logit_bias": {3: float("nan")}}, "SamplingParams.logit_bias="),
        ({"presence_penalty": 3}, "SamplingParams.presence_penalty=3"),
        ({"repetition_penalty": 0}, "SamplingParams.repetition_penalty=0: must be a number from 0.01 to 100"),
        ({"repetition_penalty": 1e-45}, "SamplingParams.repetition_penalty=1e-45: must be"),
        ({"logit_bias": [(3, 1.0), (3, 2.0)]}, "SamplingParams.logit_bias=.*: a token id repeats"),
        ({"min_tokens": 17}, "SamplingParams.min_tokens=17: must be at most max_tokens=16"),
        ({"bad_words": [" "]}, "SamplingParams.bad_words="),
        ({"stop": "a", "detokenize": False}, "SamplingParams.detokenize=False"),
    ],
)
def test_params_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_none_is_no_option() -> None:
    assert SamplingParams(best_of=None, stop=None, bad_words=None, logit_bias=None) == SamplingParams()  # type: ignore


def test_params_that_a_model_refuses(llm: LLM, qwen3: str) -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\].*logit_bias: token id 99999 is outside"):
        llm.generate("a", SamplingParams(logit_bias={99999: 1}))
    with pytest.raises(ValueError, match=r"bad_words.*strings need a tokenizer"):
        LLM(qwen3).generate([[5]], SamplingParams(bad_words=["a"]))
    every = range(llm.model_config.vocab_size)
    with pytest.raises(
        ValueError, match=r"prompts\[0\]: SamplingParams.min_tokens=2 forbids all tokens.*stop_token_ids"
    ):
        llm.generate("a", SamplingParams(min_tokens=2, stop_token_ids=[*every, 99999]))
    but_one = [*every[:-1], *every[:-1]]
    (output,) = llm.generate("a", SamplingParams(min_tokens=2, stop_token_ids=but_one))
    assert output.outputs[0].token_ids[:2] == [every[-1]] * 2


# -- options of the engine


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"enable_prefix_caching": False}, {"prefix_caching": False}),
        ({"gpu_memory_utilization": 0.4}, {"memory_utilization": 0.4, "kv_cache_bytes": "auto"}),
        ({"enforce_eager": True, "trust_remote_code": True}, {"cuda_graphs": False}),
        ({"enable_chunked_prefill": True, "quantization": None, "max_model_len": 9}, {"max_model_len": 9}),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
            {"drafter": "ngram", "max_draft_tokens": 5},
        ),
        ({"speculative_config": {"method": "suffix"}}, {"drafter": "suffix"}),
        ({"speculative_config": {"model": "a/b"}}, {"drafter": "model", "draft_model": "a/b"}),
        ({"speculative_config": None}, {}),
        ({"enable_prefix_caching": None, "gpu_memory_utilization": None, "enforce_eager": None}, {}),
        ({"enable_chunked_prefill": None, "trust_remote_code": None, "max_num_seqs": None, "block_size": None}, {}),
    ],
)
def test_options_of_the_engine(options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert translate(options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "awq"}, "LLM: quantization='awq': vLLM's option has no equivalent; use an unquantised"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill=False"),
        ({"speculative_config": {"method": "eagle"}}, "method='eagle': there are draft_model"),
        ({"speculative_config": "ngram"}, "speculative_config='ngram': give a dictionary"),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_max": 9}}, "always 2 and 4"),
        ({"speculative_config": {"method": "suffix", "model": "a"}}, "model: is no option of method='suffix'"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "EngineConfig.max_draft_tokens=0"),
        ({"limit_mm_per_prompt": 3}, "LLM: unknown option.*limit_mm_per_prompt"),
    ],
)
def test_options_that_are_refused(text_model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(text_model, **options)


def test_speculation_by_vllm_s_option_keeps_the_tokens_and_is_counted(text_model: str, llm: LLM) -> None:
    drafting = LLM(
        text_model, dtype="float64", draft_lengths="fixed",
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )  # fmt: skip
    params = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias={ord("a"): 1e4, ord("b"): 1e4})
    mine, theirs = (one.generate(["hello"] * 4, params, prompt_uids=range(4)) for one in (drafting, llm))
    assert [one.outputs[0].token_ids for one in mine] == [one.outputs[0].token_ids for one in theirs]
    metrics = drafting.draft_metrics
    assert 0 < metrics["draft_acceptance"] < 1 and metrics["draft_length"] <= 3
    assert metrics["acceptance_length"] == pytest.approx(1 + metrics["draft_acceptance"] * metrics["draft_length"])
    assert llm.draft_metrics["num_drafted"] == 0
