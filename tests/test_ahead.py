"""Steps launched before the results of the one before are read: the same results, and clean books.

A CPU runs each step when it is launched, so nothing overlaps here; what is tested is everything else: the
order of plans, tokens that only the device knows, sequences that end unforeseen, and changes in between.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout.ahead
import rollout.stepper
from fake_graphs import FakeGraphs, serve_graphs
from oracle import assert_greedy, oracle_greedy
from rollout import Completion, RolloutEngine, SamplingParams
from rollout.ahead import UNKNOWN_ID
from tiny_models import TINY_MODELS

SMALL = {"q_padding_interval_size": 4, "kv_padding_interval_size": 16, "page_size": 4}
AHEAD = {"use_cuda_graph": True, "use_async_batching": True} | SMALL
PROMPTS = [[5], [3, 1, 4, 1, 5], list(range(17)), list(range(40, 70)), [9, 9], [7, 8, 9, 10]]


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    return serve_graphs(monkeypatch)


def make(name: str = "llama", *, model: dict[str, Any] | None = None, **settings: Any) -> RolloutEngine:
    return RolloutEngine(TINY_MODELS[name](**(model or {})), config=AHEAD | settings)


def plain(model: dict[str, Any] | None = None, name: str = "llama", **settings: Any) -> RolloutEngine:
    """The slow twin: nothing is recorded and steps follow each other."""
    config = {"use_cuda_graph": False, "page_size": 4} | settings
    return RolloutEngine(TINY_MODELS[name](**(model or {})), config=config)


def assert_same(ahead: Iterable[Completion], one_by_one: Iterable[Completion]) -> None:
    """All that must not depend on when results are read; numbers to what other batch shapes change."""
    for one, other in zip(ahead, one_by_one, strict=True):
        assert (one.prompt_ids, one.token_ids) == (other.prompt_ids, other.token_ids)
        assert (one.finish_reason, one.stop_match) == (other.finish_reason, other.stop_match)
        assert one.versions == other.versions
        for numbers in ("logprobs", "policy_logprobs", "log_kept_mass"):
            assert getattr(one, numbers) == pytest.approx(getattr(other, numbers), abs=2e-4)


def mixed(n: int = 2, lengths: Callable[[int], int] = lambda i: 6 + 3 * i) -> list[SamplingParams]:
    knobs: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "min_new_tokens": 4},
        {"temperature": 0.9, "logit_bias": {3: 2.0}},
    ]
    return [SamplingParams(max_new_tokens=lengths(i), n=n, seed=i, **each) for i, each in enumerate(knobs)]


# --- the same results ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_wide", "mistral", "gemma3", "gpt_oss"])
def test_results_are_those_of_steps_that_follow_each_other(name: str) -> None:
    """Ending ids that are drawn often, so that sequences end where nobody could foresee it."""
    model = {"eos_token_id": [5, 17, 40, 71]}
    params = mixed(lengths=lambda i: 30)
    ahead = make(name, model=model)
    batch = ahead.generate(PROMPTS, params)
    ahead.check()
    twin = plain(model, name).generate(PROMPTS, params)
    assert_same(batch, twin)
    assert "eos" in {c.finish_reason for c in batch} and batch.metrics.discarded_tokens > 0
    assert twin.metrics.discarded_tokens == 0
    computed, drawn = batch.metrics.computed_tokens, batch.metrics.discarded_tokens
    assert computed == twin.metrics.computed_tokens + drawn


@pytest.mark.parametrize(
    "tight",
    [
        {"num_blocks": 20},
        {"num_blocks": 20, "scheduler_type": "prefill_first"},
        {"max_requests_per_batch": 3},
        {"max_batch_tokens": 7},
        {"allow_block_sharing": False},
    ],
    ids=str,
)
def test_tight_settings_change_nothing(tight: dict[str, Any]) -> None:
    model = {"eos_token_id": [5, 17, 40, 71]}
    params = mixed(lengths=lambda i: 14 + i)
    engine = make(model=model, **tight)
    batch = engine.generate(PROMPTS, params)
    engine.check()
    assert_same(batch, plain(model).generate(PROMPTS, params))


def test_an_end_that_can_be_foreseen_costs_nothing() -> None:
    engine = make()
    batch = engine.generate(PROMPTS, mixed())
    assert {c.finish_reason for c in batch} == {"length"}
    assert batch.metrics.discarded_tokens == 0 and engine._stepper.flight is None
    engine = make(model={"max_position_embeddings": 36})
    batch = engine.generate(PROMPTS, SamplingParams(max_new_tokens=50, temperature=0))
    assert {c.finish_reason for c in batch} == {"max_position"}
    assert batch.metrics.discarded_tokens == 0


def test_alone_in_a_full_cache_it_ends_as_it_would_have() -> None:
    """Planned ahead, the last token's successor has no page; that must not end it before its EOS is seen."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    tokens = oracle_greedy(TINY_MODELS["llama"](), prompt, 8)
    room = {"num_blocks": 4}  # 16 tokens: the eighth generated one is drawn from a full cache
    params = SamplingParams(max_new_tokens=100, temperature=0)
    (full,) = make(**room).generate([prompt], params)
    assert full.finish_reason == "cache_full" and full.token_ids == tuple(tokens)
    (ended,) = make(model={"eos_token_id": tokens[7]}, **room).generate([prompt], params)
    assert ended.finish_reason == "eos"


