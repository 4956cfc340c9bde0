"""Every request is answered once, by what it asked for: races made certain, and the edges of each call."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching.requests import RequestStatus

from rollout import RolloutEngine, SamplingParams
from rollout.manager import ContinuousBatchingManager
from rollout.types import DuplicateRequestError, FinishReason
from tiny_models import TINY_MODELS
from tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

SECONDS = 30.0
GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)


def make(**settings: Any) -> ContinuousBatchingManager:
    engine = RolloutEngine(TINY_MODELS["llama"](), config={"page_size": 4, **settings})
    return ContinuousBatchingManager(engine, GREEDY)


@pytest.fixture
def manager() -> Iterator[ContinuousBatchingManager]:
    made = make()
    made.start()
    yield made
    made.stop(hard_stop=True, timeout=SECONDS)
    assert not made.is_running()


def in_thread(work: Any) -> "queue.Queue[Any]":
    """What ``work()`` gives, once it does."""
    found: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=lambda: found.put(work()), daemon=True).start()
    return found


# ---- nobody is forgotten


@pytest.mark.parametrize("prompt", [5, None, [], ["a"], [5.5], {"role": "user"}], ids=str)
def test_what_is_no_prompt_fails_alone(manager: ContinuousBatchingManager, prompt: Any) -> None:
    good = manager.add_request([5, 6])
    bad = manager.add_request(prompt)
    assert manager.get_result(good, timeout=SECONDS).error is None
    failed = manager.get_result(bad, timeout=SECONDS)
    assert failed.status is RequestStatus.FAILED and failed.error and failed.lifespan[1] > 0
    with manager.pause():
        pass
    assert manager.get_result(manager.add_request([7]), timeout=SECONDS).error is None


def test_an_error_in_ending_the_loop_leaves_no_waiter(
    monkeypatch: pytest.MonkeyPatch, manager: ContinuousBatchingManager
) -> None:
    def broken() -> list[Any]:
        raise OSError("broken")

    monkeypatch.setattr(manager.engine, "take_finished", broken)  # the step and the end both call it
    waiting = in_thread(lambda: manager.get_result(manager.add_request([5])))
    assert waiting.get(timeout=SECONDS).error == "broken"
    assert in_thread(manager.get_result).get(timeout=SECONDS) is None
    monkeypatch.undo()


def test_no_waiter_looks_between_the_end_of_a_request_and_its_delivery(
    manager: ContinuousBatchingManager,
) -> None:
    deliver = manager._desk.mail.deliver

    def late(*arguments: Any) -> None:
        time.sleep(0.05)
        deliver(*arguments)

    manager._desk.mail.deliver = late  # type: ignore[method-assign]
    ids = manager.add_requests([[5, i] for i in range(4)])
    waiting = [in_thread(lambda each=each: manager.get_result(each)) for each in ids]
    assert [found.get(timeout=SECONDS).request_id for found in waiting] == ids
    assert len(list(manager.add_requests([[6, i] for i in range(4)]))) == len(list(manager))


def test_a_request_that_comes_with_a_stop_is_finished(manager: ContinuousBatchingManager) -> None:
    apply, late = manager._loop._apply, []

    def and_then(*arguments: Any) -> None:  # commands are taken; the loop has not decided anything yet
        if not late:
            late.append(manager.add_request([5, 6]))
            manager.stop(block=False)
        apply(*arguments)

    manager._loop._apply = and_then  # type: ignore[method-assign]
    manager.cancel_request("unknown")  # wakes the loop
    wait_for = time.monotonic() + SECONDS
    while not late and time.monotonic() < wait_for:
        time.sleep(0.001)
    assert manager.get_result(late[0], timeout=SECONDS).status is RequestStatus.FINISHED


def test_two_threads_that_wait_for_a_place_cannot_add_the_same_id() -> None:
    manager = make(max_queue_size=1)
    manager.add_request([5])

    def add() -> Any:
        try:
            return manager.add_request([6], request_id="x")
        except DuplicateRequestError as error:
            return error

    waiting = [in_thread(add), in_thread(add)]
    time.sleep(0.05)
    manager.start()
    found = [each.get(timeout=SECONDS) for each in waiting]
    assert sorted(type(each).__name__ for each in found) == ["DuplicateRequestError", "str"]
    assert manager.get_result("x", timeout=SECONDS).error is None
    manager.stop(timeout=SECONDS)


def test_a_loop_that_is_just_ending_is_waited_for_and_started_again(
    manager: ContinuousBatchingManager,
) -> None:
    wake = manager._desk.mail.wake

    def linger() -> None:
        wake()
        time.sleep(0.3)

    manager._desk.mail.wake = linger  # type: ignore[method-assign]
    waiting = in_thread(manager.get_result)
    manager.stop(block=False)
    assert waiting.get(timeout=SECONDS) is None and manager.is_running()
    manager.start()
    assert manager.get_result(manager.add_request([5]), timeout=SECONDS).error is None


def test_a_manager_that_never_ran_answers_when_it_is_destroyed() -> None:
    manager = make()
    request_id = manager.add_request([5])
    assert list(manager) == [], "no loop runs"
    manager.destroy()
    assert "destroyed" in manager.get_result(request_id, timeout=SECONDS).error
    assert manager.add_request([5]) is None
    with pytest.raises(RuntimeError, match="was destroyed"):
        next(manager.run_here())


def test_waits_inside_ones_own_pause_are_refused(manager: ContinuousBatchingManager) -> None:
    done = manager.add_request([5])
    manager._desk.mail.take(None, SECONDS, lambda: True)  # it is answered
    with manager.pause():
        request_id = manager.add_request([6])
        for wait in (lambda: manager.get_result(request_id), manager.join, manager.stop, manager.start):
            with pytest.raises(RuntimeError, match=r"inside pause\(\) would wait for ever"):
                wait()
        assert manager.get_result(done) is None and manager.get_result(request_id, timeout=0.01) is None
        manager.stop(block=False)
    assert manager.get_result(request_id, timeout=SECONDS).error is None


# ---- cancelling


def test_a_cancellation_is_of_the_request_that_was_there() -> None:
    manager = make()
    manager.cancel_request("x")
    manager.add_request([5], request_id="x")
    manager.start()
    output = manager.get_result("x", timeout=SECONDS)
    assert output.completion.finish_reason is FinishReason.LENGTH
    manager.stop(timeout=SECONDS)


def test_a_childs_id_cancels_that_sample_alone(manager: ContinuousBatchingManager) -> None:
    parent = manager.add_request([5, 6], n=3, temperature=1.0, max_new_tokens=40, streaming=True)
    assert manager.get_result(parent, timeout=SECONDS) is not None
    manager.cancel_request(f"{parent}__child#1")
    ends = {output.request_id: output for output in manager if output.is_finished()}
    reasons = {name.removeprefix(parent): output.completion.finish_reason for name, output in ends.items()}
    assert reasons["__child#1"] is FinishReason.CANCELLED
    assert reasons[""] is reasons["__child#0"] is FinishReason.LENGTH


# ---- what is asked and what is told


def test_prompts_may_be_tensors_and_are_copied() -> None:
    manager = make()
    buffer = [5, 6, 7]
    ids = [
        manager.add_request(buffer),
        *manager.add_requests([torch.tensor([5, 6, 7]), torch.tensor([5, 6])]),
    ]
    buffer[:] = [9]
    manager.start()
    prompts = [manager.get_result(each, timeout=SECONDS).prompt_ids for each in ids]
    assert prompts == [[5, 6, 7], [5, 6, 7], [5, 6]]
    manager.stop(timeout=SECONDS)


def test_streamed_outputs_of_text_know_their_tokens() -> None:
    tokenizer = tiny_tokenizer()
    engine = RolloutEngine(TINY_MODELS["llama"](vocab_size=VOCAB_SIZE), tokenizer)
    manager = ContinuousBatchingManager(engine, GREEDY)
    manager.start()
    request_id = manager.add_request("abc", streaming=True)
    outputs = list(manager.request_id_iter(request_id))
    assert len(outputs) > 1 and all(o.prompt_ids == engine.encode("abc") for o in outputs)
    manager.stop(timeout=SECONDS)


def test_prompts_are_queued_sorted_and_ids_keep_their_order() -> None:
    manager = make()
    ids = manager.add_requests([[5], [9, 1], [5, 6], [9]])
    assert ids == ["req_0", "req_1", "req_2", "req_3"]
    tickets, _ = manager._desk.take()
    assert [ticket.prompt for ticket in tickets] == [[9, 1], [9], [5, 6], [5]]


def test_ids_that_are_made_avoid_ids_that_were_given(manager: ContinuousBatchingManager) -> None:
    with manager.pause():
        manager.add_request([5], request_id="req_0")
        assert manager.add_request([6]) == "req_1"
        assert manager.add_requests([[6], [7]]) == ["req_2", "req_3"]
    assert len(list(manager)) == 4


def test_add_requests_queues_nothing_when_it_refuses(manager: ContinuousBatchingManager) -> None:
    with pytest.raises(ValueError, match="temperature"):
        manager.add_requests([[5], [6]], temperature=-1)
    with pytest.raises(TypeError, match="unknown parameters \\['heat'\\]"):
        manager.add_request([5], heat=1)
    assert manager._desk.unanswered == []


def test_greedy_logprobs_are_the_policys_as_in_transformers(manager: ContinuousBatchingManager) -> None:
    output = manager.get_result(manager.add_request([5, 6]), timeout=SECONDS)
    assert output.logprobs == list(output.completion.policy_logprobs) and max(output.logprobs) < 0
    drawn = manager.get_result(manager.add_request([5, 6], temperature=0.7, top_k=3), timeout=SECONDS)
    assert drawn.logprobs == list(drawn.completion.logprobs) != list(drawn.completion.policy_logprobs)


def test_a_request_that_fails_on_its_way_keeps_what_it_has(manager: ContinuousBatchingManager) -> None:
    request_id = manager.add_request([5, 6], max_new_tokens=240, record_timestamps=True)
    while not any(manager.engine.progress({request_id}).values()):
        time.sleep(0.001)
    manager.stop(hard_stop=True, timeout=SECONDS)
    output = manager.get_result(request_id)
    assert output.status is RequestStatus.FAILED and output.prompt_ids == [5, 6]
    assert 0 < len(output.generated_tokens) == len(output.logprobs) == len(output.timestamps) < 240
    assert output.created_time <= output.lifespan[0] < output.lifespan[1]


def test_the_lifespan_begins_before_the_first_step(manager: ContinuousBatchingManager) -> None:
    output = manager.get_result(manager.add_request([5, 6], max_new_tokens=1), timeout=SECONDS)
    assert output.lifespan[1] - output.lifespan[0] > 0


def test_an_error_without_a_text_is_named(
    monkeypatch: pytest.MonkeyPatch, manager: ContinuousBatchingManager
) -> None:
    def explode(**_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(manager.engine, "step", explode)
    assert manager.get_result(manager.add_request([5]), timeout=SECONDS).error == "MemoryError"


def test_a_handler_whose_event_loop_is_closed_leaves_the_output_to_others(
    manager: ContinuousBatchingManager,
) -> None:
    async def register() -> None:
        manager.register_result_handler("x", lambda output: None)

    asyncio.run(register())
    manager.add_request([5], request_id="x")
    assert manager.get_result("x", timeout=SECONDS).error is None


# ---- the engine behind it


@pytest.mark.parametrize("fused", [False, True])
def test_whatever_is_written_in_a_pause_is_noticed(manager: ContinuousBatchingManager, fused: bool) -> None:
    """A fused optimizer and ``.data`` count no writes."""
    parameters = list(manager.engine.model.parameters())
    request_id = manager.add_request([5, 6, 7], max_new_tokens=80, streaming=True)
    manager.get_result(request_id, timeout=SECONDS)
    with manager.pause():
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW(parameters, lr=0.1, fused=fused).step()
    *_, last = manager.request_id_iter(request_id)
    assert set(last.completion.versions) == {0, 1}
    with manager.pause():
        parameters[0].data.mul_(1.5)
    assert manager.get_result(manager.add_request([5]), timeout=SECONDS).completion.versions[0] == 2


def test_memory_goes_back_when_the_loop_ends_unless_it_is_kept() -> None:
    manager = make()
    for keep, block in ((False, True), (True, True), (False, False)):
        manager.start()
        manager.get_result(manager.add_request([5]), timeout=SECONDS)
        manager.stop(block=block, keep_for_next_session=keep, timeout=SECONDS)
        manager.join(SECONDS)
        assert (manager.engine.cache_bytes > 0) is keep
    manager.start()
    manager.get_result(manager.add_request([5]), timeout=SECONDS)
    manager.stop(keep_for_next_session=True, timeout=SECONDS)
    assert manager.engine.cache_bytes > 0
    manager.destroy()
    assert manager.engine.cache_bytes == 0


def test_the_loops_thread_takes_over_inference_mode_and_hinders_no_exit() -> None:
    modes = []
    manager = make()
    manager.engine.add_refresh_hook(lambda version: modes.append(torch.is_inference_mode_enabled()))
    step = manager.engine.step
    manager.engine.step = lambda **_: modes.append(torch.is_inference_mode_enabled()) or step()  # type: ignore
    with torch.inference_mode():
        manager.start()
    assert manager._thread is not None and manager._thread.daemon
    manager.get_result(manager.add_request([5], max_new_tokens=1), timeout=SECONDS)
    manager.stop(timeout=SECONDS)
    assert modes == [True]


def test_progress_is_of_running_samples() -> None:
    engine = RolloutEngine(TINY_MODELS["llama"](), config={"max_requests_per_batch": 1})
    ids = [engine.add_request([5, i], GREEDY) for i in range(3)]
    engine.step()
    assert list(engine.progress(set(ids))) == ids[:1]


def test_a_warmup_beside_the_loop_is_under_its_autocast() -> None:
    engine = RolloutEngine(TINY_MODELS["llama"](), config={"varlen_compile_config": {"backend": "eager"}})
    manager = ContinuousBatchingManager(engine, GREEDY)
    with torch.autocast("cpu", torch.bfloat16):
        manager.start()
    request_id = manager.add_request([5, 6], max_new_tokens=60, streaming=True)
    manager.get_result(request_id, timeout=SECONDS)
    manager.warmup(num_requests=2, num_tokens=16)
    *_, last = manager.request_id_iter(request_id)
    assert len(set(last.completion.versions)) == 1, "a warmup changes no weights"
    manager.stop(timeout=SECONDS)
