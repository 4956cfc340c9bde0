"""The nouns refuse what makes no sense, with a sentence, and belong to nobody but themselves."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rollout.types import (
    Completion,
    DrawnToken,
    DuplicateRequestError,
    FinishReason,
    NonFiniteLogits,
    RolloutError,
    RolloutMetrics,
    SamplingParams,
    UnsupportedModelError,
)

# ---- sampling params --------------------------------------------------------------------------


def test_the_defaults_are_neutral() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, None, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.logit_bias, params.stop_token_ids, params.stop_strings) == ({}, (), ())
    assert (params.min_new_tokens, params.ignore_eos, params.n, params.seed) == (0, False, 1, None)
    assert params.logits_processors == ()


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", 0, "max_new_tokens=0 is out of range; allowed: >= 1"),
        ("max_new_tokens", -3, "max_new_tokens=-3 is out of range"),
        ("min_new_tokens", -1, "min_new_tokens=-1 is out of range; allowed: >= 0"),
        ("temperature", -0.1, "temperature=-0.1 is out of range; allowed: >= 0.0 and finite"),
        ("temperature", NAN, "temperature=nan is out of range"),
        ("temperature", INF, "temperature=inf is out of range"),
        ("top_k", -1, "top_k=-1 is out of range; allowed: >= 0"),
        ("top_p", 0, "top_p=0 is out of range; allowed: > 0.0 and <= 1.0"),
        ("top_p", 1.01, "top_p=1.01 is out of range"),
        ("top_p", NAN, "top_p=nan is out of range"),
        ("min_p", -0.01, "min_p=-0.01 is out of range; allowed: >= 0.0 and <= 1.0"),
        ("min_p", 1.5, "min_p=1.5 is out of range"),
        ("repetition_penalty", 0.0, "repetition_penalty=0.0 is out of range; allowed: > 0.0 and finite"),
        ("repetition_penalty", INF, "repetition_penalty=inf is out of range"),
        ("presence_penalty", -INF, "presence_penalty=-inf is out of range"),
        ("presence_penalty", NAN, "presence_penalty=nan is out of range"),
        ("frequency_penalty", INF, "frequency_penalty=inf is out of range"),
        ("n", 0, "n=0 is out of range; allowed: >= 1"),
        ("seed", -1, "seed=-1 is out of range; allowed: >= 0 and <= 9223372036854775807"),
        ("seed", 2**63, "seed=9223372036854775808 is out of range"),
        ("logit_bias", {-1: 0.5}, "a logit_bias token id=-1 is out of range; allowed: >= 0"),
        ("logit_bias", {7: NAN}, "logit_bias[7]=nan; give a finite number or -inf"),
        ("logit_bias", {7: INF}, "logit_bias[7]=inf; give a finite number or -inf"),
        ("stop_token_ids", [3, -1], "a stop token id=-1 is out of range"),
        ("stop_strings", ["a", ""], "a stop string is empty"),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{field: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", 3.0, "max_new_tokens=3.0 has type float; give a whole number"),
        ("max_new_tokens", True, "max_new_tokens=True has type bool"),
        ("max_new_tokens", None, "max_new_tokens=None has type NoneType"),
        ("min_new_tokens", "2", "min_new_tokens='2' has type str"),
        ("temperature", "1", "temperature='1' has type str; give a number"),
        ("temperature", True, "temperature=True has type bool"),
        ("temperature", None, "temperature=None has type NoneType"),
        ("temperature", 1 + 0j, "temperature=(1+0j) has type complex"),
        ("top_k", 2.5, "top_k=2.5 has type float"),
        ("top_p", [0.9], "top_p=[0.9] has type list"),
        ("min_p", "0.1", "min_p='0.1' has type str"),
        ("repetition_penalty", None, "repetition_penalty=None has type NoneType"),
        ("presence_penalty", "", "presence_penalty='' has type str"),
        ("frequency_penalty", {}, "frequency_penalty={} has type dict"),
        ("n", 2.0, "n=2.0 has type float"),
        ("seed", "7", "seed='7' has type str"),
        ("seed", False, "seed=False has type bool"),
        ("ignore_eos", 1, "ignore_eos=1 has type int; give a bool"),
        ("logit_bias", [(7, 1.0)], "logit_bias=[(7, 1.0)] must map token ids to numbers"),
        ("logit_bias", {"7": 1.0}, "a logit_bias token id='7' has type str"),
        ("logit_bias", {7: "1"}, "logit_bias[7]='1' has type str; give a number"),
        ("logit_bias", {7: True}, "logit_bias[7]=True has type bool"),
        ("stop_token_ids", 5, "stop_token_ids=5 must be a list or tuple"),
        ("stop_token_ids", {5}, "stop_token_ids={5} must be a list or tuple"),
        ("stop_token_ids", [5.0], "a stop token id=5.0 has type float"),
        ("stop_strings", "stop", "stop_strings='stop' must be a list or tuple"),
        ("stop_strings", [b"stop"], "stop string b'stop' has type bytes; give a str"),
        ("logits_processors", len, "must be a list or tuple"),
        ("logits_processors", ["no"], "logits processor 'no' is not callable"),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{field: value})
    assert message in str(caught.value)


def test_more_tokens_at_the_least_than_at_the_most_is_refused() -> None:
    with pytest.raises(ValueError, match=r"min_new_tokens=9 is above max_new_tokens=8; raise max_new_tokens"):
        SamplingParams(min_new_tokens=9, max_new_tokens=8)
    SamplingParams(min_new_tokens=8, max_new_tokens=8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", Fraction(1, 2)),
        ("temperature", np.float32(0.5)),
        ("max_new_tokens", np.int64(5)),
        ("top_k", 0),
        ("top_p", 1),
        ("min_p", 1),
        ("presence_penalty", -2),
        ("seed", 2**63 - 1),
        ("logit_bias", {0: -INF, np.int64(3): 2}),
        ("stop_token_ids", (np.int32(3),)),
        ("logits_processors", [len]),
    ],
)
def test_the_edges_of_what_is_allowed_are_allowed(field: str, value: Any) -> None:
    SamplingParams(**{field: value})


def test_zero_temperature_means_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy


def test_unknown_and_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        SamplingParams(16)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="max_tokens"):
        SamplingParams(max_tokens=16)  # type: ignore[call-arg]


def test_params_are_frozen_and_the_callers_lists_stay_the_callers() -> None:
    stop_ids, strings, bias, processors = [1, 2], ["a"], {3: 1.0}, [len]
    params = SamplingParams(
        stop_token_ids=stop_ids,  # type: ignore[arg-type]
        stop_strings=strings,  # type: ignore[arg-type]
        logit_bias=bias,
        logits_processors=processors,  # type: ignore[arg-type]
    )
    stop_ids.append(9)
    strings.append("b")
    bias[4] = 1.0
    processors.clear()
    assert (params.stop_token_ids, params.stop_strings) == ((1, 2), ("a",))
    assert (params.logit_bias, params.logits_processors) == ({3: 1.0}, (len,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]
    assert dataclasses.replace(params, n=4).stop_token_ids == (1, 2)
    with pytest.raises(ValueError, match="n=0"):
        dataclasses.replace(params, n=0)


# ---- completions ------------------------------------------------------------------------------


def completion(**changes: Any) -> Completion:
    values: dict[str, Any] = {
        "request_id": "r",
        "index": 0,
        "prompt_ids": (1, 2),
        "token_ids": (3, 4),
        "logprobs": (-0.5, -0.25),
        "policy_logprobs": (-1.0, -0.5),
        "log_kept_mass": (-0.5, -0.25),
        "versions": (0, 1),
        "finish_reason": FinishReason.LENGTH,
    }
    return Completion(**(values | changes))


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "policy_logprobs", "log_kept_mass", "versions"])
def test_tokens_and_their_numbers_have_one_length(field: str) -> None:
    completion()
    with pytest.raises(AssertionError, match="r: lengths differ"):
        completion(**{field: (0,)})


def test_an_error_and_its_reason_come_together() -> None:
    completion(finish_reason=FinishReason.ERROR, error=ValueError("why"))
    with pytest.raises(AssertionError):
        completion(finish_reason=FinishReason.ERROR)
    with pytest.raises(AssertionError):
        completion(error=ValueError("why"))


def test_every_reason_is_an_end_a_cut_or_neither() -> None:
    kinds = {}
    for reason in FinishReason:
        error = RuntimeError("x") if reason is FinishReason.ERROR else None
        ended = completion(finish_reason=reason, error=error)
        kinds[str(reason)] = (ended.is_finished, ended.is_truncated)
    assert kinds == {
        "eos": (True, False),
        "stop": (True, False),
        "length": (False, True),
        "max_position": (False, True),
        "cache_full": (False, True),
        "cancelled": (False, False),
        "error": (False, False),
    }


def test_results_are_frozen() -> None:
    for record, field in [(completion(), "token_ids"), (DrawnToken(1, -0.5, -0.5, 0.0), "logprob")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, None)


# ---- metrics, reasons, errors -----------------------------------------------------------------


def metrics(**changes: Any) -> RolloutMetrics:
    values = {f.name: 0 for f in dataclasses.fields(RolloutMetrics)}
    return RolloutMetrics(**(values | {"seconds_by_stage": {}} | changes))


def test_metrics_give_a_flat_dict_of_numbers() -> None:
    flat = metrics(
        generated_tokens=30, seconds=2.0, seconds_by_stage={"forward": 1.5, "sample": 0.25}
    ).as_dict()
    assert (flat["tokens_per_second"], flat["seconds_forward"], flat["seconds_sample"]) == (15.0, 1.5, 0.25)
    assert "seconds_by_stage" not in flat
    assert flat["generated_tokens"] == 30
    assert all(isinstance(value, (int, float)) for value in flat.values())


def test_no_time_gives_no_speed() -> None:
    assert metrics(generated_tokens=30, seconds=0.0).tokens_per_second == 0.0


def test_reasons_compare_and_print_as_their_words() -> None:
    assert FinishReason("eos") is FinishReason.EOS
    assert ["eos"] == [FinishReason.EOS] and f"{FinishReason.EOS}" == "eos"


def test_errors_are_of_the_kind_that_callers_catch() -> None:
    assert issubclass(NonFiniteLogits, ArithmeticError)
    assert issubclass(UnsupportedModelError, ValueError)
    assert issubclass(DuplicateRequestError, ValueError)
    error = RolloutError("one failed", ["the batch"])
    assert isinstance(error, RuntimeError)
    assert (str(error), error.batch) == ("one failed", ["the batch"])
