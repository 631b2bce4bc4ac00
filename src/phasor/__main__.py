"""`python -m phasor` is the command `phasor`."""

import sys

from phasor.cli import main

if __name__ == "__main__":
    sys.exit(main())
