"""`python -m api.main`: serves the API on the configured address."""

import uvicorn

from api.app import create_app
from core.settings import get_settings


def main() -> None:
    """Runs until SIGINT or SIGTERM; open streams get a few seconds to end."""
    settings = get_settings()
    uvicorn.run(
        create_app(), host=settings.api_host, port=settings.api_port, log_level="info", access_log=False, timeout_graceful_shutdown=5,
        server_header=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
