"""Weights from the model's own initialisers, as if it had been built in memory: docs/birth.md says what is promised."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from offload.birth import hugging_face
from offload.birth.adapters import in_dtypes_of_layers, without_adapters
from offload.birth.origin import Origin
from offload.birth.recording import Recording, Shapes
from offload.errors import ConfigError
from offload.units import Site

_Model = TypeVar("_Model", bound=nn.Module)

_recordings: weakref.WeakKeyDictionary[nn.Module, Recording] = weakref.WeakKeyDictionary()
"""Recordings of the models that ``deferred_init`` has built."""


def deferred_init(build: Callable[..., _Model], *args: Any, **kwargs: Any) -> _Model:
    """The model that ``build(*args, **kwargs)`` returns, with its weights on the meta device: it takes no memory.

    ``OffloadEngine(model)`` gives it the weights that it would have now: whatever the program did to make them, with
    the same random numbers, which count as drawn. Raises ``ConfigError`` if a program looks into its weights.
    """
    recording = Recording()
    model = _built(recording, partial(build, *args, **kwargs))
    _recordings[model] = recording
    return model


def shapes_of(build: Callable[[], _Model]) -> _Model:
    """The model that ``build`` returns, of which nothing but shapes is known: no random number is drawn, so it takes
    no longer than its modules. Raises ``ConfigError`` if a program looks into its weights."""
    return _built(Shapes(), build)


def _built(recording: Recording, build: Callable[[], _Model]) -> _Model:
    try:
        with recording, in_dtypes_of_layers():
            model = build()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise ConfigError(
            f"the model cannot be built without memory, since it looks into its weights: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"deferred_init: expected a function that returns a model, and got {type(model).__name__}")
    return model


def _recorded(recording: Recording, tensor: torch.Tensor) -> Origin:
    """The origin that is the result of what a recording does to ``tensor``. It does not keep the parameter itself: a
    handle takes that one's place."""
    value = tensor.detach()
    return Origin(partial(recording.value, value), partial(recording.rows, value))


def initialise(model: nn.Module, wanted: Set[Site]) -> dict[Site, Origin]:
    """Find the origins of the values of these sites' tensors, which are on the meta device.

    Random numbers are drawn now, in the order of an in-memory construction: by ``deferred_init``'s recording; a model
    of ``transformers`` is built again; other modules' ``reset_parameters`` are called, those of children first.
    Raises ``ConfigError`` for a module that nothing initialises.
    """
    origins = recorded(model, wanted)
    rest = wanted - origins.keys()
    if rest:
        recording = Recording()
        with recording:
            made = _Initialisers(rest).run(model)
        origins.update(_origins(recording, made))
    return origins


def recorded(model: nn.Module, wanted: Set[Site]) -> dict[Site, Origin]:
    """The origins of those of these sites' tensors that ``deferred_init`` has filled, of the model or of parts."""
    return {
        site: _recorded(recording, tensor_of(site))
        for site in wanted
        for recording in _recordings_of(model)
        if recording.fills(tensor_of(site))
    }


def give(model: nn.Module, values: Iterable[tuple[torch.Tensor, Callable[[], torch.Tensor]]]) -> None:
    """Tensors on the meta device of a model that ``deferred_init`` has built have these values, whatever was recorded.
    What was computed from them is computed from these."""
    for tensor, value in values:
        for recording in _recordings_of(model):
            recording.give(tensor, value)


def without_value(model: nn.Module, sites: Iterable[Site]) -> set[Site]:
    """Those of these sites whose values are not known: they were not recorded, or depend on values in whose place
    others were given."""
    lost = set(sites)
    for recording in _recordings_of(model):
        filled = {id(tensor_of(site)): site for site in lost if recording.fills(tensor_of(site))}
        unknown = {id(tensor) for tensor in recording.without_value([tensor_of(site) for site in filled.values()])}
        lost -= {site for key, site in filled.items() if key not in unknown}
    return lost


def _recordings_of(model: nn.Module) -> list[Recording]:
    return [_recordings[module] for module in model.modules() if module in _recordings]


