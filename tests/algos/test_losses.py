"""Loss terms against scalar loops over the papers' equations, and the sum of shares against the whole."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from algos import losses
from algos.algorithm import Algorithm
from algos.cispo import CISPO
from algos.dapo import DAPO
from algos.experience import LossInputs
from algos.grpo import GRPO
from algos.gspo import GSPO
from algos.logprobs import token_logprobs
from algos.reinforce_pp import ReinforcePlusPlus
from algos.rloo import RLOO


def make_inputs(num_rows: int = 5, num_positions: int = 7, seed: int = 0) -> LossInputs:
    """float64 inputs: ratios far from one, both signs of advantage, ragged masks, one row without a token."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(num_rows, num_positions, generator=generator, dtype=torch.float64)

    trainer_BT = -2.0 + noise(0.5)
    mask_BT = torch.rand(num_rows, num_positions, generator=generator) < 0.7
    mask_BT[1] = False
    advantages_B = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    advantages_B[0], advantages_B[2] = -1.5, 1.5
    return LossInputs(
        logprobs_BT=(trainer_BT + noise(0.5)).requires_grad_(),
        trainer_logprobs_BT=trainer_BT,
        rollout_logprobs_BT=trainer_BT + noise(0.4),
        ref_logprobs_BT=trainer_BT + noise(0.6),
        entropy_BT=(2.0 + noise(0.1)).requires_grad_(),
        advantages_BT=advantages_B[:, None].expand(num_rows, num_positions).contiguous(),
        loss_mask_BT=mask_BT,
        num_tokens=int(mask_BT.sum()),
        num_sequences=int(mask_BT.any(-1).sum()),
    )


