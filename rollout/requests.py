"""From what the user gave (ids, text, chat messages) to checked requests and their sequences.

Everything that can be refused about one request is refused here, before it is queued.
"""

import zlib
from array import array
from collections import Counter
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

Repeats: TypeAlias = Counter[tuple[tuple[int, ...], int | None]]
"""Samples asked for so far per (prompt ids, seed)."""


def plain_prompt(prompt: Prompt) -> Prompt:
    """A copy in plain lists, which later changes of the caller's do not reach and which can be compared.

    What is no prompt at all is given back as it is: it will be refused where prompts are checked.
    """
    if isinstance(prompt, (Tensor, np.ndarray)):
        return cast(Prompt, prompt.tolist())
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return cast(Prompt, list(prompt)) if is_list else prompt


def is_token_ids(prompt: Prompt) -> bool:
    """Whether a plain prompt is a list of ids."""
    return isinstance(prompt, list) and all(isinstance(item, int) for item in prompt)


class RequestBuilder:
    """Checks prompts and parameters against one model and tokenizer.

    Example::

        builder = RequestBuilder(tokenizer, seed=0, rank=0)
        builder.renew(vocab_size=49152, position_limit=8192, eos_ids=frozenset({2}))
        request = builder.build("Hello", SamplingParams(n=4), "my-request")
        builder.accept(request)
        samples = builder.samples(request, num_groups=1)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, seed: int, rank: int) -> None:
        self._tokenizer = tokenizer
        self._seed, self._rank = seed, rank
        self._ordinal = 0
        self.vocab_size = self.position_limit = 0
        self.eos_ids: frozenset[int] = frozenset()

    def renew(self, *, vocab_size: int, position_limit: int, eos_ids: frozenset[int]) -> None:
        """Take over a model's facts, at first and whenever the model changes.

        An EOS id that the head cannot draw (a tokenizer larger than the model) ends nothing.
        """
        self.vocab_size, self.position_limit = vocab_size, position_limit
        self.eos_ids = frozenset(token for token in eos_ids if token < vocab_size)

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        repeats: Repeats | None = None,
    ) -> Request:
        """A checked request; it gets its number for good by :meth:`accept`.

        ``repeats`` counts the samples of equal prompts under equal seeds so far in a call: a repeat
        continues the sample indices, so that 4 equal prompts draw what one prompt with n=4 draws.

        Raises:
            TypeError: the prompt or the parameters have a wrong type.
            ValueError: the prompt is empty, too long or has ids outside the vocabulary, or the
                parameters name such ids or need a tokenizer that is not there.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params has type {type(params).__name__}; give a SamplingParams")
        ids = tuple(self.encode(prompt))
        self.check_prompt(ids)
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", params.logit_bias)
        if params.stop_strings and self._tokenizer is None:
            raise ValueError("stop_strings need a tokenizer: RolloutEngine(model, tokenizer=...)")
        first_index = 0
        if repeats is not None:
            first_index = repeats[ids, params.seed]
            repeats[ids, params.seed] += params.n
        return Request(
            request_id=f"request-{self._ordinal}" if request_id is None else request_id,
            ordinal=self._ordinal,
            prompt_ids=ids,
            params=params,
            eos_ids=frozenset() if params.ignore_eos else self.eos_ids,
            noise_key=self._noise_key(params, ids),
            first_index=first_index if params.seed is not None else 0,
        )

    def accept(self, request: Request) -> None:
        """Count a request that is queued: the next one gets the next number."""
        assert request.ordinal == self._ordinal
        self._ordinal += 1

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

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Refuse a prompt after which the model could draw nothing.

        Raises:
            ValueError: it is empty, too long, or has ids outside the vocabulary.
        """
        if not ids:
            raise ValueError("the prompt is empty; give at least one token (a BOS token, say)")
        if len(ids) >= self.position_limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the model {self.position_limit} positions; "
                "shorten the prompt so that at least one position is left"
            )
        self.check_ids("the prompt", ids)

    def check_ids(self, what: str, ids: Sequence[int] | Mapping[int, float]) -> None:
        """Refuse ids outside the vocabulary; ``what`` names them in the ValueError."""
        outside = [token for token in ids if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(
                f"{what} has ids {outside[:5]} outside the vocabulary; allowed: 0 to {self.vocab_size - 1}"
            )

    def _noise_key(self, params: SamplingParams, ids: Sequence[int]) -> tuple[int, int, int]:
        """A request's own seed and its prompt fix its noise: the same request draws the same, and
        different prompts under one seed draw independently. Without a seed of its own, the engine's
        seed, this rank and the request's number do. High word 0 keeps the two cases apart."""
        if params.seed is not None:
            return (params.seed, zlib.crc32(array("q", ids).tobytes()), 0)
        return (self._seed, self._ordinal & 0xFFFFFFFF, self._rank + 1)


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
