"""python -m twinpool: the same as the `twinpool` command."""

import sys

from twinpool.launch import main

sys.exit(main())
