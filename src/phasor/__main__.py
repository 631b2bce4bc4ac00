"""`python -m phasor` is the command `phasor`."""

import os
import signal
import sys


def main() -> int:
    """The command `phasor`: Ctrl-C ends it with the code 130, while the command line itself is being imported too."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from phasor.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
