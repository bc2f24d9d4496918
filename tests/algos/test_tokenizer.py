import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from algos.tokenizer import EOS_TOKEN_ID, PAD_TOKEN_ID, VOCAB_SIZE, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[PreTrainedTokenizerFast]:
    """As made, and as saved and loaded."""
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(directory)
    return [byte_tokenizer(), AutoTokenizer.from_pretrained(directory)]


@given(text=st.text())
def test_any_text_is_its_bytes_and_comes_back(tokenizers, text):
    for tokenizer in tokenizers:
        token_ids = tokenizer(text).input_ids
        assert token_ids == list(text.encode())
        assert tokenizer.decode(token_ids) == text


@pytest.mark.parametrize("text", ["", " both ends ", "a\r\n\tb\x00", "don 't , really ?", "∑ 漢字 🙂", "<eos><pad>"])
def test_awkward_texts_come_back(tokenizers, text):
    for tokenizer in tokenizers:
        token_ids = tokenizer.encode(text)
        assert token_ids == list(text.encode())  # also "<eos>": a text cannot contain the token
        assert tokenizer.decode(token_ids, skip_special_tokens=True) == text


def test_special_tokens(tokenizers):
    for tokenizer in tokenizers:
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_TOKEN_ID, EOS_TOKEN_ID) == (256, 257)
        assert tokenizer.convert_tokens_to_ids(["<pad>", "<eos>"]) == [256, 257]
        assert tokenizer.bos_token_id is None
        assert tokenizer.decode([72, 105, EOS_TOKEN_ID, PAD_TOKEN_ID], skip_special_tokens=True) == "Hi"
        assert len(tokenizer) <= VOCAB_SIZE and VOCAB_SIZE % 8 == 0


def test_a_batch_is_padded_on_the_left(tokenizers):
    for tokenizer in tokenizers:
        batch = tokenizer(["ab", "c"], padding=True)
        assert batch.input_ids == [[97, 98], [PAD_TOKEN_ID, 99]]
        assert batch.attention_mask == [[1, 1], [0, 1]]
