import torch

from offload.memory import copy_memory


def test_a_copy_of_memory_is_no_part_of_a_transform_that_is_under_way():
    weight, copy = torch.arange(6.0), torch.zeros(6)

    def function(x: torch.Tensor) -> torch.Tensor:
        copy_memory(copy.data_ptr(), weight.data_ptr(), weight.nbytes)
        return x.square().sum()

    torch.func.grad(function)(torch.ones(2))
    assert copy.tolist() == weight.tolist()
