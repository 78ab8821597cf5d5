"""``python -m clipwise`` is the command ``clipwise``."""

import sys

from clipwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
