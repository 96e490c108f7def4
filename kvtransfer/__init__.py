"""Moves KV rows from the prefill worker that computed them into the memory that a decode worker has reserved.

It knows regions (preallocated arrays), rows (fixed-size pieces of them) and bytes, never models. Life of a transfer:

 1. Both processes describe their cache as `Region`s. The decode worker starts a `KvReceiver`, the prefill worker makes
    a `KvSender`.
 2. Decode reserves rows for one request and attempt: `KvReceiver.reserve(...)` -> `Reservation`. Its `target`, opaque
    bytes with a secret single-use token, goes to the prefill worker through the router.
 3. Prefill opens a push for the target: `KvSender.open(target, ...)` -> `Push`. The link to that receiver is made in
    the background or reused; both sides prove the cluster key and agree on fingerprint, regions and incarnation.
 4. Whenever a layer's rows are final, `Push.put(region, positions, rows)` queues their descriptor. The link's thread
    gathers the rows from the cache memory into bounded frames while the next layer computes; a slow receiver slows it
    down and grows no queue of bytes.
 5. The receiver's thread checks token, request id, attempt, region and positions of every frame before a byte is
    written, lets the bytes go straight into the reserved rows, and verifies each row's checksum there.
 6. `Push.commit(note, on_done)` sends row counts and a digest over everything. The receiver checks that every expected
    (region, position) arrived exactly once, calls `on_commit(Commit)` with the note, and acknowledges: `on_done`.
 7. The sender's rows are free once `push.closed` is set, the receiver's once `Reservation.release()` has returned True:
    from then on no byte of this transfer can land.

Block sizes and heads may differ: a `Region` says what its rows are made of (layout.py), and a sender whose rows hold
all that the receiver's do makes them on their way (mapping.py). Otherwise the link is refused with both layouts.

On one host the sender copies the rows straight into the receiver's memory (transports/shm.py): it first asks which rows
a push may write, and says when it writes no more. Until it has said so, or is gone, `release()` returns False and the
rows stay in quarantine. A `KvReceiver` offers what it can, best first, and a `KvSender` takes the first that connects.

Certificates, where configured, make every TCP link TLS 1.3 with both sides verified, before the first frame.

Anything else ends both sides, each exactly once, typed: an expired, used or foreign reservation (ReservationGone), a
deadline (TransferTimeout), a broken link (PeerLost, for all pushes on it), other bytes (ChecksumMismatch), wrong or
missing rows and aborts (TransferFailed), another model or cache (Incompatible), another key (Unauthenticated).

    region.py, target.py        the nouns                    reservation*.py, receiver.py   decode's side
    layout.py, mapping.py       rows of one side made from the other's
    cache_regions.py            a worker's cache as regions
    wire.py, handshake.py       frames; who may send them    push.py, outbound.py, sender.py   prefill's side
    digest.py, memory.py        row checksums; memory that  transports/   how bytes move: one file each
                                can be shared                writers.py    who may still write: quarantine
    metrics.py                  what it reports              native.py     rows copied, hashed, sent natively
"""

from kvtransfer.layout import Plane, RowLayout
from kvtransfer.memory import SharedMemory, cache_memory
from kvtransfer.metrics import NoMetrics, TransferMetrics
from kvtransfer.push import Push, PushResult
from kvtransfer.receiver import KvReceiver
from kvtransfer.region import Region
from kvtransfer.reservation import Commit, Reservation
from kvtransfer.sender import KvSender

__all__ = [
    "Commit",
    "KvReceiver",
    "KvSender",
    "NoMetrics",
    "Plane",
    "Push",
    "PushResult",
    "Region",
    "Reservation",
    "RowLayout",
    "SharedMemory",
    "TransferMetrics",
    "cache_memory",
]
