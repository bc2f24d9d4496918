from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.simulator.datasheets import A40, DEVICES, H100, H800, LLAMA_8B, QWEN_14B, QWEN_32B, QWEN_72B, SHAPES
from research.simulator.latency import TP_SIZES, Efficiencies, LatencyProfile, all_profiles, markdown_table, profile

ALL = list(all_profiles())


def test_parameters_are_the_published_counts() -> None:
    """The sums of elements that the checkpoints' safetensors indices name on Hugging Face."""
    published = {
        "0.5B": 494_032_768,
        "1.5B": 1_543_714_304,
        "7B": 7_615_616_512,
        "8B": 8_030_261_248,
        "14B": 14_770_033_664,
        "32B": 32_763_876_352,
        "72B": 72_706_203_648,
        "Qwen3-8B": 8_190_735_360,
        "Qwen3-14B": 14_768_307_200,
        "Qwen3-32B": 32_762_123_264,
    }
    assert {shape.name: shape.num_parameters for shape in SHAPES} == published


def test_a_decode_step_by_hand() -> None:
    """H100, 8B, one GPU, batch 32 at 4096 tokens each: every term written out."""
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    weights = 2 * (32 * layer + 128256 * 4096)  # bytes read; the embedding is not
    assert weights == pytest.approx(15.01e9, rel=1e-3)
    overhead = 0.5e-3 + 32 * 10e-6
    products = weights / (3.35e12 * 0.8)
    assert products > 32 * weights / (989.5e12 * 0.6)  # 2 FLOPs per 2-byte element: memory is the bound
    attention = 32 * 4096 * (2 * 32 * 8 * 128 * 2) / (3.35e12 * 0.7)
    sampling = 32 * 128256 * 16 / (3.35e12 * 0.8)
    expected = overhead + products + attention + sampling
    assert profile("h100-8b-tp1").step_seconds(32, 32, 32 * 4096) == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(13.77e-3, rel=1e-3)


def test_a_verification_step_over_pcie_by_hand() -> None:
    """A40, 8B, TP 4, 64 sequences of 1000 tokens verify 7 drafts each: products are bound by FLOPs, links by rings."""
    new, context = 64 * 8, 64 * 1000
    elements = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 128256 * 4096
    products = 2 * elements * new / 4 / (149.7e12 * 0.6)
    assert products > 2 * elements / 4 / (696e9 * 0.8)
    attention = context * 131072 / 4 / (696e9 * 0.7)
    assert attention > 4 * 32 * 4096 * new * 1000 / 4 / (149.7e12 * 0.4)
    reduce = 6 * 5e-6 + 2 * 3 / 4 * new * 4096 * 2 / (32e9 * 0.25)
    gather = 3 * 5e-6 + 3 / 4 * new * 128256 * 2 / (32e9 * 0.25)
    sampling = gather + new * 128256 * 16 / (696e9 * 0.8)
    expected = 0.5e-3 + 32 * 10e-6 + products + attention + 64 * reduce + sampling
    assert profile("a40-8b-tp4").step_seconds(64, new, context) == pytest.approx(expected, rel=1e-12)


def test_a_prefill_by_hand() -> None:
    """Causal pairs, one row of logits per prompt, FLOPs as the bound of products and attention."""
    prompt, cached = 3000, 1000
    elements = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    products = (2 * elements * 2 * prompt + 2 * 128256 * 4096 * 2) / (989.5e12 * 0.6)
    pairs = 2 * sum(cached + i for i in range(1, prompt + 1))
    attention = 4 * 32 * 4096 * pairs / (989.5e12 * 0.4)
    expected = 0.5e-3 + 32 * 10e-6 + products + attention + 2 * 128256 * 16 / (3.35e12 * 0.8)
    assert profile("h100-8b-tp1").prefill_seconds(2, prompt, cached) == pytest.approx(expected, rel=1e-12)


