"""Parameters that stand in the model still, and those that the user's code has put others in the place of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from torch import nn

from offload.errors import ConfigError
from offload.model.handle import Handle
from offload.units import ParameterSpec

_Place: TypeAlias = tuple[ParameterSpec, nn.Parameter, object, nn.Module, str]
"""A place of the model: the parameter that stood there at first, what it stood for, the module and the name."""


class Standing:
    """Looks at the places of ``parameters``: by spec, where the model had them at first."""

    def __init__(self, parameters: Mapping[ParameterSpec, nn.Parameter]) -> None:
        self._parameters = parameters
        self._backings = {spec: vars(handle).get("_backing") for spec, handle in parameters.items()}
        self._places = [
            (spec, handle, self._backings[spec], module, name)
            for spec, handle in parameters.items()
            for module, name in spec.owners
        ]
        self._packed_places = [place for place in self._places if place[0].packing is not None]
        self._lost: set[ParameterSpec] = set()
        """Parameters that were said to be lost."""

    def lost(self, model: nn.Module) -> Iterator[str]:
        """The names of trained parameters that stand nowhere in the model any more; each is named once. Raises
        ``ConfigError`` for one that has become another one of the engine's."""
        suspects = [spec for spec in self._gone(self._places) if spec.trainable and spec not in self._lost]
        present = {id(parameter) for parameter in model.parameters()} if suspects else set()
        for spec in suspects:
            handle = self._parameters[spec]
            if not self._is_itself(spec) and isinstance(handle, Handle) and handle._is_managed:
                raise ConfigError(
                    f"parameter {spec.name} was exchanged with {handle._backing.name} (torch.utils.swap_tensors), and "
                    "the engine computes with the weights that belong to each place. Exchange them back, and then "
                    "their values: first.data, second.data = second.data.clone(), first.data.clone()"
                )
            if id(handle) not in present or not self._is_itself(spec):
                self._lost.add(spec)
                yield spec.name

    def replaced(self) -> list[str]:
        """The names of quantised parameters that others stand in the place of; each is named once."""
        found = [spec for spec in self._gone(self._packed_places) if spec not in self._lost]
        self._lost.update(found)
        return [spec.name for spec in found]

    def _gone(self, places: Iterable[_Place]) -> Iterable[ParameterSpec]:
        """Parameters of these places that are not everywhere where the model had them, or are something else there by
        now (``torch.utils.swap_tensors`` makes another one of them, or a value that looks at it). Each step asks."""
        return dict.fromkeys(
            spec
            for spec, handle, backing, module, name in places
            if module._parameters.get(name) is not handle
            or (own := vars(handle)).get("_backing") is not backing
            or not own.get("_is_managed")
        )

    def _is_itself(self, spec: ParameterSpec) -> bool:
        """The object stands for the parameter still."""
        handle = self._parameters[spec]
        return isinstance(handle, Handle) and handle._is_managed and handle._backing is self._backings[spec]
