"""Settings of PPO: names, bounds and what they exclude. ``ppo.py`` trains by them."""

import math
from dataclasses import dataclass, fields
from typing import Any

from rollout.types import SamplingParams, require_int, require_number


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Settings of ``ppo.PPOTrainer``, named as in TRL's PPOConfig where that has them."""

    output_dir: str
    """Folder of checkpoints and of trackers that write files."""
    max_steps: int | None = None
    """Steps (a rollout and its update each). Give this or ``total_episodes``."""
    total_episodes: int | None = None
    """Completions over all processes; rounded up to whole steps."""
    per_device_train_batch_size: int = 8
    """Completions per forward and backward on one process."""
    gradient_accumulation_steps: int = 1
    """Backwards per optimizer step; only sizes ``batch_size`` when that is ``None``."""
    num_mini_batches: int = 1
    """Optimizer steps per epoch over a step's completions (fewer if a process has fewer rows)."""
    num_ppo_epochs: int = 4
    """Passes over a step's completions."""
    batch_size: int | None = None
    """Prompts per step over all processes. ``None``: the product of the three sizes before
    ``num_ppo_epochs`` and the number of processes."""
    response_length: int = 53
    """Tokens to generate per completion at the most."""
    temperature: float = 1.0
    """Divides the logits, in generation and in every logprob; above 0."""
    top_k: int | None = None
    """Draw from the ``top_k`` likeliest tokens; ``None`` from all. Logprobs are over all tokens."""
    top_p: float = 1.0
    """Draw from the likeliest tokens of this mass, in (0, 1]. Logprobs are over all tokens."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a completion, besides EOS."""
    missing_eos_penalty: float | None = None
    """Taken from the score of a completion that did not end by itself; ``None``: nothing."""
    learning_rate: float = 3e-6
    """Of AdamW, at the first step."""
    lr_scheduler_type: str = "constant"
    """``"constant"``, or ``"linear"``: down to 0 over all steps."""
    max_grad_norm: float | None = 1.0
    """Longer gradients are shortened to this norm; ``None``: never."""
    kl_coef: float = 0.05
    """Reward taken per nat of KL to the reference. 0: no reference is made."""
    kl_estimator: str = "k1"
    """``"k1"`` or ``"k3"``, see :func:`~rollout.integrations.ppo_math.kl_estimate`."""
    target_kl: float | None = None
    """Nats per completion to which ``kl_coef`` steers; ``None``: ``kl_coef`` stays as it is."""
    kl_horizon: float = 10_000.0
    """Completions over which ``kl_coef`` follows a steady error of KL in full."""
    cliprange: float = 0.2
    """Distance of the probability ratio from 1 beyond which it gains nothing."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    cliprange_value: float = 0.2
    """Distance of a value from its old one beyond which it gains nothing."""
    gamma: float = 1.0
    """Discount per token, in [0, 1]."""
    lam: float = 0.95
    """Decay of generalized advantage estimation per token, in [0, 1]."""
    whiten_rewards: bool = False
    """Scale the rewards of a step to variance 1."""
    whiten_advantages: bool = True
    """Scale the advantages of a step to mean 0 and variance 1."""
    value_backbone: str = "own"
    """``"own"``: a transformer body of its own. ``"shared"``: the policy's last hidden state."""
    logprob_gap_bound: float = 1e-3
    """Nats. The engine's logprobs are used as old ones where the sampled gap is below; 0: never."""
    bf16: bool = False
    """Forwards in bf16 by autocast; weights stay as they are."""
    use_cpu: bool = False
    """Leave accelerators alone."""
    seed: int = 0
    """Of prompt order, completions and minibatches, and of nothing else."""
    save_steps: int | None = None
    """Steps between checkpoints; ``None``: none are saved."""
    save_total_limit: int | None = None
    """Checkpoints kept in ``output_dir``, newest first; ``None``: all."""
    report_to: Any = None
    """accelerate's ``log_with``: a tracker or its name, or a list; ``None`` or ``"none"``: no tracker."""
    disable_tqdm: bool = False
    """Show no progress bar."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        for field in fields(self):
            if field.type in (int, int | None) and getattr(self, field.name) is not None:
                require_int(field.name, getattr(self, field.name), low=0 if field.name == "seed" else 1)
            elif field.type in (float, float | None) and getattr(self, field.name) is not None:
                high = 1.0 if field.name in ("gamma", "lam", "top_p") else math.inf
                is_open = field.name in ("temperature", "top_p", "kl_horizon", "target_kl", "max_grad_norm")
                require_number(field.name, getattr(self, field.name), low=0.0, high=high, low_open=is_open)
        _require_choice("kl_estimator", self.kl_estimator, ("k1", "k3"))
        _require_choice("value_backbone", self.value_backbone, ("own", "shared"))
        _require_choice("lr_scheduler_type", self.lr_scheduler_type, ("constant", "linear"))
        self.sampling_params(seed=0)  # checks stop_strings
        if (self.max_steps is None) == (self.total_episodes is None):
            raise ValueError(
                f"max_steps={self.max_steps} and total_episodes={self.total_episodes}: exactly one says how "
                "long to train; set the other to None"
            )
        if self.target_kl is not None and self.kl_coef == 0:
            raise ValueError(
                f"target_kl={self.target_kl} multiplies kl_coef, which is 0 and would stay 0; "
                "start from kl_coef > 0 or drop target_kl"
            )

    def sampling_params(self, *, seed: int) -> SamplingParams:
        """How the prompts of a step are completed."""
        return SamplingParams(
            max_new_tokens=self.response_length,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop_strings=self.stop_strings,
            seed=seed,
        )


def _require_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; allowed: {', '.join(map(repr, allowed))}")
