"""Options of a process: one frozen dataclass, built once from flags > environment > file > defaults.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class DecodeConfig(WorkerConfig):
        port: int = option(7072, help="gRPC port, 0 picks a free one", unit="port", minimum=0, maximum=65535)
        memory: Size = option(Size(4 << 30), help="cache memory, or a fraction of this machine's", unit="bytes")
        kv_dtype: str = option("int8", help="what the cache stores", choices=("int8", "bf16", "fp32"))

    def main() -> None:
        config = load(DecodeConfig, "decode")  # --kv-dtype bf16, TWINPOOL_KV_DTYPE=bf16, kv_dtype = "bf16" in a file
        ...

    run_main(main, "decode")  # a ConfigError becomes one line on stderr and exit status 2

The command line, the environment names and `--help` are derived from the fields. A field is a str, int, float, bool,
tuple[str, ...] (comma separated) or Size. Checks that span fields go into the dataclass' `__post_init__`.

A file (`--config FILE.toml` or TWINPOOL_CONFIG) holds the same names. Keys at its top are for every process; a table
named after a process (`[decode]`) is for that process and wins, so one file can configure a whole deployment.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar, get_type_hints

from twinpool.certificates import Certificates
from twinpool.errors import ConfigError

ENV_PREFIX = "TWINPOOL_"
PROCESSES = ("router", "prefill", "decode")  # whose tables a file may have
ConfigT = TypeVar("ConfigT")

# Kubernetes puts TWINPOOL_PORT_7070_TCP_ADDR and the like into every pod beside a service called "twinpool".
_KUBERNETES_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT$|_PORT_\d+_(TCP|UDP|SCTP)")


class Size(int):
    """A number of bytes. Reads "4GiB", "512MiB", "1_000_000", and "0.5" as that fraction of this machine's memory."""

    UNITS: ClassVar[Mapping[str, int]] = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

    @classmethod
    def parse(cls, text: str) -> Size:
        """Raises ValueError when `text` is none of the above, or negative."""
        match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([KMGT]iB|B|)\s*", text)
        if match is None:
            raise ValueError(f"no size: {text!r}")
        number, unit = match.groups()
        if "." in number and not unit:
            fraction = float(number)
            if not 0 < fraction < 1:
                raise ValueError(f"no size: {text!r}")
            return cls(fraction * machine_memory_bytes())
        return cls(float(number) * cls.UNITS[unit] if "." in number else int(number) * cls.UNITS[unit])

    def __str__(self) -> str:
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self and self % self.UNITS[unit] == 0:
                return f"{int(self) // self.UNITS[unit]}{unit}"
        return str(int(self))


