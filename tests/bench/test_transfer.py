"""The transfer benchmark end to end, as short as it goes: two real processes, every way that is installed here."""

import json
import subprocess
import sys

import pytest

from bench.transfer import wire_bytes_ratio


@pytest.mark.flow
def test_it_measures_every_way_and_prints_one_json_line() -> None:
    command = [sys.executable, "-m", "bench.transfer", "--seconds", "0.1", "--no-ttft"]
    got = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert got.returncode == 0, got.stderr
    lines = got.stdout.splitlines()
    result = json.loads(lines[-1])
    kinds = {line.split()[1] for line in lines[2:-2]}
    assert kinds >= {"memcpy", "socket", "grpc", "shm", "tcp"}
    assert result["bench"] == "transfer"
    assert result["ttft_transfer_share_2048"] is None
    for key in ("shm_memcpy_ratio_256k", "shm_memcpy_ratio_1m", "tcp_socket_ratio_1m", "tcp_vs_grpc"):
        assert result[key] > 0, key
    for key in ("tcp_vs_mooncake", "tcp_vs_nixl"):
        assert (result[key] is not None) == (key.removeprefix("tcp_vs_") in kinds), key
    for kind in kinds:
        assert result[f"{kind}_cpu_s_per_gb_1m"] > 0, kind


@pytest.mark.parametrize("head_dim", [128, 64])
def test_int8_rows_are_about_half_of_bf16_on_the_wire(head_dim: int) -> None:
    assert (head_dim + 2) / (2 * head_dim) < wire_bytes_ratio(head_dim) <= 1.02 * (head_dim + 2) / (2 * head_dim)
