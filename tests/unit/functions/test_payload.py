"""The files of a call: only its owner decides what is unpickled."""

import json
import pickle
from pathlib import Path

import pytest

import toolkit
from toolkit.functions.payload import FOLDER, SubmittedCall


@pytest.fixture
def call(tmp_path: Path) -> SubmittedCall:
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    (folder / "call.json").write_text(json.dumps({"ranks": 1, "restarts": 0}))
    (folder / "call.pkl").write_bytes(pickle.dumps((print, (1,), {"end": ""})))
    for path in (tmp_path, folder, folder / "call.pkl"):
        path.chmod(0o700)
    return SubmittedCall(tmp_path)


def test_a_call_is_read_again(call: SubmittedCall) -> None:
    assert call.parts() == (print, (1,), {"end": ""})


@pytest.mark.parametrize("name", ["", FOLDER, f"{FOLDER}/call.pkl"])
def test_a_call_that_others_may_write_is_not_unpickled(call: SubmittedCall, name: str) -> None:
    (call.run_dir / name).chmod(0o772)
    with pytest.raises(toolkit.LauncherError, match="can be written by others"):
        call.parts()