def machine_memory_bytes() -> int:
    """Memory this process may use: the container's limit (cgroup v2 or v1) if there is one, else all there is."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return min(physical, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return physical


def option(
    default: Any,
    *,
    help: str,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    secret: bool = False,
) -> Any:
    """A field of a config dataclass. Bounds are inclusive; a secret is left out of repr, help and error messages."""
    metadata = {"help": help, "unit": unit, "minimum": minimum, "maximum": maximum, "choices": tuple(choices)}
    return dataclasses.field(default=default, repr=not secret, metadata=metadata | {"secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """What every process can be told. A process' own config inherits from this and sets its default ports."""

    host: str = option("127.0.0.1", help="address to listen on; 0.0.0.0 for every interface")
    port: int = option(0, help="gRPC port; 0 picks a free one", unit="port", minimum=0, maximum=65535)
    advertise: str = option("", help="HOST or HOST:PORT that other processes reach this one at; empty: found out")
    metrics_port: int = option(
        0,
        help="HTTP port of /metrics and /healthz; 0 picks a free one, -1 turns it off",
        unit="port",
        minimum=-1,
        maximum=65535,
    )
    log_level: str = option("info", help="least severe log line written", choices=("debug", "info", "warning", "error"))
    cluster_key: str = option("", help="secret that routers and workers share; empty: open to all", secret=True)
    registry: str = option(
        "",
        help="where routers are listed and workers find them, in place of --routers: etcd://HOST:2379,.../PREFIX",
        unit="URL",
        secret=True,
    )
    tls_cert: str = option("", help="PEM certificate of this process; empty: plain text", unit="path")
    tls_key: str = option("", help="PEM key to it, without a passphrase", unit="path")
    tls_ca: str = option("", help="PEM certificates of the CA that signed those of all processes", unit="path")
    ready_file: str = option("", help="file to write as JSON once the process serves", unit="path")
    config: str = option("", help="TOML file with options", unit="path")

    def load_certificates(self) -> Certificates | None:
        """For TLS on every connection; None where none is configured. Raises ConfigError naming file and reason."""
        return Certificates.load(self.tls_cert, self.tls_key, self.tls_ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ProcessConfig):
    """What prefill and decode workers share on top."""

    routers: tuple[str, ...] = option(("127.0.0.1:7070",), help="routers to register with", unit="HOST:PORT,...")
    worker_id: str = option("", help="unique in the deployment; empty: POOL-HOST:PORT of the advertised address")
    model: str = option("", help="Hugging Face directory with config.json and safetensors", unit="path")
    model_name: str = option("", help="served name; empty: the directory's name")
    backend: str = option("cpu", help="operators to run on", choices=("cpu", "reference"))
    dtype: str = option("bf16", help="of weights and activations", choices=("bf16", "fp32"))
    kv_dtype: str = option("int8", help="what the cache stores and ships", choices=("int8", "bf16", "fp32"))
    kv_transport: str = option(
        "auto",
        help="how KV blocks travel; auto: shm on one host, else RDMA or Ascend by mooncake or nixl, else tcp",
        choices=(
            "auto",
            "shm",
            "tcp",
            "mooncake",
            "mooncake+rdma",
            "mooncake+ascend",
            "mooncake+tcp",
            "nixl",
            "nixl+rdma",
            "nixl+shm",
            "nixl+tcp",
            "collective",
        ),
    )
    kv_streams: int = option(
        1,
        help="connections of a KV link that a prefill worker makes over tcp; more where one does not fill the network",
        minimum=1,
        maximum=16,
    )
    kv_collective_backend: str = option(
        "gloo", help="of torch.distributed, for --kv-transport collective", choices=("gloo", "nccl", "hccl")
    )
    kv_collective_plaintext: bool = option(
        False, help="with TLS, accept that KV rows of --kv-transport collective are not encrypted"
    )
    kv_lease: float = option(
        6.0,
        help="a peer silent on a KV link for this long is lost, with what it held; of two workers the shorter counts",
        unit="s",
        minimum=0.5,
        maximum=600,
    )
    block_size: int = option(
        0,
        help="tokens in one cache row, 0: 64 or what the model needs; best the same on every worker",
        unit="tokens",
        minimum=0,
    )
    memory: Size = option(Size(1 << 30), help="KV cache, beside the weights, or a fraction of the memory", unit="bytes")
    packed_weights: str = option(
        "auto",
        help="folder through which workers of a host share packed weights; auto: packed below the store of models; off",
        unit="path",
    )
    threads: int = option(0, help="compute threads; 0 takes one a core", unit="threads", minimum=0, maximum=1024)
    cores: str = option("", help='CPU cores to run on, as in "0-3,8"; empty: all', unit="cores")


def load(
    cls: type[ConfigT], prog: str, argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None
) -> ConfigT:
    """Builds the config `cls` of the process `prog` ("router", "prefill", ...).

    Raises ConfigError that names the option, where the value came from, the value, and what is allowed.
    """
    options = _options(cls)
    env = os.environ if env is None else env
    parsed, strange = _parser(prog, options).parse_known_args(argv)
    if strange:
        raise ConfigError(f"unknown argument {strange[0]!r}; {_hint(strange[0], map(_flag, options), prog)}")
    flags = vars(parsed)
    values = _from_env(options, env)
    path = flags.get("config") or values.get("config") or ""
    values = (_from_file(options, prog, path) if path else {}) | values
    for name, text in flags.items():
        values[name] = options[name].read(text, _flag(name))
    return cls(**values)


