"""The manager: the engine's tokens through a thread, and no way for a waiter to hang.

Every wait of these tests has a limit, so that a hang is a failure and not a stuck run.
"""

import asyncio
import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from transformers.generation.continuous_batching.requests import RequestStatus

from rollout import RolloutEngine, SamplingParams
from rollout.manager import ContinuousBatchingManager
from rollout.types import DuplicateRequestError, FinishReason
from tiny_models import TINY_MODELS

SECONDS = 30.0
GREEDY = SamplingParams(temperature=0, max_new_tokens=6)


def make(defaults: SamplingParams = GREEDY, **settings: int) -> ContinuousBatchingManager:
    engine = RolloutEngine(TINY_MODELS["llama"](), config={"page_size": 4, **settings})
    return ContinuousBatchingManager(engine, defaults)


@pytest.fixture
def manager() -> Iterator[ContinuousBatchingManager]:
    made = make()
    made.start()
    yield made
    made.stop(hard_stop=True, timeout=SECONDS)
    assert not made.is_running()


def wait_until(condition: object) -> None:
    end = time.monotonic() + SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def test_results_are_the_engines(manager: ContinuousBatchingManager) -> None:
    prompts = [[5, 6, 7], [8, 9], [5, 6, 7, 10]]
    ids = manager.add_requests(prompts)
    outputs = [manager.get_result(request_id, timeout=SECONDS) for request_id in reversed(ids)][::-1]
    expected = RolloutEngine(TINY_MODELS["llama"]()).generate(prompts, GREEDY)
    for prompt, output, completion in zip(prompts, outputs, expected, strict=True):
        assert output is not None and output.is_finished() and output.error is None
        assert output.prompt_ids == prompt and output.generated_tokens == list(completion.token_ids)
        assert output.status is RequestStatus.FINISHED and len(output.logprobs) == 6
        assert output.created_time <= output.lifespan[0] <= output.lifespan[1]
        assert output.completion is not None and output.completion.finish_reason is FinishReason.LENGTH


def test_samples_are_children_as_in_transformers(manager: ContinuousBatchingManager) -> None:
    request_id = manager.add_request([5, 6], n=3, temperature=1.0, seed=4)
    ids = {manager.get_result(timeout=SECONDS).request_id for _ in range(3)}
    assert ids == {request_id, f"{request_id}__child#0", f"{request_id}__child#1"}
    assert manager.get_result(request_id, timeout=SECONDS) is None  # at once: nothing is expected of it


def test_iterating_ends_when_all_is_answered(manager: ContinuousBatchingManager) -> None:
    ids = manager.add_requests([[5, 6], [7]])
    assert sorted(output.request_id for output in manager) == ids
    assert list(manager) == [], "nothing was added since"


def test_streaming_shows_every_token_once_more(manager: ContinuousBatchingManager) -> None:
    request_id = manager.add_request([5, 6, 7], streaming=True, record_timestamps=True)
    outputs = list(manager.request_id_iter(request_id))
    lengths = [len(output.generated_tokens) for output in outputs]
    assert lengths[-1] == 6 and lengths == sorted(lengths) and len(lengths) >= 5
    final = outputs[-1]
    for output in outputs[:-1]:
        assert output.status is RequestStatus.DECODING
        assert output.generated_tokens == final.generated_tokens[: len(output.generated_tokens)]
    assert len(final.timestamps) == 6 and final.timestamps == sorted(final.timestamps)


def test_eos_ids_of_a_request(manager: ContinuousBatchingManager) -> None:
    first = manager.get_result(manager.add_request([5, 6, 7]), timeout=SECONDS).generated_tokens
    stop = first[2]
    request_id = manager.add_request([5, 6, 7], eos_token_id=[stop, 96])
    short = manager.get_result(request_id, timeout=SECONDS).generated_tokens
    assert short == first[: first.index(stop) + 1]
    endless = manager.add_request([5, 6, 7], eos_token_id=-1)
    assert manager.get_result(endless, timeout=SECONDS).generated_tokens == first


def test_a_bad_request_fails_alone(manager: ContinuousBatchingManager) -> None:
    good = manager.add_request([5, 6, 7])
    bad = manager.add_request([5, 10_000])
    output = manager.get_result(bad, timeout=SECONDS)
    assert output.status is RequestStatus.FAILED and "10000" in output.error
    assert manager.get_result(good, timeout=SECONDS).error is None
    with pytest.raises(TypeError, match="unknown parameters \\['top_q'\\]; known: frequency_penalty"):
        manager.add_request([5], top_q=1)
    with pytest.raises(ValueError, match="temperature=-1"):
        manager.add_request([5], temperature=-1)


def test_a_live_id_is_refused_and_an_answered_one_is_free() -> None:
    manager = make()
    manager.add_request([5, 6], request_id="mine")
    with pytest.raises(DuplicateRequestError, match="'mine' is unanswered"):
        manager.add_request([7], request_id="mine")
    manager.start()
    assert manager.get_result("mine", timeout=SECONDS).error is None
    manager.add_request([7], request_id="mine")
    assert manager.get_result("mine", timeout=SECONDS).prompt_ids == [7]
    manager.stop(timeout=SECONDS)


