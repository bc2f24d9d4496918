import json
from functools import partial

import pytest
import torch
from torch.nn.functional import rms_norm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from algos.tokenizer import byte_tokenizer
from algos.widening import widen, widen_model

EPS = 1e-2  # so large that getting it wrong shows


def make(model_class, config_class, *, tied: bool, heads: int, kv_heads: int, **options) -> PreTrainedModel:
    """A float64 model whose every parameter, biases and norms too, is random."""
    config = config_class(
        vocab_size=97,
        hidden_size=8 * heads,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        rms_norm_eps=EPS,
        **options,
    )
    torch.manual_seed(0)
    model = model_class(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model.eval()


MODELS = {
    "qwen3 tied": lambda: make(Qwen3ForCausalLM, Qwen3Config, tied=True, heads=4, kv_heads=2, head_dim=8),
    # Three query heads per KV head, and heads wider than hidden_size / heads.
    "qwen3 odd": lambda: make(Qwen3ForCausalLM, Qwen3Config, tied=False, heads=6, kv_heads=2, head_dim=12),
    "qwen3 one kv": lambda: make(Qwen3ForCausalLM, Qwen3Config, tied=True, heads=3, kv_heads=1, head_dim=8),
    "qwen2": lambda: make(Qwen2ForCausalLM, Qwen2Config, tied=True, heads=6, kv_heads=3),
    "llama": lambda: make(LlamaForCausalLM, LlamaConfig, tied=False, heads=4, kv_heads=4),
    "llama biases": lambda: make(
        LlamaForCausalLM, LlamaConfig, tied=True, heads=4, kv_heads=1, attention_bias=True, mlp_bias=True
    ),
}


def logits(model: PreTrainedModel) -> torch.Tensor:
    for module in model.modules():
        # Hugging Face's own RMSNorm rounds to float32, whatever the model's dtype.
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(rms_norm, normalized_shape=module.weight.shape, weight=module.weight, eps=EPS)
    tokens = torch.arange(40).reshape(2, 20) * 7 % 97
    with torch.inference_mode():
        return model(tokens).logits


@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_unchanged_at_every_position(name, factor):
    model = MODELS[name]()
    wide = widen_model(model, factor)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(logits(wide), logits(model), rtol=0, atol=1e-12)
    assert wide.config.hidden_size == factor * model.config.hidden_size
    for old, new in zip(model.model.layers, wide.model.layers, strict=True):
        for projection in ("q_proj", "k_proj"):
            narrow_weight, wide_weight = (getattr(x.self_attn, projection).weight for x in (old, new))
            assert wide_weight.shape == tuple(factor * size for size in narrow_weight.shape)
        assert new.mlp.up_proj.weight.shape[0] == factor * old.mlp.up_proj.weight.shape[0]


def test_float32_and_a_factor_of_16():
    model = MODELS["qwen3 odd"]().float()
    torch.testing.assert_close(logits(widen_model(model, 16)), logits(model), rtol=0, atol=1e-4)


def test_added_heads_do_real_work():
    # Silenced, but neither zero (what no model computes) nor NaN (0 / eps), nor denormal.
    wide = widen_model(MODELS["qwen3 tied"](), 4)
    attention = wide.model.layers[1].self_attn
    outputs = []
    attention.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    logits(wide)
    added = outputs[0][..., attention.head_dim * 4 :]
    assert added.shape[-1] == 3 * 4 * attention.head_dim
    assert added.abs().amax(dim=(0, 1)).min() > 1e-6 and added.isfinite().all()


def test_a_directory_is_widened_with_its_tokenizer(tmp_path):
    model = MODELS["qwen3 tied"]().float()
    model.generation_config.eos_token_id = 7
    model.save_pretrained(tmp_path / "narrow")
    byte_tokenizer().save_pretrained(tmp_path / "narrow")
    state = torch.get_rng_state()
    for _ in range(2):  # again over its own result
        assert widen(tmp_path / "narrow", tmp_path / "wide", 4) == tmp_path / "wide"
    assert torch.equal(torch.get_rng_state(), state)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    torch.testing.assert_close(logits(wide), logits(model), rtol=0, atol=1e-4)
    assert wide.generation_config.eos_token_id == 7
    assert AutoTokenizer.from_pretrained(tmp_path / "wide").encode("a") == [97]
    assert json.loads((tmp_path / "wide" / "made_with.json").read_text())["widened"]["factor"] == 4


def test_what_cannot_be_widened_is_named(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=1, n_layer=1, vocab_size=9)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="model_type='gpt2'"):
        widen(tmp_path / "gpt2", tmp_path / "wide", 4)
    with pytest.raises(ValueError, match="factor=1: must be at least 2"):
        widen(tmp_path / "gpt2", tmp_path / "wide", 1)
    with pytest.raises(ValueError, match=r"no config\.json there"):
        widen(tmp_path / "nowhere", tmp_path / "wide", 4)
    with pytest.raises(ValueError, match="is the source"):
        widen(tmp_path / "gpt2", tmp_path / "gpt2", 4)
    assert not (tmp_path / "wide").exists()
    MODELS["qwen2"]().save_pretrained(tmp_path / "qwen2")
    with pytest.raises(ValueError, match=r"directory=.*gpt2.*holds other files"):
        widen(tmp_path / "qwen2", tmp_path / "gpt2", 4)
    assert (tmp_path / "gpt2" / "config.json").exists()
