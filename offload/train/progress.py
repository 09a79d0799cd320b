"""A line that moves on a terminal, and a few plain lines where there is none. Everything goes to stderr."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm


class Progress:
    """Counts steps on stderr: a bar on a terminal, else one line for every tenth of the way."""

    def __init__(self, what: str, num_steps: int) -> None:
        self._what = what
        self._num_steps = num_steps
        self._done = 0
        self._bar = tqdm(total=num_steps, desc=what, unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True)

    def step(self, values: dict[str, str]) -> None:
        """One more step is done; ``values`` are shown beside it."""
        self._done += 1
        self._bar.set_postfix(values, refresh=False)
        self._bar.update()
        tenths = 10 * self._done // self._num_steps
        if self._bar.disable and tenths > 10 * (self._done - 1) // self._num_steps:
            shown = "  ".join(f"{name} {value}" for name, value in values.items())
            print(f"{self._what}: step {self._done} of {self._num_steps}  {shown}", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