def test_penalties_and_processors_see_every_token() -> None:
    """Their draws need the tokens themselves, so such steps follow each other."""
    seen: list[list[int]] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return scores

    params = [
        SamplingParams(max_new_tokens=8, temperature=1.0, seed=0, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=8, temperature=1.0, seed=1, presence_penalty=0.7),
        SamplingParams(max_new_tokens=8, temperature=0, logits_processors=[processor]),
        SamplingParams(max_new_tokens=8, temperature=1.0, seed=3, frequency_penalty=0.5),
    ]
    for each, prompt in zip(params, PROMPTS, strict=False):
        batch = make().generate([prompt], each)
        assert_same(batch, plain().generate([prompt], each))
    assert seen and UNKNOWN_ID not in {token for ids in seen for token in ids}


def test_a_later_turn_finds_the_pages_of_the_one_before() -> None:
    """Full pages are registered once their tokens are known, none under a token that was guessed."""
    prompt = list(range(9))
    params = SamplingParams(max_new_tokens=15, temperature=0)
    cached = []
    for engine in (make(num_blocks=40), plain()):
        (first,) = engine.generate([prompt], params)
        (second,) = engine.generate([[*prompt, *first.token_ids, 1, 2]], params)
        cached.append((second.cached_tokens, second.token_ids))
        assert_greedy(engine.model, second)
    assert cached[0] == cached[1] and cached[0][0] >= 20


@settings(max_examples=15)
@given(data=st.data())
def test_any_mix_of_requests_and_interruptions_ends_the_same(data: st.DataObject) -> None:
    """Requests that come, are cancelled and see weights change between steps, tight pages, any policy."""
    policy = data.draw(st.sampled_from(["recompute", "keep", "cancel"]))
    script = data.draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("add"), st.integers(0, 5), st.integers(1, 12), st.sampled_from([1, 3])),
                st.tuples(st.just("step"), st.integers(1, 4)),
                st.tuples(st.just("cancel"), st.integers(0, 3)),
                st.tuples(st.just("change")),
                st.tuples(st.just("release")),
            ),
            min_size=2,
            max_size=12,
        )
    )
    # a place that an unforeseen end sets free is given away a step later, so under which weights the next
    # one begins is only the same where all have a place
    has_change = ("change",) in script
    settings_ = {
        "page_size": 4,
        "num_blocks": 500 if has_change else data.draw(st.sampled_from([12, 25, 60])),
        "max_requests_per_batch": 50 if has_change else data.draw(st.sampled_from([2, 5, 50])),
        "on_weight_change": policy,
    }
    model = {"eos_token_id": [5, 17, 40, 71, 80, 11]}
    one = play(make(model=model, **settings_), script)
    other = play(plain(model, **settings_), script)
    assert one.keys() == other.keys()
    if policy == "keep":  # what lies in the pages depends on when they were preempted
        return
    assert_same((one[key] for key in sorted(one)), (other[key] for key in sorted(one)))


def play(engine: RolloutEngine, script: list[tuple[Any, ...]]) -> dict[tuple[str, int], Completion]:
    """Run a script of calls, then to the end; the books are audited after each."""
    done: dict[tuple[str, int], Completion] = {}
    count = 0

    def take(completions: list[Completion]) -> None:
        for completion in completions:
            key = completion.request_id, completion.index
            assert key not in done
            done[key] = completion

    for action, *values in script:
        if action == "add":
            prompt, length, n = values
            params = SamplingParams(max_new_tokens=length, temperature=1.0, n=n, seed=prompt)
            engine.add_request(PROMPTS[prompt], params, request_id=f"r{count}")
            count += 1
        elif action == "step":
            for _ in range(values[0]):
                take(engine.step())
        elif action == "cancel":
            engine.cancel_request(f"r{values[0]}")
        elif action == "change":
            with torch.no_grad():
                engine.model.lm_head.weight.mul_(0.9)
        else:
            engine.release_memory()
        engine.check()
        assert UNKNOWN_ID not in {token for s in engine._stepper.scheduler.live() for token in s.ids}
    while engine.has_work:
        take(engine.step())
        engine.check()
    assert engine._stepper.flight is None
    return done


