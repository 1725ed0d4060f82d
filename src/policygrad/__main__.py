"""`python -m policygrad`."""

import sys

from policygrad.cli import main

sys.exit(main())
