"""Options of vLLM's `LLM` as ours. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {"enable_prefix_caching": "prefix_caching", "gpu_memory_utilization": "memory_utilization"}
_NOT_HERE = {
    "enable_lora": "merge the adapter into the checkpoint",
    "load_format": "checkpoints are read from safetensors",
    "logprobs_mode": "log-probs are those of the distribution that is sampled from",
    "pipeline_parallel_size": "a model is cut by tensor_parallel_size only",
    "quantization": "use an unquantised checkpoint",
    "swap_space": "give kv_host_bytes, in bytes",
    "tokenizer": "the tokenizer is the checkpoint's",
}
_NONE_IS_DEFAULT = {
    *(_NAMES.keys() | _NOT_HERE.keys()),
    *("block_size", "enable_chunked_prefill", "enforce_eager", "max_num_batched_tokens", "max_num_seqs"),
    *("speculative_config", "trust_remote_code"),
}
_METHODS = {"draft_model": "model", "model": "model"} | {name: name for name in ("ngram", "suffix", "grouped_suffix")}


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `EngineConfig` that these options mean. Raises ValueError for one that has no equivalent.

    An option of vLLM's that is None is as if it were not given.
    """
    given = {name: value for name, value in options.items() if name not in _NONE_IS_DEFAULT or value is not None}
    mine = {_NAMES.get(name, name): value for name, value in given.items()}
    for name in mine.keys() & _NOT_HERE.keys():
        raise ValueError(f"LLM: {name}={mine[name]!r}: vLLM's option has no equivalent; {_NOT_HERE[name]}")
    if "gpu_memory_utilization" in given:
        mine.setdefault("kv_cache_bytes", "auto")
    if "enforce_eager" in mine:
        mine["cuda_graphs"] = not mine.pop("enforce_eager")
    mine.pop("trust_remote_code", None)  # a permission, which is never used
    if mine.pop("enable_chunked_prefill", True) is False:
        raise ValueError("LLM: enable_chunked_prefill=False: prefills share max_num_batched_tokens; raise that instead")
    if (config := mine.pop("speculative_config", None)) is not None:
        mine |= _speculation(config)
    return mine


def _speculation(config: Any) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        raise ValueError(f"LLM: speculative_config={config!r}: give a dictionary with `method`")
    left = {name: value for name, value in config.items() if value is not None}
    method = left.pop("method", "draft_model" if "model" in left else None)
    if method not in _METHODS:
        raise ValueError(f"LLM: speculative_config: method={method!r}: there are {', '.join(_METHODS)}")
    options = {"drafter": _METHODS[method]}
    if "num_speculative_tokens" in left:
        options["max_draft_tokens"] = left.pop("num_speculative_tokens")
    if options["drafter"] == "model":
        options["draft_model"] = left.pop("model", None)
    elif method == "ngram" and (left.pop("prompt_lookup_min", 2), left.pop("prompt_lookup_max", 4)) != (2, 4):
        raise ValueError("LLM: speculative_config: prompt_lookup_min, prompt_lookup_max: are always 2 and 4 tokens")
    if left:
        raise ValueError(f"LLM: speculative_config: {', '.join(left)}: is no option of method={method!r}; leave it out")
    return options
