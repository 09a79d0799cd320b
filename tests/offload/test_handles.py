"""ExternalAccess of its module's forward a parameter is a handle: everything that people do with parameters works on
it."""

import copy
import ctypes
import gc
import io
import weakref
from pathlib import Path

import pytest
import torch
from tiny import Tiny, as_weight, batches, loss_of, train
from torch import nn
from torch.utils.dlpack import to_dlpack

from offload import ConfigError, OffloadEngine, OffloadError
from offload.model.handle import make_handle
from offload.plan.plan import Tier


@pytest.fixture(params=["fp32", "bf16"])
def engine(request, make_model, tmp_path: Path):
    options = {"precision": request.param, "host_memory": "5MiB" if request.param == "fp32" else "3MiB"}
    with OffloadEngine(make_model(), nvme_path=tmp_path, **options) as engine:
        yield engine


def test_reading_a_weight_gives_its_value(engine, make_model):
    for name, parameter in make_model().named_parameters():
        handle = engine.module.get_parameter(name)
        expected = as_weight(parameter, handle.dtype)
        assert isinstance(handle, nn.Parameter)
        assert handle.shape == expected.shape and handle.device.type == "cpu" and handle.requires_grad
        assert torch.equal(handle.detach().clone(), expected)
        assert torch.equal(handle[0].clone(), expected[0])
    assert engine.module.head.weight.norm().item() == pytest.approx(
        make_model().head.weight.to(engine.config.dtype).norm().item(), rel=1e-2
    )
    assert engine.module.norm.weight.tolist() == [1.0] * 128
    assert "[1., 1., 1.," in repr(engine.module.norm.weight)


def test_writing_a_weight_is_seen_by_the_next_forward_and_the_next_step(engine):
    train(engine, 2)
    model = engine.module
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.arange(256))
        model.norm.bias[3] = 7.0
        model.norm.bias[5:7].fill_(2.0)
        model.embed.weight.data.mul_(0.5)
    assert model.head.weight.abs().max() == 0
    assert model.norm.bias.tolist()[3:8] == [7.0, model.norm.bias[4].item(), 2.0, 2.0, model.norm.bias[7].item()]
    logits = engine(batches(1)[0][0])
    assert torch.equal(logits[0, 0].float(), torch.arange(256).to(logits.dtype).float())
    for _ in range(2):
        loss = loss_of(engine(batches(1)[0][0]), batches(1)[0][1])
        engine.backward(loss)
        engine.step()
    assert 0 < model.head.weight.abs().max() < 0.01


def test_a_written_bf16_weight_is_the_whole_master(make_model, tmp_path: Path):
    """The remainder of the old master must not come back with the next update."""
    with OffloadEngine(
        make_model(), precision="bf16", nvme_path=tmp_path, host_memory="3MiB", lr=0.0, weight_decay=0.0
    ) as engine:
        value = torch.full((256, 128), 0.3).bfloat16()
        with torch.no_grad():
            engine.module.head.weight.copy_(value)
        train(engine, 1)
        assert torch.equal(engine.module.head.weight.detach().clone(), value)
        (head,) = (item for item in engine.plan.units if item.unit.name == "head")
        assert all(tier is Tier.NVME for _, tier in head.tiles)


def test_state_dict_round_trip_and_deepcopy_give_ordinary_tensors(engine, make_model):
    train(engine, 1)
    state = engine.module.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    twin = copy.deepcopy(engine.module)
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    plain = Tiny().to(engine.config.dtype)
    plain.load_state_dict(loaded)
    tokens = batches(1)[0][0]
    with torch.no_grad():
        expected = engine(tokens)
        assert torch.equal(plain(tokens), expected)
        assert torch.equal(twin(tokens), expected)
    engine.module.load_state_dict(make_model().state_dict())
    expected = make_model().head.weight.detach().to(engine.config.dtype)
    assert torch.equal(engine.module.head.weight.detach().clone(), expected)