def test_all_reduce_takes_the_better_way() -> None:
    switched = LatencyProfile(device=H100, shape=LLAMA_8B, tp_size=8)
    per_byte = 1 / 360e9
    assert switched.all_reduce_seconds(8192) == pytest.approx(8e-6 + 7 * 8192 * per_byte)  # one-shot
    assert switched.all_reduce_seconds(1e8) == pytest.approx(14 * 4e-6 + 14 / 8 * 1e8 * per_byte)  # ring
    assert LatencyProfile(device=A40, shape=LLAMA_8B, tp_size=8).all_reduce_seconds(0) == pytest.approx(14 * 5e-6)
    assert LatencyProfile(device=A40, shape=LLAMA_8B, tp_size=1).all_reduce_seconds(1e6) == 0


@given(st.sampled_from(ALL), st.integers(1, 512), st.integers(1, 64), st.integers(0, 32768), st.data())
def test_more_work_never_takes_less_time(
    replica: LatencyProfile, batch: int, each: int, before: int, data: st.DataObject
) -> None:
    def alike(batch: int, each: int, before: int) -> float:
        return replica.step_seconds(batch, batch * each, batch * (before + each))

    seconds = alike(batch, each, before)
    assert seconds == alike(batch, each, before) > 0
    more = data.draw(st.integers(1, 100))
    assert alike(batch + more, each, before) > seconds
    assert alike(batch, each + more, before) > seconds
    assert alike(batch, each, before + more) > seconds
    # In sums: one number at a time, where it may grow alone.
    new, context = batch * each, batch * (before + each) + 1000
    base = replica.step_seconds(batch, new, context)
    assert replica.step_seconds(batch, new, context + more) > base
    assert replica.step_seconds(batch, new + min(more, 1000), context) > base
    # Any sequence that joins, however short, costs something once the pairs are told.
    joined = new * (before + each) + 1.0
    alone = replica.step_seconds(batch, new, context, pairs=new * (before + each))
    assert replica.step_seconds(batch + 1, new + 1, context + 1, pairs=joined) > alone


def test_pairs_and_logit_rows_default_to_sequences_alike() -> None:
    replica = profile("h100-8b-tp1")
    plain = replica.step_seconds(4, 4096, 8192)
    assert plain == replica.step_seconds(4, 4096, 8192, pairs=4096 * 2048, logit_rows=4096)
    assert plain > replica.step_seconds(4, 4096, 8192, logit_rows=4)
    assert plain < replica.step_seconds(4, 4096, 8192, pairs=4096 * 8192)


def test_weights_and_memory() -> None:
    one, two = profile("h100-32b-tp1"), profile("h100-32b-tp2")
    assert one.weight_bytes_per_rank == 2 * 32_763_876_352 == 2 * two.weight_bytes_per_rank
    assert one.kv_bytes_per_token == 2 * 64 * 8 * 128 * 2
    # 72 GB less 65.5 GB leave 6.5 GB; two ranks have 144 GB less the same weights.
    assert one.kv_tokens_capacity() == (72_000_000_000 - 65_527_752_704) // 262_144 == 24_689
    assert two.kv_tokens_capacity() == (144_000_000_000 - 65_527_752_704) // 262_144
    assert one.kv_tokens_capacity(reserve=0) > one.kv_tokens_capacity() > one.kv_tokens_capacity(reserve=0.15)
    assert one.kv_tokens_capacity(reserve=0.2) == 0 and not one.fits(reserve=0.2) and one.fits()
    # PAT §5.4: 14 GB of KV for 9 samples of Llama-3.1-8B at 12K tokens.
    assert profile("a40-8b-tp2").kv_bytes_per_token * 9 * 12288 == pytest.approx(14.5e9, rel=0.01)


def test_pat_s_premise_latency() -> None:
    """A larger TP size makes one sequence faster, wherever it fits (PAT §3.1), but for less than its GPUs."""
    for device in DEVICES:
        for shape in (LLAMA_8B, QWEN_14B, QWEN_32B, QWEN_72B):
            steps = [LatencyProfile(device=device, shape=shape, tp_size=tp).step_seconds(1, 1, 4096) for tp in TP_SIZES]
            assert steps == sorted(steps, reverse=True)
            assert steps[0] / steps[-1] < 8