def run_main(main: Callable[[], int | None], prog: str) -> NoReturn:
    """Runs the `main` of a process and exits; a ConfigError is one line on stderr and status 2, never a traceback."""
    try:
        sys.exit(main())
    except ConfigError as error:
        with suppress(OSError):  # stderr is a file on a full disk; the status still tells
            print(f"{prog}: {error.message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One field of a config class, with what `option` was told about it."""

    name: str
    kind: Any
    default: Any
    help: str
    unit: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]
    secret: bool

    def read(self, raw: Any, source: str) -> Any:
        """`raw` (text, or a TOML value) as this option's type; `source` says in the error where it was set."""
        try:
            value = _convert(raw, self.kind)
        except (ValueError, TypeError, OverflowError):
            self._refuse(raw, source)
        if self.choices and value not in self.choices:
            self._refuse(raw, source)
        if self.minimum is not None and not value >= self.minimum:  # so that nan is refused
            self._refuse(raw, source)
        if self.maximum is not None and not value <= self.maximum:
            self._refuse(raw, source)
        return value

    def _refuse(self, raw: Any, source: str) -> NoReturn:
        shown = "the given value" if self.secret else repr(raw)
        raise ConfigError(f"{source}: {shown} is not allowed; expected {self.allowed}", field=self.name)

    @property
    def allowed(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        expected = _EXPECTED.get(self.kind, "a comma separated list")
        if self.minimum is not None and self.maximum is not None:
            return f"{expected} from {self.minimum} to {self.maximum}"
        if self.minimum is not None:
            return f"{expected} of at least {self.minimum}"
        if self.maximum is not None:
            return f"{expected} of at most {self.maximum}"
        return expected

    @property
    def usage(self) -> str:
        """The help text: what it is, then unit, default and environment name."""
        default = ",".join(self.default) if isinstance(self.default, tuple) else str(self.default)
        if isinstance(self.default, bool):
            default = default.lower()
        facts = [f"unit {self.unit}"] if self.unit else []
        facts += ["one of " + ", ".join(self.choices)] if self.choices else []
        facts += [f"default {default}" if default and not self.secret else "default empty"]
        facts += [f"env {_env_name(self.name)}"]
        return f"{self.help} [{'; '.join(facts)}]".replace("%", "%%")


_EXPECTED = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    Size: 'a size such as "512MiB", "4GiB", or "0.5" of the memory',
}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _convert(raw: Any, kind: Any) -> Any:
    """Raises ValueError or TypeError when `raw` cannot be a `kind`."""
    if isinstance(raw, bool) and kind is not bool:
        raise TypeError("a switch where a value belongs")
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        if str(raw).lower() not in _TRUE + _FALSE:
            raise ValueError(raw)
        return str(raw).lower() in _TRUE
    if kind is Size:
        return Size.parse(str(raw))
    if kind is int:
        return int(raw) if isinstance(raw, str | int) else int(str(raw))  # int(2.5) would round in silence
    if kind is float:
        return float(raw)
    if kind is str:
        if not isinstance(raw, str):
            raise TypeError(raw)
        return raw
    items = raw.split(",") if isinstance(raw, str) else raw
    return tuple(item for item in (_convert(item, str).strip() for item in items) if item)


def _options(cls: Any) -> dict[str, _Option]:
    hints = get_type_hints(cls)
    known = (str, int, float, bool, Size, tuple[str, ...])
    options = {}
    for field in dataclasses.fields(cls):
        if hints[field.name] not in known or not isinstance(field.metadata, types.MappingProxyType):
            raise TypeError(f"{cls.__name__}.{field.name}: declare it with option() as one of {known}")
        options[field.name] = _Option(name=field.name, kind=hints[field.name], default=field.default, **field.metadata)
    return options


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see python -m {self.prog.split()[-1]} --help)")


def _parser(prog: str, options: Mapping[str, _Option]) -> _Parser:
    parser = _Parser(
        prog=f"python -m {prog}",
        description="Options are flags, environment variables or keys of --config FILE.toml; the first of these wins.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for each in options.values():
        if each.kind is bool:
            parser.add_argument(_flag(each.name), action=argparse.BooleanOptionalAction, help=each.usage)
        else:
            parser.add_argument(_flag(each.name), help=each.usage, metavar=each.unit.upper() or each.name.upper())
    return parser


def _hint(name: str, known: Iterable[str], prog: str) -> str:
    close = difflib.get_close_matches(name.partition("=")[0], list(known), n=1, cutoff=0.8)
    return f"did you mean {close[0]}?" if close else f"see python -m {prog} --help"


def _from_env(options: Mapping[str, _Option], env: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for key, text in env.items():
        if not key.startswith(ENV_PREFIX):
            continue
        name = key.removeprefix(ENV_PREFIX).lower()
        if name in options:
            if text.startswith("tcp://") and _KUBERNETES_LINK.search(key):
                raise ConfigError(
                    f"{key}={text} was set by Kubernetes for a service called {name.split('_')[0]!r}; "
                    "set enableServiceLinks: false in the pod, or rename the service",
                    field=name,
                )
            values[name] = options[name].read(text, key)
        elif not _KUBERNETES_LINK.search(key):
            # A name of another process is fine (one environment may serve all of them), a misspelt one is not.
            for close in difflib.get_close_matches(name, options, n=1, cutoff=0.8):
                raise ConfigError(f"{key} is no option; did you mean {_env_name(close)}?", field=name)
    return values


def _from_file(options: Mapping[str, _Option], prog: str, path: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}; check --config", field="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}", field="config") from error
    for name, value in document.items():
        if isinstance(value, dict) and name not in PROCESSES:
            known = ", ".join(f"[{process}]" for process in PROCESSES)
            raise ConfigError(f"config file {path}: [{name}] is no table of a process; known are {known}", field=name)
    own = document.get(prog, {})
    if not isinstance(own, dict):
        raise ConfigError(f"config file {path}: {prog} is no table; write [{prog}] above its options", field="config")
    shared = {key: value for key, value in document.items() if not isinstance(value, dict)}
    values = {}
    for key, value in (shared | own).items():
        if key not in options:
            raise ConfigError(
                f"config file {path}: {key} is no option of {prog}; {_hint(key, options, prog)}", field=key
            )
        if key == "config":
            raise ConfigError(f"config file {path} names another one; only one is read", field="config")
        values[key] = options[key].read(value, f"config file {path}: {key}")
    return values