# --- in between ---------------------------------------------------------------------------------


def started(**settings: Any) -> RolloutEngine:
    """An engine with three decoding sequences and a step in flight."""
    engine = make(num_blocks=60, **settings)
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add_request(prompt, SamplingParams(max_new_tokens=12, temperature=0), request_id=f"r{i}")
    for _ in range(3):
        assert engine.step() == []
    assert engine._stepper.flight is not None and len(engine._stepper.flight.drawing) == 3
    return engine


def finish(engine: RolloutEngine) -> dict[str, Completion]:
    done = {}
    while engine.has_work:
        done.update({c.request_id: c for c in engine.step()})
    engine.check()
    return done


def test_between_steps_there_are_only_tokens_that_are_known() -> None:
    engine = started()
    progress = engine.progress({"r0", "r1", "r2"})
    assert {len(samples[0].token_ids) for samples in progress.values()} == {3}
    for i, samples in enumerate(progress[f"r{i}"] for i in range(3)):
        assert list(samples[0].token_ids) == oracle_greedy(engine.model, PROMPTS[i], 3)


def test_a_cancelled_sequence_gets_nothing_of_the_step_in_flight() -> None:
    engine = started()
    assert engine.cancel_request("r1")
    (cancelled,) = engine.step()
    assert cancelled.request_id == "r1" and cancelled.finish_reason == "cancelled"
    assert len(cancelled.token_ids) == 3
    done = finish(engine)
    assert {key: len(c.token_ids) for key, c in done.items()} == {"r0": 12, "r2": 12}
    for completion in (cancelled, *done.values()):
        assert_greedy(engine.model, completion)


def test_all_cancelled_leaves_nothing_in_flight() -> None:
    engine = started()
    for i in range(3):
        engine.cancel_request(f"r{i}")
    assert {c.finish_reason for c in engine.step()} == {"cancelled"}
    assert engine._stepper.flight is None and not engine.has_work
    engine.check()


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_a_change_of_weights_lets_go_of_the_step_in_flight(policy: str) -> None:
    """Its tokens were drawn from the old weights before anybody could see them: they are drawn again."""
    engine = started(on_weight_change=policy)
    with torch.no_grad():
        engine.model.lm_head.weight.mul_(-1.0)
    done = finish(engine)
    for i, completion in enumerate(done[f"r{i}"] for i in range(3)):
        assert completion.versions == (0,) * 3 + (1,) * 9
        continued = [*PROMPTS[i], *completion.token_ids[:3]]
        # the head alone changed, so that old keys and values are the new ones
        assert list(completion.token_ids[3:]) == oracle_greedy(engine.model, continued, 9)


@pytest.mark.parametrize("call", ["release", "refresh", "warmup", "score"])
def test_other_calls_leave_results_as_they_are(call: str) -> None:
    engine = started()
    if call == "release":
        engine.release_memory()
    elif call == "refresh":
        engine.refresh_weights()
    elif call == "warmup":
        engine.warmup(num_requests=4, num_tokens=30)
    else:
        engine.score([[1]], [[2]])
    done = finish(engine)
    assert len(done) == 3
    for completion in done.values():
        assert len(completion.token_ids) == 12
        assert_greedy(engine.model, completion)


def test_a_failure_ahead_does_not_lose_the_tokens_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is launched before the last token of this one is read."""
    engine = make(
        num_blocks=60, model={"eos_token_id": oracle_greedy(TINY_MODELS["llama"](), PROMPTS[0], 2)[1]}
    )
    engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=12, temperature=0), request_id="ends")
    engine.add_request(PROMPTS[1], SamplingParams(max_new_tokens=12, temperature=0), request_id="goes on")
    assert engine.step() == []

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rollout.stepper, "carry_over", fail)
    done = {c.request_id: c for c in engine.step()}
    monkeypatch.undo()
    assert done["ends"].finish_reason == "eos" and len(done["ends"].token_ids) == 2
    assert done["goes on"].finish_reason == "error" and "out of memory" in str(done["goes on"].error)
    assert engine._stepper.flight is None and not engine.has_work
    engine.check()


def test_a_row_without_finite_logits_fails_alone() -> None:
    engine = make(num_blocks=60)
    with torch.no_grad():
        engine.model.model.embed_tokens.weight[90] = float("nan")
    batch = engine.generate(
        [[5], [3, 1, 90], [3, 1, 4]], SamplingParams(max_new_tokens=8, temperature=0), on_error="return"
    )
    assert [c.finish_reason for c in batch] == ["length", "error", "length"]
    for completion in (batch[0], batch[2]):
        assert len(completion.token_ids) == 8
        assert_greedy(engine.model, completion)
    engine.check()
    assert rollout.ahead.UNKNOWN_ID < 0
