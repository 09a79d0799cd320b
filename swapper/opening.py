"""The beginning of a durable store, and taking one up that is there.

[Note: A store that is damaged] One manifest that is damaged, or gone though its generation was committed, does not
close the store: generations whose manifests are whole can be opened. But which places the lost one needs is not known
any more, and its data may have other names. So nothing is written: such a store is only read. The generation that is
asked for must be whole: the last one, if none is named. There is no going back in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from swapper.device import Device
from swapper.directory import Directory
from swapper.durable import DurableStore
from swapper.errors import StorageCorrupt, StorageError, StoreExists, StoreMissing, failed
from swapper.manifest import Manifest
from swapper.publication import committed, left_over, missing, prepared, published, read_manifest, retained_name

MakeDevice = Callable[[Manifest], Device]
"""Gives the device that holds the data of a store, as its manifest describes it."""


def begin(
    directory: Directory,
    make_device: MakeDevice,
    empty: Manifest,
    where: str,
    reserved: Sequence[int] | None = None,
) -> DurableStore:
    """Publish ``empty`` as generation 0 of a new store. See ``create_store``; ``reserved`` is that of the store."""
    names = _names(directory, where)
    if published(names) or committed(names):
        raise StoreExists(f"{where} is there already.")
    device = make_device(empty)
    try:
        _clear(directory, names)
        first = replace(empty, chunks=tuple(device.table()))
        store = DurableStore(directory, device, {0: first}, set(), 0, 0, where, reserved)
        store.publish_first()
        return store
    except BaseException:
        device.close()
        raise


def take_up(
    directory: Directory,
    make_device: MakeDevice,
    where: str,
    generation: int | None = None,
    reserved: Sequence[int] | None = None,
) -> DurableStore:
    """The store that ``directory`` tells of, at its last generation or at ``generation``. See ``open_store``."""
    names = _names(directory, where)
    found = published(names)
    kept, damage = _read_all(directory, names)
    if not found and not damage:
        raise StoreMissing(f"{where}: its creation was never finished.")
    last = max({*found, *damage} - {*prepared(names)})
    base = last if generation is None else generation
    error = damage.get(base, None if kept else damage[max(damage)])
    if error is not None:
        error.args = (f"{where}: {error.args[0]}",)
        if whole := sorted(kept.keys() & found.keys()):
            error.advice = f"Generations {whole} are whole, and can be read: open_store(..., generation={whole[-1]})."
        raise error
    if base not in found:
        raise StoreMissing(f"{where} has no generation {base}; there are {sorted(found)}.")
    newest = kept[max(kept)]  # its table of chunks holds for what was kept when it was made
    device = make_device(newest)
    try:
        if not damage:
            _clear(directory, names)
        retained = {number for number in kept if found.get(number) == retained_name(number)}
        wrong = [str(error.args[0]) for error in damage.values()]
        return DurableStore(directory, device, kept, retained, last, base, where, reserved, wrong)
    except BaseException:
        device.close()
        raise


def _read_all(directory: Directory, names: Sequence[str]) -> tuple[dict[int, Manifest], dict[int, StorageError]]:
    """By generation: the manifests that are whole and of one store, and what is wrong with the others."""
    kept: dict[int, Manifest] = {}
    damage: dict[int, StorageError] = {}
    for number, name in sorted((published(names) | prepared(names)).items(), reverse=True):
        try:
            manifest = read_manifest(directory, name)
        except StorageError as error:
            damage[number] = error
            continue
        newest = kept[max(kept)] if kept else manifest
        if manifest.generation == number and _shape(manifest) == _shape(newest):
            kept[number] = manifest
        else:
            damage[number] = StorageCorrupt(f"manifest {name} is that of another store or generation.")
    if gone := missing(names):
        damage[max(committed(names))] = StorageCorrupt(gone)
    return kept, damage


def _shape(manifest: Manifest) -> tuple[object, ...]:
    extents = [(entry.nbytes, manifest.places(entry)) for entry in manifest.entries]
    return manifest.store, manifest.num_copies, manifest.num_paths, extents


def _names(directory: Directory, where: str) -> list[str]:
    try:
        return directory.names()
    except OSError as error:
        raise failed(f"listing of {where}", error) from error


def _clear(directory: Directory, names: Sequence[str]) -> None:
    for name in left_over(names):
        try:
            directory.remove(name)
        except OSError as error:
            raise failed(f"removal of {name}, which a dead owner left", error) from error
