"""State that torch keeps for each thread by itself, carried to other threads."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch

from offload.torch_internals import others_listen


class Surroundings:
    """The modes that the calling thread is in when this is made, and its context variables.

    Modes of grad, of inference and of autocast, the default device and the number of threads are carried. What listens
    to operations (``TorchFunctionMode``, ``TorchDispatchMode``, ``saved_tensors_hooks``, transforms of ``torch.func``)
    and the casts that autocast keeps cannot be: ``can_be_carried`` says whether there is none.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = torch.is_autocast_enabled("cpu")
        self._autocast_dtype = torch.get_autocast_dtype("cpu")
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._device = torch.get_default_device()
        self._num_threads = torch.get_num_threads()
        self._variables = contextvars.copy_context()
        self.can_be_carried = not others_listen() and not casts_are_kept()

    def variables(self) -> contextvars.Context:
        """A copy of the context variables, to run a thread's work in."""
        return self._variables.copy()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The same modes in the thread that calls this, which ends afterwards."""
        torch.set_autocast_enabled("cpu", self._autocast)
        torch.set_autocast_dtype("cpu", self._autocast_dtype)
        torch.set_autocast_cache_enabled(self._autocast_cache)
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        with contextlib.ExitStack() as modes:
            if torch.get_default_device() != self._device:
                modes.enter_context(self._device)
            modes.enter_context(torch.inference_mode(self._inference))
            modes.enter_context(torch.set_grad_enabled(self._grad))
            yield


def casts_are_kept() -> bool:
    """Autocast keeps casts of weights, with their part of the graph, in one place for all threads."""
    return torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
