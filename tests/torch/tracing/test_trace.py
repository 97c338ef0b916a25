"""The trace: who produced what, where in the code, and which infinities are meant."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from halfwise.torch.tracing.records import Record, measure
from halfwise.torch.tracing.trace import Trace


class Scaled(nn.Module):
    """A layer with a line of its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2.0


def _by_operation(trace: Trace, operation: str, direction: str = "forward") -> list[Record]:
    return [r for r in trace.settle() if r.operation == operation and r.direction == direction]


def test_forward_operations_are_attributed_to_module_and_line() -> None:
    model = nn.Sequential(Scaled(), nn.Tanh())
    with Trace(model) as trace:
        model(torch.ones(1, 3))
    (linear,), (scale,) = _by_operation(trace, "aten.addmm"), _by_operation(trace, "aten.mul")
    assert (linear.place.module, linear.place.module_class) == ("0.inner", "Linear")
    assert (scale.place.module, scale.place.module_class) == ("0", "Scaled")
    line = Scaled.forward.__code__.co_firstlineno + 1
    assert linear.place.source == scale.place.source == f"test_trace.py:{line}"


def test_code_outside_all_modules_has_a_line_and_no_module() -> None:
    model = nn.Linear(3, 3)
    with Trace(model) as trace:
        model(torch.ones(1, 3)).square().mean()
    (mean,) = _by_operation(trace, "aten.mean")
    assert (mean.place.module, mean.place.module_class) == ("", "")
    assert mean.place.source.startswith("test_trace.py:")
    (linear,) = _by_operation(trace, "aten.addmm")
    assert (linear.place.module, linear.place.module_class) == ("", "Linear")  # the model itself


def test_an_operation_in_a_replaced_forward_belongs_to_the_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    class Override:
        def __call__(self, x: Tensor) -> Tensor:
            return torch.exp(x)

    model[0].__dict__["forward"] = Override()
    with Trace(model) as trace:
        model(torch.ones(1, 3))
    assert _by_operation(trace, "aten.exp")[0].place.module == "0"


def test_backward_operations_lead_to_the_forward_ones() -> None:
    model = nn.Sequential(Scaled(), nn.Tanh())
    with torch.autograd.set_multithreading_enabled(False), Trace(model) as trace:
        model(torch.ones(1, 3)).sum().backward()
    (tanh,) = _by_operation(trace, "aten.tanh_backward", "backward")
    assert (tanh.place.module, tanh.of) == ("1", "aten.tanh")
    weights = [r for r in _by_operation(trace, "aten.mm", "backward") if r.of == "aten.addmm"]
    assert {r.place.module for r in weights} == {"0.inner"}
    grad = model[0].inner.weight.grad  # type: ignore[union-attr]
    assert isinstance(grad, Tensor)
    assert trace.producer(grad) in {r.index for r in weights}


def test_a_custom_functions_backward_keeps_its_own_line() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2.0

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad * 3.0

    model = nn.Linear(2, 2)
    with Trace(model) as trace:
        Double.apply(model(torch.ones(1, 2))).sum().backward()  # type: ignore[no-untyped-call]
    (record,) = [r for r in _by_operation(trace, "aten.mul", "backward") if 3.0 in r.scalars or r.largest == 3.0]
    assert record.place.source == f"test_trace.py:{Double.backward.__code__.co_firstlineno + 2}"


def test_ranges_are_those_of_the_values_and_let_nan_through() -> None:
    model = nn.Identity()
    with Trace(model) as trace:
        finite = torch.tensor([-3.0, 2.0]) * 2
        broken = torch.tensor([1.0, math.nan]) * 2
    records = trace.settle()
    assert (records[trace.producer(finite)].low, records[trace.producer(finite)].high) == (-6.0, 4.0)
    assert records[trace.producer(broken)].found == "nan"


