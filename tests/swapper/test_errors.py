import pickle

import pytest
import store_docs

import swapper
from swapper import OffloadError, StorageCorrupt, StorageError, StorageFull


def test_the_documentation_has_the_table_of_errors():
    page = store_docs.PAGE.read_text()
    assert store_docs.updated(page) == page, "run scripts/store_docs.py"


def test_every_error_says_what_survives_and_what_to_do():
    kinds = store_docs.errors()
    public = {getattr(swapper, name) for name in swapper.__all__}
    assert {kind for kind in public if isinstance(kind, type) and issubclass(kind, OffloadError)} == {
        *kinds,
        OffloadError,
        StorageError,
    }
    for kind in kinds:
        assert all((kind.happened, kind.numbers, kind.survives, kind.advice)), kind
        assert str(kind("It broke.")) == (
            f"It broke.\n  {kind.survives} {kind.advice} (offload explain {kind.__name__})"
        )
    assert str(StorageFull("Full.", survives="All.", advice="Wait.")) == (
        "Full.\n  All. Wait. (offload explain StorageFull)"
    )
    assert str(StorageError("Bad.")) == "Bad. (offload explain StorageError)"
    assert str(OffloadError("Plain.")) == "Plain."


@pytest.mark.parametrize("error", [StorageFull("Full.", advice="Wait."), StorageCorrupt("Bad.", expected=1, seen=2)])
def test_errors_travel_between_processes(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
