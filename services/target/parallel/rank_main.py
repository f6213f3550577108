"""Entry point of a rank that rank 0 starts with ``python -m``. Reads an `Order` from standard input."""

from __future__ import annotations

import sys

from outrider.services.target.parallel.group import Order, run_rank
from outrider.shared.base.errors import OutriderError
from outrider.shared.obs.logging import configure_logging


def main() -> int:
    """Run one rank; return the exit code."""
    try:
        order = Order.from_json(sys.stdin.readline())
        ranks = order.settings.ranks()
        assert ranks is not None, "rank 0 sets the variables"
        configure_logging(f"target-{ranks.rank}", order.settings.log_level, order.settings.log_json)
        return run_rank(order, ranks)
    except OutriderError as error:
        print(error.message, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
