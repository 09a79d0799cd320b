"""Outputs of a module: the tensors in them, and the nodes of the graph that they tell of."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import Node

from offload.model.unit_in_model import UnitInModel
from offload.torch_internals import belongs_to_backward, graph_task, leaves_of, sequence_number


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors in what a module returned."""
    if isinstance(output, torch.Tensor):
        return [output]
    leaves = leaves_of(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def own_copy(unit: UnitInModel, leaf: Any) -> Any:
    """A module may return its parameter, or a view of it: such an output must stay when the unit is released."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and unit.holds(leaf) else leaf


def first_node(sequence: int, output: torch.Tensor) -> Node | None:
    """The node through which gradients of ``output`` reach those that the unit has made since ``sequence``.

    None for what a unit has merely passed through: its gradient tells nothing of the unit's backward. A view that the
    caller changes in place gets a new history, which goes through its base alone: the base's node is the one.
    """
    for tensor in (output._base, output):
        node = None if tensor is None else tensor.grad_fn
        if node is not None and sequence_number(node) >= sequence and not _is_older(node):
            return node
    return None


def _is_older(node: Node) -> bool:
    """The unit is being recomputed, and the node was made before. Each thread counts its nodes by itself, and autograd
    may recompute in another one than that which ran the forward: there the numbers tell nothing."""
    return graph_task() != -1 and belongs_to_backward(node)
