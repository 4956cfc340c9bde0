"""A request of a manager, from the moment it was added until all its samples are answered."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from rollout.outputs import GenerationOutput, RequestStatus, status_of
from rollout.requests import Prompt, plain_prompt
from rollout.results import Progress
from rollout.turns import ToldRequest
from rollout.types import Completion, SamplingParams


class Ticket:
    """What was asked, how it is to be delivered, and the outputs made of what the engine gives.

    Example::

        ticket = Ticket("req_0", [1, 2, 3], SamplingParams(n=2), streaming=False, is_timed=False)
        ticket.ids                      # ("req_0", "req_0__child#0")
        ticket.failed(error)            # two outputs
    """

    def __init__(
        self, request_id: str, prompt: Prompt, params: SamplingParams, streaming: bool, is_timed: bool
    ) -> None:
        self.request_id, self.prompt, self.params = request_id, plain_prompt(prompt), params
        self.streaming, self.is_timed = streaming, is_timed
        # sample 0 has the request's own id, the others are its children
        self.ids = (request_id, *(f"{request_id}__child#{i}" for i in range(params.n - 1)))
        self.prompt_ids: list[int] = []
        """The prompt's tokens, once they are known."""
        self.has_started = False
        self._lifespan = (-1.0, -1.0)
        self._created = time.perf_counter()
        self._times: list[list[float]] = [[] for _ in range(params.n)]  # of each sample's tokens
        self._seen: dict[int, Progress] = {}  # of each running sample, after the last step

    @property
    def is_watched(self) -> bool:
        """Whether it wants to see what its samples have after each step."""
        return self.streaming or self.is_timed or not self.has_started

    def index_of(self, sample_id: str) -> int:
        """Number of the sample of this id."""
        return self.ids.index(sample_id)

    def told(self) -> ToldRequest:
        """What other ranks are told of it."""
        return ToldRequest.of(
            self.request_id, self.prompt, self.params, streaming=self.streaming, is_timed=self.is_timed
        )

    def observed(self, samples: Sequence[Progress], began: float, ended: float) -> list[GenerationOutput]:
        """Note what the running samples have after a step; the outputs that are to be streamed."""
        self._start(began)
        outputs = []
        for progress in samples:
            before = self._seen.get(progress.index)
            self._seen[progress.index] = progress
            new = len(progress.token_ids) - (0 if before is None else len(before.token_ids))
            if new <= 0:
                continue
            self._times[progress.index] += [ended] * new
            if self.streaming:
                outputs.append(
                    self._output(
                        progress.index,
                        generated_tokens=list(progress.token_ids),
                        logprobs=list(self._logprobs(progress)),
                        status=RequestStatus.DECODING,
                    )
                )
        return outputs

    def ended(self, completion: Completion, began: float, ended: float) -> GenerationOutput:
        """The last output of a sample, whose last step ``began`` and ``ended`` then."""
        self._start(began)
        times = self._times[completion.index]
        times += [ended] * (len(completion.token_ids) - len(times))
        self._lifespan = (self._lifespan[0], ended)
        return self._output(
            completion.index,
            prompt_ids=list(completion.prompt_ids),
            generated_tokens=list(completion.token_ids),
            logprobs=list(self._logprobs(completion)),
            status=status_of(completion),
            error=None if completion.error is None else described(completion.error),
            completion=completion,
        )

    def failed(self, error: BaseException, indices: Iterable[int] | None = None) -> list[GenerationOutput]:
        """The last outputs of these samples, or of all, that will not come to their end."""
        chosen = range(self.params.n) if indices is None else indices
        self._lifespan = (self._lifespan[0], time.perf_counter())
        outputs = []
        for index in chosen:
            seen = self._seen.get(index)
            tokens = [] if seen is None else list(seen.token_ids)
            logprobs = [] if seen is None else list(self._logprobs(seen))
            outputs.append(
                self._output(
                    index,
                    generated_tokens=tokens,
                    logprobs=logprobs,
                    status=RequestStatus.FAILED,
                    error=described(error),
                )
            )
        return outputs

    def _start(self, began: float) -> None:
        if not self.has_started:
            self.has_started, self._lifespan = True, (began, -1.0)

    def _logprobs(self, sample: Progress | Completion) -> Sequence[float]:
        # of a greedy row the distribution that was sampled has one token, at log-probability 0
        return sample.policy_logprobs if self.params.is_greedy else sample.logprobs

    def _output(self, index: int, **values: Any) -> GenerationOutput:
        return GenerationOutput(
            request_id=self.ids[index],
            created_time=self._created,
            lifespan=self._lifespan,
            timestamps=list(self._times[index]) if self.is_timed else None,
            **({"prompt_ids": list(self.prompt_ids)} | values),
        )


def described(error: BaseException) -> str:
    """What an output says of an error: its text, or its type where it has none."""
    return str(error) or type(error).__name__