def test_views_and_in_place_operations_keep_the_chain() -> None:
    model = nn.Identity()
    with Trace(model) as trace:
        x = torch.ones(4) * 2.0
        made = trace.producer(x)
        assert trace.producer(x.view(2, 2)[0]) == made
        x.add_(1.0)
        changed = trace.producer(x)
        x.fill_(7.0)
    records = trace.settle()
    assert [i.record for i in records[changed].inputs] == [made]
    assert (records[changed].short, records[changed].high) == ("add_", 3.0)
    assert records[trace.producer(x)].inputs == ()  # what was overwritten was not read


def test_a_write_to_a_part_does_not_hide_what_stands_in_the_rest() -> None:
    model = nn.Identity()
    with Trace(model) as trace:
        x = torch.ones(4) * 1e38 * 1e38
        bad = trace.producer(x)
        x[:2] = 0.0
        y = x[2:] + 1.0
        z = x[:2] + 1.0
    records = trace.settle()
    reader, sound = records[trace.producer(y)], records[trace.producer(z)]
    assert bad in {i.record for i in reader.inputs}
    assert trace.extents[reader.inputs[0].extent] == (math.inf, math.inf)
    assert trace.extents[sound.inputs[0].extent] == (0.0, 0.0)


def test_a_slice_of_a_tensor_from_outside_is_measured_by_itself() -> None:
    data = torch.tensor([1.0, 2.0, math.nan, 4.0])
    with Trace(nn.Identity()) as trace:
        left, right = data[:2] * 2, data[2:] * 2
    records = trace.settle()
    extents = [trace.extents[records[trace.producer(t)].inputs[0].extent] for t in (left, right)]
    assert extents[0] == (1.0, 2.0)
    assert math.isnan(extents[1][0])


def test_an_address_used_again_is_not_mistaken_for_the_old_tensor() -> None:
    with Trace(nn.Identity()) as trace:
        for _ in range(50):
            x = torch.ones(1000) * 2.0
            made = trace.producer(x)
            del x
            fresh = torch.frombuffer(bytearray(4000), dtype=torch.float32)  # made without an operation
            assert trace.producer(fresh) == -1
            y = torch.ones(1000) * 3.0
            assert trace.producer(y) != made
            del y


def test_intended_infinities_are_masks_and_what_passes_them_on() -> None:
    hidden = torch.tensor([[False, True], [False, False]])
    with Trace(nn.Identity()) as trace:
        scores = torch.ones(2, 2) * 3.0
        filled = scores.masked_fill(hidden, -math.inf)
        where = torch.where(hidden, -math.inf, scores)
        added = scores + torch.triu(torch.full((2, 2), -math.inf), diagonal=1)
        half = filled.to(torch.float16)
        logarithm = torch.log(scores * 0.0)
        overflow = scores * 1e38 * 1e38
        both = overflow + torch.full((2, 2), -math.inf)
    records = trace.settle()
    for intended in (filled, where, added, half):
        record = records[trace.producer(intended)]
        assert record.intended, record
        assert not record.finite
    for fault in (logarithm, overflow, both):
        assert not records[trace.producer(fault)].intended


def test_a_mask_from_outside_is_intended_and_a_parameter_never_is() -> None:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(-math.inf)
    mask = torch.tensor([[0.0, -math.inf]])
    with Trace(model) as trace:
        model(torch.ones(1, 2)) + mask
    found = {r.kind: r.intended for r in trace.settle() if r.kind and not r.finite}
    assert found == {"parameter": False, "tensor": True}


def test_recomputation_by_checkpointing_counts_as_forward() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with torch.autograd.set_multithreading_enabled(False), Trace(model) as trace:
        x = torch.ones(1, 3, requires_grad=True)
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert [r.place.module for r in _by_operation(trace, "aten.tanh")] == ["1", "1"]
    assert [r.place.module for r in _by_operation(trace, "aten.tanh_backward", "backward")] == ["1"]


