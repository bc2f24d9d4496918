"""The model's shape and the engine's options: frozen values, checked when they are made. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from engines.adapter_config import base_folder, checkpoint_folder
from engines.constraints import Count, Int64, Margin, Positive, Share, WholeNumber, check_fields
from engines.json_files import read_json

DType = Literal["float64", "float32", "bfloat16"]
Kernels = Literal["auto", "torch", "native", "triton"]
Exchange = Literal["all_to_all", "all_gather"]
Transport = Literal["auto", "shared memory", "gloo"]
Preemption = Literal["auto", "swap", "recompute"]
DraftBytes = Annotated[int, Meta(ge=2**16, le=2**40, description="at least 65536")]
DrafterName = Literal["none", "ngram", "suffix", "grouped_suffix", "model", "own"]
LOOKUPS = ("ngram", "suffix", "grouped_suffix")
"""Drafters that copy from text; others draw with a small model, a pass for each token of the longest draft."""
DraftMode = Literal["filled", "strict", "naive"]
DraftNoise = Literal["target", "own"]
DraftLengths = Literal["adaptive", "fixed"]
RopeType = Literal["default", "linear", "llama3"]
Attention = Literal["auto", "flash_attn", "triton", "native", "sdpa"]

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `scaling` names Hugging Face's `rope_type`."""

    theta: float
    scaling: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One dense decoder: Llama 2/3, Qwen2/2.5 or Qwen3, as its Hugging Face `config.json` describes it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element

    @staticmethod
    def from_pretrained(directory: str | Path, name: str = "model") -> ModelConfig:
        """Reads `config.json`, and `generation_config.json` for the end-of-sequence ids. `name` is for messages.

        An adapter's are those of its base. Raises FileNotFoundError without a `config.json`, ValueError for an
        architecture or option not supported.
        """
        if not isinstance(directory, str | os.PathLike):
            raise ValueError(f"{name}={directory!r}: give the path of a Hugging Face checkpoint")
        directory = base_folder(directory)
        path = directory / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{name}={str(directory)!r}: no config.json there; give a Hugging Face checkpoint")
        generation = directory / "generation_config.json"
        eos = read_json(generation, _Generation).eos_token_id if generation.is_file() else None
        architecture = (read_json(path, _Kind).architectures or ["missing"])[0]
        if architecture not in ARCHITECTURES:  # first: only these have the fields below
            raise ValueError(
                f"{path}: architectures={architecture!r} is not supported; use one of {list(ARCHITECTURES)}"
            )
        return _parse(architecture, read_json(path, _Fields), eos, path)


Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenIds = Annotated[int, Meta(ge=-1, le=2**31 - 1)] | list[Annotated[int, Meta(ge=-1, le=2**31 - 1)]]


class _Generation(Struct, frozen=True):
    """The fields that are read from generation_config.json."""

    eos_token_id: TokenIds | None = None


class _Kind(Struct, frozen=True):
    architectures: list[str] | None = None


