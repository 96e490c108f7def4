"""twinpool drain: a worker finishes what it has, gets nothing new, leaves and exits, as after SIGTERM."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import grpc

from twinpool import errors
from twinpool.calls import Routers
from twinpool.commands.connection import add_router_option, connect
from twinpool.v1.worker_pb2 import DrainRequest
from twinpool.v1.worker_pb2_grpc import RegistryStub

_TIMEOUT_S = 10.0
_POLL_S = 0.2
_LONGEST_WAIT_S = 86400.0


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "drain",
        help="let a worker finish and leave",
        description="The worker takes nothing new, finishes what it has, leaves its routers and exits with status 0. "
        "Needs the cluster key in TWINPOOL_CLUSTER_KEY where the deployment has one.",
    )
    parser.add_argument("worker", metavar="WORKER", help="its id, from `twinpool pools`")
    add_router_option(parser)
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", help="wait until it has left, at most so long")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.wait <= _LONGEST_WAIT_S:  # nan neither; said before the worker is told anything
        raise errors.ConfigError(f"--wait {args.wait:g}: it is 0 to {_LONGEST_WAIT_S:g} seconds", field="wait")
    with connect(args, timeout_s=_TIMEOUT_S) as client:
        client.pools()  # so that no router at all is told as by every other command
        _ask(Routers(args.router, grpc), args.worker)
        end = time.monotonic() + args.wait
        while args.wait and any(worker.worker_id == args.worker for worker in client.pools().workers):
            if time.monotonic() > end:
                raise errors.DeadlineExceeded(f"{args.worker} has not left within {args.wait:g} s; it goes on draining")
            time.sleep(_POLL_S)
    print(f"{args.worker} {'has left' if args.wait else 'drains'}")
    return 0


def _ask(routers: Routers, worker_id: str) -> None:
    """Tells the worker through the first router that is there. Raises UnknownWorker, Unauthenticated, Unavailable."""
    key = os.environ.get("TWINPOOL_CLUSTER_KEY", "")
    for i, address in enumerate(routers.addresses):
        with routers.open(address) as channel:
            try:
                RegistryStub(channel).Drain(
                    DrainRequest(worker_id=worker_id),
                    timeout=_TIMEOUT_S,
                    metadata=(("twinpool-cluster-key", key),) if key else (),
                )
                return
            except grpc.RpcError as failure:
                error = errors.from_status(failure.code(), failure.details() or "", failure.trailing_metadata())
                if not isinstance(error, errors.Unavailable) or i + 1 == len(routers.addresses):
                    raise error from failure