def scalar_objective(inputs: LossInputs, hyper: dict[str, Any]) -> dict[str, float]:
    """Loss and figures by a loop over sequences and tokens, in Python floats."""
    policy, trainer = inputs.logprobs_BT.tolist(), inputs.trainer_logprobs_BT.tolist()
    rollout, entropy = inputs.rollout_logprobs_BT.tolist(), inputs.entropy_BT.tolist()
    ref = inputs.ref_logprobs_BT.tolist() if inputs.ref_logprobs_BT is not None else policy
    mask, advantages = inputs.loss_mask_BT.tolist(), inputs.advantages_BT.tolist()
    terms: dict[str, list[list[float]]] = {name: [] for name in ("pg", "kl", "entropy", "clip", "lower", "mismatch")}
    for b in range(len(policy)):
        kept = [t for t in range(len(policy[b])) if mask[b][t]]
        rows: dict[str, list[float]] = {name: [] for name in terms}
        sequence_log_ratio = sum(trainer[b][t] - rollout[b][t] for t in kept)
        for t in kept:
            ratio, advantage = math.exp(policy[b][t] - trainer[b][t]), advantages[b][t]
            clipped = min(max(ratio, 1 - hyper["low"]), 1 + hyper["high"])
            objective = min(ratio * advantage, clipped * advantage)
            rows["clip"].append(float(clipped * advantage < ratio * advantage))
            dual = hyper["dual"]
            rows["lower"].append(float(dual is not None and advantage < 0 and objective < dual * advantage))
            if dual is not None and advantage < 0:
                objective = max(objective, dual * advantage)
            log_weight = {"off": 0.0, "token": trainer[b][t] - rollout[b][t], "sequence": sequence_log_ratio}
            rows["pg"].append(-min(math.exp(log_weight[hyper["correction"]]), hyper["cap"]) * objective)
            delta = ref[b][t] - policy[b][t]
            rows["kl"].append({"k1": -delta, "k2": delta**2 / 2, "k3": math.exp(delta) - delta - 1}[hyper["kl"]])
            rows["entropy"].append(entropy[b][t])
            rows["mismatch"].append(rollout[b][t] - trainer[b][t])
        for name, values in rows.items():
            terms[name].append(values)

    def token_mean(rows: list[list[float]]) -> float:
        return sum(map(sum, rows)) / sum(map(len, rows))

    def reduce(rows: list[list[float]]) -> float:
        present = [row for row in rows if row]
        if hyper["aggregation"] == "token-mean":
            return token_mean(rows)
        if hyper["aggregation"] == "sequence-mean":
            return sum(sum(row) / len(row) for row in present) / len(present)
        return sum(sum(row) / 100 for row in present) / len(present)

    mismatch = [value for row in terms["mismatch"] for value in row]
    return {
        "actor/pg_loss": reduce(terms["pg"]),
        "actor/kl_loss": reduce(terms["kl"]),
        "actor/entropy": token_mean(terms["entropy"]),
        "actor/pg_clipfrac": token_mean(terms["clip"]),
        "actor/pg_clipfrac_lower": token_mean(terms["lower"]),
        "actor/loss": (
            reduce(terms["pg"]) + hyper["beta"] * reduce(terms["kl"]) - hyper["bonus"] * reduce(terms["entropy"])
        ),
        "rollout_corr/kl": sum(mismatch) / len(mismatch),
        "rollout_corr/k3_kl": sum(math.exp(-value) + value - 1 for value in mismatch) / len(mismatch),
        "rollout_corr/logprob_abs_diff_mean": sum(map(abs, mismatch)) / len(mismatch),
        "rollout_corr/logprob_abs_diff_max": max(map(abs, mismatch)),
    }  # fmt: skip


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant-length"])
@pytest.mark.parametrize("correction", ["off", "token", "sequence"])
@pytest.mark.parametrize(("dual", "estimator"), [(None, "k1"), (1.2, "k2"), (3.0, "k3")])
@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_is_its_equation(aggregation: Any, correction: Any, dual: float | None, estimator: Any, seed: int) -> None:
    grpo = GRPO(
        dual_clip=dual, kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.05, importance_correction=correction,
        importance_cap=1.3, loss_aggregation=aggregation, constant_length=100, ratio_clip_low=0.2, ratio_clip_high=0.25,
    )  # fmt: skip
    hyper = {"low": 0.2, "high": 0.25, "dual": dual, "correction": correction, "cap": 1.3, "aggregation": aggregation,
             "kl": estimator, "beta": 0.3, "bonus": 0.05}  # fmt: skip
    inputs = make_inputs(seed=seed)
    output = grpo.loss(inputs)
    for name, value in scalar_objective(inputs, hyper).items():
        assert (output.metrics | output.maxima)[name].item() == pytest.approx(value, rel=1e-6, abs=1e-9), name


def test_the_inputs_of_these_tests_meet_every_branch() -> None:
    metrics = GRPO(dual_clip=1.2, importance_cap=1.3).loss(make_inputs()).metrics
    for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "rollout_corr/rollout_is_clipfrac"):
        assert 0 < metrics[name].item() < 1, name


def test_dapo_is_its_equation() -> None:
    inputs = make_inputs()
    hyper = {"low": 0.2, "high": 0.28, "dual": None, "correction": "token", "cap": 2.0, "aggregation": "token-mean",
             "kl": "k3", "beta": 0.0, "bonus": 0.0}  # fmt: skip
    want = scalar_objective(inputs, hyper)
    output = DAPO().loss(dataclasses.replace(inputs, ref_logprobs_BT=None))
    for name in set(want) - {"actor/kl_loss"}:
        assert (output.metrics | output.maxima)[name].item() == pytest.approx(want[name], rel=1e-6, abs=1e-9), name


LOW, HIGH, CAP, KL = 0.2, 0.25, 1.1, 0.3
CLIPS: Any = {"ratio_clip_low": LOW, "ratio_clip_high": HIGH, "importance_cap": CAP}


def ppo_term(ratio: float, advantage: float) -> tuple[float, float]:
    """-min(rho A, clip(rho) A), and its derivative by log rho."""
    plain, clipped = ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage
    return -min(plain, clipped), -plain if plain <= clipped else 0.0


