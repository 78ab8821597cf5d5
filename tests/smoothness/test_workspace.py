"""Memory that measurements share."""

import torch

from curvestep.smoothness.snapshot import Workspace


def test_copies_are_equal_and_take_no_new_memory():
    workspace = Workspace()
    lists = [[torch.randn(3, 4), None, torch.randn(2)] for _ in range(3)]
    addresses = set()
    for tensors in lists:
        copies = workspace.copies(tensors)
        assert copies[1] is None
        for copy, tensor in ((copies[0], tensors[0]), (copies[2], tensors[2])):
            assert torch.equal(copy, tensor)
            assert copy.data_ptr() != tensor.data_ptr()
        addresses.add((copies[0].data_ptr(), copies[2].data_ptr()))
    assert len(addresses) == 1


def test_tensor_of_another_kind_gets_memory_of_its_own():
    workspace = Workspace()
    for tensor in (
        torch.randn(3, 4),
        torch.randn(4, 3),
        torch.randn(3, 4).t(),
        torch.randn(4, 3, dtype=torch.float32),
        torch.randn(4, 3).to_sparse(),
        torch.nn.Parameter(torch.randn(4, 3)),
    ):
        [copy] = workspace.copies([tensor])
        assert not copy.requires_grad
        assert copy.dtype == tensor.dtype
        assert copy.layout == tensor.layout
        assert copy.stride() == tensor.stride() if not tensor.is_sparse else True
        assert torch.equal(copy.to_dense(), tensor.detach().to_dense())
