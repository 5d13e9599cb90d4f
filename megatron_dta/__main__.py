"""`python -m megatron_dta`."""

import sys

from megatron_dta.cli import main

sys.exit(main())