def test_averaged_model_and_loggers_work(engine):
    average = torch.optim.swa_utils.AveragedModel(engine.module)
    train(engine, 1)
    average.update_parameters(engine.module)
    norms = {name: p.norm().item() for name, p in engine.module.named_parameters()}
    assert all(value >= 0 for value in norms.values())
    assert torch.nn.utils.parameters_to_vector(engine.module.parameters()).numel() == engine.plan.num_parameters


def test_a_weight_used_outside_of_its_module_gets_its_gradient(make_model, tmp_path: Path):
    class ExternalAccess(Tiny):
        def forward(self, tokens):
            return super().forward(tokens) * self.blocks[0].norm.weight.sum() + self.norm.weight.square().sum()

    torch.manual_seed(0)
    plain = ExternalAccess()
    torch.manual_seed(0)
    wrapped = ExternalAccess()
    tokens = batches(1)[0][0]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    plain(tokens).square().mean().backward()
    optimizer.step()
    with OffloadEngine(wrapped, nvme_path=tmp_path, host_memory="8MiB", precision="fp32", lr=1e-2) as engine:
        engine.backward(engine(tokens).square().mean())
        engine.step()
        for name, parameter in plain.named_parameters():
            got = wrapped.get_parameter(name).detach().clone()
            torch.testing.assert_close(got, parameter.detach(), rtol=1e-4, atol=1e-5, msg=name)


def test_what_cannot_work_is_refused(engine):
    weight = engine.module.head.weight
    with pytest.raises(ConfigError, match=r"head\.weight is .* cannot become"):
        weight.data = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"cannot become torch\.float64"):
        engine.module.double()
    with pytest.raises(OffloadError, match="has no address"):
        weight.share_memory_()
    with pytest.raises(OffloadError, match="cannot be resized"):
        weight.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match="in an engine already"):
        OffloadEngine(engine.module)


def test_what_is_at_an_address_stays_the_same_as_the_parameter(engine):
    weight = engine.module.head.weight
    there = (ctypes.c_ubyte * weight.nbytes).from_address(weight.data_ptr())
    assert weight.data_ptr() == weight.data.data_ptr() == weight.t().data_ptr() == weight.untyped_storage().data_ptr()
    engine.backward(engine(batches(1)[0][0]).square().mean())
    engine.step()
    assert bytes(there) == weight.detach().clone().flatten().view(torch.uint8).numpy().tobytes()
    ctypes.memset(weight[1].data_ptr(), 0, weight[1].nbytes)
    assert weight[1].norm() == 0 and weight[0].norm() > 0 and weight[2].norm() > 0


def test_memory_of_an_address_is_let_go_of_with_the_engine(make_model):
    engine = OffloadEngine(make_model(), precision="fp32")
    engine.module.head.weight.untyped_storage()
    reference = weakref.ref(engine)
    engine.close(discard=True)
    del engine
    gc.collect()
    assert reference() is None


def test_assigning_data_of_the_same_kind_sets_the_value(engine):
    weight = engine.module.norm.weight
    weight.data = torch.full((128,), 3.0, dtype=weight.dtype)
    assert engine.module.norm.weight.sum().item() == 384.0


def test_after_close_a_weight_says_that_the_engine_is_closed(make_model):
    engine = OffloadEngine(make_model())
    engine.close(discard=True)
    with pytest.raises(OffloadError, match="closed"):
        engine.module.head.weight.norm()
    with pytest.raises(OffloadError, match="closed"):
        engine(batches(1)[0][0])
    engine.close()


class _Value:
    """A backing in memory."""

    name, in_use, trainable, gradient = "weight", (), True, None

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def read(self) -> torch.Tensor:
        return self.value.clone()

    def write(self, value: torch.Tensor) -> None:
        self.value = value.clone()


