"""`python -m jaxcoll`."""

import sys

from jaxcoll.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