def test_pat_s_premise_throughput() -> None:
    """Tokens per second and GPU for one number of sequences per GPU: TP 1 loses while weights are the bound (the
    negative case), and wins once the products are bound by FLOPs, within the KV capacity."""

    def per_gpu(tp: int, sequences: int, context: int) -> float:
        replica, batch = profile(f"h100-32b-tp{tp}"), tp * sequences
        assert batch * context <= replica.kv_tokens_capacity()
        return sequences / replica.step_seconds(batch, batch, batch * context)

    assert per_gpu(1, 8, 1024) < per_gpu(8, 8, 1024)
    assert per_gpu(1, 256, 64) > per_gpu(2, 256, 64) > per_gpu(4, 256, 64) > per_gpu(8, 256, 64)
    # TP 1 leaves room for 24,689 tokens only: at the length of real responses the choice is from TP 2 on.
    assert per_gpu(2, 8, 1024) < per_gpu(8, 8, 1024)
    assert per_gpu(2, 128, 1024) > per_gpu(8, 128, 1024)


def test_a_slower_link_costs_only_where_there_is_one() -> None:
    def step(name: str) -> float:
        return profile(name).step_seconds(64, 64, 64 * 2048)

    assert step("h800-8b-tp1") == step("h100-8b-tp1") and step("h800-8b-tp8") > step("h100-8b-tp8")


@pytest.mark.parametrize(
    "name", ["b200-8b-tp1", "h100-9b-tp1", "h100-0.5b-tp4", "h100-8b-tp3", "h100-8b-tp16", "h100-8b", ""]
)
def test_unknown_profiles(name: str) -> None:
    with pytest.raises(ValueError, match=r"H100, H800, H200, H20, A40 x 0.5B, .*, Qwen3-32B x TP 1, 2, 4, 8") as error:
        profile(name)
    assert repr(name) in str(error.value)


def test_every_profile_is_found_or_does_not_fit() -> None:
    for replica in ALL:
        if replica.fits():
            assert profile(replica.name) == replica
        else:
            with pytest.raises(ValueError, match=r"does not fit: weights take [\d.]+ GB per rank.*larger TP"):
                profile(replica.name)
    with pytest.raises(ValueError, match=r"145\.4 GB per rank, of 80 GB"):
        profile("h100-72b-tp1")


def test_errors_name_the_field() -> None:
    replica = profile("h100-8b-tp1")
    for arguments, field in [((0, 1, 1), "batch=0"), ((4, 3, 9), "new_tokens=3"), ((4, 4, 3), "context_tokens=3")]:
        with pytest.raises(ValueError, match=field):
            replica.step_seconds(*arguments)
    with pytest.raises(ValueError, match="logit_rows=5"):
        replica.step_seconds(4, 4, 40, logit_rows=5)
    with pytest.raises(ValueError, match="pairs=3"):
        replica.step_seconds(4, 4, 40, pairs=3)
    with pytest.raises(ValueError, match="reserve=1"):
        replica.kv_tokens_capacity(reserve=1)
    with pytest.raises(ValueError, match="tp_size=3"):
        LatencyProfile(device=H800, shape=QWEN_32B, tp_size=3)
    with pytest.raises(ValueError, match="num_kv_heads=4"):
        LatencyProfile(device=H800, shape=replace(QWEN_32B, num_kv_heads=4), tp_size=8)
    with pytest.raises(ValueError, match=r"gemm=1\.5"):
        Efficiencies(gemm=1.5)
    with pytest.raises(ValueError, match="layer_overhead_s=-1"):
        Efficiencies(layer_overhead_s=-1)


def test_the_printed_table() -> None:
    """Every profile that fits has a row; a cell whose sequences' caches do not fit is empty."""
    rows = {row.split(" | ")[0].strip("| "): row for row in markdown_table().splitlines()[2:]}
    assert set(rows) == {replica.name for replica in ALL if replica.fits()}
    assert rows["h100-8b-tp1"].startswith("| h100-8b-tp1 | 16.1 | 426,784 | 6.65 | 13.77 | - |")
