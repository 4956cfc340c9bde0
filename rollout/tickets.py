"""A request of a manager, from the moment it was added until all its samples are answered."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from rollout.outputs import GenerationOutput, RequestStatus, status_of
from rollout.requests import Prompt
from rollout.results import Progress
from rollout.turns import ToldRequest
from rollout.types import Completion, SamplingParams


class Ticket:
    """What was asked, how it is to be delivered, and the outputs made of what the engine gives.

    Example::

        ticket = Ticket("req_0", [1, 2, 3], SamplingParams(n=2), streaming=False, is_timed=False)
        ticket.id_of(1)                 # "req_0__child#0"
        ticket.failed(error)            # two outputs
    """

    def __init__(
        self, request_id: str, prompt: Prompt, params: SamplingParams, streaming: bool, is_timed: bool
    ) -> None:
        self.request_id, self.prompt, self.params = request_id, prompt, params
        self.streaming, self.is_timed = streaming, is_timed
        self.unanswered = params.n
        self.started = -1.0
        self._created = time.perf_counter()
        self._times: list[list[float]] = [[] for _ in range(params.n)]  # of each sample's tokens
        self._shown: dict[int, int] = {}  # tokens of each sample that were seen

    def id_of(self, index: int) -> str:
        """Sample 0 has the request's own id, the others are its children."""
        return self.request_id if index == 0 else f"{self.request_id}__child#{index - 1}"

    def told(self) -> ToldRequest:
        """What other ranks are told of it."""
        return ToldRequest.of(
            self.request_id, self.prompt, self.params, streaming=self.streaming, is_timed=self.is_timed
        )

    def observed(self, samples: Sequence[Progress], now: float) -> list[GenerationOutput]:
        """Note the tokens that the running samples got in a step; what is to be streamed of them."""
        outputs = []
        for progress in samples:
            if self.started < 0 and progress.is_running:
                self.started = now
            new = len(progress.token_ids) - self._shown.get(progress.index, 0)
            if new <= 0:
                continue
            self._shown[progress.index] = len(progress.token_ids)
            self._times[progress.index] += [now] * new
            if self.streaming:
                outputs.append(
                    self._output(
                        progress.index,
                        generated_tokens=list(progress.token_ids),
                        logprobs=list(progress.logprobs),
                        status=RequestStatus.DECODING,
                    )
                )
        return outputs

    def ended(self, completion: Completion, now: float) -> GenerationOutput:
        """The last output of a sample."""
        if self.started < 0:
            self.started = now
        times = self._times[completion.index]
        times += [now] * (len(completion.token_ids) - len(times))
        output = self._output(
            completion.index,
            prompt_ids=list(completion.prompt_ids),
            generated_tokens=list(completion.token_ids),
            logprobs=list(completion.logprobs),
            status=status_of(completion),
            error=None if completion.error is None else str(completion.error),
            completion=completion,
        )
        output.lifespan = (self.started, now)
        return output

    def failed(self, error: BaseException, indices: Iterable[int] | None = None) -> list[GenerationOutput]:
        """The last outputs of these samples, or of all, where none of them came to an end."""
        chosen = range(self.params.n) if indices is None else indices
        return [self._output(index, status=RequestStatus.FAILED, error=str(error)) for index in chosen]

    def _output(self, index: int, **values: Any) -> GenerationOutput:
        is_ids = not isinstance(self.prompt, str) and all(isinstance(item, int) for item in self.prompt)
        known: dict[str, Any] = {"prompt_ids": list(self.prompt)} if is_ids else {}
        return GenerationOutput(
            request_id=self.id_of(index),
            created_time=self._created,
            lifespan=(self.started, -1),
            timestamps=list(self._times[index]) if self.is_timed else None,
            **(known | values),
        )