def scalar_loss(algorithm: Algorithm, inputs: LossInputs) -> tuple[float, list[list[float]]]:
    """The loss and its derivatives by each log-prob, by the papers' sums over sequences and tokens."""
    assert inputs.ref_logprobs_BT is not None
    policy, trainer = inputs.logprobs_BT.tolist(), inputs.trainer_logprobs_BT.tolist()
    rollout, ref = inputs.rollout_logprobs_BT.tolist(), inputs.ref_logprobs_BT.tolist()
    mask, advantages = inputs.loss_mask_BT.tolist(), inputs.advantages_BT.tolist()
    rows = [[t for t in range(len(policy[b])) if mask[b][t]] for b in range(len(policy))]
    num_sequences, num_tokens = sum(map(bool, rows)), sum(map(len, rows))
    loss, gradient = 0.0, [[0.0] * len(row) for row in policy]
    for b, kept in enumerate(rows):
        weights = {t: min(math.exp(trainer[b][t] - rollout[b][t]), CAP) for t in kept}
        if isinstance(algorithm, GSPO) and kept:
            s = math.exp(sum(policy[b][t] - trainer[b][t] for t in kept) / len(kept))
            value, slope = ppo_term(s, advantages[b][kept[0]])
            weight = sum(weights.values()) / len(kept)
            loss += weight * value / num_sequences
            for t in kept:
                gradient[b][t] = weight * slope / len(kept) / num_sequences
            continue
        for t in kept:
            ratio, advantage = math.exp(policy[b][t] - trainer[b][t]), advantages[b][t]
            if isinstance(algorithm, CISPO):
                factor = weights[t] * min(max(ratio, 1 - LOW), 1 + HIGH) * advantage / num_tokens
                loss -= factor * policy[b][t]
                gradient[b][t] = -factor
                continue
            value, slope = ppo_term(ratio, advantage)
            per = num_sequences if isinstance(algorithm, RLOO) else num_sequences * len(kept)
            loss += weights[t] * value / per
            gradient[b][t] = weights[t] * slope / per
            if isinstance(algorithm, ReinforcePlusPlus):
                loss += KL * (ref[b][t] - policy[b][t]) ** 2 / 2 / per
                gradient[b][t] += KL * (policy[b][t] - ref[b][t]) / per
    return loss, gradient


