"""The front door: what comes back, what is refused and how, weights in, memory out."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import LLM, RequestOutput, SamplingParams
from engines.models.checksums import checksum
from engines.models.loader import checkpoint_tensors
from engines.parallel.collectives import SingleRank
from engines.parallel.layout import nested_layout
from engines.rollout.placement import Placement
from engines.sequence import Finished, SequenceKey, SequenceState, Work
from tests.checkpoints import EOS, save_checkpoint


@pytest.fixture
def copy(qwen3: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(qwen3, tmp_path / "model"))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_config(directory: Path, **changes: object) -> None:
    edit_json(directory / "config.json", **changes)


class TestStops:
    def test_eos_stop_ids_and_length(self, qwen3: str) -> None:
        llm = LLM(qwen3, kv_cache_bytes=2**23)
        free = llm.generate([[5]] * 64, SamplingParams(max_tokens=40), prompt_uids=range(64))
        for output in free:
            completion = output.outputs[0]
            assert EOS not in completion.token_ids[:-1]
            assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == EOS)
            assert completion.finish_reason == "stop" or len(completion.token_ids) == 40
        deaf = llm.generate([[5]] * 64, SamplingParams(max_tokens=40, ignore_eos=True), prompt_uids=range(64))
        for before, after in zip(free, deaf, strict=True):
            assert len(after.outputs[0].token_ids) == 40
            assert after.outputs[0].token_ids[: len(before.outputs[0].token_ids)] == before.outputs[0].token_ids
        stop = deaf[0].outputs[0].token_ids[9]
        params = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=[stop])
        stopped = llm.generate([[5]], params, prompt_uids=[0])[0].outputs[0]
        expected = deaf[0].outputs[0].token_ids
        assert stopped.token_ids == expected[: expected.index(stop) + 1]

    def test_context_end_is_a_length_finish(self, qwen3: str) -> None:
        llm = LLM(qwen3, max_model_len=32, kv_cache_bytes=2**23)
        out = llm.generate([[5] * 20], SamplingParams(max_tokens=500, ignore_eos=True))[0].outputs[0]
        assert (len(out.token_ids), out.finish_reason) == (12, "length")

    def test_stop_strings_end_at_the_token_that_completes_them(self, text_model: str) -> None:
        llm = LLM(text_model, kv_cache_bytes=2**23)
        params = SamplingParams(max_tokens=200, n=8, ignore_eos=True)
        plain = llm.generate(["hello"], params, prompt_uids=[0])[0].outputs
        stop = next(c.text[50:52] for c in plain if c.text[50:52].isascii() and len(c.text) > 52)
        params = SamplingParams(max_tokens=200, n=8, ignore_eos=True, stop=stop)
        stopped = llm.generate(["hello"], params, prompt_uids=[0])
        hit = 0
        for before, after in zip(plain, stopped[0].outputs, strict=True):
            assert before.token_ids[: len(after.token_ids)] == after.token_ids
            if stop in before.text:
                hit += 1
                assert after.finish_reason == "stop"
                assert after.text == before.text[: before.text.index(stop)]
                assert stop in llm.tokenizer.decode(after.token_ids)
                assert stop not in llm.tokenizer.decode(after.token_ids[:-1])
        assert hit


def test_outputs_carry_aligned_records(text_model: str) -> None:
    llm = LLM(text_model, kv_cache_bytes=2**23)
    seen: list[int] = []
    outputs = llm.generate(
        ["1+1=", [50, 51]], SamplingParams(max_tokens=9, n=3), on_finished=lambda f: seen.append(f.completion.index)
    )
    assert [o.prompt for o in outputs] == ["1+1=", None]
    assert outputs[0].prompt_token_ids == llm.tokenizer.encode("1+1=")
    assert outputs[1].prompt_token_ids == [50, 51]
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]
    for output in outputs:
        assert [c.index for c in output.outputs] == [0, 1, 2]
        for c in output.outputs:
            assert len(c.token_ids) == len(c.logprobs) == len(c.versions) <= 9
            assert all(p <= 0 for p in c.logprobs)
            assert c.text == llm.tokenizer.decode(c.token_ids, skip_special_tokens=True)


INDEX_ERROR = r"index\.json: Expected .* at `\$\.weight_map"
DAMAGES = [
    *(
        ("model.safetensors.index.json", json.dumps({"weight_map": weight_map}), INDEX_ERROR)
        for weight_map in ([], {"a": 3}, {"a": "../model.safetensors"}, {"a": "x" * 300}, {"a": "model.safetensors\0"})
    ),
    *(("config.json", text, r"config\.json: ") for text in ("[]", "\x00\xff", "3", "[" * 100_000)),
    ("config.json", '{"architectures": ["Qwen3', "not valid JSON"),
]


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*not supported.*Qwen3ForCausalLM"),
            ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
            ({"hidden_act": "gelu"}, "gelu"),
            ({"use_sliding_window": True}, "use_sliding_window"),
            ({"num_key_value_heads": 3}, "not a multiple"),
            ({"vocab_size": None}, "Expected `int`, got `null` - at `\\$.vocab_size`"),
            ({"num_attention_heads": 0}, "Expected `int` >= 1 - at `\\$.num_attention_heads`"),
            ({"num_attention_heads": 0, "head_dim": None}, "Expected `int` >= 1 - at `\\$.num_attention_heads`"),
            ({"num_hidden_layers": 2**70}, "Expected `int` <= 2147483647 - at `\\$.num_hidden_layers`"),
            ({"architectures": {"a": 1}}, "Expected `array \\| null`, got `object` - at `\\$.architectures`"),
            ({"architectures": [3]}, "Expected `str`, got `int` - at `\\$.architectures\\[0\\]`"),
            ({"rms_norm_eps": float("nan")}, "Expected `float` > 0.0 - at `\\$.rms_norm_eps`"),
            ({"rope_parameters": {"rope_theta": "far"}}, "rope_parameters or .*Expected `float \\| null`, got `str`"),
            ({"rope_parameters": {"rope_theta": "\ud800"}}, "rope_parameters or rope_scaling: "),
            (
                {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}},
                "for each type of layer are not supported \\(full_attention\\)",
            ),
            (
                {"rope_scaling": {"type": "linear", "factor": 4.0}},
                "rope_scaling=.* and rope_parameters=.* differ; leave",
            ),
            ({"rope_parameters": {"rope_type": "linear"}}, "'linear' wants factor, and one is missing"),
            ({"eos_token_id": ["end"]}, "Expected `int`, got `str` - at `\\$.eos_token_id"),
            ({"head_dim": 7}, "head_dim=7 is odd"),
            ({"hidden_size": "48"}, "Expected `int`, got `str` - at `\\$.hidden_size`"),
            ({"num_hidden_layers": 3}, "missing; the checkpoint is not complete"),
            ({"num_hidden_layers": 1}, "is no parameter"),
            ({"intermediate_size": 81}, r"has shape \[48, 80\], config.json asks for \[48, 81\]"),
        ],
    )
    def test_config(self, copy: Path, changes: dict, message: str) -> None:
        edit_config(copy, **changes)
        with pytest.raises(ValueError, match=message):
            LLM(copy, kv_cache_bytes=2**23)

    @pytest.mark.parametrize(("file", "text", "message"), DAMAGES)
    def test_a_damaged_file(self, copy: Path, file: str, text: str, message: str) -> None:
        (copy / file).write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=message):
            LLM(copy, kv_cache_bytes=2**23)

    @pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
    def test_truncated_weights(self, copy: Path, keep: int) -> None:
        path = copy / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
            LLM(copy, kv_cache_bytes=2**23)

    def test_missing_parts(self, copy: Path) -> None:
        (copy / "model.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"model\.safetensors missing"):
            LLM(copy, kv_cache_bytes=2**23)
        raw = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({name: raw[name] for name in raw if name != "hidden_size"}))
        with pytest.raises(ValueError, match="hidden_size"):
            LLM(copy, kv_cache_bytes=2**23)

    def test_integer_weights(self, copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"holds torch\.int8; quantised"):
            LLM(copy, kv_cache_bytes=2**23)

    def test_missing_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no config\.json"):
            LLM(tmp_path / "nowhere")

    def test_fields_that_are_null_are_absent(self, copy: Path) -> None:
        before = LLM(copy, kv_cache_bytes=2**23).model_config
        edit_config(copy, rope_scaling=None, sliding_window=None, quantization_config=None)
        assert LLM(copy, kv_cache_bytes=2**23).model_config == before

    def test_broken_tokenizer(self, text_model: str, tmp_path: Path) -> None:
        directory = Path(shutil.copytree(text_model, tmp_path / "model"))
        edit_json(directory / "tokenizer_config.json", model_max_length="long")
        with pytest.raises(ValueError, match="its tokenizer cannot encode a text"):
            LLM(directory, kv_cache_bytes=2**23)
        (directory / "tokenizer.json").write_text("{}")
        with pytest.raises(ValueError, match="AutoTokenizer cannot read it"):
            LLM(directory, kv_cache_bytes=2**23)

    def test_tokenizer_of_another_model(self, qwen3: str, text_model: str, copy: Path) -> None:
        for file in Path(text_model).glob("tokenizer*"):
            shutil.copy(file, copy)
        with pytest.raises(ValueError, match="vocab_size=131; they belong to different models"):
            LLM(copy, kv_cache_bytes=2**23)

    def test_weights_that_are_not_finite(self, copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        weights["model.norm.weight"][0] = float("nan")
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
        llm = LLM(copy, kv_cache_bytes=2**23)
        with pytest.raises(FloatingPointError, match="not finite"):
            llm.generate([[5]])
        assert not llm.replica.has_work

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ([], "at least one prompt"),
            ("hello", "give a list"),
            (5, "prompts=5: give a list"),
            (None, "prompts=None: give a list"),
            ([[5], []], r"^prompts\[1\]: has no tokens"),
            ([[131], [5]], r"^prompts\[0\]: token id 131 is outside the model's vocabulary of 131"),
            ([[5], [5], [-1]], r"^prompts\[2\]: token id -1 is outside"),
            ([[2**70]], r"^prompts\[0\]: token id 1180591620717411303424 is outside"),
            ([[5], [5] * 256], r"^prompts\[1\]: 256 tokens leave no room in max_model_len=256"),
            ([[5] * 100], r"^prompts\[0\]: 100 tokens .* can reach 150 tokens, the KV cache holds 64"),
            ([[5], "text"], r"^prompts\[1\]='text': the checkpoint has no tokenizer"),
            ([[5], b"text"], r"^prompts\[1\]=b'text': give text"),
            ([[5], [1.7]], r"prompts\[1\]=\[1\.7\]: give text, or a list of integer token ids"),
            ([None], r"prompts\[0\]=None: give text"),
            ([40, 41], r"^prompts\[0\]=40: is a token id.*in a list of their own"),
        ],
    )
    def test_prompts(self, qwen3: str, prompts: list, message: str) -> None:
        llm = LLM(qwen3, kv_cache_bytes=4 * 16 * 2 * 2 * 2 * 16 * 4)
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, SamplingParams(max_tokens=50))
        outputs = [one.generate([[5]], SamplingParams(max_tokens=3)) for one in (llm, LLM(qwen3, kv_cache_bytes=2**23))]
        assert outputs[0][0].outputs[0].token_ids == outputs[1][0].outputs[0].token_ids, "no prompt uid was taken"

    def test_half_a_surrogate_pair(self, text_model: str) -> None:
        with pytest.raises(ValueError, match=r"^prompts\[1\]='\\ud800': holds half a surrogate pair"):
            LLM(text_model, kv_cache_bytes=2**23).generate(["a", "\ud800"])

    def test_options(self, qwen3: str) -> None:
        for options, message in (
            ({"kv_cache": 3}, "unknown option.*kv_cache.*; there are dtype, block_size, kv_cache_bytes"),
            (
                {"tensor_parallel_size": 2},
                "tensor_parallel_size=2: one process has one shard; start ranks with torchrun",
            ),
            ({"world": SingleRank()}, "world=.*: give a GroupCache"),
            ({"layout": nested_layout(range(2), 1), "tensor_parallel_size": 2}, "=2: the layout says it; leave one"),
            ({"dtype": "float16"}, "float16"),
            ({"kv_cache_bytes": 100}, "one block of 16 tokens takes 8192 bytes"),
            (
                {"kv_cache_bytes": 2**60},
                r"weights 1, KV cache 1099511627776, .*; available: \d+ MiB. Lower kv_c",
            ),
            ({"kv_cache_bytes": None}, "kv_cache_bytes=None"),
            ({"max_num_seqs": True}, "max_num_seqs=True"),
            ({"max_num_batched_tokens": 1e9}, "max_num_batched_tokens=1000000000.0"),
            ({"max_model_len": 257}, "the model's context is 256"),
            ({"block_size": 0}, "block_size=0"),
            ({"block_size": "16"}, "block_size='16'"),
            ({"seed": 2**70}, "seed=1180591620717411303424"),
            ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens=8"),
        ):
            with pytest.raises(ValueError, match=message):
                LLM(qwen3, **options)

    def test_call_arguments(self, qwen3: str) -> None:
        llm = LLM(qwen3, kv_cache_bytes=2**23)
        with pytest.raises(ValueError, match="2 for 1 prompts"):
            llm.generate([[5]], [SamplingParams()] * 2)
        with pytest.raises(ValueError, match="sampling_params=5: give SamplingParams, or a list"):
            llm.generate([[5]], 5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^sampling_params\[1\]={}: give SamplingParams"):
            llm.generate([[5], [6]], [SamplingParams(), {}])  # type: ignore[list-item]
        for uids in ([2**63, 1], ["a", "b"], [1.5, 2.5]):
            with pytest.raises(ValueError, match="is not an integer of 64 bits"):
                llm.generate([[5], [6]], prompt_uids=uids)
        with pytest.raises(ValueError, match="1 distinct values for 2 prompts"):
            llm.generate([[5], [6]], prompt_uids=[3, 3])
        with pytest.raises(ValueError, match=r"^prompts\[1\]: SamplingParams.stop=.*need a tokenizer"):
            llm.generate([[5], [6]], [SamplingParams(), SamplingParams(stop="x")])

    @pytest.mark.parametrize(
        "field",
        [
            {"temperature": -1}, {"top_k": -2}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2}, {"n": 0}, {"max_tokens": 0},
            {"stop": ("",)}, {"temperature": float("nan")}, {"temperature": 1e-9},
            {"seed": 2**63}, {"top_k": 1.5}, {"n": 1.5}, {"n": True}, {"max_tokens": 2.5}, {"max_tokens": float("inf")},
            {"temperature": "1"}, {"temperature": True}, {"top_k": True}, {"top_p": None}, {"min_p": float("nan")},
            {"stop": [5]}, {"stop": "a\ud800"}, {"stop": ["a", "\udfff"]},
            {"stop_token_ids": 5}, {"stop_token_ids": ["a"]}, {"ignore_eos": 1},
            {"seed": True},
        ],
    )  # fmt: skip
    def test_sampling_params(self, field: dict) -> None:
        with pytest.raises(ValueError, match=rf"SamplingParams\.{next(iter(field))}="):
            SamplingParams(**field)


class TestWeights:
    def test_update_is_like_loading(self, qwen3: str, tmp_path: Path) -> None:
        save_checkpoint(tmp_path, "qwen3", seed=1)
        fresh, updated = LLM(tmp_path, kv_cache_bytes=2**23), LLM(qwen3, kv_cache_bytes=2**23)
        before = updated.checksum()
        got = updated.update_weights(checkpoint_tensors(tmp_path), version=1)
        assert got == fresh.checksum() != before
        fresh.replica.policy_version = 1
        params = SamplingParams(max_tokens=30)
        assert updated.generate([[5, 6]], params)[0].outputs[0] == fresh.generate([[5, 6]], params)[0].outputs[0]

    def test_a_failed_update_leaves_no_engine_that_generates(self, qwen3: str) -> None:
        llm = LLM(qwen3, kv_cache_bytes=2**23)
        with pytest.raises(ValueError, match="missing"):
            llm.update_weights(list(checkpoint_tensors(qwen3))[:-1], version=1)
        with pytest.raises(RuntimeError, match="no weights"):
            llm.generate([[5]])

    @pytest.mark.parametrize("version", [2**63, -1, 1.5, True, None])
    def test_a_version_that_is_none(self, qwen3: str, version: Any) -> None:
        llm = LLM(qwen3, kv_cache_bytes=2**20)
        with pytest.raises(ValueError, match=f"version={version}: must be an integer of 64 bits, at least 0"):
            llm.update_weights(checkpoint_tensors(qwen3), version)
        assert llm.generate([[5]], SamplingParams(max_tokens=3)), "the weights are the old ones"

    def test_good_weights_heal_after_bad_ones(self, qwen3: str) -> None:
        llm = LLM(qwen3, kv_cache_bytes=2**20)
        params = SamplingParams(max_tokens=20)
        expected = llm.generate([[5, 6]] * 3, params, prompt_uids=range(3))
        good = dict(checkpoint_tensors(qwen3))
        name = "model.layers.0.self_attn.v_proj.weight"
        llm.update_weights({**good, name: torch.full_like(good[name], torch.nan)}.items(), version=0)
        with pytest.raises(FloatingPointError):
            llm.generate([[5, 6]] * 3, params)
        llm.update_weights(good.items(), version=0)
        assert llm.generate([[5, 6]] * 3, params, prompt_uids=range(3)) == expected

    def test_memory_is_given_back_and_taken_again(self, qwen3: str) -> None:
        llm = LLM(qwen3, kv_cache_bytes=2**23)
        first = llm.generate([[5, 6]], SamplingParams(max_tokens=20), prompt_uids=[0])
        llm.sleep(weights=True)
        held = [*llm._engine.kv.keys, *llm._engine.kv.values, *llm._engine.decoder.parameters.tensors()]
        assert sum(t.untyped_storage().size() for t in held) == 0
        with pytest.raises(RuntimeError, match="wake_up"):
            llm.generate([[5]])
        llm.wake_up()
        with pytest.raises(RuntimeError, match="update_weights"):
            llm.generate([[5]])
        llm.update_weights(checkpoint_tensors(qwen3), version=0)
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=20), prompt_uids=[0]) == first


def test_after_close_nothing_is_generated(qwen3: str) -> None:
    llm = LLM(qwen3, kv_cache_bytes=2**20)
    llm.close()
    llm.close()
    for call in (lambda: llm.generate([[5]]), lambda: llm.update_weights(checkpoint_tensors(qwen3), version=1)):
        with pytest.raises(RuntimeError, match="LLM: is closed; make a new one"):
            call()


class TestChecksum:
    def test_any_bit_name_or_order_shows(self) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = {"a": torch.randn(30, 40, generator=generator), "b": torch.randn(30, 40, generator=generator)}
        base = checksum(weights)
        assert checksum(dict(reversed(weights.items()))) == base
        swapped = {"a": weights["b"], "b": weights["a"]}
        transposed = {**weights, "a": weights["a"].view(40, 30).flip(0)}
        bumped = {**weights, "a": weights["a"].clone()}
        bumped["a"][3, 4] = torch.nextafter(bumped["a"][3, 4], torch.tensor(10.0))
        rows, columns = list(range(30)), list(range(40))
        rows[3], rows[17], columns[5], columns[6] = 17, 3, 6, 5
        moved = [{**weights, "a": weights["a"][rows]}, {**weights, "a": weights["a"][:, columns]}]
        others = [swapped, transposed, bumped, *moved]
        assert len({base, *map(checksum, others)}) == 1 + len(others)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_pieces_add_up(self, dtype: torch.dtype) -> None:
        from engines.models import checksums as module

        tensor = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
        before = tensor.clone()
        whole = checksum({"a": tensor})
        assert torch.equal(tensor, before)
        original, module._CHUNK = module._CHUNK, {"cpu": 7}
        try:
            assert checksum({"a": tensor}) == whole
        finally:
            module._CHUNK = original


@pytest.mark.parametrize("fails_at", [(0, 6), (2, 6), (2, 4), (1, 3)])
def test_what_a_hidden_stop_raises_loses_and_adds_nothing(qwen3: str, fails_at: tuple[int, int]) -> None:
    """At a step in which others end, or none does: on going on, everything is as if nothing had happened."""
    pending = [fails_at]

    def stop(state: SequenceState) -> bool:
        if pending and (state.key.prompt_uid, state.num_generated) == pending[0]:
            pending.clear()
            raise RuntimeError("from the hidden stop")
        return False

    def run(llm: LLM) -> dict[int, tuple[list[int], str, int]]:
        for uid, max_tokens in enumerate((6, 6, 20)):
            key = SequenceKey(run_seed=0, policy_step=0, prompt_uid=uid, sample_index=0)
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            state = SequenceState(key=key, group_id=uid, tokens=[5, 6, uid + 2], num_prompt_tokens=3, params=params)
            llm.replica.submit(Work(state=state))
        finished = []
        while llm.replica.has_work:
            try:
                finished += llm.replica.step().finished
            except RuntimeError as error:
                assert "from the hidden stop" in str(error)
        completions = {one.state.key.prompt_uid: one.completion for one in finished}
        assert len(finished) == len(completions) == 3
        return {uid: (one.token_ids, one.finish_reason, len(one.logprobs)) for uid, one in completions.items()}

    options: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**22}
    expected = run(LLM(qwen3, **options))
    assert run(LLM(qwen3, hidden_stop=stop, **options)) == expected
    assert not pending


def test_a_refused_call_names_no_prompts(qwen3: str) -> None:
    llms = [LLM(qwen3, dtype="float64", kv_cache_bytes=2**22) for _ in range(2)]
    with pytest.raises(ValueError, match="token id 999"):
        llms[0].generate([[5], [999]])
    outputs = [llm.generate([[5, 6]], SamplingParams(max_tokens=20))[0].outputs[0].token_ids for llm in llms]
    assert outputs[0] == outputs[1]


# -- one call at a time

LATER: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate([[7]]),
    "update_weights": lambda llm: llm.update_weights([], version=1),
    "sleep": lambda llm: llm.sleep(),
    "wake_up": lambda llm: llm.wake_up(),
    "close": lambda llm: llm.close(),
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("same_thread", [True, False])
def test_a_second_call_is_refused_and_the_first_goes_on(qwen3: str, name: str, same_thread: bool) -> None:
    def run(on_finished: Callable[[Finished], None] | None = None) -> list[RequestOutput]:
        llms.append(LLM(qwen3, dtype="float64", kv_cache_bytes=2**22))
        return llms[-1].generate([[5, 6]], SamplingParams(max_tokens=9, n=3), on_finished=on_finished)

    def call_again(_: object) -> None:
        with pytest.raises(RuntimeError, match=rf"^LLM\.{name}: LLM\.generate\(\) is running; wait"):
            LATER[name](llms[-1])
        refused.append(name)

    def elsewhere(_: object) -> None:
        thread = threading.Thread(target=call_again, args=(None,))
        thread.start()
        thread.join()

    llms: list[LLM] = []
    refused: list[str] = []
    assert run(call_again if same_thread else elsewhere) == run()
    assert refused == [name] * 3


def test_no_two_threads_generate_at_once(qwen3: str) -> None:
    llm = LLM(qwen3, dtype="float64", kv_cache_bytes=2**22)
    params = SamplingParams(max_tokens=20, n=4)
    expected = llm.generate([[5, 6]], params, prompt_uids=[0])
    num_refused = 0
    for _ in range(10):
        start = threading.Barrier(3)
        results: list[object] = []

        def call(start: threading.Barrier = start, results: list[object] = results) -> None:
            start.wait()
            try:
                results.append(llm.generate([[5, 6]], params, prompt_uids=[0]))
            except RuntimeError as error:
                results.append(str(error))

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        others = [result for result in results if result != expected]
        num_refused += len(others)
        assert len(others) < len(results) == 3 and all("is running" in str(other) for other in others)
    assert num_refused


@pytest.mark.parametrize("how", ["pause", "pause one", "abort", "abort the last"])
def test_sequences_taken_away_by_a_callback_are_one_clear_error(qwen3: str, how: str) -> None:
    llm = LLM(qwen3, dtype="float64", kv_cache_bytes=2**22)
    params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True) for max_tokens in (3, 9, 9)]

    def take(_: object) -> None:
        ids = [state.sequence_id for state in llm.replica.states()]
        if how == "abort the last" and len(ids) > 1:
            return
        if how.startswith("abort"):
            llm.replica.abort(ids[0])
        else:
            llm.replica.pause(ids[:1] if how == "pause one" else None)

    if how == "abort the last":
        params[2] = SamplingParams(max_tokens=12, ignore_eos=True)
    with pytest.raises(RuntimeError, match="on_finished has paused or aborted sequences; do that between two calls"):
        llm.generate([[5], [6], [7]], params, prompt_uids=range(3), on_finished=take)
    fresh = LLM(qwen3, dtype="float64", kv_cache_bytes=2**22)
    outputs = [one.generate([[5], [6], [7]], params, prompt_uids=range(3)) for one in (llm, fresh)]
    assert outputs[0] == outputs[1]


def test_the_error_of_an_engine_that_cannot_be_built_is_the_one_that_is_raised(
    qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(self: Placement, layout: object) -> None:
        raise ValueError("no memory is left")

    monkeypatch.setattr(Placement, "build", build)
    with pytest.raises(ValueError, match="no memory is left"):
        LLM(qwen3, kv_cache_bytes=2**22)