def initialise_missing(model: nn.Module, wanted: Set[Site]) -> dict[Site, Origin]:
    """The same for what a weights file of a ``transformers`` model lacks, which may have adapters: as
    ``from_pretrained`` does, which draws for nothing else."""
    recording = Recording()
    with recording:
        loaded = [tensor_of(site) for site in sites_of(model) if site not in wanted]
        hugging_face.initialise_missing(without_adapters(model), loaded)
    return _origins(recording, {site: tensor_of(site) for site in wanted})


def forget(model: nn.Module) -> None:
    """The model has its weights: how it was built is not needed any more."""
    for module in model.modules():
        _recordings.pop(module, None)


def sites_of(model: nn.Module) -> Iterable[Site]:
    """Sites of the model's parameters and buffers."""
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield Site(module, name)


def tensor_of(site: Site) -> torch.Tensor:
    """Tensor that the model has there."""
    module, name = site
    tensor: torch.Tensor | None = module._parameters.get(name)
    if tensor is None:
        tensor = module._buffers.get(name)
    if tensor is None:
        raise ConfigError(f"{type(module).__name__} has lost its {name} while the engine was made")
    return tensor


def _origins(recording: Recording, made: dict[Site, torch.Tensor]) -> dict[Site, Origin]:
    origins: dict[Site, Origin] = {}
    for site, tensor in made.items():
        if tensor.device.type != "meta":
            value = tensor.detach()
            origins[site] = Origin(value.detach)
        elif recording.fills(tensor) or not tensor.numel():
            origins[site] = _recorded(recording, tensor)
        else:
            raise ConfigError(_nothing_fills(site.module, [site.name], "its initialisers leave it out"))
    return origins


class _Initialisers:
    """One run over the initialisers of a model's modules, within a recording."""

    def __init__(self, wanted: Set[Site]) -> None:
        self._wanted = wanted
        self._made: dict[Site, torch.Tensor] = {}
        self._seen: set[nn.Module] = set()
        self._shared: dict[int, torch.Tensor] = {}
        """By ``id``, the tensors that an initialiser has filled."""

    def run(self, model: nn.Module) -> dict[Site, torch.Tensor]:
        """The tensors of the wanted sites, as they were recorded."""
        self._visit(model)
        return self._made

    def _visit(self, module: nn.Module) -> None:
        if module in self._seen:
            return
        self._seen.add(module)
        if hugging_face.is_pretrained(module) and any(Site(*site) in self._wanted for site in sites_of(module)):
            self._made.update(hugging_face.build_again(module, self._wanted))
            self._seen.update(module.modules())
            return
        for child in module.children():
            self._visit(child)
        self._initialise(module)

    def _initialise(self, module: nn.Module) -> None:
        """Call the module's initialiser, if it has something to initialise.

        A tied weight keeps what its first module gave it. What the second module draws for it is drawn, too, since it
        had a weight of its own before they were tied.
        """
        names = [name for name in (*module._parameters, *module._buffers) if Site(module, name) in self._wanted]
        if not names:
            return
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None:
            raise ConfigError(_nothing_fills(module, names, "no reset_parameters() to initialise them"))
        tied = {name: p for name, p in module._parameters.items() if p is not None and id(p) in self._shared}
        try:
            for name, parameter in tied.items():
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
            reset()
        except Exception as error:
            raise ConfigError(
                f"{type(module).__name__}.reset_parameters() cannot run without memory ({error}). Build the model on "
                "the CPU."
            ) from error
        finally:
            module._parameters.update(tied)
        for name in names:
            tensor = self._made[Site(module, name)] = tensor_of(Site(module, name))
            self._shared[id(tensor)] = tensor


def _nothing_fills(module: nn.Module, names: list[str], why: str) -> str:
    return (
        f"{type(module).__name__} has {', '.join(names)} on the meta device and {why}. Build the model by "
        "offload.deferred_init(build, ...) instead of under torch.device('meta'), give its weights (weights=), or "
        "build it on the CPU."
    )
