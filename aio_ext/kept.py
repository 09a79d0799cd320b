"""Files of measurements that are kept for the programs to come: JSON under ``$XDG_CONFIG_HOME/offload`` (``~/.config``
without the variable), entries by key."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class KeptFile:
    """One such file. Its entries stand under ``field``, beside the version of their format."""

    def __init__(self, name: str, field: str, version: int) -> None:
        self._name, self._field, self._version = name, field, version

    @property
    def path(self) -> Path:
        """Where the variables of the environment say that it is now."""
        home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
        return Path(home) / "offload" / self._name

    def entries(self) -> dict[str, Any]:
        """All that is in the file; nothing if it is not there, or damaged, or of another version."""
        try:
            content = json.loads(self.path.read_text())
            return dict(content[self._field]) if content["version"] == self._version else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def add(self, entries: Mapping[str, Any]) -> Path:
        """Keep these, too; others stay. The file is replaced at once. Returns its path. Raises ``OSError``."""
        file = self.path
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"version": self._version, self._field: {**self.entries(), **entries}}
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(descriptor, "w") as stream:
                json.dump(content, stream, indent=2)
            return Path(temporary).replace(file)
        except BaseException:
            Path(temporary).unlink()
            raise
