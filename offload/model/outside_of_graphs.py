"""Functions that ``torch.compile`` calls as they are, between two of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload.interrupts import handlers, of_python, undisturbed
from offload.torch_internals import found

_compiler: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: False)
"""What makes graphs of the functions that this thread calls; None if there is nothing. Older releases do not tell."""


def outside_of_graphs(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """``function``, which ``torch.compile`` runs as it is, between two graphs; it says ``reason`` where it may not.

    Where nothing compiles it is called at once: torch's wrapper takes five calls to find that out. Handlers of the
    program's own run before or after it: see ``undisturbed``.
    """
    whole = undisturbed(function)
    outside = torch.compiler.disable(whole, reason=reason)

    def call(*arguments: Any) -> Any:
        if _compiler() is not None:
            return outside(*arguments)
        return function(*arguments) if all(map(of_python, handlers())) else whole(*arguments)

    call.__qualname__ = getattr(function, "__qualname__", call.__qualname__)  # the compiler's message names it
    found(torch._dynamo.decorators, "skip")(call)
    call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    call._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    return call
