"""Classes of requests: how long the input is, what service level the client asked for, and whose it is.

The two kinds of class cross: an SLA class says how soon and how steadily tokens should come, the input class how much
there is to compute before the first. Length is counted without what a prefix cache holds: that part costs nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from twinpool.errors import ConfigError, InvalidRequest

SHORT, LONG = "short", "long"
PRIORITY_LIMIT = 1000  # of classes and of requests, either way

_TENANT = re.compile(r"[ -~]{0,64}")
_MAX_SALT = 128
_TTFT_TARGET_MS = (1.0, 3.6e6)
_TPOT_TARGET_MS = (1.0, 6e4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaClass:
    """A service level that the operator offers. Zero targets mean none."""

    name: str
    ttft_ms: float = 0.0  # target for arrival to first token
    tpot_ms: float = 0.0  # target for the mean time between tokens; bounds the decode batch
    priority: int = 0  # lower ones are shed first when the router is overloaded, and lose their rows first
    deadline_s: float = 600.0  # arrival to last token, for requests that name none
    queue: int = 256  # requests that may wait for a worker; more are refused
    weight: float = 1.0  # share of the workers while several classes wait
    max_batch: int = 0  # most sequences of a decode step that holds one of this class; 0: the worker's own limit

    @classmethod
    def parse(cls, text: str) -> SlaClass:
        """Reads "NAME:key=value:key=value". Raises ConfigError that names the class, the key and what is allowed."""
        name, *settings = text.split(":")
        name = name.strip()
        if not name:
            raise ConfigError(f"SLA class {text!r} has no name; write NAME:key=value:...", field="sla_classes")
        values: dict[str, float] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            if key not in _KEYS:
                raise ConfigError(
                    f"SLA class {name!r}: unknown key {key!r}; known are {', '.join(_KEYS)}", field="sla_classes"
                )
            values[key] = _KEYS[key].read(value, f"SLA class {name!r}: {key}")
        return cls(name=name, **values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Key:
    """What a setting of a class may be: a whole number or not, from `least` to `most`."""

    kind: type[int] | type[float]
    least: float
    most: float

    def read(self, text: str, what: str) -> float:
        noun = "a whole number" if self.kind is int else "a number"
        allowed = f"allowed is {noun} from {self.least:g} to {self.most:g}"
        try:
            value = self.kind(text)
        except ValueError:
            raise ConfigError(f"{what} is {text!r}: {allowed}", field="sla_classes") from None
        if not self.least <= value <= self.most:  # so that nan is refused
            raise ConfigError(f"{what} is {text}: {allowed}", field="sla_classes")
        return value


_KEYS: Mapping[str, _Key] = {
    "ttft_ms": _Key(float, 0, 3.6e6),
    "tpot_ms": _Key(float, 0, 6e4),
    "priority": _Key(int, -PRIORITY_LIMIT, PRIORITY_LIMIT),
    "deadline_s": _Key(float, 0.001, 864000),
    "queue": _Key(int, 1, 1000000),
    "weight": _Key(float, 0.001, 1000),
    "max_batch": _Key(int, 0, 65536),
}


class Classifier:
    """Sorts requests into input classes and SLA classes; `default` is the class of requests that name none."""

    def __init__(self, classes: Iterable[SlaClass], default: str, long_input_tokens: int) -> None:
        self.classes = {sla.name: sla for sla in classes}
        self._default = default
        self._long_input_tokens = long_input_tokens
        if default not in self.classes:
            raise ConfigError(f"default SLA class {default!r} is not among {', '.join(self.classes)}")

    def sla_class(self, name: str, ttft_target_ms: float = 0.0, tpot_target_ms: float = 0.0) -> SlaClass:
        """The class called `name`, or the default one for "", with the request's own targets where it has any.

        Raises InvalidRequest naming the field, its value and what is allowed.
        """
        sla = self.classes.get(name or self._default)
        if sla is None:
            raise InvalidRequest(
                f"sla_class is {name!r}: this router offers {', '.join(self.classes)}", field="sla_class"
            )
        if ttft_target_ms:
            sla = replace(sla, ttft_ms=_target("ttft_target_ms", ttft_target_ms, *_TTFT_TARGET_MS))
        if tpot_target_ms:
            sla = replace(sla, tpot_ms=_target("tpot_target_ms", tpot_target_ms, *_TPOT_TARGET_MS))
        return sla

    def input_class(self, num_uncached_tokens: int) -> str:
        return LONG if num_uncached_tokens >= self._long_input_tokens else SHORT


def check_priority(priority: int) -> None:
    if not -PRIORITY_LIMIT <= priority <= PRIORITY_LIMIT:
        raise InvalidRequest(
            f"priority is {priority}: allowed is {-PRIORITY_LIMIT} to {PRIORITY_LIMIT}", field="priority"
        )


def check_salt(salt: str) -> None:
    if len(salt) > _MAX_SALT:
        raise InvalidRequest(f"cache_salt has {len(salt)} characters: allowed are 0 to {_MAX_SALT}", field="cache_salt")


def tenant_of(named: str, metadata: Mapping[str, str | bytes]) -> str:
    """Whose request it is: as named, as a proxy says in the metadata, or by the API key; "" when none of these is
    there.

    An API key is never kept, only a digest of it. Raises InvalidRequest for a name that cannot be one.
    """
    tenant = named or _text(metadata.get("twinpool-tenant", ""))
    if not _TENANT.fullmatch(tenant):
        raise InvalidRequest(
            f"tenant is {tenant[:80]!r}: allowed are up to 64 printable ASCII characters", field="tenant"
        )
    key = _text(metadata.get("x-api-key", "")) or _text(metadata.get("authorization", ""))
    if not tenant and key:
        return "key-" + hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
    return tenant


def _target(field: str, value: float, least: float, most: float) -> float:
    if not least <= value <= most:
        raise InvalidRequest(
            f"{field} is {value:g}: allowed is 0 (the class's own) or {least:g} to {most:g}", field=field
        )
    return value


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
