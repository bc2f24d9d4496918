"""Stop strings against decoding everything after each token, with tokens of bytes, of half characters, and special."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from algos.tokenizer import EOS_TOKEN_ID, PAD_TOKEN_ID, byte_tokenizer
from engines import LLM, SamplingParams
from engines.models.tokenizer import detokenizer
from engines.replica.endings import Endings
from engines.replica.schedule import Sequence
from engines.replica.stop_strings import StopSearch
from engines.sequence import Completion
from tests.checkpoints import save_text_checkpoint
from tests.states import make_state

SPECIAL = (PAD_TOKEN_ID, EOS_TOKEN_ID)
PIECES = ["a", "b", "ab", " ", "é", "€", "😀", "\ufffd"]


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As those of Llama 2: words with a leading space, bytes as tokens of their own for what is in no word."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["<pad>", "<eos>"]
    words += ["a", "b", "ab", "▁", "▁a", "é", "�", "▁▁"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


TOKENIZERS = {"byte level": byte_tokenizer(), "byte fallback": byte_fallback_tokenizer()}
OTHERS = {"byte level": [], "byte fallback": list(range(258, 266))}


def texts(kind: str) -> st.SearchStrategy[list[int]]:
    """Token ids: whole characters, halves of some, runs of special tokens, and tokens that are no bytes."""
    whole = st.sampled_from(PIECES).map(lambda piece: list(piece.encode()))
    torn = st.tuples(st.sampled_from(PIECES[4:]), st.integers(1, 3)).map(lambda one: list(one[0].encode()[: one[1]]))
    rest = st.tuples(st.sampled_from(PIECES[4:]), st.integers(1, 3)).map(lambda one: list(one[0].encode()[one[1] :]))
    special = st.tuples(st.sampled_from(SPECIAL), st.integers(1, 12)).map(lambda one: [one[0]] * one[1])
    other = [st.sampled_from(OTHERS[kind]).map(lambda token: [token])] * 2 if OTHERS[kind] else []
    return st.lists(st.one_of(whole, whole, torn, rest, special, *other), max_size=40).map(
        lambda pieces: [token for piece in pieces for token in piece]
    )


def cut_of(text: str, stops: tuple[str, ...]) -> int:
    settled = text
    while settled.endswith("\ufffd"):
        settled = settled[:-1]
    return min((settled.index(stop) for stop in stops if stop in settled), default=-1)


STOPS = st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join), min_size=1, max_size=3)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_against_decoding_everything_after_each_token(kind: str, data: st.DataObject) -> None:
    detokenize = detokenizer(TOKENIZERS[kind])
    assert detokenize is not None
    tokens = data.draw(texts(kind))
    stops = tuple(data.draw(STOPS))
    begun = data.draw(st.integers(0, 5))  # generated elsewhere
    begun = min(begun, len(tokens))
    assume(cut_of(detokenize(tokens[:begun]), stops) < 0)
    prompt = [97, 98]
    search = StopSearch(stops, detokenize, tokens[:begun])
    for length in range(begun + 1, len(tokens) + 1):
        expected = cut_of(detokenize(tokens[:length]), stops) >= 0
        assert search.hits(prompt + tokens[:length], len(prompt)) == expected, (length, stops)
        if expected:
            break


def complete(tokens: list[int], max_tokens: int = 1000, **params: Any) -> Completion | None:
    """As a replica would, these tokens being drawn one after the other."""
    state = make_state(0, [65], SamplingParams(ignore_eos=True, **params))
    sequence = Sequence(state=state, max_len=1 + max_tokens, release_len=1 + max_tokens)
    endings = Endings(eos_token_ids=(EOS_TOKEN_ID,), detokenize=detokenizer(TOKENIZERS["byte level"]))
    for token in tokens:
        state.tokens.append(token)
        if (reason := endings.reason(sequence)) is not None:
            return endings.completion(state, reason)
    return None


def test_however_many_special_tokens_lie_inside() -> None:
    tokens = [*b"xS", *[PAD_TOKEN_ID] * 500, *b"TOP", *b"more"]
    completion = complete(tokens, stop="STOP")
    assert completion is not None
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("x", "stop", 505)


def test_a_stop_string_that_does_not_count_costs_no_whole_text_for_ever() -> None:
    """One within the first `min_tokens` tokens lies in the tail until that is behind it."""
    lengths = []

    def decode(tokens: Items[int]) -> str:
        lengths.append(len(tokens))
        return bytes(tokens).decode()

    tokens = [*b"aaa\n", *b"b" * 1000]
    search = StopSearch(["\n"], decode, [], num_free=10)
    assert not any(search.hits(tokens[:n], 0) for n in range(1, len(tokens) + 1))
    assert sum(lengths) < 50 * len(tokens)


def test_half_a_character_is_no_replacement_character() -> None:
    euro = "€".encode()
    for half in (1, 2):
        assert complete([*b"x", *euro[:half]], stop="\ufffd") is None
        assert complete([*b"x", *euro[:half]], stop="x\ufffd") is None
    assert complete([*b"x", *euro, *b"y"], stop="\ufffd") is None
    really = complete([*b"x", *euro[:2], *b"y", *b"z"], stop="\ufffd")
    assert really is not None and (really.text, len(really.token_ids)) == ("x", 4)


def test_what_ends_for_its_length_is_not_cut() -> None:
    completion = complete([*b"x", 0xE2], max_tokens=2, stop="\ufffd")
    assert completion is not None and (completion.text, completion.finish_reason) == ("x\ufffd", "length")
    completion = complete([*b"ab"], max_tokens=2, stop="b")
    assert completion is not None and (completion.text, completion.finish_reason) == ("a", "stop")


def test_in_an_engine_that_preempts(tmp_path: Path) -> None:
    """Every completion ends where decoding it whole first shows a stop string, and its text is cut there."""
    save_text_checkpoint(tmp_path)
    llm = LLM(tmp_path, dtype="float64", kv_cache_bytes=60 * 16 * 2 * 16 * 8, block_size=4, max_model_len=200)
    params = SamplingParams(max_tokens=100, n=12, ignore_eos=True)
    plain = llm.generate(["hello"], params, prompt_uids=[0])[0].outputs
    stops = tuple({one.text[40:42] for one in plain} | {"\ufffd\ufffd", "a\ufffd"})
    stopped = llm.generate(["hello"], dataclasses.replace(params, stop=stops), prompt_uids=[0])[0].outputs
    assert llm.replica.scheduler.num_preemptions
    decode = detokenizer(llm.tokenizer)
    assert decode is not None
    for before, after in zip(plain, stopped, strict=True):
        lengths = [n for n in range(1, 101) if cut_of(decode(before.token_ids[:n]), stops) >= 0]
        length = lengths[0] if lengths else 100
        text = decode(before.token_ids[:length])
        assert after.token_ids == before.token_ids[:length]
        assert after.finish_reason == ("stop" if lengths else "length")
        assert after.text == (text[: cut_of(text, stops)] if lengths else text)
    assert {one.finish_reason for one in stopped} >= {"stop"}


@pytest.mark.parametrize(
    ("tokens", "stop"),
    [
        ([*b"aab", *("€" * 40).encode(), *"é€".encode()], "€é€"),  # one run of bytes, whole but for its last character
        ([258, 0xE2, *b"a" * 60, 258], "aaa"),  # one that is no text as a whole, though parts of it would be
        ([261, 256, 261, 258], " a"),  # spaces, of which the first is dropped where it begins the text
        ([261, 261, 261, 258], "  a"),
    ],
)
def test_what_is_decoded_together_counts_as_a_whole(tokens: list[int], stop: str) -> None:
    detokenize = detokenizer(TOKENIZERS["byte fallback"])
    assert detokenize is not None
    for num_before in range(30):
        generated = [258] * num_before + tokens
        search = StopSearch([stop], detokenize, [])
        found = [search.hits(generated[:n], 0) for n in range(1, len(generated) + 1)]
        assert found == [stop in detokenize(generated[:n]) for n in range(1, len(generated) + 1)]
