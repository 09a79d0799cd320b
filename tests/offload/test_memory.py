import torch

from offload.memory import copied_memory


def test_a_copy_of_memory_is_no_part_of_a_transform_that_is_under_way():
    weight, copies = torch.arange(6.0), []

    def function(x: torch.Tensor) -> torch.Tensor:
        copies.append(copied_memory(weight))
        return x.square().sum()

    torch.func.grad(function)(torch.ones(2))
    copy = torch.empty(0).set_(copies[0])
    assert copy.tolist() == weight.tolist() and copy.data_ptr() != weight.data_ptr()
