"""`python -m crossshard.cli`, the same as `crossshard`."""

import sys

from crossshard.cli import main

sys.exit(main())
