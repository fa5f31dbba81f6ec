"""`python -m recmill` is `recmill`."""

import sys

from recmill.cli import main

sys.exit(main())
