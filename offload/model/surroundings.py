"""State that torch keeps for each thread by itself, carried to other threads."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch
from torch.nn.utils import parametrize

from offload.device.protocol import Processor
from offload.settings import Settings
from offload.torch_internals import found, others_listen


class Surroundings:
    """The modes that the calling thread is in when this is made, and its context variables.

    Modes of grad, of inference and of autocast, the default device, the device's stream and the number of threads are
    carried. What listens to operations (``TorchFunctionMode``, ``TorchDispatchMode``, ``saved_tensors_hooks``,
    transforms of ``torch.func``) and what torch keeps for all threads cannot be: ``can_be_carried`` says whether there
    is none.
    """

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self.device = processor.torch_device
        """The device that the model computes on."""
        self._computing = processor.surroundings()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds(self.device)
        ]
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._default_device = torch.get_default_device()
        self._num_threads = torch.get_num_threads()
        self._settings = Settings()
        self._variables = contextvars.copy_context()
        self.can_be_carried = not others_listen() and self.kept_for_all_threads() is None

    def left(self) -> Surroundings | None:
        """What the thread that calls this leaves, where it has entered these and changed them; None: it has not."""
        now = Surroundings(self._processor)
        kept = ("_grad", "_inference", "_autocast", "_autocast_cache", "_default_device", "_num_threads", "_settings")
        is_same = all(getattr(now, name) == getattr(self, name) for name in kept)
        before = dict(self._variables.items())
        variables = dict(now._variables.items())
        if is_same and all(before.get(each, self) is value for each, value in variables.items()):
            return None
        return now

    def take_on(self) -> None:
        """Have the calling thread go on with the modes and variables of these."""
        for kind, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._autocast_cache)
        torch.set_num_threads(self._num_threads)
        self._settings.put()
        if torch.get_default_device() != self._default_device:
            torch.set_default_device(self._default_device)
        torch.set_grad_enabled(self._grad)
        now = dict(contextvars.copy_context().items())
        for variable, value in self._variables.items():
            if now.get(variable, self) is not value:
                variable.set(value)

    def kept_for_all_threads(self) -> str | None:
        """The reason why micro-batches would find a part of another one's graph: torch keeps it in one place for all
        threads. None: it does not."""
        is_on = any(torch.is_autocast_enabled(kind) for kind in _kinds(self.device))
        if is_on and torch.is_autocast_cache_enabled():
            return (
                "autocast keeps its casts for all threads in one place (precision=, or autocast's cache_enabled=False, "
                "keep none)"
            )
        if found(parametrize, "_cache_enabled"):
            return "torch.nn.utils.parametrize.cached() keeps weights for all threads in one place"
        return None

    def variables(self) -> contextvars.Context:
        """A copy of the context variables, to run a thread's work in."""
        return self._variables.copy()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The same modes in the thread that calls this, which ends afterwards. Backward runs in it, too: a thread of
        torch's for the device could not wait for others that need it."""
        for kind, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._autocast_cache)
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        self._settings.put()
        with contextlib.ExitStack() as modes:
            if torch.get_default_device() != self._default_device:
                modes.enter_context(self._default_device)
            modes.enter_context(self._computing())
            modes.enter_context(torch.inference_mode(self._inference))  # first: it sets those below, too
            modes.enter_context(torch.set_grad_enabled(self._grad))
            modes.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield


def _kinds(device: torch.device) -> set[str]:
    """Kinds of devices whose operations autocast may cast."""
    return {"cpu", device.type}
