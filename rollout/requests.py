"""From what the user gave (ids, text, chat messages) to checked requests and their sequences.

Everything that can be refused about one request is refused here, before it is queued.
"""

import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rollout.sequence import Request
from rollout.sequence import Sequence as Sample
from rollout.text import StopTextFinder
from rollout.types import Completion, FinishReason, SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]] | Tensor
"""Token ids, text, or chat messages (the last two need a tokenizer)."""


class RequestBuilder:
    """Checks prompts and parameters against one model and tokenizer.

    Example::

        builder = RequestBuilder(tokenizer, vocab_size=49152, eos_ids=frozenset({2}),
                                 position_limit=8192, stream=(0, 0))
        request = builder.build("Hello", SamplingParams(n=4), "my-request")
        samples = builder.samples(request, num_groups=1)
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        position_limit: int,
        stream: tuple[int, int],
    ) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.position_limit = position_limit
        self._seed, self._rank = stream
        self._ordinal = 0

    def build(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Request:
        """A checked request.

        Raises:
            TypeError: the prompt or the parameters have a wrong type.
            ValueError: the prompt is empty, too long or has ids outside the vocabulary, or the
                parameters name such ids or need a tokenizer that is not there.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params has type {type(params).__name__}; give a SamplingParams")
        ids = self.encode(prompt)
        if not ids:
            raise ValueError("the prompt is empty; give at least one token (a BOS token, say)")
        if len(ids) >= self.position_limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the model {self.position_limit} positions; "
                "shorten the prompt so that at least one position is left"
            )
        self._check_ids("the prompt", ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        if params.stop_strings and self._tokenizer is None:
            raise ValueError("stop_strings need a tokenizer: RolloutEngine(model, tokenizer=...)")
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        return Request(
            request_id=f"request-{ordinal}" if request_id is None else request_id,
            ordinal=ordinal,
            prompt_ids=tuple(ids),
            params=params,
            eos_ids=frozenset() if params.ignore_eos else self.eos_ids,
            noise_key=self._noise_key(params, ids, ordinal),
        )

    def samples(self, request: Request, num_groups: int) -> list[Sample]:
        """The request's ``n`` sequences."""
        return [
            Sample(
                request=request,
                index=index,
                ids=list(request.prompt_ids),
                num_groups=num_groups,
                stop_text=self._stop_text(request),
            )
            for index in range(request.params.n)
        ]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt of any kind.

        Raises:
            TypeError: the prompt is of no kind.
            ValueError: it needs a tokenizer that is not there, or the tokenizer refuses it.
        """
        if isinstance(prompt, (Tensor, np.ndarray)):
            prompt = prompt.tolist()
        if isinstance(prompt, str):
            return self._encode_with_tokenizer("a text prompt", prompt)
        if not isinstance(prompt, Sequence):
            raise TypeError(
                f"prompt has type {type(prompt).__name__}; give a list of token ids, a str, or chat messages"
            )
        if prompt and all(isinstance(item, Mapping) for item in prompt):
            return self._encode_with_tokenizer("a chat prompt", list(prompt))
        for item in prompt:
            if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
                raise TypeError(f"a prompt of token ids holds {item!r}; all items must be whole numbers")
        return [int(item) for item in cast("Sequence[int]", prompt)]

    def _encode_with_tokenizer(self, what: str, content: Any) -> list[int]:
        if self._tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer: RolloutEngine(model, tokenizer=...)")
        try:
            if isinstance(content, str):
                return list(self._tokenizer(content)["input_ids"])
            return list(
                self._tokenizer.apply_chat_template(
                    content, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            )
        except Exception as error:  # templates raise what they like; the fault is this prompt's
            raise ValueError(f"the tokenizer refuses {what}: {type(error).__name__}: {error}") from error

    def _stop_text(self, request: Request) -> StopTextFinder | None:
        if not request.params.stop_strings or self._tokenizer is None:
            return None
        return StopTextFinder(self._tokenizer, request.params.stop_strings)

    def _check_ids(self, what: str, ids: Sequence[int] | Mapping[int, float]) -> None:
        outside = [token for token in ids if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(
                f"{what} has ids {outside[:5]} outside the vocabulary; allowed: 0 to {self.vocab_size - 1}"
            )

    def _noise_key(self, params: SamplingParams, ids: list[int], ordinal: int) -> tuple[int, int, int]:
        """A request's own seed and its prompt fix its noise: the same request draws the same, and
        different prompts under one seed draw independently. Without a seed of its own, the engine's
        seed, this rank and the request's number do. High word 0 keeps the two cases apart."""
        if params.seed is not None:
            return (params.seed, zlib.crc32(array("q", ids).tobytes()), 0)
        return (self._seed, ordinal & 0xFFFFFFFF, self._rank + 1)


def params_per_prompt(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise TypeError(f"prompts has type {type(prompts).__name__}; give a list with one entry per prompt")
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"{len(params)} params for {len(prompts)} prompts; give one, or one per prompt")
    for each in params:
        if not isinstance(each, SamplingParams):
            raise TypeError(f"params holds a {type(each).__name__}; give SamplingParams")
    return list(params)


def refused_completions(request_id: str, prompt: Prompt, n: int, error: Exception) -> list[Completion]:
    ids = prompt if isinstance(prompt, (list, tuple)) and all(isinstance(t, int) for t in prompt) else ()
    return [
        Completion(
            request_id=request_id,
            index=index,
            prompt_ids=tuple(ids),
            token_ids=(),
            logprobs=(),
            policy_logprobs=(),
            log_kept_mass=(),
            versions=(),
            finish_reason=FinishReason.ERROR,
            error=error,
        )
        for index in range(n)
    ]
