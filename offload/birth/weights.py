"""Weights of a model: one file, or an index of shards, as on Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from offload.birth.gguf_file import GgufFile, GgufTensor
from offload.birth.safetensors_file import SafetensorsFile
from offload.birth.weights_file import StoredTensor, WeightsFile
from offload.errors import WeightsError
from swapper.checked import Cursor, FileName, MapOf, Refused, read_regular, refusals, require_held, text_of, within
from swapper.files import named

INDEX_NAME = "model.safetensors.index.json"
FILE_NAME = "model.safetensors"
GGUF_SUFFIX = ".gguf"
_WEIGHT_MAP = MapOf(FileName())
_INDEX_BYTES_MAX = 100 << 20


class Weights:
    """The tensors of one file, or of all shards of an index."""

    def __init__(self, path: Path) -> None:
        """``path`` is a ``.safetensors`` or ``.gguf`` file, an index of shards, or a directory with a safetensors file
        or an index under the names that Hugging Face gives them. Raises ``WeightsError``."""
        self.path = path
        self.files: list[WeightsFile] = []
        self.tensors: dict[str, StoredTensor] = {}
        index = _index_of(path)
        file_names = {} if index is None else _weight_map(index)
        try:
            for file in [_only_file(path)] if index is None else _shards(index, file_names):
                self.files.append(opened(file))
                for name, tensor in self.files[-1].tensors.items():
                    if name in self.tensors:
                        raise WeightsError(f"{name} is in two weights files: {self.tensors[name].file.path} and {file}")
                    self.tensors[name] = tensor
            for name, file_name in file_names.items():
                if name not in self.tensors:
                    raise WeightsError(f"{index} names {name} in {file_name}, and the file does not have it")
        except BaseException:
            self.close()
            raise

    @property
    def architecture(self) -> str | None:
        """The name that a GGUF file has for its kind of model; None for other files."""
        return next((file.architecture for file in self.files if isinstance(file, GgufFile)), None)

    @property
    def of_gguf(self) -> dict[str, GgufTensor]:
        """The tensors of a GGUF file."""
        return {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, GgufTensor)}

    @property
    def directory(self) -> Path:
        """The folder of the files."""
        return self.path if self.path.is_dir() else self.path.parent

    def close(self) -> None:
        for file in self.files:
            file.close()
        self.files = []


def opened(path: Path) -> WeightsFile:
    """The weights file at ``path``, of the format that its name says. Raises ``WeightsError``."""
    return GgufFile(path) if path.suffix == GGUF_SUFFIX else SafetensorsFile(path)


def _shards(index: Path, file_names: Mapping[str, str]) -> list[Path]:
    files = [index.parent / name for name in dict.fromkeys(file_names.values())]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise WeightsError(f"{index} names weights files that are not there: {', '.join(missing)}")
    return files


def _only_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if (path / FILE_NAME).exists():
        return path / FILE_NAME
    raise WeightsError(
        f"weights: there is neither {FILE_NAME} nor {INDEX_NAME} in {path}. Name the file itself if it is a "
        "GGUF file. Other formats (.bin, .pt) are not read: save them as safetensors (transformers: save_pretrained)."
    )


def _index_of(path: Path) -> Path | None:
    if path.is_dir():
        return path / INDEX_NAME if (path / INDEX_NAME).exists() and not (path / FILE_NAME).exists() else None
    return path if path.suffix == ".json" else None


def _weight_map(index: Path) -> dict[str, str]:
    """The file name of each tensor. Raises ``WeightsError``."""
    with refusals(f"the index of weights files {named(index)}", WeightsError):
        try:
            text = read_regular(index, _INDEX_BYTES_MAX, links=True)
            require_held(text)
            cursor = Cursor(text_of(text))
        except OSError as error:
            raise WeightsError(f"cannot read the index of weights files {named(index)}: {error.strerror}") from None
        found = None
        for name in cursor.members():
            with within(name):
                if name == "weight_map":
                    found = _WEIGHT_MAP.read(cursor)
                else:
                    cursor.piece()
        cursor.end()
        if found is None:
            raise Refused("it has no weight_map")
        return found
