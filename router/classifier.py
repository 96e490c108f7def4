"""Classes of requests: how long the input is, and what service level the client asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from twinpool.errors import ConfigError, InvalidRequest

SHORT, LONG = "short", "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaClass:
    """A service level that the operator offers. Zero targets mean none."""

    name: str
    ttft_ms: float = 0.0  # target for arrival to first token
    tpot_ms: float = 0.0  # target for the mean time between tokens; bounds the decode batch
    priority: int = 0  # classes of higher priority leave the queue first
    deadline_s: float = 600.0  # arrival to last token, for requests that name none
    queue: int = 256  # requests that may wait for a worker; more are refused

    @classmethod
    def parse(cls, text: str) -> SlaClass:
        """Reads "NAME:key=value:key=value". Raises ConfigError that names the class, the key and what is allowed."""
        name, *settings = text.split(":")
        kinds = {"ttft_ms": float, "tpot_ms": float, "priority": int, "deadline_s": float, "queue": int}
        values: dict[str, float] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            if key not in kinds:
                raise ConfigError(f"SLA class {name!r}: unknown key {key!r}; known are {', '.join(kinds)}")
            try:
                values[key] = kinds[key](value)
            except ValueError:
                raise ConfigError(f"SLA class {name!r}: {key} is {value!r}; a number is needed") from None
            if not values[key] >= 0 and key != "priority":
                raise ConfigError(f"SLA class {name!r}: {key} is {value}; allowed is 0 or more")
        if not name.strip():
            raise ConfigError(f"SLA class {text!r} has no name; write NAME:key=value:...")
        sla = cls(name=name.strip(), **values)  # type: ignore[arg-type]
        if sla.deadline_s == 0 or sla.queue == 0:
            raise ConfigError(f"SLA class {sla.name!r}: deadline_s and queue must be over 0")
        return sla


class Classifier:
    """Sorts requests into input classes and SLA classes; `default` is the class of requests that name none."""

    def __init__(self, classes: Iterable[SlaClass], default: str, long_input_tokens: int) -> None:
        self.classes = {sla.name: sla for sla in classes}
        self._default = default
        self._long_input_tokens = long_input_tokens
        if default not in self.classes:
            raise ConfigError(f"default SLA class {default!r} is not among {', '.join(self.classes)}")

    def sla_class(self, name: str) -> SlaClass:
        """The class called `name`, or the default one for "". Raises InvalidRequest."""
        sla = self.classes.get(name or self._default)
        if sla is None:
            raise InvalidRequest(
                f"sla_class is {name!r}: this router offers {', '.join(self.classes)}", field="sla_class"
            )
        return sla

    def input_class(self, num_tokens: int) -> str:
        return LONG if num_tokens >= self._long_input_tokens else SHORT