@pytest.mark.parametrize(
    "algorithm", [GSPO(**CLIPS), CISPO(**CLIPS), RLOO(**CLIPS), ReinforcePlusPlus(kl_coef=KL, **CLIPS)]
)
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_losses_and_their_gradients_are_the_papers(algorithm: Algorithm, seed: int) -> None:
    inputs = make_inputs(seed=seed)
    output = algorithm.loss(inputs)
    want, want_gradient = scalar_loss(algorithm, inputs)
    assert output.loss.item() == pytest.approx(want, rel=1e-12)
    assert output.metrics["actor/loss"] == output.loss
    (gradient_BT,) = torch.autograd.grad(output.loss, inputs.logprobs_BT)
    torch.testing.assert_close(gradient_BT, torch.tensor(want_gradient, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    assert 0 < output.metrics["actor/pg_clipfrac"] < 1 and 0 < output.metrics["rollout_corr/rollout_is_clipfrac"] < 1
    clipped = [t for row, kept in zip(want_gradient, inputs.loss_mask_BT.tolist(), strict=True)
               for t, is_kept in zip(row, kept, strict=True) if is_kept and t == 0]  # fmt: skip
    assert bool(clipped) == isinstance(algorithm, GSPO | RLOO), "CISPO learns from clipped tokens, too"


@pytest.mark.parametrize("algorithm", [GSPO(), CISPO(), RLOO(), ReinforcePlusPlus()])
def test_the_first_update_is_the_plain_policy_gradient(algorithm: Algorithm) -> None:
    """Where the policy is the one that sampled, every clip is idle: the gradient is -A / divisor."""
    inputs = make_inputs()
    here_BT = inputs.trainer_logprobs_BT
    inputs = dataclasses.replace(
        inputs, logprobs_BT=here_BT.clone().requires_grad_(), rollout_logprobs_BT=here_BT, ref_logprobs_BT=None
    )
    (gradient_BT,) = torch.autograd.grad(algorithm.loss(inputs).loss, inputs.logprobs_BT)
    lengths_B1 = inputs.loss_mask_BT.sum(-1, keepdim=True)
    divisor: Any = inputs.num_sequences * lengths_B1
    divisor = {CISPO: inputs.num_tokens, RLOO: inputs.num_sequences}.get(type(algorithm), divisor)  # type: ignore[call-overload]
    want_BT = (-inputs.advantages_BT / divisor).where(inputs.loss_mask_BT, 0.0)
    torch.testing.assert_close(gradient_BT, want_BT)


ALGORITHMS: list[Algorithm] = [
    GRPO(kl_coef=0.3, entropy_coef=0.05, dual_clip=3.0),
    GRPO(loss_aggregation="constant-length", normalise_std=False, importance_correction="sequence"),
    DAPO(),
    GSPO(ratio_clip_low=0.2, ratio_clip_high=0.25),
    CISPO(),
    RLOO(),
    ReinforcePlusPlus(kl_coef=0.3),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("cuts", [[0, 1, 5], [0, 2, 3, 5], [0, 1, 2, 3, 4, 5]])
def test_shares_sum_to_the_whole_however_it_is_cut(algorithm: Algorithm, cuts: list[int]) -> None:
    inputs = make_inputs()
    whole = algorithm.loss(inputs)
    (whole_grad,) = torch.autograd.grad(whole.loss, inputs.logprobs_BT, retain_graph=True)
    assert whole_grad.abs().sum() > 0
    parts, grad = [], torch.zeros_like(whole_grad)
    for start, end in itertools.pairwise(cuts):
        rows = {
            field.name: getattr(inputs, field.name)[start:end]
            for field in dataclasses.fields(inputs)
            if field.name.endswith("_BT")
        }
        part = algorithm.loss(dataclasses.replace(inputs, **rows))
        grad += torch.autograd.grad(part.loss, inputs.logprobs_BT, retain_graph=True)[0]
        parts.append(part)
    torch.testing.assert_close(grad, whole_grad)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(sum(part.metrics[name] for part in parts), value, msg=name)
    for name, value in whole.maxima.items():
        assert max(part.maxima[name] for part in parts) == value


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_masked_positions_have_no_part_even_if_they_are_not_numbers(algorithm: Algorithm) -> None:
    inputs = make_inputs()
    clean = algorithm.loss(inputs)
    (clean_grad,) = torch.autograd.grad(clean.loss, inputs.logprobs_BT)
    garbage_BT = torch.where(inputs.loss_mask_BT, 0.0, math.nan)
    names = ("logprobs_BT", "trainer_logprobs_BT", "rollout_logprobs_BT", "ref_logprobs_BT")
    garbled = {name: getattr(inputs, name) + garbage_BT for name in names}
    dirty = algorithm.loss(dataclasses.replace(inputs, **garbled))
    (dirty_grad,) = torch.autograd.grad(dirty.loss, inputs.logprobs_BT)
    assert torch.equal(dirty.loss, clean.loss) and torch.equal(dirty_grad, clean_grad)
    assert clean_grad[~inputs.loss_mask_BT].eq(0).all() and clean_grad[inputs.loss_mask_BT].ne(0).any()
    assert all(torch.equal(dirty.metrics[name], value) for name, value in clean.metrics.items())


def test_importance_weights_are_truncated_and_detached() -> None:
    inputs = dataclasses.replace(make_inputs(), trainer_logprobs_BT=make_inputs().trainer_logprobs_BT.requires_grad_())
    for correction in ("off", "token", "sequence"):
        weights_BT = losses.importance_weights(inputs, correction, cap=1.1)  # type: ignore[arg-type]
        assert not weights_BT.requires_grad and weights_BT.max() <= 1.1
    sequence_BT = losses.importance_weights(inputs, "sequence", cap=100.0)
    assert torch.equal(sequence_BT, sequence_BT[:, :1].expand_as(sequence_BT))


@pytest.mark.parametrize("delta", [1e-6, -1e-5, 1e-4])
def test_k3_sees_differences_of_the_size_of_rounding(delta: float) -> None:
    """e^d - d - 1 is all but d^2 / 2 there; computed in float32 as it stands it is 0 or noise."""
    policy_BT = torch.zeros(1, 1, requires_grad=True)
    kl_BT = losses.kl_estimate(policy_BT, torch.full((1, 1), delta), "k3")
    assert kl_BT.item() == pytest.approx(delta**2 / 2, rel=1e-3)
    kl_BT.sum().backward()
    assert policy_BT.grad is not None and policy_BT.grad.item() == pytest.approx(-delta, rel=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator: Any) -> None:
    """The expectation over a small vocabulary, summed exactly, is the KL divergence."""
    torch.manual_seed(1)
    log_p, log_q = (torch.log_softmax(torch.randn(16, dtype=torch.float64), -1) for _ in range(2))
    kl = (log_p.exp() * (log_p - log_q)).sum()
    torch.testing.assert_close((log_p.exp() * losses.kl_estimate(log_p, log_q, estimator)).sum(), kl)


def test_k2s_gradient_is_the_kls() -> None:
    """As its docstring says: E[grad k2] = grad KL, E[grad k1] = 0."""
    torch.manual_seed(2)
    logits = torch.randn(16, dtype=torch.float64, requires_grad=True)
    log_q = torch.log_softmax(torch.randn(16, dtype=torch.float64), -1)
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    (want,) = torch.autograd.grad((p * (log_p - log_q)).sum(), logits, retain_graph=True)
    means = {name: (p.detach() * losses.kl_estimate(log_p, log_q, name)).sum() for name in ("k1", "k2")}  # type: ignore[arg-type]
    torch.testing.assert_close(torch.autograd.grad(means["k2"], logits, retain_graph=True)[0], want)
    torch.testing.assert_close(torch.autograd.grad(means["k1"], logits)[0], torch.zeros_like(want))


@pytest.mark.parametrize("chunk_elements", [1, 40, 10_000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs_and_their_gradient(chunk_elements: int, temperature: float) -> None:
    torch.manual_seed(0)
    logits_NV = torch.randn(9, 13, dtype=torch.float64, requires_grad=True)
    tokens_N = torch.randint(0, 13, (9,))
    kept_NV = logits_NV.detach().clone()
    logprobs_N, entropy_N = token_logprobs(logits_NV, tokens_N, temperature, chunk_elements)
    log_p_NV = torch.log_softmax(logits_NV / temperature, -1)
    torch.testing.assert_close(logprobs_N, log_p_NV[torch.arange(9), tokens_N])
    torch.testing.assert_close(entropy_N, -(log_p_NV.exp() * log_p_NV).sum(-1))
    assert torch.autograd.gradcheck(
        lambda logits: token_logprobs(logits, tokens_N, temperature, chunk_elements), (logits_NV,)
    )
    assert torch.equal(logits_NV, kept_NV)  # nothing was done in place


def test_token_logprobs_of_bf16_logits_are_computed_in_fp32() -> None:
    torch.manual_seed(0)
    logits_NV = (5 * torch.randn(6, 50)).bfloat16().requires_grad_()
    tokens_N = torch.randint(0, 50, (6,))
    logprobs_N, entropy_N = token_logprobs(logits_NV, tokens_N)
    want_N = torch.log_softmax(logits_NV.float(), -1)[torch.arange(6), tokens_N]
    assert logprobs_N.dtype == entropy_N.dtype == torch.float32
    torch.testing.assert_close(logprobs_N, want_N)
    (grad_NV,) = torch.autograd.grad(logprobs_N.sum(), logits_NV)
    assert grad_NV.dtype == torch.bfloat16
