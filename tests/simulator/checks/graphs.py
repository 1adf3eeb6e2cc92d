"""Check that CUDA graphs of the simulator behave as on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

Tensors = tuple[torch.Tensor, ...]


def capture(function: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph of the operations of ``function``, and the result of ``function`` in the capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = function()
    return graph, result


def gpu(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cuda")


def weak(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the address of ``tensor``, created as in TE's ``make_weak_ref``."""

    class Address:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }

    return torch.as_tensor(Address())


def refused(function: Callable[[], Any], named: str) -> None:
    """Assert that a capture of ``function`` fails, and that the error and its cause contain ``named``."""
    graph = torch.cuda.CUDAGraph()
    expected = rf"failed due to a previous error during capture: .*{named}"
    with pytest.raises(RuntimeError, match=expected) as raised, torch.cuda.graph(graph):
        function()
    cause = raised.value.__context__
    assert "not permitted when stream is capturing" in str(cause)
    assert named in str(cause)
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def check_copies_to_the_host_are_copies() -> None:
    tensor = gpu(1, 2)
    host = [tensor.cpu(), tensor.to("cpu"), tensor.to(device="cpu", dtype=torch.float64)]
    back = host[0].cuda()
    tensor.zero_()
    assert all(copy.tolist() == [1, 2] and copy.device.type == "cpu" and not copy.is_cuda for copy in host)
    host[0].zero_()
    assert back.tolist() == [1, 2]
    assert all(same is tensor for same in (tensor.cuda(), tensor.to("cuda"), tensor.to(0), tensor.to(device=0)))
    assert tensor.to("cuda", torch.float16).dtype == tensor.to(torch.float16).dtype == torch.float16
    assert host[0].to(torch.float16).device.type == "cpu"
    assert tensor.to(host[0]).device.type == "cpu"
    assert tensor.to("cuda", copy=True) is not tensor


def check_nothing_runs_at_capture() -> None:
    total, x = gpu(10), gpu(3)
    view = total.view(1, 1)
    graph, y = capture(lambda: (total.add_(x), view.mul_(2), torch.add(x, 1, out=x), x * 5)[-1])
    assert (total.item(), x.item()) == (10, 3)
    assert torch.isnan(y).all()
    graph.replay()
    assert (total.item(), x.item(), y.item()) == (26, 4, 20)


def check_views_and_strides() -> None:
    x = torch.arange(12.0, device="cuda").view(3, 4)

    def body() -> Tensors:
        y = x.t() * 2
        left, right = y.split(2)
        right.zero_()
        turned = y.view(4, 3)
        turned.t_()
        return y, left, y.unsqueeze_(0)[0, 1:, :2].contiguous(), turned

    graph, (y, left, part, turned) = capture(body)
    x.add_(1)
    graph.replay()
    graph.replay()
    assert turned.shape == (3, 4)
    assert y.shape == (1, 4, 3)
    expected = x.t() * 2
    expected[2:] = 0
    assert torch.equal(y[0], expected)
    assert torch.equal(left, expected[:2])
    assert torch.equal(part, expected[1:, :2])
    assert y[0].stride() == (x.t() * 2).stride()


def check_lists_of_tensors() -> None:
    xs = [gpu(1, 2), gpu(3)]
    graph, ys = capture(lambda: (torch._foreach_add_(xs, 1), torch._foreach_mul(xs, 2), torch.cat(xs))[1:])
    assert [x.tolist() for x in xs] == [[1, 2], [3]]
    graph.replay()
    assert [y.tolist() for y in ys[0]] == [[4, 6], [8]]
    assert ys[1].tolist() == [2, 3, 4]


def check_freed_memory_goes_to_later_captures_of_the_pool() -> None:
    x, pool = gpu(1, 2), torch.cuda.graph_pool_handle()
    first, y = capture(lambda: x + 1, pool)
    seen = weak(y)
    second, z = capture(lambda: x * 100, pool)
    assert z.data_ptr() != y.data_ptr()
    del y
    third, w = capture(lambda: x * -1, pool)
    assert w.data_ptr() == seen.data_ptr()
    first.replay()
    assert seen.tolist() == [2, 3]
    second.replay()
    assert seen.tolist() == [2, 3]
    third.replay()
    assert seen.tolist() == [-1, -2]
    assert z.tolist() == [100, 200]


