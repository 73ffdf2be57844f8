"""Device memory by name, by size, and of this machine."""

from pathlib import Path

import pytest

from spotune.errors import UsageError
from spotune.plan.devices import (
    DEVICE_CAPABILITIES,
    DEVICE_MEMORY_BYTES,
    GIB,
    CgroupMemory,
    device_memory_bytes,
    free_memory_bytes,
    machine_memory_bytes,
    missing_capability,
    parse_bytes,
)


def test_device_memory_is_slightly_less_than_nominal() -> None:
    assert 79 * GIB < device_memory_bytes("A100-80GB") < 80 * GIB


def test_fp8_needs_tensor_cores_for_it() -> None:
    assert DEVICE_CAPABILITIES.keys() == DEVICE_MEMORY_BYTES.keys()
    without = {name for name, has in DEVICE_CAPABILITIES.items() if missing_capability("fp8", name, has)}
    assert without == {"t4", "v100-16gb", "v100-32gb", "a10g", "a100-40gb", "a100-80gb"}
    by_rows = {name for name, has in DEVICE_CAPABILITIES.items() if missing_capability("fp8-rowwise", name, has)}
    assert by_rows == without | {"l4", "l40s", "rtx4090"}
    assert not any(missing_capability("auto", name, has) for name, has in DEVICE_CAPABILITIES.items())


def test_unknown_device_error_suggests_the_nearest_name_and_device_memory() -> None:
    with pytest.raises(UsageError, match=r"did you mean a100-80gb\?.*--device-memory 80GB"):
        device_memory_bytes("a100-80")
    with pytest.raises(UsageError, match=r"--device tpu: unknown device\. Known devices: t4, "):
        device_memory_bytes("tpu")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("79.5 GiB", int(79.5 * GIB)),
        ("16Gi", 16 * GIB),
        ("500mb", 500 * 10**6),
        ("2T", 2 * 10**12),
        ("1024", 1024),
    ],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_bytes(text, "--device-memory") == size


@pytest.mark.parametrize("text", ["", "80 apples", "-1GB", "0", "GB", "0.1"])
def test_text_that_is_no_size_is_refused_with_the_options_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"--device-memory .*expected a size such as 80GB"):
        parse_bytes(text, "--device-memory")


def test_container_limit_counts_where_it_is_lower_than_the_machine(tmp_path: Path) -> None:
    limited, unlimited, absurd = (tmp_path / name for name in ("limited", "unlimited", "absurd"))
    limited.write_text("104857600\n")
    unlimited.write_text("max\n")
    absurd.write_text(f"{2**63}\n")
    missing = tmp_path / "missing"

    assert machine_memory_bytes((limited, unlimited)) == 104_857_600
    assert machine_memory_bytes((unlimited, absurd, missing)) == machine_memory_bytes(()) > 104_857_600


def test_free_memory_is_that_of_the_container_where_it_is_less(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       2000 kB\nMemAvailable:   1000 kB\n")
    limit, usage, statistics = (tmp_path / name for name in ("limit", "usage", "statistics"))
    group = CgroupMemory(limit, usage, statistics, "inactive_file")
    assert free_memory_bytes(meminfo, (group,)) == 1_024_000, "there is no such group"
    usage.write_text("700000\n")
    statistics.write_text("anon 300000\ninactive_file 100000\n")
    limit.write_text("max\n")
    assert free_memory_bytes(meminfo, (group,)) == 1_024_000
    limit.write_text("800000\n")
    assert free_memory_bytes(meminfo, (group,)) == 200_000, "page cache that is not in use can be had"
    assert free_memory_bytes() > 0
