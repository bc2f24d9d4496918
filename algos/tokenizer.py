"""A byte-level tokenizer that needs no training and loses nothing: token id = byte value."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD_TOKEN_ID = 256
EOS_TOKEN_ID = 257
VOCAB_SIZE = 264
"""Rows of a model's embedding: at most 260 tokens, padded to a multiple of 8 so that TP 2, 4 and 8 can split it."""
CHAT_TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def byte_tokenizer(*, is_chat: bool = False) -> PreTrainedTokenizerFast:
    """256 bytes without merges, `<pad>` and `<eos>`; any text round-trips, and encoding adds no special token.

    The characters "<eos>" in a text become five bytes, never the token, so a prompt cannot contain the token. A chat
    model's has two more tokens, with which its template surrounds messages; their texts in a prompt become the tokens.
    """
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>", *(("<|im_start|>", "<|im_end|>") if is_chat else ())])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>" if is_chat else "<eos>",
        chat_template=CHAT_TEMPLATE if is_chat else None,
        split_special_tokens=not is_chat,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _byte_characters() -> list[str]:
    """The printable character that the byte-level alphabet writes for each byte value.

    GPT-2's table: printable Latin-1 bytes stand for themselves, the others are moved, in order, to U+0100 and on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]