def _beside_plain(look) -> None:
    """``look`` gives what it sees of ``parameter.data``; afterwards the parameter is the same, too."""
    plain = nn.Parameter(torch.arange(12.0).view(3, 4))
    backing = _Value(plain.detach().clone())
    handle = make_handle(backing, plain.shape, plain.dtype, plain.device, True)
    seen, expected = look(handle.data), look(plain.data)
    assert [(item.shape, item.tolist()) for item in seen] == [(item.shape, item.tolist()) for item in expected]
    assert torch.equal(backing.value, plain.detach()) and handle.shape == plain.shape


def _transposed(w):
    w.t_()
    w[1, 2] = 100.0
    return [w, w[0], w.sum(0)]


def _one_dimension_more(w):
    w.unsqueeze_(0).mul_(2.0)
    w.squeeze_().transpose_(0, 1).add_(1.0)
    return [w]


def _rows_at_other_strides(w):
    w.as_strided_((2, 2), (1, 4), 1)
    w.fill_(-3.0)
    return [w, w[1]]


def _a_part_resized(w):
    rows = w.view(-1)[4:]
    rows.resize_(2, 3)
    rows.zero_()
    return [rows]


def _other_memory(w):
    own = torch.full((2, 5), 7.0)
    w.set_(own)
    w.mul_(2.0)
    return [w, own]


def _a_part_of_other_memory(w):
    w.set_(torch.arange(10.0).untyped_storage(), 2, (2, 2), (1, 3))
    return [w, w.t()]


def _each_element(w):
    w.apply_(lambda element: element * 2)
    w[1:].map_(torch.ones(2, 4), lambda element, other: element + other)
    w.map2_(torch.ones(3, 4), torch.ones(3, 4), lambda element, one, other: element - one - other)
    return [w]


@pytest.mark.parametrize(
    "look",
    [
        _transposed,
        _one_dimension_more,
        _rows_at_other_strides,
        _a_part_resized,
        _other_memory,
        _a_part_of_other_memory,
        _each_element,
    ],
)
def test_an_alias_that_looks_in_another_way_leaves_the_parameter_as_it_is_and_still_writes_to_it(look):
    _beside_plain(look)


def test_an_alias_may_become_one_of_another_parameter():
    first, second = _Value(torch.zeros(2, 3)), _Value(torch.ones(4))
    handles = [make_handle(v, v.value.shape, torch.float32, torch.device("cpu"), True) for v in (first, second)]
    alias = handles[0].data
    alias.set_(handles[1].data)
    alias.mul_(5.0)
    assert first.value.tolist() == [[0.0] * 3] * 2 and second.value.tolist() == [5.0] * 4


def test_a_parameter_keeps_its_shape_and_an_alias_its_size():
    backing = _Value(torch.zeros(2, 3))
    handle = make_handle(backing, backing.value.shape, torch.float32, torch.device("cpu"), True)
    with (
        torch.no_grad(),
        pytest.raises(ConfigError, match=r"\(2, 3\) and is held by the engine: it cannot"),
    ):
        handle.t_()
    with pytest.raises(ConfigError, match=r"cannot become \(9,\)"):
        handle.data.resize_(9)


def test_memory_that_a_handle_does_not_have_is_an_error_and_no_crash():
    backing = _Value(torch.zeros(2, 3))
    handle = make_handle(backing, backing.value.shape, torch.float32, torch.device("cpu"), True)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        to_dlpack(handle.detach())


def test_a_shallow_copy_is_a_leaf_over_the_same_value(engine):
    head = engine.module.head
    copies = [copy.copy(head.weight), copy.copy(head.weight.data), copy.copy(head.weight[1:2])]
    with torch.no_grad():
        head.weight.add_(1)
    for each, first in zip(copies, (0, 0, 1), strict=True):
        assert torch.equal(each.detach(), head.weight[first : first + len(each)])
    assert [each.requires_grad for each in copies] == [True, False, True] and copies[0] is not head.weight
    copies[0].square().sum().backward()
    assert head.weight.grad is None and copies[0].grad is not None
