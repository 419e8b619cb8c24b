"""`python -m crossshard.tools.cli`, the same as `crossshard`."""

import sys

from crossshard.tools.cli import main

sys.exit(main())