def check_a_view_owns_memory_and_a_weak_reference_does_not() -> None:
    x, pool = torch.ones(200, device="cuda"), torch.cuda.graph_pool_handle()
    _, y = capture(lambda: x + 1, pool)
    address, view = y.data_ptr(), y[3:5]
    del y
    _, z = capture(lambda: x + 2, pool)
    assert z.data_ptr() != address
    del view
    _, w = capture(lambda: x + 3, pool)
    assert w.data_ptr() == address


def check_autograd_owns_what_it_saved() -> None:
    x, pool = torch.ones(8, device="cuda", requires_grad=True), torch.cuda.graph_pool_handle()
    addresses = []

    def body() -> torch.Tensor:
        inner = x * 2
        addresses.append(inner.data_ptr())
        return inner.square()

    _, y = capture(body, pool)
    _, z = capture(lambda: x.detach() + 1, pool)
    assert z.data_ptr() != addresses[0]
    del y
    _, w = capture(lambda: x.detach() + 1, pool)
    assert w.data_ptr() == addresses[0]


def check_pools_are_kept_apart() -> None:
    x = gpu(1)
    graph, y = capture(lambda: x + 1)
    address = y.data_ptr()
    del y
    _, z = capture(lambda: x + 1)
    assert z.data_ptr() != address
    _, w = capture(lambda: x + 1, graph.pool())
    assert w.data_ptr() == address


def check_the_smallest_block_that_fits_is_taken() -> None:
    pool = torch.cuda.graph_pool_handle()

    def sizes(*counts: int) -> list[torch.Tensor]:
        return [torch.empty(count, dtype=torch.uint8, device="cuda") for count in counts]

    _, blocks = capture(lambda: sizes(4096, 512, 1024, 512), pool)
    addresses = [block.data_ptr() for block in blocks]
    assert [b - a for a, b in itertools.pairwise(addresses)] == [4096, 512, 1024]
    blocks[0] = blocks[2] = torch.empty(0)
    _, (small,) = capture(lambda: sizes(600), pool)
    assert small.data_ptr() == addresses[2]
    del small, blocks
    _, (whole,) = capture(lambda: sizes(6000), pool)
    assert whole.data_ptr() == addresses[0]


def check_small_and_large_blocks_are_kept_apart() -> None:
    mib = 1 << 20
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()

    def blocks(*mibs: float) -> list[torch.Tensor]:
        return [torch.empty(int(size * mib), dtype=torch.uint8, device="cuda") for size in mibs]

    graph, (first, large, second, huge) = capture(lambda: blocks(0.5, 4, 1, 17))
    assert torch.cuda.memory_reserved() - reserved == (2 + 20 + 18) * mib
    assert torch.cuda.memory_allocated() - allocated == 23.5 * mib  # 17 MiB take the whole segment of 18 MiB
    assert second.data_ptr() - first.data_ptr() == mib / 2
    del large, huge
    _, (again,) = capture(lambda: blocks(0.25), graph.pool())
    assert again.data_ptr() - first.data_ptr() == 1.5 * mib


def check_replay_and_pool_need_a_capture() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="CUDAGraph::replay without a preceding successful capture"):
        graph.replay()
    with pytest.raises(RuntimeError, match="CUDAGraph::pool without a preceding successful capture"):
        graph.pool()
    with pytest.raises(RuntimeError, match="capture_end was called without"):
        graph.capture_end()


def check_captures_do_not_nest() -> None:
    refused(lambda: capture(lambda: None), "synchronize")
    refused(lambda: torch.cuda.CUDAGraph().capture_begin(), "capture_begin")
    graph, _ = capture(lambda: None)
    refused(graph.replay, "CUDAGraph.replay")


