"""Tensors through Flower's records: shapes, dtypes and bytes survive."""

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from strategies.messages import Outbox, Payload, TransportError, attach_part, decode, decode_parts, encode, wire_bytes
from tests.local_grid import through_the_wire

TENSORS = {
    "scalar": torch.tensor(2.5),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "half": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "brain": torch.tensor([1.0, 3.0e38], dtype=torch.bfloat16),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "last": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "empty": torch.zeros(0, 3),
}


def test_every_kind_of_tensor_comes_back_as_it_was_sent():
    back = decode(through_the_wire(encode(TENSORS)))
    assert back.keys() == TENSORS.keys()
    for name, sent in TENSORS.items():
        assert back[name].dtype == sent.dtype, name
        assert back[name].shape == sent.shape, name
        assert torch.equal(back[name], sent), name


@pytest.mark.parametrize(("dtype", "error"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_a_narrow_transport_halves_the_bytes_rounds_once_and_restores_the_dtype(dtype, error):
    tensors = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(1)), "n": torch.tensor(3)}
    back = decode(through_the_wire(encode(tensors, dtype)))
    assert back["w"].dtype == torch.float32
    assert back["n"].dtype == torch.int64
    assert not torch.equal(back["w"], tensors["w"])
    torch.testing.assert_close(back["w"], tensors["w"], rtol=error, atol=1e-7)
    assert wire_bytes(encode(tensors, dtype)) < 0.55 * wire_bytes(encode(tensors))


def test_a_half_precision_tensor_is_not_widened_by_a_wider_transport():
    back = decode(through_the_wire(encode({"w": torch.ones(3, dtype=torch.bfloat16)}, "float16")))
    assert back["w"].dtype == torch.bfloat16


def test_wire_bytes_counts_values_and_headers():
    count = wire_bytes(encode({"w": torch.zeros(1000)}))
    assert 4000 + 100 < count < 4000 + 200


def test_a_message_of_another_kind_is_refused_with_a_reason():
    with pytest.raises(ValueError, match="another version"):
        decode(RecordDict({"x": ConfigRecord({"a": 1})}))


def test_a_part_in_two_messages_is_one_record_and_comes_back_in_both():
    rows = encode({"rows": torch.arange(6.0).reshape(2, 3), "brain": torch.ones(2, dtype=torch.bfloat16)})
    one, two = encode({"x": torch.ones(1)}), encode({})
    attach_part(one, "peer-0", rows)
    attach_part(two, "peer-3", rows)
    assert one["arrays.peer-0"] is two["arrays.peer-3"]
    assert wire_bytes(one) == wire_bytes(encode({"x": torch.ones(1)})) + wire_bytes(rows)
    back = decode_parts(through_the_wire(two))
    assert back.keys() == {"peer-3"}
    assert torch.equal(back["peer-3"]["rows"], torch.arange(6.0).reshape(2, 3))
    assert back["peer-3"]["brain"].dtype == torch.bfloat16
    assert decode(through_the_wire(one)).keys() == {"x"}
    assert decode_parts(encode({})) == {}


def test_tensors_can_be_taken_out_of_a_message_as_they_are_read():
    content = encode(TENSORS)
    taken = decode(content, take=True)
    assert taken.keys() == TENSORS.keys()
    assert not content["arrays"]


def test_what_goes_out_twice_is_one_record_until_the_outbox_is_cleared():
    outbox, part = Outbox("float32"), {"z": torch.ones(3)}
    payload = Payload(dict(TENSORS), parts={"peer": part})
    first, second = outbox.content(payload), outbox.content(payload)
    other = outbox.content(Payload(dict(TENSORS), parts={"peer": part}))
    assert first is not second
    assert all(first[key] is second[key] for key in first)
    assert (first["arrays"] is other["arrays"], first["arrays.peer"] is other["arrays.peer"]) == (False, True)
    outbox.clear()
    assert outbox.content(payload)["arrays"] is not first["arrays"]


def test_a_finite_value_beyond_the_transports_dtype_is_named_and_an_infinite_one_is_left_to_the_receiver():
    with pytest.raises(
        TransportError, match=r'offset holds 7e\+04, more than float16 carries \(65504\); set transport\.dtype = "bfloat16"'
    ):
        encode({"w": torch.ones(2), "offset": torch.tensor(7e4)}, "float16")
    assert encode({"offset": torch.tensor(7e4)}, "bfloat16")
    assert decode(encode({"w": torch.tensor([torch.inf])}, "float16"))["w"].isinf().all()
