"""How `espalier up` shows itself: a live table on a terminal, a line a change elsewhere, JSON lines for scripts, or nothing."""

import json as jsonlib
from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from cli.supervisor import Running, State
from core.settings import Settings

_COLOURS = {State.HEALTHY: "green", State.UNHEALTHY: "red", State.RESTARTING: "red", State.STARTING: "yellow"}


class View:
    """A line for each change; a context manager that is open while the platform runs."""

    def __init__(self, settings: Settings) -> None:
        self._url = f"http://{settings.api_host}:{settings.api_port}"
        self._data_dir = settings.data_dir
        self._was_healthy = False

    def say(self, text: str) -> None:
        """One line, e.g. about what happens before the parts start."""
        print(text, flush=True)

    def update(self, running: Sequence[Running], changed: Running, *, all_healthy: bool) -> None:
        """A part changed."""
        del running
        self.say(_line(changed))
        if all_healthy and not self._was_healthy:
            self.say(_ready(self._url, str(self._data_dir)))
        self._was_healthy = all_healthy

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Quiet(View):
    def say(self, text: str) -> None:
        del text


class _Json(View):
    """JSON lines: {"event": "part", …}, {"event": "ready", …}."""

    def say(self, text: str) -> None:
        self._emit({"event": "message", "message": text})

    def update(self, running: Sequence[Running], changed: Running, *, all_healthy: bool) -> None:
        del running
        pid = changed.process.pid if changed.process else None
        self._emit(
            {
                "event": "part", "part": changed.part.name, "state": str(changed.state), "pid": pid, "port": changed.part.port,
                "restarts": changed.num_restarts,
            }
        )  # fmt: skip
        if all_healthy and not self._was_healthy:
            self._emit({"event": "ready", "url": self._url, "data_dir": str(self._data_dir)})
        self._was_healthy = all_healthy

    def _emit(self, value: dict[str, Any]) -> None:
        print(jsonlib.dumps(value), flush=True)


class _Table(View):
    """A table that is redrawn in place."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def update(self, running: Sequence[Running], changed: Running, *, all_healthy: bool) -> None:
        del changed
        table = Table(caption=_ready(self._url, str(self._data_dir)) if all_healthy else None, caption_justify="left")
        for heading in ("part", "health", "pid", "port", "restarts", "log"):
            table.add_column(heading, justify="right" if heading in ("pid", "port", "restarts") else "left", overflow="fold")
        for r in running:
            state = f"[{_COLOURS.get(r.state, 'default')}]{r.state}"
            pid = str(r.process.pid) if r.process else ""
            table.add_row(r.part.name, state, pid, str(r.part.port or ""), str(r.num_restarts), str(r.log))
        self._live.update(table, refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def make_view(settings: Settings, *, json: bool, quiet: bool) -> View:
    """The view that fits where the output goes."""
    if json:
        return _Json(settings)
    if quiet:
        return _Quiet(settings)
    return _Table(settings) if Console().is_terminal else View(settings)


def _line(running: Running) -> str:
    words = [f"{running.part.name}: {running.state}"]
    if running.process is not None:
        words.append(f"pid {running.process.pid}")
    if running.part.port is not None:
        words.append(f"port {running.part.port}")
    if running.state is State.RESTARTING:
        words.append(f"exit {running.last_exit}, restart {running.num_restarts}, see {running.log}")
    return ", ".join(words)


def _ready(url: str, data_dir: str) -> str:
    return f"Espalier is up at {url} (all state in {data_dir}). Ctrl-C stops it; twice, without waiting for jobs to write a checkpoint."
