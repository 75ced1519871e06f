"""``python -m fuelflow``: the ``fuelflow`` command."""

import sys

from fuelflow.cli import main

sys.exit(main())
