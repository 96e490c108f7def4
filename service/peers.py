"""Series of metrics for each peer, and for a bounded number of them, however many come and go.

peers = Peers()
registry.register(peers)             # before the metrics: it clears up when they are about to be read
peers.watch(gauge)                   # one with a label "peer"
label = peers.enter("decode-1")      # "decode-1", or "other" when there are too many
gauge.labels(peer=label).inc()
peers.leave(label)                   # once for every `enter`; its series go when it has been away for long
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

MAX_PEERS = 64  # with series of their own, the strangers among them
MAX_STRANGERS = 16  # so that whoever scans a port does not push the workers out
GONE_S = 1800.0  # series of a peer that was away for so long are removed
OTHER = "other"


@dataclass(slots=True)
class _Peer:
    stranger: bool
    uses: int = 0
    left_at: float = 0.0
    failed: bool = False  # the last time


class Peers(Collector):
    """Thread safe. Who comes first is named, until its series are removed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._metrics: list[MetricWrapperBase] = []

    def watch(self, metric: MetricWrapperBase) -> None:
        """Has the series of peers that are gone removed from `metric`, which has a label "peer"."""
        self._metrics.append(metric)

    def enter(self, name: str, *, stranger: bool = False) -> str:
        """The label of a peer that is in use until `leave`. A stranger has not proved who it is."""
        with self._lock:
            peer = self._peers.get(name)
            if peer is None:
                self._remove_gone()
                if not self._has_room(stranger):
                    return OTHER
                peer = self._peers[name] = _Peer(stranger)
            peer.stranger = peer.stranger and stranger
            peer.uses += 1
            return name

    def leave(self, label: str, *, failed: bool | None = None) -> None:
        """failed: whether its link did; None: this was no link."""
        with self._lock:
            peer = self._peers.get(label)
            if peer is None:
                return  # one of the others
            peer.uses -= 1
            peer.left_at = self._clock()
            peer.failed = peer.failed if failed is None else failed

    def failed_before(self, label: str) -> bool:
        """Whether the peer left in failure the last time, and has not been asked about since."""
        with self._lock:
            peer = self._peers.get(label)
            failed = peer is not None and peer.failed
            if peer is not None:
                peer.failed = False
            return failed

    def collect(self) -> Iterable[Metric]:
        """Has nothing of its own to show."""
        with self._lock:
            self._remove_gone()
        return ()

    def describe(self) -> Iterable[Metric]:
        return ()

    def _has_room(self, stranger: bool) -> bool:
        if stranger and sum(peer.stranger for peer in self._peers.values()) >= MAX_STRANGERS:
            return False
        return len(self._peers) < MAX_PEERS

    def _remove_gone(self) -> None:
        end = self._clock() - GONE_S
        for name in [name for name, peer in self._peers.items() if not peer.uses and peer.left_at <= end]:
            del self._peers[name]
            for metric in self._metrics:
                metric.remove_by_labels({"peer": name})
