"""`espalier status`: what /healthz says, and what a running `espalier up` knows."""

import json as jsonlib
import socket
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from cli.health import WorkerPing, api_answers, http_answers
from cli.lock import read_status
from cli.up import api_url, reachable_host
from core.errors import InvalidInput, Unavailable
from core.settings import Settings


def check_part(part: str, settings: Settings) -> int:
    """Asks one part on this host.

    Returns:
        0 if it is well, else 1.
    Raises:
        InvalidInput: there is no such part, or none that answers questions.
    """
    match part:
        case "api":
            well = api_answers(f"{api_url(settings)}/healthz")
        case "engine":
            well = http_answers(f"http://{reachable_host(settings.engine_host)}:{settings.engine_port}/health")
        case "worker":
            well = WorkerPing(settings.resolved_broker_url, f"espalier@{socket.gethostname()}")()
        case _:
            raise InvalidInput(f"No part {part!r} can be asked; name api, engine or worker.", param="part")
    print(f"{part}: {'well' if well else 'not answering'}")
    return 0 if well else 1


def show_status(settings: Settings, *, json: bool) -> int:
    """Prints it.

    Returns:
        0 if the API says that everything is well, else 1.
    Raises:
        Unavailable: the API does not answer.
    """
    supervised = read_status(settings.data_dir)
    url = f"{supervised['url'] if supervised else api_url(settings)}/healthz"
    try:
        answer = httpx.get(url, timeout=10.0, trust_env=False)
        health: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Unavailable(f"Nothing healthy answers at {url} ({error}). Start it with `espalier up`, or set ESPALIER_API_PORT.") from None
    healthy = answer.status_code == 200
    if json:
        print(jsonlib.dumps({"healthy": healthy, "healthz": health, "supervised": supervised}))
        return 0 if healthy else 1
    console = Console()
    console.print(f"{url}: {'healthy' if healthy else 'NOT healthy'} (HTTP {answer.status_code})", highlight=False)
    console.print_json(jsonlib.dumps(health))
    if supervised:
        table = Table(title=f"espalier up, pid {supervised['pid']}", title_justify="left")
        for heading in ("part", "state", "pid", "port", "restarts"):
            table.add_column(heading)
        for name, part in supervised["parts"].items():
            table.add_row(name, part["state"], str(part["pid"] or ""), str(part["port"] or ""), str(part["restarts"]))
        console.print(table)
    return 0 if healthy else 1
