"""The terms that policy losses are made of, each a pure function of the tensors in `LossInputs`.

Shape suffix _BT: B sequences, T positions. Means and sums are *shares* of one micro-batch: they are divided by the
counts of the whole mini-batch. The shares of all micro-batches and ranks add up to the mini-batch's value, however the
mini-batch was cut. The functions use tensor methods and do not import torch, because `--help` imports this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from algos.experience import LossInputs, LossOutput

if TYPE_CHECKING:
    from torch import Tensor

LossAggregation = Literal["token-mean", "sequence-mean", "constant-length"]
KLEstimator = Literal["k1", "k2", "k3"]
ImportanceCorrection = Literal["off", "token", "sequence"]
DualClip = Annotated[float, Meta(gt=1, description="above 1")]

# Log-ratios are clamped to this, as in verl: exp() of a larger one is useless as a weight, and soon infinite.
MAX_LOG_RATIO = 20.0


def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over unmasked positions. Values at masked positions (NaN included) are ignored and get no gradient."""
    return values_BT.masked_fill(~mask_BT, 0.0).sum()


def token_mean(values_BT: Tensor, inputs: LossInputs) -> Tensor:
    """This micro-batch's share of the mean over the mini-batch's unmasked tokens."""
    return masked_sum(values_BT, inputs.loss_mask_BT) / inputs.num_tokens


def aggregate(values_BT: Tensor, inputs: LossInputs, how: LossAggregation, constant_length: int = 0) -> Tensor:
    """Reduces per-token losses to this micro-batch's share of the mini-batch's loss.

    token-mean: every token weighs the same (DAPO, arXiv:2503.14476, Eq. 8).
    sequence-mean: mean over tokens, then sequences (GRPO, arXiv:2402.03300, Eq. 3): tokens of long ones weigh less.
    constant-length: sum over tokens / `constant_length`, mean over sequences (Dr. GRPO, arXiv:2503.20783, §3.2).
    """
    if how == "token-mean":
        return token_mean(values_BT, inputs)
    mask_BT = inputs.loss_mask_BT
    sums_B = values_BT.masked_fill(~mask_BT, 0.0).sum(-1)
    if how == "sequence-mean":
        return (sums_B / mask_BT.sum(-1).clamp(min=1)).sum() / inputs.num_sequences
    assert how == "constant-length" and constant_length >= 1
    return sums_B.sum() / constant_length / inputs.num_sequences


@dataclass(frozen=True)
class ClippedSurrogate:
    """The per-token loss to minimise; detached: where clipping was active, and the log-ratios of new to old policy."""

    loss_BT: Tensor
    clipped_BT: Tensor
    clipped_lower_BT: Tensor
    log_ratio_BT: Tensor


def log_ratios(inputs: LossInputs) -> Tensor:
    """Each token's log-ratio of the policy being trained to the policy before the rollout's first update; 0 at masked
    positions, where the gradient of a log-prob that is no number would be none, either."""
    log_ratio_BT = (inputs.logprobs_BT - inputs.trainer_logprobs_BT).masked_fill(~inputs.loss_mask_BT, 0.0)
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratios(inputs: LossInputs) -> Tensor:
    """The mean of a sequence's log-ratios over its unmasked tokens, at each of its positions (GSPO, Eq. 7)."""
    mask_BT = inputs.loss_mask_BT
    log_ratio_BT = log_ratios(inputs)
    return (log_ratio_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)).expand_as(log_ratio_BT)


def clipped_surrogate(
    inputs: LossInputs,
    ratio_clip_low: float,
    ratio_clip_high: float,
    dual_clip: float | None = None,
    log_ratio_BT: Tensor | None = None,
) -> ClippedSurrogate:
    """PPO's clipped objective per token, negated (arXiv:1707.06347, Eq. 7; separate low and high clip: DAPO, Eq. 8).

    `dual_clip` c > 1 limits the loss to c |A| where A < 0, however large the ratio is (arXiv:1912.09729).
    `log_ratio_BT` replaces the tokens' own log-ratios.
    """
    advantages_BT = inputs.advantages_BT
    log_ratio_BT = log_ratios(inputs) if log_ratio_BT is None else log_ratio_BT
    ratio_BT = log_ratio_BT.exp()
    plain_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - ratio_clip_low, 1 + ratio_clip_high)
    loss_BT = plain_BT.maximum(clipped_BT)
    lower_BT = loss_BT.new_zeros(loss_BT.shape).bool()
    if dual_clip is not None:
        bound_BT = -advantages_BT * dual_clip
        lower_BT = (advantages_BT < 0) & (loss_BT > bound_BT)
        loss_BT = loss_BT.minimum(bound_BT).where(advantages_BT < 0, loss_BT)
    return ClippedSurrogate(loss_BT, clipped_BT.detach() > plain_BT.detach(), lower_BT, log_ratio_BT.detach())


