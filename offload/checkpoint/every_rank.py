"""Work that counts only when every rank has done its part: an error of one is the error of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from offload.errors import ConfigError, WeightsError
from offload.ranks.ranks import Ranks
from swapper import OffloadError, StorageCorrupt, StorageFull, StorageIOError, StoreMissing, StoreUnsafe

_Result = TypeVar("_Result")

_KINDS: dict[str, type[OffloadError]] = {
    kind.__name__: kind
    for kind in (ConfigError, WeightsError, StorageFull, StorageIOError, StorageCorrupt, StoreMissing, StoreUnsafe)
}


def on_every_rank(ranks: Ranks, what: str, call: Callable[[], _Result]) -> list[_Result]:
    """Make the call, and wait until all ranks have made theirs; what each of them returned, in order.

    Raises what this rank's call has raised, else what another one's has. ``what`` says where the program is.
    """
    try:
        result = call()
    except BaseException as error:
        tell(ranks, what, error)
        raise
    return tell(ranks, what, None, result)


def if_every_rank(ranks: Ranks, what: str, call: Callable[[], _Result]) -> _Result:
    """The same, of a result that is this rank's own."""
    results: list[_Result] = []
    on_every_rank(ranks, what, lambda: results.append(call()))
    return results[0]


def tell(ranks: Ranks, what: str, error: BaseException | None, result: Any = None) -> list[Any]:
    """Tell the others of this rank's error or result; the results of all. Raises what another one has met, unless this
    one has an error of its own."""
    results = []
    for rank, (told, of_rank) in enumerate(
        ranks.all_gather_object(what, (None if error is None else _told(error), result))
    ):
        if told is not None and error is None:
            raise _error_of(rank, *told)
        results.append(of_rank)
    return results


def _told(error: BaseException) -> tuple[str, int | None, str, str, str]:
    if isinstance(error, OffloadError):
        return type(error).__name__, None, str(error.args[0]), error.survives, error.advice
    name = type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    return name, number, str(error) if number is not None else f"{name}: {error}", "", ""


def _error_of(rank: int, name: str, number: int | None, what: str, survives: str, advice: str) -> Exception:
    text = f"rank {rank}: {what}"
    if number is not None:
        return OSError(number, text)
    error = _KINDS.get(name, OffloadError)(text)
    error.survives, error.advice = survives, advice
    return error
