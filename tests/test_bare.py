"""Forwards without the wrappers of transformers: the same logits, and what computes another stays."""

import functools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracle import assert_greedy
from rollout import RolloutEngine, SamplingParams
from rollout.bare import BareForward, bare_forwards, bare_of, wrapped_forwards
from rollout.runner import engine_mode
from test_fused import CPU, logits_of, make_prepared
from tiny_models import TINY_MODELS

IDS = torch.arange(9)[None]


def bare(view: nn.Module) -> int:
    with engine_mode():
        return bare_forwards(view, CPU)


def num_bare(view: nn.Module) -> int:
    return sum(isinstance(vars(module).get("forward"), BareForward) for module in view.modules())


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_are_the_same_to_the_bit(name: str) -> None:
    view = make_prepared(TINY_MODELS[name]())
    expected = logits_of(view, IDS)
    count = bare(view)
    assert count >= 2 and num_bare(view) == count, "a causal model and its decoder, at least"
    assert torch.equal(logits_of(view, IDS), expected)
    wrapped_forwards(view)
    assert num_bare(view) == 0 and torch.equal(logits_of(view, IDS), expected)


def test_the_engine_runs_bare_forwards_and_leaves_the_trainers_alone() -> None:
    model = TINY_MODELS["llama_wide"]()
    engine = RolloutEngine(model)
    assert num_bare(engine._weights.view) >= 2 and num_bare(model) == 0
    (completion,) = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8, temperature=0))
    assert_greedy(model, completion)


def test_wrappers_of_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY_MODELS["llama_wide"]()
    kind, calls = type(model), []
    plain = kind.forward

    @functools.wraps(plain)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", counted)
    assert bare_of(counted) is counted and bare_of(plain) is not plain
    view = make_prepared(model)
    assert bare(view) >= 1  # that of the decoder inside
    calls.clear()
    logits_of(view, IDS)
    assert calls == [1]


def test_a_forward_of_the_instance_stays() -> None:
    view = make_prepared(TINY_MODELS["llama_wide"]())
    own = view.forward
    view.forward = own
    bare(view)
    assert vars(view)["forward"] is own


def test_a_wrapper_that_matters_is_kept(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TINY_MODELS["llama_wide"]()
    kind = type(model.model.norm)
    plain = kind.forward

    @functools.wraps(plain)
    def doubled(self: Any, hidden_states: Tensor) -> Tensor:
        return 2 * plain(self, hidden_states)

    # as if it were one of transformers' own
    monkeypatch.setitem(doubled.__globals__, "__name__", "transformers.utils.generic")
    monkeypatch.setattr(kind, "forward", doubled)
    view = make_prepared(model)
    expected = logits_of(view, IDS)
    with caplog.at_level(logging.INFO, logger="rollout"):
        assert bare(view) == 0
    assert "wrappers of forwards are kept: ValueError" in caplog.text
    assert num_bare(view) == 0 and torch.equal(logits_of(view, IDS), expected)
