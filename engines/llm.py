"""The front door: a checkpoint on this rank, and `generate` over one process or all ranks of a data-parallel group."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from engines.config import EngineConfig, ModelConfig
from engines.kvcache.block_manager import BlockManager
from engines.kvcache.paged import PagedKVCache
from engines.models.decoder import Decoder
from engines.models.loader import checkpoint_tensors, load_weights
from engines.parallel.collectives import Communicator, SingleRank
from engines.replica import Replica, Work
from engines.runner import ModelRunner
from engines.scheduler import Scheduler
from engines.sequence import Completion, RequestOutput, SamplingParams, SequenceKey, SequenceState, is_int64
from engines.weights import checksum

Prompt = str | list[int]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Telemetry of one step."""

    seconds: float
    """Since the rollout began, at the step's end."""
    num_running: int
    num_tokens: int


class LLM:
    """A Hugging Face checkpoint (Llama, Qwen2/2.5, Qwen3) ready to generate.

    Under torchrun give the ranks' group as `data_parallel`: every rank holds the whole model, calls `generate` with
    the same prompts, runs sequence i when i mod size is its rank, and gets all outputs.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str | torch.device | None = None,
        data_parallel: Communicator | None = None,
        load: bool = True,
        **options: Any,
    ) -> None:
        """`options` are the fields of `EngineConfig`. With `load=False` the weights come by `update_weights`.

        Raises FileNotFoundError or ValueError, naming field, value and fix, before memory is taken.
        """
        try:
            config = EngineConfig(**options)
        except TypeError as error:
            raise ValueError(f"LLM: unknown option ({error}); options are the fields of EngineConfig") from None
        self.config = config
        self.model_config = ModelConfig.from_pretrained(model)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.max_model_len = _resolve_max_model_len(config, self.model_config)
        self.tokenizer = _load_tokenizer(Path(model), self.model_config)
        self._data_parallel: Communicator = data_parallel or SingleRank()
        dtype: torch.dtype = getattr(torch, config.dtype)
        num_blocks = _num_blocks(config, self.model_config, dtype.itemsize)
        self._decoder = Decoder(
            self.model_config,
            dtype=dtype,
            device=self.device,
            max_positions=self.max_model_len,
            tensor_parallel=SingleRank(),
        )
        self._has_weights = load
        if load:
            load_weights(self._decoder, checkpoint_tensors(model))
        self._kv = PagedKVCache(
            num_layers=self.model_config.num_layers,
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_kv_heads=self.model_config.num_kv_heads,
            head_dim=self.model_config.head_dim,
            dtype=dtype,
            device=self.device,
        )
        self._asleep = False
        blocks = BlockManager(num_blocks, config.block_size)
        self.replica = Replica(
            runner=ModelRunner(self._decoder, self._kv, blocks, config, self.max_model_len),
            scheduler=Scheduler(config, blocks),
            blocks=blocks,
            max_model_len=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.model_config.eos_token_ids,
            detokenize=self._detokenize if self.tokenizer is not None else None,
        )
        self._next_uid = 0
        self.step_records: list[StepRecord] = []
        """One entry per step of this rank's part of the last `generate`."""

    @property
    def policy_version(self) -> int:
        return self.replica.policy_version

    # -- generation

    def generate(
        self,
        prompts: Items[Prompt],
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        prompt_uids: Items[int] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt `n` times; outputs in the order of the prompts.

        `prompt_uids` name the prompts within a policy step: the same uid, step and seed draw the same tokens
        whatever else runs. By default they count on from call to call. `on_completion` is called for each
        completion of this rank as it finishes.
        """
        token_lists = self.encode(prompts)
        params = _broadcast_params(sampling_params, len(prompts))
        states = self._make_states(token_lists, params, prompt_uids)
        self._check_ready()
        for tokens, one in zip(token_lists, params, strict=True):
            self.replica.check(tokens, one)
        group = self._data_parallel
        if group.size > 1:
            self._check_same_request(states)
        mine = self._run(states[group.rank :: group.size], on_completion)
        completions = self._gather(mine)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        return [
            RequestOutput(
                prompt_token_ids=tokens,
                outputs=[completions[uid, index] for index in range(one.n)],
                prompt=text,
            )
            for tokens, one, text, uid in zip(
                token_lists, params, texts, dict.fromkeys(s.key.prompt_uid for s in states), strict=True
            )
        ]

    def encode(self, prompts: Items[Prompt]) -> list[list[int]]:
        """Token ids of each prompt; text goes through the checkpoint's tokenizer without a chat template."""
        if isinstance(prompts, str) or not len(prompts):
            raise ValueError(f"prompts={prompts!r}: give a list of at least one prompt")
        if any(isinstance(prompt, str) for prompt in prompts) and self.tokenizer is None:
            raise ValueError("prompts: the checkpoint has no tokenizer; give lists of token ids")
        return [self.tokenizer.encode(p) if isinstance(p, str) else [int(t) for t in p] for p in prompts]

    def check(self, prompt: Prompt, sampling_params: SamplingParams) -> None:
        """Raises ValueError, with the numbers, when the prompt's completions could never run here."""
        self.replica.check(self.encode([prompt])[0], sampling_params)

    def _detokenize(self, tokens: Items[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _make_states(
        self, token_lists: list[list[int]], params: list[SamplingParams], uids: Items[int] | None
    ) -> list[SequenceState]:
        if uids is None:
            uids = range(self._next_uid, self._next_uid + len(token_lists))
            self._next_uid += len(token_lists)
        wrong = [uid for uid in uids if not is_int64(uid)]
        if wrong:
            raise ValueError(f"prompt_uids: {wrong[0]!r} is not an integer of 64 bits")
        if len(set(uids)) != len(token_lists):
            raise ValueError(
                f"prompt_uids: {len(set(uids))} distinct values for {len(token_lists)} prompts; give one each"
            )
        return [
            SequenceState(
                key=SequenceKey(
                    run_seed=self.config.seed, policy_step=self.policy_version, prompt_uid=uid, sample_index=index
                ),
                group_id=uid,
                tokens=list(tokens),
                num_prompt_tokens=len(tokens),
                params=one,
            )
            for tokens, one, uid in zip(token_lists, params, uids, strict=True)
            for index in range(one.n)
        ]

    def _check_ready(self) -> None:
        if self._asleep:
            raise RuntimeError("LLM: memory is released; call wake_up() first")
        if not self._has_weights:
            raise RuntimeError("LLM: there are no weights; call update_weights() first")
        if self.replica.has_work:
            raise RuntimeError("LLM: the replica has sequences of an interrupted call; pause() or abort() them first")

    def _run(
        self, states: list[SequenceState], on_completion: Callable[[Completion], None] | None
    ) -> list[tuple[int, Completion]]:
        """(prompt uid, completion) of this rank's sequences, in the order they finish."""
        for state in states:
            self.replica.submit(Work(state=state))
        self.step_records = []
        done: list[tuple[int, Completion]] = []
        start = time.perf_counter()
        try:
            while self.replica.has_work:
                output = self.replica.step()
                self.step_records.append(
                    StepRecord(
                        seconds=time.perf_counter() - start,
                        num_running=output.num_running,
                        num_tokens=output.num_tokens,
                    )
                )
                for finished in output.finished:
                    done.append((finished.state.key.prompt_uid, finished.completion))
                    if on_completion is not None:
                        on_completion(finished.completion)
        finally:
            self.replica.pause()  # after an error or an interrupt the next call starts clean
        return done

    def _check_same_request(self, states: list[SequenceState]) -> None:
        digest = hashlib.blake2b(msgspec.msgpack.encode(states), digest_size=16).digest()
        others = [rank for rank, other in enumerate(self._data_parallel.all_gather_bytes(digest)) if other != digest]
        if others:
            raise ValueError(
                f"generate: ranks {others} were given other prompts or parameters than rank "
                f"{self._data_parallel.rank}; give all ranks the same"
            )

    def _gather(self, mine: list[tuple[int, Completion]]) -> dict[tuple[int, int], Completion]:
        if self._data_parallel.size > 1:
            decode = msgspec.msgpack.Decoder(list[tuple[int, Completion]]).decode
            parts = self._data_parallel.all_gather_bytes(msgspec.msgpack.encode(mine))
            mine = [pair for part in parts for pair in decode(part)]
        return {(uid, completion.index): completion for uid, completion in mine}

    # -- weights and memory

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Takes new weights, parameter by parameter, under Hugging Face names; returns their checksum.

        All cached KV is of the old weights and is dropped. Raises RuntimeError while sequences are running,
        ValueError when the stream does not fit the model.
        """
        if self.replica.has_work:
            raise RuntimeError("update_weights: sequences are running; pause() them first")
        self._has_weights = False
        if not self._decoder.parameters.embedding.untyped_storage().size():
            _resize(self._decoder.parameters.tensors(), full=True)
        load_weights(self._decoder, weights)
        self._has_weights = True
        self.replica.policy_version = version
        return self.checksum()

    def checksum(self) -> int:
        """Of the weights in use, over logical elements: equal for equal weights, however they are laid out."""
        return checksum(self._decoder.logical_views())

    def sleep(self, *, weights: bool = False) -> None:
        """Gives the KV cache's memory back for training, and the weights' too when asked (then update them)."""
        if self.replica.has_work:
            raise RuntimeError("sleep: sequences are running; pause() them first")
        if not self._asleep:
            self._kv.release()
            self._asleep = True
        if weights:
            self._has_weights = False
            _resize(self._decoder.parameters.tensors(), full=False)

    def wake_up(self) -> None:
        """Takes the KV cache's memory again."""
        if self._asleep:
            self._kv.restore()
            self._asleep = False


def _resize(tensors: list[Tensor], *, full: bool) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size() if full else 0)


def _broadcast_params(params: SamplingParams | Items[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"sampling_params: {len(params)} for {count} prompts; give one, or one per prompt")
    return list(params)


def _resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    asked = config.max_model_len or model.max_position_embeddings
    if asked > model.max_position_embeddings:
        raise ValueError(
            f"EngineConfig.max_model_len={asked}: the model's context is {model.max_position_embeddings} tokens"
        )
    return asked


def _num_blocks(config: EngineConfig, model: ModelConfig, bytes_per_element: int) -> int:
    block_bytes = config.block_size * model.kv_bytes_per_token(bytes_per_element)
    num_blocks = config.kv_cache_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"EngineConfig.kv_cache_bytes={config.kv_cache_bytes}: one block of {config.block_size} tokens takes "
            f"{block_bytes} bytes; give at least that"
        )
    return num_blocks


def _load_tokenizer(directory: Path, model: ModelConfig) -> Any:
    """The checkpoint's tokenizer, or None when it has none."""
    if not (directory / "tokenizer.json").is_file() and not (directory / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # what a broken file raises depends on where it is broken
        raise ValueError(f"model={str(directory)!r}: its tokenizer cannot be read ({error!r})") from None
    if len(tokenizer) > model.vocab_size:
        raise ValueError(
            f"model={str(directory)!r}: the tokenizer has {len(tokenizer)} tokens, config.json says "
            f"vocab_size={model.vocab_size}; they belong to different models"
        )
    return tokenizer