def check_values_cannot_be_read_in_a_capture() -> None:
    x = gpu(1, 2)
    refused(lambda: x.sum().item(), "_local_scalar_dense")
    refused(lambda: bool(x.sum() > 0), "_local_scalar_dense")
    refused(lambda: torch.equal(x, x), "aten::equal")
    refused(x.tolist, "tolist")
    refused(x.numpy, "numpy")
    refused(x.cpu, "cpu")
    refused(torch.cuda.synchronize, "synchronize")
    refused(torch.cuda.Event().synchronize, "Event.synchronize")
    refused(lambda: gpu(1), "copies values from the host")


def check_sizes_cannot_depend_on_values_in_a_capture() -> None:
    x = gpu(1, 0, 2)
    refused(x.nonzero, "nonzero")
    refused(lambda: x[x > 0], "aten::index")
    refused(x.unique, "unique")
    graph, y = capture(lambda: x[torch.zeros(2, dtype=torch.long)])
    graph.replay()
    assert y.tolist() == [1, 1]


def check_what_cannot_be_replayed_is_refused() -> None:
    x = gpu(1, 0, 2)
    refused(lambda: torch.rand(2, device="cuda", generator=torch.Generator()), "generator that is not registered")
    refused(lambda: x.resize_(7), "resize_")
    assert x.tolist() == [1, 0, 2]


def check_memory_outside_of_pools_that_nobody_owns_gets_other_content() -> None:
    owned = [gpu(1, 2), gpu(3, 4)]
    graph, found = capture(lambda: (owned[0] + 1, owned[1].view(2, 1) + 1))
    reference = weak(owned[0])
    owned[1] = owned[1][1:]
    graph.replay()
    assert [each.flatten().tolist() for each in found] == [[2, 3], [4, 5]]
    del owned[0]
    graph.replay()
    assert found[0].isnan().all()
    assert reference.isnan().all()
    assert found[1].flatten().tolist() == [4, 5]  # a view still owns the memory
    owned.clear()
    graph.replay()
    assert found[1].isnan().all()


def check_a_tensor_that_is_set_to_other_memory_is_read_there() -> None:
    x, y = gpu(1, 2, 3), torch.empty(0, device="cuda")

    def body() -> torch.Tensor:
        doubled = 2 * x
        y.set_(doubled.untyped_storage(), 1, (2,), (1,))
        return y + 1

    graph, found = capture(body)
    for value in (1, 5):
        x.fill_(value)
        graph.replay()
        assert found.tolist() == [2 * value + 1] * 2


def check_each_replay_draws_new_random_numbers() -> None:
    x = torch.ones(8, 8, device="cuda")

    def body() -> Tensors:
        return torch.nn.functional.dropout(x, 0.5), torch.rand(4, device="cuda"), torch.empty_like(x).normal_()

    torch.manual_seed(1)
    wanted = [body() for _ in range(3)]
    torch.manual_seed(1)
    graph, found = capture(body)
    for eager in wanted:
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
    assert not torch.equal(wanted[0][0], wanted[1][0])


def check_tensors_on_the_host_can_be_read_in_a_capture() -> None:
    x = gpu(1, 2, 3)

    def body() -> Tensors:
        sizes = torch.tensor([1, 2], dtype=torch.int32, device="cpu").to(torch.int64)
        assert sizes.tolist() == [1, 2]
        assert (sizes + 1).sum().item() == 5
        return torch.split(x * 2, sizes.tolist())

    graph, (first, second) = capture(body)
    graph.replay()
    assert (first.tolist(), second.tolist()) == ([2], [4, 6])


def check_times_and_autocast_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="elapsed_time"):
        torch.cuda.Event().elapsed_time(torch.cuda.Event())
    with pytest.raises(NotImplementedError, match="autocast"):
        torch.autocast("cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", enabled=False):
        pass


def check_torchs_own_graphed_callables_work() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)).cuda()
    x = torch.randn(3, 4, device="cuda")
    wanted = module(x)
    wanted.sum().backward()
    grads = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    graphed = torch.cuda.make_graphed_callables(module, (torch.randn(3, 4, device="cuda"),))
    found = graphed(x)
    found.sum().backward()
    assert torch.equal(found, wanted)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(module.parameters(), grads, strict=True))
