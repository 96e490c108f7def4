"""Weights that the workers of one host share: the same numbers, written once, and never taken from a bad file."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import packed_weights
from engine.engine import Engine
from engine.ops import native
from engine.packed_weights import UNSHARED, shared_parts
from engine.part_description import Place, build, describe
from tests import tiny_models
from tests.engine.running import greedy, logits_in_chunks
from twinpool import model_store

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
PROMPT = [3 * i % 90 for i in range(40)]


def load(path: Path, folder: Path | None, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"dtype": "bf16", "kv_dtype": "int8", "memory_bytes": 1 << 20, "threads": 1}
    return Engine.load(path, packed_weights=folder, **(defaults | options))


def written(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.packed"))


@pytest.mark.parametrize("weights", ["bf16", "w8a16", "w8a8"])
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_a_model_from_the_file_gives_the_same_bits(tmp_path: Path, kind: str, weights: str) -> None:
    path, folder = tiny_models.make(tmp_path / "model", kind), tmp_path / "packed"
    plain = load(path, None, weights=weights)
    expected = logits_in_chunks(plain, PROMPT, [17])
    for _ in range(2):  # the one who writes, and one who finds it
        engine = load(path, folder, weights=weights)
        assert torch.equal(logits_in_chunks(engine, PROMPT, [17]), expected)
        assert (engine.weight_bytes, engine.fingerprint) == (plain.weight_bytes, plain.fingerprint)
    assert len(written(folder)) == 1
    assert [each.name for each in folder.iterdir() if each.suffix == ".part"] == []


def test_the_second_worker_reads_no_tensor_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tiny_models.make(tmp_path / "model"), tmp_path / "packed"
    expected = greedy(load(path, folder), [PROMPT], 8)
    monkeypatch.setattr("engine.loading.Checkpoint.take", lambda *_: pytest.fail("a tensor was read again"))
    assert greedy(load(path, folder), [PROMPT], 8) == expected


@pytest.mark.parametrize("first", ["w8a16", "w8a8"])
def test_workers_of_both_int8_formats_share_one_file(tmp_path: Path, first: str) -> None:
    path, folder = tiny_models.make(tmp_path / "model"), tmp_path / "packed"
    for weights in (first, "w8a16", "w8a8"):
        shared, own = load(path, folder, weights=weights), load(path, None, weights=weights)
        assert torch.equal(logits_in_chunks(shared, PROMPT, [40]), logits_in_chunks(own, PROMPT, [40])), weights
    assert len(written(folder)) == 1


def test_other_options_and_other_weights_have_files_of_their_own(tmp_path: Path) -> None:
    path, other, folder = (
        tiny_models.make(tmp_path / "a"),
        tiny_models.make(tmp_path / "b", seed=1),
        tmp_path / "packed",
    )
    for model, options in ((path, {}), (path, {"dtype": "fp32"}), (path, {"kv_dtype": "bf16"}), (other, {})):
        shared, own = load(model, folder, **options), load(model, None, **options)
        assert torch.equal(logits_in_chunks(shared, PROMPT, [40]), logits_in_chunks(own, PROMPT, [40]))
    assert len(written(folder)) == 4


def test_another_version_takes_the_place_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tiny_models.make(tmp_path / "model"), tmp_path / "packed"
    load(path, folder)
    before = written(folder)[0].read_bytes()
    monkeypatch.setattr("engine.engine.source_digest", lambda: "another")
    load(path, folder)
    assert len(written(folder)) == 1
    assert written(folder)[0].read_bytes() != before


@pytest.mark.parametrize(
    "place", ["magic", "identity", "size", "header checksum", "tensors", "descriptions", "cut", "empty"]
)
def test_a_damaged_file_is_found_said_and_written_again(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, folder = tiny_models.make(tmp_path / "model"), tmp_path / "packed"
    expected = greedy(load(path, folder), [PROMPT], 8)
    file = written(folder)[0]
    whole = file.read_bytes()
    if place == "cut":
        file.write_bytes(whole[:-4097])
    elif place == "empty":
        file.write_bytes(b"")
    else:
        at = {"magic": 3, "identity": 30, "size": 60, "header checksum": 106, "tensors": 5000, "descriptions": -5}[
            place
        ]
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        file.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert greedy(load(path, folder), [PROMPT], 8) == expected
    assert "cannot be used" in caplog.text
    assert file.read_bytes() == whole


def test_what_a_killed_writer_left_is_no_obstacle(tmp_path: Path) -> None:
    path, folder = tiny_models.make(tmp_path / "model"), tmp_path / "packed"
    load(path, folder)
    file = written(folder)[0]
    file.rename(file.with_suffix(".part"))
    load(path, folder)
    assert written(folder) == [file]
    assert not file.with_suffix(".part").exists()


def _load_and_report(path: Path, folder: Path, done: Any) -> None:
    torch.set_num_threads(1)
    done.put(greedy(load(path, folder), [PROMPT], 8))


def test_workers_that_start_together_write_once(tmp_path: Path) -> None:
    path, folder = tiny_models.make(tmp_path / "model"), tmp_path / "packed"
    expected = greedy(load(path, None), [PROMPT], 8)
    spawn = multiprocessing.get_context("fork")
    done = spawn.Queue()
    workers = [spawn.Process(target=_load_and_report, args=(path, folder, done)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert [done.get(timeout=60) for _ in workers] == [expected] * 3
    for worker in workers:
        worker.join(60)
    assert len(written(folder)) == 1


class _Counting:
    """What reads a model of one part, and how often."""

    def __init__(self) -> None:
        self.times = 0

    def read(self, parts: Any) -> Any:
        return parts.part("only", self._make, {})

    def _make(self) -> torch.Tensor:
        self.times += 1
        return torch.arange(10)


def test_one_waits_for_the_other_that_is_writing(tmp_path: Path) -> None:
    counting = _Counting()
    tmp_path.joinpath("m.lock").touch()
    with open(tmp_path / "m.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.2, lambda: fcntl.flock(lock, fcntl.LOCK_UN)).start()
        parts = shared_parts(tmp_path, "m", "it", counting.read, wait_s=30)
    assert torch.equal(counting.read(parts), torch.arange(10))
    assert counting.times == 1


def test_a_wait_ends_and_the_worker_reads_for_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counting = _Counting()
    with open(tmp_path / "m.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert shared_parts(tmp_path, "m", "it", counting.read, wait_s=0.1) is UNSHARED
    assert "another worker has been writing" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert shared_parts(tmp_path / "file", "m", "it", _Counting().read) is UNSHARED
    assert f"weights are not shared with other workers through {tmp_path / 'file' / 'm.packed'}" in caplog.text


def test_a_folder_that_is_mounted_read_only_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_arguments: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    shared_parts(tmp_path, "m", "it", _Counting().read)
    monkeypatch.setattr(os, "utime", read_only)
    again = _Counting()
    assert shared_parts(tmp_path, "m", "it", again.read) is not UNSHARED
    assert again.times == 0


def test_a_part_without_a_description_is_kept_to_oneself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = shared_parts(tmp_path, "m", "it", lambda parts: parts.part("p", lambda: {1, 2}, {}))
    assert parts is UNSHARED
    assert "builtins.set" in caplog.text
    assert list(tmp_path.glob("*.p*")) == []


def test_shared_tensors_lie_in_the_page_cache_and_cannot_be_written(tmp_path: Path) -> None:
    parts = shared_parts(tmp_path, "m", "it", _Counting().read)
    tensor = _Counting().read(parts)
    mapping = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("m.packed"))
    first, last = (int(end, 16) for end in mapping.split()[0].split("-"))
    assert first <= tensor.data_ptr() < last
    assert mapping.split()[1] == "r--s"


def test_files_that_nobody_opened_for_long_are_removed(tmp_path: Path) -> None:
    shared_parts(tmp_path, "old", "it", _Counting().read)
    long_ago = time.time() - packed_weights.KEPT_S - 60
    (tmp_path / "killed.part").touch()  # of a worker that was killed, and of a model that nobody serves since
    for name in ("old.packed", "killed.part"):
        os.utime(tmp_path / name, (long_ago, long_ago))
    shared_parts(tmp_path, "new", "it", _Counting().read)
    assert [path.name for path in written(tmp_path)] == ["new.packed"]
    assert not (tmp_path / "killed.part").exists()


def test_descriptions_build_nothing_but_dataclasses_of_the_engine() -> None:
    def tensor(place: Place) -> torch.Tensor:
        raise AssertionError(place)

    for name in ("builtins:eval", "engine.engine:Engine", "os:system", "engine.nowhere:Thing"):
        with pytest.raises(TypeError, match="no dataclass of the engine"):
            build({"is": name, "of": {}}, tensor, {})
    value = [None, True, 1.5, "text", (1, [2]), {"a": (3,), 4: {}}, torch.bfloat16]
    assert build(describe(value, tensor, {}), tensor, {}) == value  # type: ignore[arg-type]


def test_where_auto_and_off_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_HOME", str(tmp_path))
    assert model_store.packed_weights("auto") == tmp_path / "packed"
    assert model_store.packed_weights("off") is None
    assert model_store.packed_weights("/somewhere") == Path("/somewhere")