def test_sparse_and_complex_tensors_are_measured() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    with Trace(embedding) as trace:
        (embedding(torch.tensor([1, 1])) * torch.tensor(2.0 + 1.0j)).abs().sum().backward()
    grad = embedding.weight.grad
    assert grad is not None
    assert grad.is_sparse
    assert trace.settle()[trace.producer(grad)].finite
    assert any(r.dtype == "complex64" for r in trace.records)


def test_measure_handles_any_layout() -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    for tensor in (base, base.permute(2, 0, 1), base[:, 1], base[:1].expand(5, 3, 4), base.to(torch.float16)):
        low, high = measure(tensor) or (None, None)
        assert (float(low), float(high)) == (float(tensor.min()), float(tensor.max()))  # type: ignore[arg-type]
    assert measure(torch.empty(0)) is None
    conjugate = torch.tensor([1.0 - 2.0j]).conj()
    ragged = [torch.tensor([1.0, -2.0]), torch.tensor([2.0])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested and CSR tensors are beta features
        for tensor in (
            conjugate,
            torch.diag(torch.tensor([1.0, -2.0, 2.0])).to_sparse_csr(),
            torch.nested.nested_tensor(ragged),
            torch.nested.nested_tensor(ragged, layout=torch.jagged),
        ):
            extent = measure(tensor)
            assert extent is not None
            assert float(extent[1]) == 2.0
    with FakeTensorMode():
        fake = torch.ones(3)
    for unreadable in (torch.ones(3, device="meta"), torch.eye(3).to_mkldnn(), fake):
        assert measure(unreadable) is None
    eighth = measure(torch.tensor([448.0, -1.0]).to(torch.float8_e4m3fn))
    assert eighth is not None
    assert float(eighth[1]) == 448.0


class Shy(Tensor):
    """A tensor of someone else's that can be multiplied and nothing else."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Shy:
        shy: Shy = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        shy.held = held
        return shy

    def __init__(self, held: Tensor) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is not torch.ops.aten.mul.Tensor:
            raise TypeError(f"{func} is not for such tensors")
        return cls(func(*(a.held if isinstance(a, Shy) else a for a in args)))


def test_an_operation_that_cannot_be_recorded_runs_all_the_same() -> None:
    with Trace(nn.Identity()) as trace:
        shy = Shy(torch.ones(2)) * 2.0
        sound = torch.ones(2) * 3.0
    assert isinstance(shy, Shy)
    assert shy.held.tolist() == [2.0, 2.0]
    assert trace.unrecorded > 0
    assert trace.settle()[trace.producer(sound)].high == 3.0


def test_no_more_than_the_given_number_of_records() -> None:
    with Trace(nn.Identity(), most_records=3) as trace:
        x = torch.ones(2)
        for _ in range(10):
            x = x * 2.0
    assert float(x[0]) == 1024.0
    assert (len(trace.settle()), trace.unrecorded) == (3, 8)


def test_a_mode_that_was_entered_after_the_trace_stays_when_the_trace_is_left() -> None:
    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    trace = Trace(nn.Identity())
    trace.__enter__()  # type: ignore[no-untyped-call]
    made = torch.ones(2) * 2.0
    with Counting() as counting:  # type: ignore[no-untyped-call]
        trace.__exit__(None, None, None)
        assert _get_current_dispatch_mode_stack() == [counting]
        before = counting.calls
        assert trace.settle()[trace.producer(made)].high == 2.0
        assert counting.calls > before
    assert _get_current_dispatch_mode_stack() == []
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode(include_infra_modes=True)


def test_leaving_the_trace_leaves_no_mode_and_results_do_not_change() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5))
    torch.manual_seed(1)
    plain = model(torch.ones(2, 4))
    torch.manual_seed(1)
    with Trace(model):
        traced = model(torch.ones(2, 4))
    assert torch.equal(plain, traced)
    assert _get_current_dispatch_mode_stack() == []