def test_cancelling_answers_with_what_there_is(manager: ContinuousBatchingManager) -> None:
    request_id = manager.add_request([5, 6, 7], max_new_tokens=200, streaming=True, eos_token_id=-1)
    stream = manager.request_id_iter(request_id)
    next(stream)
    manager.cancel_request(request_id)
    manager.cancel_request("nobody")
    last = list(stream)[-1]
    assert last.is_finished() and last.completion.finish_reason is FinishReason.CANCELLED
    assert 0 < len(last.generated_tokens) < 200


def test_stopping_finishes_what_is_there_and_takes_no_more(caplog: pytest.LogCaptureFixture) -> None:
    manager = make()
    ids = manager.add_requests([[5, i] for i in range(20)])
    manager.start()
    manager.stop(timeout=SECONDS)
    assert manager.add_request([5]) is None
    assert "the manager is stopping; request 'req_20' is not taken" in caplog.text
    assert all(manager.get_result(each, timeout=0).error is None for each in ids)
    assert manager.get_result(timeout=None) is None  # at once: the loop has ended
    manager.start()  # again
    assert manager.get_result(manager.add_request([5]), timeout=SECONDS).error is None
    manager.destroy()
    manager.destroy()
    with pytest.raises(RuntimeError, match="destroyed and cannot be started"):
        manager.start()


def test_a_hard_stop_fails_what_is_not_done() -> None:
    manager = make()
    manager.start()
    request_id = manager.add_request([5, 6], max_new_tokens=240, eos_token_id=-1, streaming=True)
    manager.get_result(request_id, timeout=SECONDS)
    manager.stop(hard_stop=True, timeout=SECONDS)
    last = list(manager.request_id_iter(request_id))[-1]
    assert last.status is RequestStatus.FAILED and "stopped before this request was done" in last.error
    manager.start()
    again = manager.add_request([5, 6], request_id=request_id)  # nothing of the old one is left
    assert len(manager.get_result(again, timeout=SECONDS).generated_tokens) == 6
    manager.stop(timeout=SECONDS)


def test_an_error_in_the_loop_reaches_every_waiter_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make()
    started = threading.Event()

    def explode(**_: object) -> None:
        started.wait(SECONDS)
        raise MemoryError("no more")

    monkeypatch.setattr(manager._engine, "step", explode)
    manager.start()
    ids = [manager.add_request([5, i]) for i in range(3)]
    found: queue.Queue[str | None] = queue.Queue()
    waiters = [
        threading.Thread(target=lambda each=each: found.put(manager.get_result(each).error), daemon=True)
        for each in ids
    ]
    for waiter in waiters:
        waiter.start()
    started.set()
    assert [found.get(timeout=SECONDS) for _ in ids] == ["no more"] * 3
    assert isinstance(manager.fatal_error, MemoryError)
    wait_until(lambda: not manager.is_running())
    assert manager.add_request([5]) is None
    with pytest.raises(RuntimeError, match="not running"), manager.pause():
        pass


def test_the_end_of_the_loop_wakes_who_waits_for_anything_or_for_a_pause() -> None:
    manager = make()
    manager.start()
    found: queue.Queue[object] = queue.Queue()

    def pause() -> None:
        try:
            with manager.pause():
                found.put("paused")
        except RuntimeError as error:
            found.put(str(error))

    waiter = threading.Thread(target=lambda: found.put(manager.get_result()), daemon=True)
    waiter.start()
    time.sleep(0.05)
    real = manager._loop.end

    def slowly() -> None:  # somebody wants a pause just when the loop ends
        threading.Thread(target=pause, daemon=True).start()
        time.sleep(0.1)
        real()

    wake = manager._desk.mail.wake

    def wake_and_linger() -> None:  # the thread is still alive when they look
        wake()
        time.sleep(0.5)

    manager._loop.end = slowly  # type: ignore[method-assign]
    manager._desk.mail.wake = wake_and_linger  # type: ignore[method-assign]
    manager.stop(timeout=SECONDS)
    answers = {found.get(timeout=SECONDS), found.get(timeout=SECONDS)}
    assert answers == {None, "the manager ended before it could pause"}


def test_the_trainer_steps_inside_a_pause(manager: ContinuousBatchingManager) -> None:
    model = manager._engine.model
    request_id = manager.add_request([5, 6, 7], max_new_tokens=60, eos_token_id=-1, streaming=True)
    manager.get_result(request_id, timeout=SECONDS)
    with manager.pause():
        model.train()
        loss = model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        seen = manager._engine.weight_version
        with pytest.raises(RuntimeError, match="leave the pause first"):
            manager.stop()
    last = list(manager.request_id_iter(request_id))[-1]
    assert last.error is None and len(last.generated_tokens) == 60
    assert set(last.completion.versions) == {seen, seen + 1}
    assert model.training and model.get_input_embeddings().weight.grad is not None


