"""What torch_tpu itself makes of our environment: it passes it on to libtpu, which then finds no chip here."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_tpu.devices.division import Division
from rl_tpu.devices.tpu_slices import divide, environments

GOOGLE = "0x1ae0"
HAS_TPU = any(vendor.read_text().strip() == GOOGLE for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"))

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_tpu") is None, reason="needs torch_tpu"),
    pytest.mark.skipif(HAS_TPU, reason="this host has a TPU"),
]
START = """
import ctypes, json, os, sys, torch
from torch_tpu import _loader
_loader._init_device("tpu")
try:
    torch.empty(2, device="tpu") + 1
except RuntimeError as error:
    print(error, file=sys.stderr)
getenv = ctypes.CDLL(None).getenv  # os.environ does not see what C++ sets
getenv.restype = ctypes.c_char_p
names = "TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID"
print(json.dumps([(getenv(name.encode()) or b"").decode() for name in names]))
"""


def python(code, environment):
    clean = {name: value for name, value in os.environ.items() if "TPU" not in name and "RANK" not in name}
    settings = clean | {"TPU_SKIP_MDS_QUERY": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | environment
    return subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=120)


def test_a_process_of_the_second_slice_of_a_host_takes_its_own_device():
    division = Division(1, 4, 2, trainer_chips=2, engines=1, chips_per_engine=2, generation="v7x")
    worker = environments(division, divide(division), ["localhost"]).engines[0][1]
    done = python(START, worker)
    assert "TPU initialization failed" in done.stderr  # no variable was missing
    assert json.loads(done.stdout.splitlines()[-1]) == ["5", "1,2,1,2", "1,1,1,1", "8476", "1"]


def test_it_is_loaded_where_it_is_used_and_says_when_there_is_no_chip():
    done = python("from rl_tpu.devices import get_device; get_device('tpu').torch_device(0)", {})
    assert "RunError: torch_tpu found no TPU on this host" in done.stderr
