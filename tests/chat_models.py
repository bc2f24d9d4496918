"""Chat templates of the form of Qwen2.5's, Qwen3's and Llama 3's, and a byte-level BPE that merges, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

QWEN25 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are helpful.') }}
    {{- '\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

QWEN3 = """
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role == 'assistant' %}
        {%- set content, thought = message.content, '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA3 = """
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

TEMPLATES = {"qwen2.5": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3}
END = {"qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}
SPECIAL = {
    "qwen2.5": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}
# The words of Qwen's and Llama 3's tokenizers: line ends merge with each other and with punctuation before them.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = [
    "the answer is twelve.\n\n\nthe\n\n\n answer is nine!\n",
    "assistant user system tool answer question 12+34=46 ",
] * 50


def chat_tokenizer(form: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges, also over line ends, and the special tokens and the template of that form."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL[form],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[form][0],
        eos_token=END[form],
        chat_template=TEMPLATES[form] if template is None else template,
        clean_up_tokenization_spaces=False,
    )


def save_chat_checkpoint(directory: Path, form: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Writes a random tiny Qwen3 with the tokenizer, which is returned; config.json alone names no end token."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=336,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer = chat_tokenizer(form, template)
    tokenizer.save_pretrained(directory)
    return tokenizer
