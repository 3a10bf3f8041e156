"""Generations of TPUs against libtpu's own topologies and torch_tpu's own tables."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from rl_tpu.devices.generations import GENERATIONS, get_generation
from rl_tpu.errors import UserError

DESCRIBE = """
import sys
from jax.experimental import topologies
for name in sys.argv[1:]:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    bounds = [1 + max(device.coords[axis] for device in devices) for axis in range(3)]
    print(len(devices), *bounds, devices[0].device_kind.replace(" ", "_"))
"""


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


@needs("libtpu")
@needs("jax")
def test_libtpu_knows_every_topology_and_finds_as_many_devices_in_it():
    # Not v4: ahead of time libtpu describes its two cores, which a host fuses into one device.
    generations = [generation for name, generation in GENERATIONS.items() if name != "v4"]
    asked = [(generation, chips) for generation in generations for chips in generation.slice_sizes if chips <= 256]
    names = [generation.topology(chips) for generation, chips in asked]
    environment = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "HOME": "/tmp"}
    command = [sys.executable, "-c", DESCRIBE, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    lines = done.stdout.strip().splitlines()
    assert len(lines) == len(names), done.stderr
    for (generation, chips), line in zip(asked, lines, strict=True):
        devices, *bounds, kind = line.split()
        assert int(devices) == chips * generation.devices_per_chip
        assert tuple(map(int, bounds)) == generation.shape(chips)
        assert get_generation(kind) is generation


@needs("torch_tpu")
def test_figures_and_host_shapes_are_torch_tpu_s():
    # Read, not imported: importing starts the package.
    package = Path(importlib.util.find_spec("torch_tpu").submodule_search_locations[0])
    tree = ast.parse((package / "_internal/utils/hardware.py").read_text())
    tables = {
        node.target.id: node.value.args[0]
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and node.value.args
    }

    def figures(table):
        pairs = zip(tables[table].keys, tables[table].values, strict=True)
        return {key.attr: eval(compile(ast.Expression(value), "", "eval")) for key, value in pairs}

    hbm, flops = figures("_HBM_BYTES_PER_CHIP"), figures("_BF16_FLOPS_PER_CHIP")
    devices = figures("_DEVICES_PER_CHIP")
    for version, size in hbm.items():
        generation = get_generation(version)
        assert devices.get(version, 1) == generation.devices_per_chip
        assert size == generation.hbm_bytes * generation.devices_per_chip
        assert flops[version] == generation.peak_flops * generation.devices_per_chip
        host = ast.literal_eval(tables[f"_{version}_TOPOLOGY"])
        sizes = [size * generation.devices_per_chip for size in generation.slice_sizes]
        assert sorted(host) == sizes[: len(host)]
        for count, shape in host.items():
            x, y, z = generation.shape(count // generation.devices_per_chip)
            assert tuple(map(int, shape.split(",")))[:3] == (x, y, z)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("v7x", "v7x"),
        ("tpu7x", "v7x"),
        ("TPU7x", "v7x"),
        ("Ironwood", "v7x"),
        ("Trillium", "v6e"),
        ("TPU v6 lite", "v6e"),
        ("v5litepod", "v5e"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v4", "v4"),
    ],
)
def test_usual_spellings_name_a_generation(spelling, name):
    assert get_generation(spelling).name == name


def test_an_unknown_generation_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"cluster.generation: 'v9' is unknown; choose one of v4, v5e, v5p, v6e, v7x"):
        get_generation("v9")


def test_a_device_of_v7x_is_half_a_chip():
    v7x = get_generation("v7x")
    assert (v7x.hbm_bytes, v7x.peak_flops, v7x.hbm_bandwidth) == (96 * 2**30, 2307e12 / 2, 7370e9 / 2)


@pytest.mark.parametrize(("name", "chips"), [("v7x", 3), ("v6e", 2), ("v5e", 6), ("v5p", 0), ("v6e", 512)])
def test_chips_that_form_no_slice_are_refused_with_those_that_do(name, chips):
    with pytest.raises(UserError, match=rf"^{chips} chips of {name} form no slice; sizes that do are 1, "):
        get_generation(name).topology(chips)
