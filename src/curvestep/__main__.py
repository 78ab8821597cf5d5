"""``python -m curvestep`` is the command ``curvestep``."""

import sys

from curvestep.cli import main

if __name__ == "__main__":
    sys.exit(main())
