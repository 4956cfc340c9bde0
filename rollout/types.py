"""The nouns of the engine: what a caller asks for, what comes back, and what can go wrong.

This room imports nothing heavy (no torch), so that every host room can use it and be tested in
milliseconds. It owns no behaviour beyond checking what the user gave.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

MAX_SEED = 2**63 - 1


class FinishReason(str, Enum):
    """Why a completion ended.

    ``eos``: an end-of-sequence token of the model or tokenizer was drawn (it is the last token).
    ``stop``: a stop token or stop string of the request was completed (its token is the last one).
    ``length``: ``max_new_tokens`` was reached. ``max_position``: the model has no position left.
    ``cache_full``: alone in the cache and still no page left. ``cancelled``: ended by the caller.
    ``error``: see :attr:`Completion.error`.
    """

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    MAX_POSITION = "max_position"
    CACHE_FULL = "cache_full"
    CANCELLED = "cancelled"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


class NonFiniteLogits(ArithmeticError):
    """The model gave NaN or +inf logits (or processors left no token) for one request's row."""


class UnsupportedModelError(ValueError):
    """The model cannot be served exactly; the message names the layer or setting in the way."""


class DuplicateRequestError(ValueError):
    """A request id was submitted while a request with the same id was still live."""


class RankError(RuntimeError):
    """A rank of a tensor-parallel model has died, is stuck, failed, or was told something else."""


class RolloutError(RuntimeError):
    """At least one request failed; everything that did finish is in :attr:`batch`.

    Example::

        try:
            batch = engine.generate(prompts, params)
        except RolloutError as error:
            batch = error.batch  # every completion, in input order, failures included
    """

    def __init__(self, message: str, batch: Any) -> None:
        super().__init__(message)
        self.batch = batch


def require_number(name: str, value: Any, *, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} has type {type(value).__name__}; give a number")
    number = float(value)
    below = number <= low if low_open else number < low
    if not math.isfinite(number) or below or number > high:
        raise ValueError(
            f"{name}={value!r} is out of range; allowed: {'>' if low_open else '>='} {low}"
            + (f" and <= {high}" if math.isfinite(high) else " and finite")
        )


