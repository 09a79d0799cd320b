"""Architectures of all kinds, to train under the engine. ``SPECIMENS`` has each of them by name."""

from zoo import adapters, perception, plain, text

SPECIMENS = {
    specimen.name: specimen
    for specimen in [*plain.SPECIMENS, *text.SPECIMENS, *perception.SPECIMENS, *adapters.SPECIMENS]
}
