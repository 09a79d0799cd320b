"""Stories: small models with hooks in them, which say what the hooks have told, beside a copy without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from offload.model.handle import make_handle
from offload.model.hooks import Hooks
from offload.model.unit_in_model import UnitInModel
from offload.torch_internals import keeps_version
from offload.units import ParameterSpec, Site, UnitSpec
from swapper import StorageIOError


class Window:
    """Weights while it is open, NaN otherwise."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights
        self.flat = torch.full_like(weights, torch.nan)
        self.open_at = 0
        self._keeps = False

    def holds(self, tensor: torch.Tensor) -> bool:
        try:
            return tensor.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()
        except RuntimeError:
            return False

    def keep(self, keeps: bool) -> None:
        self._keeps = keeps

    def has_copy(self) -> bool:
        return not bool(torch.isnan(self.flat).any())

    def drop_copy(self) -> None:
        self.look_at(torch.nan)

    def open(self) -> None:
        self.look_at(self.weights)

    def close(self) -> None:
        """Nobody sees NaN but those who are not known to the engine."""
        if not self._keeps:
            self.look_at(torch.nan)

    def look_at(self, value: torch.Tensor | float) -> None:
        with torch.no_grad(), keeps_version(self.flat):
            self.flat.copy_(value) if isinstance(value, torch.Tensor) else self.flat.fill_(value)


class Backing:
    """The value of a handle."""

    gradient = None
    trainable = True
    in_use = ()

    def __init__(self, name: str, value: torch.Tensor, site: Site) -> None:
        self.name = name
        self.value = value
        self._site = site

    @property
    def in_model(self) -> nn.Parameter | None:
        return self._site.module._parameters[self._site.name]

    def read(self) -> torch.Tensor:
        return self.value.clone()

    def write(self, value: torch.Tensor) -> None:
        self.value.copy_(value)


class Story:
    """A model, of which the submodules with these names are units, and all that their hooks have told.

    A parameter belongs to the innermost unit around it. The events are lines such as "begin a", "end a", "take a.bias"
    and "over a" when all gradients of a unit have come.
    """

    def __init__(self, model: nn.Module, *names: str) -> None:
        self.model = model
        self.plain = copy.deepcopy(model)
        self.events: list[str] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.in_use: set[str] = set()
        self.aliased: set[int] = set()
        self.refused: str | None = None
        """The unit whose use fails."""
        self.units = []
        handles, self.replaced = {}, {}
        for index, name in enumerate(names):
            found = {n: p for n, p in model.named_parameters() if innermost(n, names) == name}
            flat = torch.cat([p.detach().flatten() for p in found.values()] or [torch.empty(0)])
            window, specs, parameters, offset = Window(flat), [], [], 0
            for parameter_name, old in found.items():
                path, _, attribute = parameter_name.rpartition(".")
                owner = model.get_submodule(path)
                spec = ParameterSpec(
                    parameter_name, old.shape, old.numel(), offset, old.requires_grad, (Site(owner, attribute),)
                )
                view = window.flat[offset : offset + old.numel()].view(old.shape)
                offset += old.numel()
                backing = Backing(parameter_name, old.detach().clone(), spec.sites[0])
                handles[spec] = make_handle(backing, old.shape, old.dtype, torch.device("cpu"), old.requires_grad)
                owner._parameters[attribute] = handles[spec]
                specs.append(spec)
                parameters.append(nn.Parameter(view, requires_grad=old.requires_grad))
                parameters[-1]._backing = backing
            owners = [spec.sites[0].module for spec in specs]
            modules = tuple(dict.fromkeys([model.get_submodule(name), *owners]))
            unit = UnitSpec(index, name, modules, tuple(specs), offset, offset, 0)
            self.units.append(UnitInModel(unit, window, parameters))
        self.handles = handles
        self.hooks = Hooks(self.units, handles, self, lambda function, reason: function)

    # What the hooks tell.

    def begin_use(self, unit: UnitSpec) -> bool:
        self.events.append(f"begin {unit.name}")
        if self.refused == unit.name:
            raise StorageIOError(f"read of {unit.name} failed.")
        assert unit.name not in self.in_use, "it is in use already"
        self.in_use.add(unit.name)
        self.units[unit.index].window.open()
        return True

    def changed_in_use(self, unit: UnitSpec, changes: Sequence[tuple[ParameterSpec, torch.Tensor]]) -> None:
        window = self.units[unit.index].window
        for spec, value in changes:
            self.events.append(f"change {spec.name}")
            window.weights[spec.offset : spec.offset + spec.numel] = value.flatten()

    def moved_in_use(self, unit: UnitSpec, spec: ParameterSpec, value: torch.Tensor, memory: object) -> None:
        self.changed_in_use(unit, [(spec, value)])

    def end_use(self, unit: UnitSpec) -> None:
        self.events.append(f"end {unit.name}")
        self.in_use.remove(unit.name)
        self.units[unit.index].window.close()

    def take_gradient(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float | None) -> None:
        self.events.append(f"take {spec.name}")
        before = self.gradients.get(spec.name)
        self.gradients[spec.name] = gradient.clone() if before is None else before + gradient

    def begin_passing(self) -> None:
        pytest.fail("no weights stay")

    def passed(self, unit: UnitSpec) -> None:
        pytest.fail("no weights stay")

    def end_backward(self, unit: UnitSpec) -> None:
        self.events.append(f"over {unit.name}")

    # What a test asks.

    def told(self) -> list[str]:
        """What has been told since this was asked last."""
        events, self.events = self.events, []
        return events

    def check_at_rest(self) -> None:
        """No call is under way, nothing is open, and handles stand in the model."""
        assert self.in_use == set()
        assert self.hooks.context.open == []
        for unit in self.units:
            assert (unit.forward_depth, unit.in_backward) == (0, False)
            assert unit.strays.are_left or bool(torch.isnan(unit.window.flat).all())
            for parameter in unit.parameters:
                assert unit.take_gradient(parameter) is None
        for spec, handle in self.handles.items():
            ((module, name),) = spec.sites
            assert module._parameters[name] is handle

    def check_gradients(self) -> None:
        """They are those of the model without hooks."""
        expected = {name: p.grad for name, p in self.plain.named_parameters() if p.grad is not None}
        assert self.gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(self.gradients[name], gradient), name

    def train(self, run: Callable[[nn.Module], torch.Tensor] | None = None) -> list[str]:
        """A forward and a backward of the model, which must be those of its copy; the events."""
        run = run or (lambda model: model(batch()))
        loss, expected = run(self.model).sum(), run(self.plain).sum()
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        self.check_at_rest()
        self.check_gradients()
        return self.told()


def innermost(parameter: str, units: Sequence[str]) -> str | None:
    """The unit with the longest name that the parameter is inside of."""
    around = [name for name in units if name == "" or parameter.startswith(f"{name}.")]
    return max(around, key=len, default=None)


def batch(*, requires_grad: bool = False) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, 12).view(3, 4).requires_grad_(requires_grad)


def chain(*names: str) -> nn.Module:
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(4, 4))
    return model


class Model(nn.Module):
    """Submodules, and a function that computes with them."""

    def __init__(self, forward: Callable[..., torch.Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.compute = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x)


class Weight(nn.Module):
    """One parameter, and a function that computes with the module."""

    def __init__(self, forward: Callable[..., object], **modules: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.compute = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> object:
        return self.compute(self, x)


def forward_of(*names: str) -> list[str]:
    return [f"{what} {name}" for name in names for what in ("begin", "end")]
