"""`python -m malliavin_jax.cli`."""

import sys

from .entry import main

sys.exit(main())