def kl_estimate(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) at tokens drawn from the policy (Schulman, "Approximating KL").

    With d = ref - policy: k1 = -d (unbiased, any sign); k2 = d^2 / 2; k3 = e^d - d - 1 (unbiased, never negative;
    GRPO Eq. 4). Used as a loss, k1 has a gradient with expectation zero, and k2 has the true gradient of the KL.
    """
    delta_BT = (ref_logprobs_BT - logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -delta_BT
    if estimator == "k2":
        return 0.5 * delta_BT.square()
    assert estimator == "k3"
    return k3(delta_BT)


def k3(delta_BT: Tensor) -> Tensor:
    """e^d - d - 1, computed in float64: for the small d of nearly equal policies float32 would round away d^2 / 2."""
    wide_BT = delta_BT.double()
    return (wide_BT.expm1() - wide_BT).to(delta_BT.dtype)


def importance_weights(inputs: LossInputs, correction: ImportanceCorrection, cap: float) -> Tensor:
    """Returns detached weights [B, T], min(pi_trainer / pi_rollout, cap): truncated importance sampling.

    The rollout engine and the trainer compute slightly different probabilities of the same tokens, which makes
    on-policy data a little off-policy (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training"). "token" uses each token's own ratio (biased, low variance); "sequence" gives every token of a
    sequence the product of the ratios of its unmasked tokens; "off" gives ones.
    """
    if correction == "off":
        return inputs.rollout_logprobs_BT.new_ones(inputs.rollout_logprobs_BT.shape)
    log_ratio_BT = (inputs.trainer_logprobs_BT - inputs.rollout_logprobs_BT).detach()
    log_ratio_BT = log_ratio_BT.masked_fill(~inputs.loss_mask_BT, 0.0)
    if correction == "sequence":
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
    else:
        assert correction == "token"
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)


def surrogate_metrics(
    surrogate: ClippedSurrogate, weights_BT: Tensor, cap: float, inputs: LossInputs
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns (shares, maxima) under verl's names. `ppo_kl` is k1 of KL(policy before the first update || policy now).

    `rollout_corr/` metrics compare the rollout engine's log-probs with the trainer's on the same tokens: `kl` (k1) and
    `k3_kl` estimate KL(rollout || trainer) in nats per token; `logprob_abs_diff` is |difference of log-probs|.
    """
    delta_BT = (inputs.trainer_logprobs_BT - inputs.rollout_logprobs_BT).detach()
    delta_BT = delta_BT.masked_fill(~inputs.loss_mask_BT, 0.0)
    values_BT = {
        "actor/pg_clipfrac": surrogate.clipped_BT.float(),
        "actor/pg_clipfrac_lower": surrogate.clipped_lower_BT.float(),
        "actor/ppo_kl": -surrogate.log_ratio_BT,
        "actor/entropy": inputs.entropy_BT.detach(),
        "rollout_corr/kl": -delta_BT,
        "rollout_corr/k3_kl": k3(delta_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)),
        "rollout_corr/logprob_abs_diff_mean": delta_BT.abs(),
        "rollout_corr/rollout_is_mean": weights_BT,
        "rollout_corr/rollout_is_clipfrac": (weights_BT >= cap).to(delta_BT.dtype),
    }
    shares = {name: token_mean(values, inputs) for name, values in values_BT.items()}
    return shares, {"rollout_corr/logprob_abs_diff_max": delta_BT.abs().max()}


def policy_loss(
    surrogate: ClippedSurrogate,
    inputs: LossInputs,
    how: LossAggregation,
    correction: ImportanceCorrection,
    cap: float,
    constant_length: int = 0,
) -> LossOutput:
    """The surrogate's loss, weighted by `importance_weights` and reduced by `aggregate`, with its metrics."""
    weights_BT = importance_weights(inputs, correction, cap)
    loss = aggregate(weights_BT * surrogate.loss_BT, inputs, how, constant_length)
    metrics, maxima = surrogate_metrics(surrogate, weights_BT, cap, inputs)
    metrics |= {"actor/pg_loss": loss.detach(), "actor/loss": loss.detach()}
    return LossOutput(loss=loss, metrics=metrics, maxima=maxima)


def with_kl(
    output: LossOutput,
    inputs: LossInputs,
    coef: float,
    estimator: KLEstimator,
    how: LossAggregation,
    constant_length: int = 0,
) -> LossOutput:
    """Adds `coef` times the KL to the reference; nothing is added, and no reference needed, when `coef` is 0."""
    if coef == 0:
        return output
    assert inputs.ref_logprobs_BT is not None
    policy_BT, ref_BT = (
        one_BT.masked_fill(~inputs.loss_mask_BT, 0.0) for one_BT in (inputs.logprobs_BT, inputs.ref_logprobs_BT)
    )
    kl_BT = kl_estimate(policy_BT, ref_BT, estimator)
    kl_loss = aggregate(kl_BT, inputs, how, constant_length)
    loss = output.loss + coef * kl_loss
    metrics = {"actor/kl_loss": kl_loss.detach(), "actor/loss": loss.detach()}
    return replace(output, loss=loss, metrics=output.metrics | metrics)