class _Fields(Struct, frozen=True, kw_only=True):
    """The fields that are read from config.json. A null means the same as a missing field."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size
    rms_norm_eps: Positive | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    eos_token_id: TokenIds | None = None
    use_sliding_window: bool | None = None
    hidden_act: str | None = None
    quantization_config: Any = None
    partial_rotary_factor: float | None = None
    rope_theta: Positive | None = None
    # transformers 5 writes `rope_parameters`; earlier releases `rope_theta` and `rope_scaling`.
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


class _RopeFields(Struct, frozen=True, kw_only=True):
    """The fields that are read from `rope_parameters` and `rope_scaling`."""

    type: RopeType | None = None
    rope_type: RopeType | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: float | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None


def _parse(architecture: str, raw: _Fields, generation_eos: TokenIds | None, path: Path) -> ModelConfig:
    if raw.use_sliding_window:
        raise ValueError(f"{path}: use_sliding_window=true is not supported; set it to false")
    if raw.hidden_act not in (None, "silu"):
        raise ValueError(f"{path}: hidden_act={raw.hidden_act!r} is not supported; only 'silu' is")
    if raw.quantization_config:
        raise ValueError(f"{path}: quantization_config is not supported; use an unquantised checkpoint")
    attention_bias = bool(raw.attention_bias)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=raw.head_dim or raw.hidden_size // raw.num_attention_heads,
        rms_norm_eps=raw.rms_norm_eps or 1e-6,
        rope=_parse_rope(raw, path),
        max_position_embeddings=raw.max_position_embeddings,
        tie_word_embeddings=bool(raw.tie_word_embeddings),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.mlp_bias),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=_union_ids(raw.eos_token_id, generation_eos),
    )
    if config.head_dim % 2 or not config.head_dim:
        raise ValueError(f"{path}: head_dim={config.head_dim} is odd or 0; rotary embedding turns pairs")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads={config.num_heads} is not a multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    return config


def _parse_rope(raw: _Fields, path: Path) -> RopeConfig:
    old, new = raw.rope_scaling or {}, raw.rope_parameters or {}
    if old and new and old != new:
        raise ValueError(f"{path}: rope_scaling={old} and rope_parameters={new} differ; leave one of them out")
    merged = new or old
    if nested := [name for name, value in merged.items() if isinstance(value, dict)]:
        raise ValueError(f"{path}: rope_parameters for each type of layer are not supported ({', '.join(nested)})")
    try:
        scaling = msgspec.convert(merged, _RopeFields)
    except ValueError as error:
        raise ValueError(
            f"{path}: rope_parameters or rope_scaling: {error}; only {list(get_args(RopeType))} are supported"
        ) from None
    kind = scaling.rope_type or scaling.type or "default"
    if {raw.partial_rotary_factor, scaling.partial_rotary_factor} - {None, 1.0}:
        raise ValueError(f"{path}: partial_rotary_factor is not supported; only whole heads are rotated")
    names = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }[kind]
    values = {name: getattr(scaling, name) for name in names}
    if None in values.values():
        raise ValueError(f"{path}: rope_type={kind!r} wants {', '.join(names)}, and one is missing; add it")
    return RopeConfig(theta=scaling.rope_theta or raw.rope_theta or 10000.0, scaling=kind, **values)


def _union_ids(*values: TokenIds | None) -> tuple[int, ...]:
    ids: list[int] = []
    for value in values:
        ids += [value] if isinstance(value, int) else (value or [])
    return tuple(dict.fromkeys(ids))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one replica runs."""

    dtype: DType = "float32"
    """Weights, activations and KV. float64 is for tests of token equality."""
    block_size: Count = 16
    """Tokens per KV block."""
    kv_cache_bytes: Count | Literal["auto"] = 512 * 2**20
    """Bytes of each rank's KV cache, over all layers. "auto" takes the free memory that the rest of the engine does not
    need, at most as much as `max_num_seqs` sequences of the longest length fill."""
    memory_utilization: Share = 0.9
    """Part of the free memory that the engine may use when the KV cache's size is "auto"."""
    max_num_seqs: Count = 256
    """Most sequences in one forward pass."""
    max_num_batched_tokens: Count = 4096
    """Most tokens in one forward pass; decodes are scheduled first, prefills are chunked into the rest."""
    prefill_chunk_size: Count | None = None
    """Most prompt tokens of one sequence per forward pass; None: only `max_num_batched_tokens` limits them."""
    prefix_caching: bool = True
    """Whether a sequence reuses the KV of its leading full blocks from another sequence that has the same first tokens,
    under the same weights: the members of a group compute their prompt once."""
    max_model_len: Count | None = None
    """Longest sequence, prompt included; None takes the model's own context length."""
    kernels: Kernels = "auto"
    """Small operations and the draw: "native" is compiled C++, for CPUs, "triton" is for CUDA (not for float64); "auto"
    is the one of the device if available, otherwise torch. With "torch", `attention="auto"` is not native either."""
    attention: Attention = "auto"
    """"auto" is the fastest available backend that supports the dtype, head size and block size: on CUDA "flash_attn"
    (block sizes that are multiples of 256), "triton" or "sdpa" (always for float64), on a CPU "native" or "sdpa"."""
    exchange: Exchange = "all_to_all"
    """How ranks exchange weights and KV when they regroup: each gets what it lacks, or all get all and slice (PAT)."""
    cuda_graphs: bool = True
    """Whether decode-only passes are captured and replayed, which saves their kernel launches. It has an effect only on
    CUDA, with an attention backend and a transport that can be captured."""
    preemption: Preemption = "auto"
    """What happens to the KV of a preempted sequence: "swap" stores it in host memory or on disk while they have room,
    "recompute" drops it, "auto" does what is faster by costs measured in the run. "auto" depends on time: where tokens
    of low precision must repeat bit for bit, choose one of the other two."""
    priority_margin: Margin = 0.0
    """Share of a running sequence's priority by which that of a waiting one must exceed it, to preempt it where slots
    or blocks are lacking; with inf priorities only order those that wait. Only a schedule policy gives priorities."""
    kv_host_bytes: WholeNumber | None = None
    """Most host memory (/dev/shm) that a rank fills with KV outside its cache; None: 1 GiB, or less when little is
    free."""
    kv_disk_bytes: WholeNumber = 0
    """Most disk space that a rank fills with KV for which host memory has no room."""
    kv_disk_folder: str | None = None
    """An existing folder on that disk. While the folder cannot be written to, KV is recomputed instead."""
    drafter: DrafterName = "none"
    """What guesses next tokens, so that one pass can draw several tokens of a sequence. "ngram" copies what followed an
    earlier occurrence of a sequence's last two to four tokens. "suffix" does so for the longest end that has occurred,
    and takes the most frequent continuation; "grouped_suffix" looks in all sequences of the prompt, also those that
    have ended. "model" draws from a small model (`draft_model`). "own" is a `Drafter` of yours, which the argument
    `own_drafter` of `LLM` makes. Only guesses that equal the draws count, so tokens
    stay the same, as far as batches of other sizes round alike."""
    draft_model: str | None = None
    """Folder, or name of the hub, of the small model for drafter="model": a supported decoder with the vocabulary. Its
    weights stay as they are. Its KV cache has room for as many tokens as the model's, beside `kv_cache_bytes`."""
    draft_noise: DraftNoise = "target"
    """Random numbers with which the small model draws: "target" takes those of the model's own draw at the position, so
    that similar distributions mostly give the same token; "own" takes independent ones."""
    max_draft_tokens: Annotated[int, Meta(ge=1, le=1024, description="an integer of 1 to 1024")] = 8
    """Most tokens that a drafter guesses for a sequence in one forward pass."""
    draft_lengths: DraftLengths = "adaptive"
    """Which guesses join a pass: "adaptive" takes those that raise the expected tokens per second, by the times of
    passes, which are measured once; "fixed" takes all, up to `max_draft_tokens` of a sequence."""
    draft_mode: DraftMode = "filled"
    """How drafts of ranks that only draft are used: "filled" verifies what has come and never waits; "strict" waits for
    whole windows of `max_draft_tokens`; "naive" does too, and nothing is drafted while they are verified."""
    draft_paths: Annotated[int, Meta(ge=1, le=16, description="an integer of 1 to 16")] = 1
    """Most guesses of a suffix drafter for a sequence in one forward pass, each of up to `max_draft_tokens` tokens. All
    are computed side by side, and the one that agrees with the draws longest counts."""
    draft_tree_bytes: DraftBytes = 64 * 2**20
    """Most host memory that the suffix trees of a rank use (up to twice as much is allocated); the trees that were
    used longest ago are dropped."""
    draft_history_bytes: WholeNumber = 0
    """Most host memory in which a rank keeps completions of earlier calls of `generate`, for "grouped_suffix" to look
    in when their prompt comes again, as in RL's next epoch; the oldest are dropped first. 0 keeps none."""
    draft_server: bool = False
    """Whether "grouped_suffix" also looks in sequences of the prompt on other replicas of the torchrun world, by way of
    a server on rank 0, whose tokens take at most `draft_tree_bytes`. Drafts then depend on time; tokens do not."""
    batch_invariant: bool = False
    """Whether tokens and log-probs have the same bits whichever sequences share a pass, however prompts are chunked,
    and whatever is preempted. For one machine, number of threads and tensor-parallel size; on CPUs with a compiler."""
    seed: Int64 = 0
    """The run's seed: the first part of every sequence's key."""

    def __post_init__(self) -> None:
        for name in ("kv_disk_folder", "draft_model"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        check_fields(self, "EngineConfig.")
        for name in ("kv_disk_folder", "draft_model"):
            if (path := getattr(self, name)) is not None:
                if not path or "\0" in path:
                    raise ValueError(f"EngineConfig.{name}={path!r}: must be a path")
                if name == "draft_model":
                    path = checkpoint_folder(path, "EngineConfig.draft_model")
                # Absolute: replicas outside the world have other working directories.
                object.__setattr__(self, name, os.path.abspath(path))
        self._check_tiers()
        self._check_drafter()
        if self.batch_invariant and not {self.kernels, self.attention} <= {"auto", "native"}:
            raise ValueError(
                "EngineConfig.batch_invariant=True: needs kernels and attention both 'auto' or 'native', not "
                f"{self.kernels!r} and {self.attention!r}: the bits of others depend on the batch"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"EngineConfig.max_num_batched_tokens={self.max_num_batched_tokens}: must be at least "
                f"max_num_seqs={self.max_num_seqs}, so that every running sequence can decode"
            )

    @property
    def most_draws(self) -> int:
        """Most tokens that are drawn in one forward pass."""
        of_sequence = 1 if self.drafter == "none" else self.draft_paths * (1 + self.max_draft_tokens)
        return min(self.max_num_seqs * of_sequence, self.max_num_batched_tokens)

    @property
    def draft_method(self) -> str:
        """What a `Pace` prices a drafter by: the kind of drafter, or the name of the small model."""
        return self.draft_model or self.drafter

    @property
    def of_draft_model(self) -> EngineConfig:
        """The options with which the draft model runs."""
        return replace(
            self,
            drafter="none",
            draft_model=None,
            draft_noise="target",
            draft_lengths="adaptive",
            batch_invariant=False,
        )

    def _check_drafter(self) -> None:
        if self.draft_server and self.drafter != "grouped_suffix":
            raise ValueError(
                f"EngineConfig.draft_server=True: is for drafter='grouped_suffix', not {self.drafter!r}; change one"
            )
        if self.draft_history_bytes and self.drafter != "grouped_suffix":
            raise ValueError(
                f"EngineConfig.draft_history_bytes={self.draft_history_bytes}: is for drafter='grouped_suffix', not "
                f"{self.drafter!r}; give 0, or change the drafter"
            )
        if self.draft_paths > 1 and self.drafter not in ("suffix", "grouped_suffix"):
            raise ValueError(
                f"EngineConfig.draft_paths={self.draft_paths}: is for drafter='suffix' and 'grouped_suffix', not "
                f"{self.drafter!r}; give 1, or change the drafter"
            )
        if (self.drafter == "model") != (self.draft_model is not None):
            raise ValueError(
                f"EngineConfig.draft_model={self.draft_model!r}, drafter={self.drafter!r}: a draft model needs both "
                f"drafter='model' and its checkpoint folder; give both, or neither"
            )
        if self.draft_lengths != "adaptive" and self.drafter == "none":
            raise ValueError(
                f"EngineConfig.draft_lengths={self.draft_lengths!r}: drafter='none' drafts nothing; give a drafter, or "
                f"leave it out"
            )
        if self.draft_noise != "target" and self.drafter != "model":
            raise ValueError(
                f"EngineConfig.draft_noise={self.draft_noise!r}: is for drafter='model', not {self.drafter!r}; change "
                f"one"
            )

    def _check_tiers(self) -> None:
        if (self.kv_disk_bytes > 0) != (self.kv_disk_folder is not None):
            raise ValueError(
                f"EngineConfig.kv_disk_bytes={self.kv_disk_bytes}, kv_disk_folder={self.kv_disk_folder!r}: a disk tier "
                f"has both; give both, or neither"
            )
        if self.preemption == "swap" and self.kv_host_bytes == 0 and not self.kv_disk_bytes:
            raise ValueError(
                "EngineConfig.preemption='swap': there is nowhere to swap to with kv_host_bytes=0 and no disk tier; "
                "raise kv_host_bytes or kv_disk_bytes, or use 'recompute'"
            )


def longest_sequence(config: EngineConfig, model: ModelConfig) -> int:
    """Returns the most tokens of a sequence, prompt included. Raises ValueError if `max_model_len` exceeds the model's
    context."""
    asked = config.max_model_len or model.max_position_embeddings
    if asked > model.max_position_embeddings:
        raise ValueError(
            f"EngineConfig.max_model_len={asked}: the model's context is {model.max_position_embeddings} tokens"
        )
    return asked


def draft_model_config(config: EngineConfig, model: ModelConfig) -> ModelConfig | None:
    """Returns the shape of the draft model; None without one. Raises FileNotFoundError or ValueError if there is none
    in its folder, or one that cannot draft for `model`."""
    if config.draft_model is None:
        return None
    draft = ModelConfig.from_pretrained(config.draft_model, "EngineConfig.draft_model")
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"EngineConfig.draft_model={config.draft_model!r}: has a vocabulary of {draft.vocab_size} tokens, the "
            f"model has {model.vocab_size}; give a draft model with the same tokenizer and vocab_size"
        )
    if draft.max_position_embeddings < (longest := longest_sequence(config, model)):
        raise ValueError(
            f"EngineConfig.draft_model={config.draft_model!r}: its context is {draft.max_position_embeddings} tokens, "
            f"max_model_len={longest}; lower max_model_len, or give another draft model"
        )
    return draft


def engine_config(owner: str, options: Mapping[str, Any]) -> EngineConfig:
    """Makes the config from the options given to `owner`. Raises ValueError for an unknown option or a wrong value."""
    try:
        return EngineConfig(**options)
    except TypeError as error:
        names = ", ".join(field.name for field in fields(EngineConfig))
        raise ValueError(f"{owner}: unknown option ({error}); there are {names}") from None
