"""The kernels are in place while anybody wants them, and PyTorch's own afterwards, whatever happened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.nn import functional as F

from halfwise.torch.emulation import emulated_region, emulation, installation

X = torch.ones(2, 2)


def acts_as_cuda() -> bool:
    with torch.autocast("cpu", dtype=torch.float16):
        return X.half().softmax(0).dtype is torch.float32


def own_kernels_are_back() -> bool:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.binary_cross_entropy(torch.full((2,), 0.5), torch.ones(2))
        lists = (X.softmax(0).dtype, (X @ X).dtype, F.avg_pool3d(X.view(1, 1, 1, 2, 2).bfloat16(), 1).dtype)
    return lists == (torch.float32, torch.bfloat16, torch.float32) and not acts_as_cuda()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    assert own_kernels_are_back()
    assert not torch.is_autocast_enabled("cpu")
    assert eval_frame._stance.stance == "default"


def in_threads(*works: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_it_is_counted() -> None:
    with emulation("float16"):
        with emulation("bfloat16"):
            assert acts_as_cuda()
        assert acts_as_cuda()
    assert not acts_as_cuda()


def test_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), emulated_region("cuda", "float16"):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError), emulated_region("cuda", "float16"):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_a_failed_installation_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulation("float16"):
        pass
    kernels = installation._installation._kernels
    broken = {**kernels, "relu": "no kernel"}
    monkeypatch.setattr(installation._installation, "_kernels", broken)
    with pytest.raises(TypeError), emulation("float16"):
        pass
    assert own_kernels_are_back()


def test_threads_overlap_each_with_its_own_format() -> None:
    met, first_left = threading.Barrier(2), threading.Event()
    x = torch.full((1, 1), 1.0 + 2.0**-12)
    found: dict[str, tuple[torch.dtype, float]] = {}

    def first() -> None:
        with emulated_region("cuda", "float8"):
            met.wait(timeout=30)
            y = F.linear(torch.tensor([[448.0, 1.06]]), torch.tensor([[0.0, 1.0]]))
            found["float8"] = (y.dtype, float(y))
            met.wait(timeout=30)
        first_left.set()

    def second() -> None:
        with emulated_region("cuda", "bfloat16"):
            met.wait(timeout=30)
            y = F.linear(torch.tensor([[448.0, 1.06]]), torch.tensor([[0.0, 1.0]]))
            found["bfloat16"] = (y.dtype, float(y))
            met.wait(timeout=30)
            assert first_left.wait(timeout=30)
            assert X.bfloat16().exp().dtype is torch.float32
        with emulated_region("cuda", "tensorfloat32"):
            found["tensorfloat32"] = ((x @ x).dtype, float(x @ torch.ones(1, 1)))

    in_threads(first, second)
    assert found == {
        "float8": (torch.bfloat16, 1.0),
        "bfloat16": (torch.bfloat16, 1.0625),
        "tensorfloat32": (torch.float32, 1.0),
    }


def test_threads_that_come_and_go() -> None:
    def work() -> None:
        torch.manual_seed(0)
        layer, x = nn.Linear(4, 4), torch.ones(2, 4)
        for _ in range(20):
            with emulated_region("cuda", "float16"):
                loss = layer(x).softmax(1)
            assert loss.dtype is torch.float32
            loss.sum().backward()

    in_threads(*[work] * 4)


def test_compiled_code_runs_eagerly_meanwhile() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append(1)
        return graph.forward

    torch.compiler.reset()
    layer = torch.compile(nn.Linear(2, 2), backend=backend)
    with emulation("float16"), emulated_region("cuda", "float16"):
        assert layer(X).dtype is torch.float16
    assert compiled == []
    layer(X)
    assert compiled == [1]
