"""transformers' ``GenerationConfig`` as :class:`~rollout.types.SamplingParams`.

Every field is honoured, or has no effect on the tokens here, or is refused by its name when it is set.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from rollout.types import SamplingParams

HONOURED = frozenset(
    {
        "max_new_tokens",
        "max_length",
        "min_new_tokens",
        "min_length",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "eos_token_id",
        "stop_strings",
        "num_return_sequences",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "bad_words_ids",
        "no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_eos_token_id",
    }
)
NO_EFFECT = frozenset(
    {
        # where and how transformers computes
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "compile_config",
        "disable_compile",
        "low_memory",
        "prefill_chunk_size",
        "continuous_batching_config",
        # ids that only padding or other kinds of models need
        "pad_token_id",
        "bos_token_id",
        "decoder_start_token_id",
        # of beam search and assisted generation, each of which is refused by the field that asks for it
        "early_stopping",
        "length_penalty",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "max_matching_ngram_size",
        "assistant_lookbehind",
        "target_lookbehind",
        "renormalize_logits",  # a draw is normalized anyway
        "transformers_version",
    }
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "guidance_scale": (1, 1.0),
    "typical_p": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "encoder_repetition_penalty": (1, 1.0),
    "encoder_no_repeat_ngram_size": (0,),
    "diversity_penalty": (0, 0.0),
    "penalty_alpha": (0, 0.0),
}
"""Values that ask for nothing; ``None`` and ``False`` do so for every field."""


def params_from(
    config: GenerationConfig,
    *,
    prompt_len: int,
    position_limit: int,
    device: torch.device,
    max_new_tokens: int | None = None,
) -> SamplingParams:
    """How a prompt of ``prompt_len`` tokens is sampled under a generation config.

    ``do_sample`` unset or False means greedy, as there. Without any length the request goes on to its
    EOS or to ``position_limit``. ``max_new_tokens`` goes before the config's.

    Raises:
        ValueError: the config asks for something that is not offered, or the prompt has ``max_length``
            tokens already.
    """
    refuse_others(config)
    room = position_limit - prompt_len
    longest = config.max_new_tokens if max_new_tokens is None else max_new_tokens
    if longest is None:
        longest = max(1, room) if config.max_length is None else config.max_length - prompt_len
        if config.max_length is not None and longest < 1:
            raise ValueError(
                f"the prompt has {prompt_len} tokens and max_length={config.max_length} leaves none to "
                "generate; raise max_length or set max_new_tokens"
            )
    eos = _as_list(config.eos_token_id)
    endings = tuple(token for token in eos if token >= 0)  # negative ones mean none, as there
    is_greedy = not config.do_sample
    return SamplingParams(
        max_new_tokens=longest,
        min_new_tokens=config.min_new_tokens or max(0, (config.min_length or 0) - prompt_len),
        temperature=0.0 if is_greedy else _or(config.temperature, 1.0),
        top_k=None if is_greedy else config.top_k,
        top_p=1.0 if is_greedy else _or(config.top_p, 1.0),
        min_p=0.0 if is_greedy else _or(config.min_p, 0.0),
        repetition_penalty=_or(config.repetition_penalty, 1.0),
        logit_bias={token: float("-inf") for token in config.suppress_tokens or ()},
        ignore_eos=bool(eos),
        stop_token_ids=endings,
        stop_strings=tuple(_as_list(config.stop_strings)),
        n=_or(config.num_return_sequences, 1),
        logits_processors=tuple(_processors(config, endings, prompt_len, longest, device)),
    )


def refuse_others(config: GenerationConfig) -> None:
    """Raises ValueError when the config asks for something that is not offered; every field is named."""
    refused = []
    for name, value in sorted(config.to_dict().items()):
        if name in HONOURED or name in NO_EFFECT or name.startswith("_"):
            continue
        if value is None or value is False or value in NEUTRAL.get(name, ()):
            continue
        refused.append(f"{name}={value!r}")
    if refused:
        raise ValueError(f"the generation config asks for what is not offered here: {', '.join(refused)}")
    if config.sequence_bias is not None and _or(config.repetition_penalty, 1.0) != 1.0:
        raise ValueError(
            "sequence_bias comes before repetition_penalty in transformers and after it here; set one of them"
        )
    if config.exponential_decay_length_penalty is not None and not [
        token for token in _as_list(config.eos_token_id) if token >= 0
    ]:
        raise ValueError("exponential_decay_length_penalty raises the EOS token; set eos_token_id")


def _processors(
    config: GenerationConfig, eos: Sequence[int], prompt_len: int, longest: int, device: torch.device
) -> list[Callable[..., Any]]:
    """transformers' own, for what they know and we have no field for."""
    found: list[Callable[..., Any]] = []
    if config.sequence_bias is not None:
        found.append(SequenceBiasLogitsProcessor(config.sequence_bias))
    if config.no_repeat_ngram_size:
        found.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.bad_words_ids is not None:
        found.append(NoBadWordsLogitsProcessor(config.bad_words_ids, list(eos) or None))
    if config.exponential_decay_length_penalty is not None:
        found.append(
            ExponentialDecayLengthPenalty(
                config.exponential_decay_length_penalty, torch.tensor(eos, device=device), prompt_len
            )
        )
    if config.forced_eos_token_id is not None:
        found.append(
            ForcedEOSTokenLogitsProcessor(
                prompt_len + longest, _as_list(config.forced_eos_token_id), str(device)
            )
        )
    if config.begin_suppress_tokens is not None:
        found.append(
            SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, prompt_len, str(device))
        )
    return found


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
