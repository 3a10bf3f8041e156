"""The registry: names, third parties, and what the library may import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import weight_sync
from weight_sync import WeightSyncError, open_receiver, open_sender

THIRD_PARTY = """
from weight_sync import Transport

class Carrier:
    def __init__(self, **options):
        self.options = options

TRANSPORT = Transport(open_sender=Carrier, open_receiver=Carrier)
"""


@pytest.fixture
def pigeon(tmp_path, monkeypatch):
    """An installed package that brings a transport of its own."""
    (tmp_path / "carrier_pigeon.py").write_text(THIRD_PARTY)
    info = tmp_path / "carrier_pigeon-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier_pigeon\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[weight_sync.transports]\npigeon = carrier_pigeon:TRANSPORT\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("carrier_pigeon", None)


def test_unknown_name_lists_the_known_ones(pigeon):
    with pytest.raises(
        WeightSyncError,
        match=r"unknown weight transport 'shared_memry'; known: disk, disk_delta, ici, pigeon, shared_memory",
    ):
        open_sender("shared_memry", run_id="x")


@pytest.mark.parametrize("name", ["pigeon", "carrier_pigeon:TRANSPORT"])
def test_third_party_by_entry_point_and_by_import_path(pigeon, name):
    assert open_sender(name, speed=3).options == {"speed": 3}
    assert open_receiver(name).options == {}


@pytest.mark.parametrize("name", ["no_such_module_here:X", "weight_sync.manifest:NOTHING"])
def test_import_path_that_leads_nowhere(name):
    with pytest.raises(WeightSyncError, match="cannot be imported"):
        open_receiver(name)


def test_built_in_transport_opens_by_name():
    receiver = open_receiver("shared_memory")
    with pytest.raises(WeightSyncError, match="not a handle of the shared_memory transport"):
        receiver.receive({"transport": "pigeon"})
    with pytest.raises(WeightSyncError, match="lacks version, host, path"):
        receiver.receive({"transport": "shared_memory"})


def test_the_library_stands_alone():
    code = (
        "import sys, weight_sync, weight_sync.shared_memory\n"
        "print([m for m in ('rl_tpu', 'ray', 'sglang', 'torchtitan', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_verification_error_survives_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(weight_sync.VerificationError(3, ["a", "b"])))
    assert (error.version, error.tensors) == (3, ["a", "b"])
    assert "a, b" in str(error)
