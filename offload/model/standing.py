"""Parameters that stand in the model still, and those that the user's code has put others in the place of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from offload.model.handle import Handle
from offload.units import ParameterSpec


class Standing:
    """Looks at the places of ``parameters``: by spec, where the model had them at first."""

    def __init__(self, parameters: Mapping[ParameterSpec, nn.Parameter]) -> None:
        self._parameters = parameters
        self._lost: set[ParameterSpec] = set()
        """Parameters that were said to be lost."""

    def lost(self, model: nn.Module) -> Iterator[str]:
        """The names of trained parameters that stand nowhere in the model any more; each is named once."""
        suspects = [
            spec
            for spec, handle in self._parameters.items()
            if spec.trainable and spec not in self._lost and not _stands(handle, spec)
        ]
        present = {id(parameter) for parameter in model.parameters()} if suspects else set()
        for spec in suspects:
            if id(self._parameters[spec]) not in present or not isinstance(self._parameters[spec], Handle):
                self._lost.add(spec)
                yield spec.name

    def replaced(self) -> list[str]:
        """The names of quantised parameters that others stand in the place of; each is named once."""
        found = [
            spec
            for spec, handle in self._parameters.items()
            if spec.packing is not None and spec not in self._lost and not _stands(handle, spec)
        ]
        self._lost.update(found)
        return [spec.name for spec in found]


def _stands(parameter: nn.Parameter, spec: ParameterSpec) -> bool:
    """It is where the model has it, and still a handle: ``torch.utils.swap_tensors`` makes something else of it."""
    return isinstance(parameter, Handle) and all(
        module._parameters.get(name) is parameter for module, name in spec.owners
    )
