"""What PPO computes: the policy with its value function, and the arithmetic as pure functions.

No trainer, no settings object, no communication: ``ppo.py`` puts these together.

Letters: B completions, P longest prompt, T longest completion, V vocabulary. ``mask`` [B, T] bool is
true for a generated token; completions are padded on the right: a row of it is true, then false.
"""

import copy
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from rollout.results import RolloutBatch
from rollout.types import Completion, FinishReason
from rollout.weights import base_model_of

if is_peft_available():
    from peft import get_peft_model

PROMPT_ORDER, ROW_ORDER = 1, 2  # keep the two kinds of shuffles apart under one seed
WIDEST_KL_ERROR = 0.2  # Ziegler et al. clip the relative error, so that one odd batch moves little


class PolicyWithValue(nn.Module):
    """Policy and value function under one wrapper, so that DDP averages one set of gradients.

    ``body is None``: the value head reads the policy's last hidden state, and its gradient flows there.
    """

    def __init__(
        self, policy: nn.Module, body: nn.Module | None, head: nn.Linear, temperature: float
    ) -> None:
        super().__init__()
        self.policy, self.body, self.head = policy, body, head
        self.temperature = temperature

    def forward(self, ids: Tensor, attention_mask: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs, entropies and values of the last ``length`` = T tokens of ``ids`` [B, P + T]:
        three times [B, T] float32. Entropies have no gradient."""
        is_shared = self.body is None
        out = self.policy(
            **_inputs(ids, attention_mask), logits_to_keep=length + 1, output_hidden_states=is_shared
        )
        logprobs, entropy = _logprobs(out.logits, ids, length, self.temperature)
        if is_shared:
            return logprobs, entropy, self._head(out.hidden_states[-1], length)
        return logprobs, entropy, self.values(ids, attention_mask, length)

    def logprobs(self, ids: Tensor, attention_mask: Tensor, length: int) -> Tensor:
        """Logprobs [B, T] float32 of the last ``length`` tokens."""
        return forward_logprobs(self.policy, ids, attention_mask, length, self.temperature)

    def values(self, ids: Tensor, attention_mask: Tensor, length: int) -> Tensor:
        """Values [B, T] float32 of the states in which the last ``length`` tokens are drawn."""
        inputs = _inputs(ids, attention_mask)
        if self.body is None:
            out = self.policy(**inputs, logits_to_keep=1, output_hidden_states=True)
            return self._head(out.hidden_states[-1], length)
        return self._head(self.body(**inputs).last_hidden_state, length)

    def _head(self, hidden: Tensor, length: int) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):  # fp32, whatever the bodies run in
            values: Tensor = self.head(hidden[:, -length - 1 : -1].float())[..., 0]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What a rank's update of one step learns from; the last rows can be dummies, masked throughout."""

    ids: Tensor  # [B, P + T] int64, prompts padded on the left, completions on the right
    attention_mask: Tensor  # [B, P + T] int64
    mask: Tensor  # [B, T] bool, true for a generated token
    logprobs: Tensor  # [B, T] float32, under the policy that drew the tokens
    values: Tensor  # [B, T] float32
    advantages: Tensor  # [B, T] float32
    returns: Tensor  # [B, T] float32

    def rows(self, places: Tensor) -> "Experience":
        """The rows at ``places`` [b] int64."""
        return Experience(**{field.name: getattr(self, field.name)[places] for field in fields(self)})


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) per token, estimated from the drawn tokens: [B, T], like both inputs.

    ``"k1"`` is the log-ratio: unbiased, of either sign. ``"k3"`` is unbiased and never negative, with
    less variance (Schulman 2020, http://joschu.net/blog/kl-approx.html).
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    assert estimator == "k3", estimator
    return torch.expm1(-log_ratio) + log_ratio


def token_rewards(kl: Tensor, scores: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """[B, T]: the KL penalty of each token, and the completion's score [B] at its last one."""
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    return is_last * scores[:, None] - kl_coef * kl * mask


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    Nothing is worth anything after the last token, whatever ended the completion.

    Args:
        rewards, values: [B, T] float32.
        mask: [B, T] bool.
        gamma: discount per token.
        lam: 0 trusts the values (one-step errors), 1 only the rewards (whole returns).

    Returns:
        Advantages and returns (advantages + values), [B, T] each, 0 where masked.
    """
    advantages = torch.zeros_like(rewards)
    carried = next_value = rewards.new_zeros(len(rewards))  # [B]
    for t in reversed(range(rewards.shape[1])):
        error = rewards[:, t] + gamma * next_value - values[:, t]
        carried = (error + gamma * lam * carried) * mask[:, t]
        next_value = values[:, t] * mask[:, t]
        advantages[:, t] = carried
    return advantages, (advantages + values) * mask


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    total: Callable[[Tensor], Tensor] = lambda local: local,
) -> Tensor:
    """Scale to variance 1 over the true places of ``mask``: [B, T], 0 where masked.

    Args:
        values: [B, T] float32.
        mask: [B, T] bool.
        shift_mean: also move the mean to 0.
        total: adds a scalar tensor up over all ranks, so that ranks scale alike.
    """
    count = total(mask.sum().to(values.dtype)).clamp(min=1)
    mean = total((values * mask).sum()) / count
    # around the mean, not by the difference of two large sums; count - 1: the mean is estimated too
    variance = total(((values - mean).square() * mask).sum()) / (count - 1).clamp(min=1)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened if shift_mean else whitened + mean) * mask


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), to be minimised.

    All inputs [B, T] float32. Returns the loss per token [B, T] and where clipping decided it, bool.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(free, clipped), clipped > free


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """Half the squared error, the worse of ``values`` and ``values`` kept near ``old_values``.

    All inputs [B, T] float32. Returns the loss per token [B, T] and where clipping decided it, bool.
    """
    near = old_values + (values - old_values).clamp(-cliprange, cliprange)
    free, clipped = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(free, clipped), clipped > free


def next_kl_coef(kl_coef: float, kl: float, *, target: float, gain: float) -> float:
    """The proportional controller of Ziegler et al. 2019 (arXiv:1909.08593, section 2.2).

    Args:
        kl: measured, in nats per completion, as ``target`` is.
        gain: relative change of the coefficient per unit of relative error.
    """
    error = min(max(kl / target - 1, -WIDEST_KL_ERROR), WIDEST_KL_ERROR)
    return kl_coef * (1 + gain * error)


def ppo_loss(
    rows: Experience,
    logprobs: Tensor,
    entropy: Tensor,
    values: Tensor,
    *,
    cliprange: float,
    cliprange_value: float,
    vf_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss summed over tokens, and sums for the log; ``"tokens"`` is their count.

    ``logprobs``, ``entropy`` and ``values`` [B, T] are of the weights as they are now.
    """
    mask = rows.mask
    logprobs = logprobs.where(mask, rows.logprobs)  # no NaN from padding: 0 * inf
    policy_loss, clipped = clipped_policy_loss(logprobs, rows.logprobs, rows.advantages, cliprange)
    value_loss, value_clipped = clipped_value_loss(values, rows.values, rows.returns, cliprange_value)
    loss = ((policy_loss + vf_coef * value_loss) * mask).sum()
    log_ratio = (logprobs - rows.logprobs).detach()
    per_token = {
        "loss/policy_avg": policy_loss.detach(),
        "loss/value_avg": value_loss.detach(),
        "policy/approxkl_avg": 0.5 * log_ratio.square(),
        "policy/clipfrac_avg": clipped,
        "val/clipfrac_avg": value_clipped,
        "val/ratio": log_ratio.exp(),
        "objective/entropy": entropy.where(mask, 0.0),
        "tokens": mask,
    }
    return loss, {name: (value * mask).sum() for name, value in per_token.items()}


def prompt_places(step: int, batch_size: int, num_prompts: int, seed: int) -> list[int]:
    """Places in the dataset of step ``step``'s prompts: epochs in a row, each in an order of its own
    that depends on (seed, epoch) alone."""
    epochs: dict[int, np.ndarray] = {}
    places = []
    for i in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(i, num_prompts)
        if epoch not in epochs:
            epochs[epoch] = np.random.default_rng([PROMPT_ORDER, seed, epoch]).permutation(num_prompts)
        places.append(int(epochs[epoch][offset]))
    return places


def shuffled_rows(num_rows: int, seed: int, step: int, epoch: int) -> Tensor:
    """The order [num_rows] int64 in which an epoch visits the rows, the same on all ranks."""
    return torch.from_numpy(np.random.default_rng([ROW_ORDER, seed, step, epoch]).permutation(num_rows))


def with_dummies(batch: RolloutBatch, num_rows: int, pad_id: int) -> RolloutBatch:
    """The batch with empty completions up to ``num_rows``: rows that no loss sees.

    Their prompt is one token, since attention over nothing at all is undefined.
    """
    dummy = Completion(
        request_id="dummy",
        index=0,
        prompt_ids=(pad_id,),
        token_ids=(),
        logprobs=(),
        policy_logprobs=(),
        log_kept_mass=(),
        versions=(),
        finish_reason=FinishReason.CANCELLED,
    )
    return RolloutBatch((*batch.completions, *[dummy] * (num_rows - len(batch))), batch.metrics)


def checked_scores(reward: Any, given: Any, expected: int) -> list[float]:
    """What a reward function gave, as floats.

    Raises:
        ValueError: not one finite number per completion; the function is named.
    """
    name = getattr(reward, "__name__", type(reward).__name__)
    values = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else given
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != expected:
        what = f"{len(values)} values" if isinstance(values, Sequence) else f"a {type(values).__name__}"
        raise ValueError(
            f"reward function {name} gave {what} for {expected} completions; return one number for each"
        )
    plain = [v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for v in values]
    for place, value in enumerate(plain):
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(
                f"reward function {name} gave {value!r} for completion {place} of {expected}; "
                "return one finite number for each"
            )
    return [float(value) for value in plain]


def build_models(
    model: nn.Module,
    *,
    ref_model: nn.Module | None,
    value_model: nn.Module | None,
    peft_config: Any,
    value_backbone: str,
    temperature: float,
    needs_reference: bool,
) -> tuple[PolicyWithValue, nn.Module | None]:
    """Policy with value, and the reference unless it is the policy without its adapter or not needed."""
    base = base_model_of(model)
    is_peft = base is not model
    if peft_config is not None and is_peft:
        raise ValueError("model is a PEFT model and peft_config is given too; give one of them")
    if peft_config is not None and not is_peft_available():
        raise ValueError("peft_config is given and peft is not installed; pip install peft, or leave it out")
    if ref_model is model:
        raise ValueError("ref_model is the model itself and would be frozen; leave it out: a copy is made")
    body, head = _value_parts(model, base, value_model, value_backbone)
    reference = ref_model
    if not needs_reference:
        reference = None
    elif ref_model is None and peft_config is None and not is_peft:
        reference = copy.deepcopy(model)
    if reference is not None:
        reference.requires_grad_(False).eval()
    policy = model if peft_config is None else get_peft_model(model, peft_config)
    module = PolicyWithValue(policy, body, head, temperature)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {name} is trained in {parameter.dtype}; load the model with dtype=torch.float32 "
                "and set bf16=True to run it in bf16"
            )
    _switch_off_dropout(module)
    return module, reference


def _value_parts(
    policy: Any, base: PreTrainedModel, value_model: Any, backbone: str
) -> tuple[nn.Module | None, nn.Linear]:
    """Body and head of the value function; a new head starts at 0, so that ranks and runs agree."""
    size = base.config.get_text_config().hidden_size
    if value_model is not None:
        if backbone == "shared":
            raise ValueError("value_model is given and value_backbone='shared' has no use for it; choose one")
        size = value_model.config.get_text_config().hidden_size
    head = nn.Linear(size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    if value_model is not None:
        score = getattr(value_model, "score", None)  # where sequence classifiers of transformers keep it
        if isinstance(score, nn.Linear) and score.out_features == 1:
            head.weight.data.copy_(score.weight.data)
        return value_model.base_model, head
    if backbone == "shared":
        return None, head
    # the policy's adapter is not the value function's
    own = copy.deepcopy(base.base_model) if base is policy else copy.deepcopy(policy).unload().base_model
    return own.float().requires_grad_(True), head


def _switch_off_dropout(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        for name, value in list(vars(child).items()):
            # layers that call the function keep its rate as a plain number: dropout, layerdrop, ...
            if "drop" in name and isinstance(value, float):
                vars(child)[name] = 0.0


def _inputs(ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)  # prompts are padded on the left
    return {
        "input_ids": ids,
        "attention_mask": attention_mask,
        "position_ids": positions,
        "use_cache": False,
    }


def _logprobs(logits: Tensor, ids: Tensor, length: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [B, T] of the last T = ``length`` ids, from logits [B, T + 1, V]."""
    everything = torch.log_softmax(logits[:, :-1].float() / temperature, -1)
    drawn = ids[:, ids.shape[1] - length :]
    logprobs = everything.gather(2, drawn[..., None])[..., 0]
    with torch.no_grad():
        entropy = -(everything.exp() * everything).sum(-1)
    return logprobs, entropy


def forward_logprobs(
    model: nn.Module, ids: Tensor, attention_mask: Tensor, length: int, temperature: float
) -> Tensor:
    logits = model(**_inputs(ids, attention_mask), logits_to_keep=length + 1).logits
    return _logprobs(logits, ids, length, temperature)[0]
