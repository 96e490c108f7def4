import dataclasses

import pytest

from service.wire import sampling_from_proto, sampling_to_proto, token_to_proto
from twinpool.sampling import SamplingParams
from twinpool.v1.router_pb2 import FINISH_REASON_STOP, Sampling

EVERY_FIELD = SamplingParams(
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    seed=(1 << 64) - 1,
    max_tokens=9,
    min_tokens=3,
    ignore_eos=True,
    stop=("\n", "é"),
    stop_token_ids=(1, 2),
    logprobs=5,
    n=4,
    echo=True,
)


def test_sampling_crosses_the_wire_whole():
    message = Sampling.FromString(sampling_to_proto(EVERY_FIELD).SerializeToString())
    assert sampling_from_proto(message) == EVERY_FIELD


def test_the_example_above_has_every_field_of_both_sides():
    defaults = SamplingParams()
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(Sampling.DESCRIPTOR.fields_by_name)
    for field in dataclasses.fields(SamplingParams):
        assert getattr(EVERY_FIELD, field.name) != getattr(defaults, field.name)


def test_absent_fields_mean_what_the_proto_says():
    params = sampling_from_proto(Sampling())
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1, 0, 0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
    assert (params.min_tokens, params.logprobs, params.n, params.ignore_eos, params.echo) == (0, None, 1, False, False)


@pytest.mark.parametrize("field", ["temperature", "top_k", "logprobs", "seed"])
def test_a_zero_that_was_sent_is_not_an_absent_field(field):
    assert getattr(sampling_from_proto(Sampling(**{field: 0})), field) == 0


def test_a_token_carries_its_alternatives_and_its_end():
    message = token_to_proto(7, -0.5, [(7, -0.5), (9, -1.25)], FINISH_REASON_STOP)
    assert (message.token_id, message.logprob, message.finish_reason) == (7, -0.5, FINISH_REASON_STOP)
    assert [(each.token_id, each.logprob) for each in message.top] == [(7, -0.5), (9, -1.25)]
