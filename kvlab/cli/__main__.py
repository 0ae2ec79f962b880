"""`python -m kvlab.cli`."""

from kvlab.cli import main

raise SystemExit(main())