def require_int(name: str, value: Any, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} has type {type(value).__name__}; give a whole number")
    if int(value) < low or (high is not None and int(value) > high):
        raise ValueError(
            f"{name}={value!r} is out of range; allowed: >= {low}"
            + (f" and <= {high}" if high is not None else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Every default is neutral: the model's own distribution.

    The order of the steps is that of transformers: logit bias, repetition, presence and frequency
    penalties, ``min_new_tokens``, the request's own ``logits_processors``, then temperature,
    ``top_k``, ``top_p``, ``min_p``.

    Example::

        SamplingParams(max_new_tokens=64, temperature=0.8, top_p=0.95, n=8, seed=0)
        SamplingParams(temperature=0)  # greedy

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or two fields contradict each other.
    """

    max_new_tokens: int = 256
    """Tokens to generate at the most, at least 1."""
    min_new_tokens: int = 0
    """Until this many tokens are there, stop ids cannot be drawn and stop strings do not end."""
    temperature: float = 1.0
    """Divides the logits. 0 takes the most likely token (greedy)."""
    top_k: int | None = None
    """Keep the ``top_k`` most likely tokens; ``None`` or 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches ``top_p``, in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least ``min_p`` times the probability of the likeliest, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or completion."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was generated."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids; ``-inf`` forbids a token."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the completion (kept as its last token), besides the model's EOS ids."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the completion, found in the decoded text; needs a tokenizer."""
    ignore_eos: bool = False
    """Do not end at the model's EOS ids. ``stop_token_ids`` still end the completion."""
    n: int = 1
    """Independent samples of the prompt."""
    seed: int | None = None
    """Reproducible noise for this request; ``None`` numbers the requests of the engine instead."""
    logits_processors: tuple[Callable[..., Any], ...] = ()
    """Called as ``processor(input_ids [1, L] int64, scores [1, V] float32) -> [1, V]`` per token,
    with prompt and completion so far; any transformers ``LogitsProcessor`` fits."""

    def __post_init__(self) -> None:
        self._freeze_collections()
        require_int("max_new_tokens", self.max_new_tokens, low=1)
        require_int("min_new_tokens", self.min_new_tokens, low=0)
        require_number("temperature", self.temperature, low=0.0, high=math.inf)
        if self.top_k is not None:
            require_int("top_k", self.top_k, low=0)
        require_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        require_number("min_p", self.min_p, low=0.0, high=1.0)
        require_number("repetition_penalty", self.repetition_penalty, low=0.0, high=math.inf, low_open=True)
        require_number("presence_penalty", self.presence_penalty, low=-math.inf, high=math.inf)
        require_number("frequency_penalty", self.frequency_penalty, low=-math.inf, high=math.inf)
        require_int("n", self.n, low=1)
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(
                f"ignore_eos={self.ignore_eos!r} has type {type(self.ignore_eos).__name__}; give a bool"
            )
        if self.seed is not None:
            require_int("seed", self.seed, low=0, high=MAX_SEED)
        self._check_bias_and_stops()
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}; "
                "raise max_new_tokens or lower min_new_tokens"
            )

    def _freeze_collections(self) -> None:
        """Own private copies, so that editing the caller's list later changes nothing here."""
        for name in ("stop_token_ids", "stop_strings", "logits_processors"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise TypeError(f"{name}={value!r} must be a list or tuple")
            object.__setattr__(self, name, tuple(value))
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias={self.logit_bias!r} must map token ids to numbers")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_bias_and_stops(self) -> None:
        for token, bias in self.logit_bias.items():
            require_int("a logit_bias token id", token, low=0)
            if isinstance(bias, bool) or not isinstance(bias, numbers.Real):
                raise TypeError(f"logit_bias[{token}]={bias!r} has type {type(bias).__name__}; give a number")
            if math.isnan(float(bias)) or float(bias) == math.inf:
                raise ValueError(f"logit_bias[{token}]={bias!r}; give a finite number or -inf")
        for token in self.stop_token_ids:
            require_int("a stop token id", token, low=0)
        for text in self.stop_strings:
            if not isinstance(text, str):
                raise TypeError(f"stop string {text!r} has type {type(text).__name__}; give a str")
            if not text:
                raise ValueError("a stop string is empty; it would end every completion at once")
        for processor in self.logits_processors:
            if not callable(processor):
                raise TypeError(f"logits processor {processor!r} is not callable")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken instead of a draw."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """One drawn token and its three numbers (see :class:`Completion`)."""

    token_id: int
    logprob: float
    policy_logprob: float
    log_kept_mass: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished sample of one prompt; tokens, logprobs and versions stay beside each other.

    For each generated token ``t`` with raw logits ``z`` (fp32, before any change):

    * ``policy_logprobs``: ``log_softmax(z / temperature)[t]`` over the whole vocabulary, which is
      what a trainer recomputes. For greedy rows the temperature is taken as 1.
    * ``logprobs``: log-probability under the distribution that was really sampled, after bias,
      penalties, processors and truncation. Greedy rows have 0.0: the draw was certain.
    * ``log_kept_mass``: log of the mass that truncation kept, so that with no penalties or
      processors ``logprobs == policy_logprobs - log_kept_mass``.
    """

    request_id: str
    index: int
    """Which of the request's ``n`` samples this is, from 0."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated ids, the EOS or stop token included."""
    logprobs: tuple[float, ...]
    policy_logprobs: tuple[float, ...]
    log_kept_mass: tuple[float, ...]
    versions: tuple[int, ...]
    """The engine's ``weight_version`` that drew each token."""
    finish_reason: FinishReason
    stop_match: int | str | None = None
    """The EOS or stop id, or the stop string, that ended the completion."""
    stop_offset: int | None = None
    """Where a matched stop string begins in the decoded completion, in characters."""
    error: Exception | None = None
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in shared pages instead of computed."""
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name))
            for name in ("token_ids", "logprobs", "policy_logprobs", "log_kept_mass", "versions")
        }
        assert len(set(lengths.values())) == 1, f"{self.request_id}: lengths differ: {lengths}"
        assert (self.error is not None) == (self.finish_reason is FinishReason.ERROR)

    @property
    def is_finished(self) -> bool:
        """Whether the model ended by itself (EOS or stop), not cut short."""
        return self.finish_reason in (FinishReason.EOS, FinishReason.STOP)

    @property
    def is_truncated(self) -> bool:
        """Whether a limit cut the completion short."""
        return self.finish_reason in (
            FinishReason.LENGTH,
            FinishReason.MAX_POSITION,
            FinishReason.CACHE_FULL,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMetrics:
    """What one ``generate`` call did. Times are wall-clock seconds."""

    num_requests: int
    num_completions: int
    prompt_tokens: int
    """Prompt tokens asked for, each prompt counted once per sample."""
    generated_tokens: int
    computed_tokens: int
    """Tokens that went through the model, recomputation after preemption included."""
    cached_tokens: int
    """Prompt tokens taken from shared pages instead of computed."""
    discarded_tokens: int
    """Tokens drawn ahead for sequences that had ended meanwhile, or under weights that changed."""
    num_steps: int
    replayed_steps: int
    """Steps that were replayed from a recorded CUDA graph."""
    recorded_graphs: int
    """CUDA graphs that were recorded meanwhile, one per padded size."""
    num_preemptions: int
    pages_saved: int
    """Pages of preempted sequences copied to host memory (see ``EngineConfig.cpu_offload_space``)."""
    pages_loaded: int
    """Pages copied back from there."""
    peak_pages: int
    num_pages: int
    cache_bytes: int
    derived_bytes: int
    """Bytes of derived weight copies (see ``EngineConfig.pack_weights``)."""
    truncated_fraction: float
    """Share of completions that a limit cut short."""
    weight_version: int
    seconds: float
    seconds_by_stage: Mapping[str, float]
    """Seconds spent on weights (noticing changes, deriving copies), planning, building, running, sampling,
    committing."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per wall-clock second."""
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields and ``tokens_per_second`` as a flat dict of plain numbers, for a logger."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "seconds_by_stage"}
        values["tokens_per_second"] = self.tokens_per_second
        values.update({f"seconds_{stage}": s for stage, s in self.seconds_by_stage.items()})
        return values
