"""Runs a command that ends when its starter does: python tether.py STARTER_PID COMMAND [ARGUMENT...]

On Linux the kernel is asked to send SIGTERM when the starter dies, however it dies; then the command takes this
process' place (exec keeps the request). Elsewhere the command runs untethered. Started by path, without importing
twinpool.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def main() -> None:
    starter, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != starter:  # it died before the kernel was asked
            sys.exit(f"{command[0]} not started: the process that wanted it is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