def test_several_threads_may_pause_at_once(manager: ContinuousBatchingManager) -> None:
    inside, leave = threading.Barrier(4), threading.Event()

    def hold() -> None:
        with manager.pause():
            inside.wait(SECONDS)
            leave.wait(SECONDS)

    threads = [threading.Thread(target=hold, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    inside.wait(SECONDS)
    request_id = manager.add_request([5])
    assert manager.get_result(request_id, timeout=0.2) is None  # held
    leave.set()
    assert manager.get_result(request_id, timeout=SECONDS).error is None
    for thread in threads:
        thread.join(SECONDS)


def test_a_full_queue_holds_the_caller_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.desk.QUEUE_SECONDS", 0.05)
    manager = make(max_queue_size=2)
    ids = [manager.add_request([5]), manager.add_request([6])]
    with pytest.raises(queue.Full, match="2 requests wait"):
        manager.add_request([7])
    manager.start()
    assert all(manager.get_result(each, timeout=SECONDS).error is None for each in ids)
    manager.stop(timeout=SECONDS)


def test_handlers_are_called_in_their_event_loop(manager: ContinuousBatchingManager) -> None:
    async def collect() -> list[int]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lengths: list[int] = []

        def handle(output: object) -> None:
            lengths.append(len(output.generated_tokens))  # type: ignore[attr-defined]
            if output.is_finished():  # type: ignore[attr-defined]
                done.set_result(None)

        request_id = manager.add_request([5, 6, 7], streaming=True)
        manager.register_result_handler(request_id, handle)  # some may have come already
        await asyncio.wait_for(done, SECONDS)
        return lengths

    lengths = asyncio.run(collect())
    assert lengths[-1] == 6 and lengths == sorted(lengths)


def test_the_loop_runs_under_the_starters_autocast() -> None:
    manager = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        manager.start()
        expected = RolloutEngine(TINY_MODELS["llama"]()).generate([[5, 6, 7]], GREEDY)[0]
    output = manager.get_result(manager.add_request([5, 6, 7]), timeout=SECONDS)
    manager.stop(timeout=SECONDS)
    assert output.completion.policy_logprobs == expected.policy_logprobs
    plain = RolloutEngine(TINY_MODELS["llama"]()).generate([[5, 6, 7]], GREEDY)[0]
    assert output.completion.policy_logprobs != plain.policy_logprobs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks are POSIX")
def test_a_forked_child_is_told(manager: ContinuousBatchingManager) -> None:
    child = os.fork()
    if child == 0:
        try:
            manager.get_result(timeout=0)
        except RuntimeError as error:
            os._exit(0 if "do not survive a fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_two_thousand_random_operations_from_eight_threads() -> None:
    manager = make(SamplingParams(max_new_tokens=8, ignore_eos=True), max_queue_size=64)
    manager.start()
    added: Counter[str] = Counter()  # samples that are to be answered
    refused = []
    lock = threading.Lock()
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        mine: list[str] = []  # with the children
        try:
            for number in range(250):
                action = rng.random()
                if action < 0.6:
                    # some prompts are empty, some have an id that the model does not know
                    prompt = [rng.choice([rng.randrange(97), 7, 5000]) for _ in range(rng.randint(0, 3))]
                    # some ids were used before, by this thread or another, and may be unanswered still
                    known = f"{rng.randrange(8)}-{rng.randrange(number + 1)}"
                    request_id = known if rng.random() < 0.2 else f"{seed}-{number}"
                    n = rng.choice([1, 1, 3])
                    try:
                        manager.add_request(
                            prompt,
                            request_id=request_id,
                            n=n,
                            max_new_tokens=rng.randint(1, 12),
                            streaming=rng.random() < 0.2,
                            temperature=rng.choice([0.7, 1]) if n > 1 else rng.choice([0, 0.7, 1]),
                        )
                    except DuplicateRequestError:
                        refused.append(request_id)
                    else:
                        mine += [request_id, *(f"{request_id}__child#{i}" for i in range(n - 1))]
                elif action < 0.8 and mine:
                    manager.cancel_request(rng.choice(mine))
                elif action < 0.9:
                    with manager.pause():
                        manager._engine.check()
                else:
                    time.sleep(rng.random() * 0.002)
        except BaseException as error:
            faults.append(error)
        with lock:
            added.update(mine)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults and not any(thread.is_alive() for thread in threads)
    manager.stop(timeout=60)
    answers: Counter[str] = Counter()
    failed = 0
    while (output := manager.get_result(timeout=0)) is not None:
        if output.is_finished():
            answers[output.request_id] += 1
            failed += output.error is not None
    assert answers == added and answers.total() > 1000
    assert failed > 100 and refused, "the faults that were meant did not happen"
    assert not any(thread.name == "rollout-manager" for thread in threading.enumerate())
    manager._engine.check()
