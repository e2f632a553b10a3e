"""`espalier`: one function a command. What a command needs is imported inside it, so that --help is instant."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from core.errors import EspalierError

# Exit codes: 0 done, 1 it failed, 2 wrong usage (typer's own), 3 the data folder is in use, 4 a port is taken, 130 interrupted.
EXIT_CODES = {"data_dir_in_use": 3, "port_taken": 4}

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Reinforcement fine-tuning that you host."
)
tenant_app = typer.Typer(no_args_is_help=True, help="Tenants, their projects and keys.")
app.add_typer(tenant_app, name="tenant")

DataDir = Annotated[Path | None, typer.Option(help="Folder that holds all state (ESPALIER_DATA_DIR; default .espalier).")]
Port = Annotated[int | None, typer.Option(help="Port of the API (ESPALIER_API_PORT; default 8000).")]
EnginePort = Annotated[int | None, typer.Option(help="Port of the engine host (ESPALIER_ENGINE_PORT; default 8100).")]
RedisPort = Annotated[int | None, typer.Option(help="Port of the Redis-protocol server (ESPALIER_REDIS_PORT; default 6390).")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of text.")]


@app.command()
def up(
    data_dir: DataDir = None,
    port: Port = None,
    engine_port: EnginePort = None,
    redis_port: RedisPort = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option(help="Print errors only.")] = False,
) -> None:
    """Run the whole platform on this machine until Ctrl-C."""
    from cli.environment import apply
    from cli.up import run_up

    _exit_with(lambda: run_up(apply(data_dir=data_dir, port=port, engine_port=engine_port, redis_port=redis_port), json=json, quiet=quiet))


@app.command()
def demo(
    data_dir: DataDir = None,
    port: Port = None,
    engine_port: EnginePort = None,
    redis_port: RedisPort = None,
    again: Annotated[bool, typer.Option(help="Train anew even if a finished job with the same settings is there.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps of the job.")] = None,
) -> None:
    """Train an adapter on a real task and compare it with its base, from nothing."""
    from cli.demo import run_demo
    from cli.environment import apply

    settings = apply(data_dir=data_dir, port=port, engine_port=engine_port, redis_port=redis_port)
    _exit_with(lambda: run_demo(settings, again=again, num_steps=steps))


@app.command()
def status(data_dir: DataDir = None, port: Port = None, json: Json = False) -> None:
    """Ask the platform how it is; exit code 0 only if every part is well."""
    from cli.environment import apply
    from cli.status import show_status

    _exit_with(lambda: show_status(apply(data_dir=data_dir, port=port), json=json))


@app.command()
def health(part: Annotated[str, typer.Argument(help="api, engine or worker, on this host.")]) -> None:
    """Ask one part that runs on this host; exit code 0 if it is well. For health checks of containers."""
    from cli.environment import apply
    from cli.status import check_part

    settings = apply()
    _exit_with(lambda: check_part(part, settings))


@tenant_app.command("create")
def tenant_create(
    name: Annotated[str, typer.Argument(help="The tenant; an existing one is reused.")],
    project: Annotated[str, typer.Option("--project", "-p", help="The project (business line); an existing one is reused.")],
    key_name: Annotated[str, typer.Option(help="What to call the key.")] = "default",
    new_key: Annotated[bool, typer.Option(help="Make another key though the project has one.")] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Make a tenant with a project and an API key; the key is shown once."""
    from cli.environment import apply
    from cli.tenant import create_tenant

    apply(data_dir=data_dir)
    _exit_with(lambda: create_tenant(name, project, key_name=key_name, new_key=new_key, json=json))


@app.command("base-model")
def base_model(data_dir: DataDir = None) -> None:
    """Make the base model ready: convert it once, check it afterwards."""
    from cli.environment import apply
    from cli.up import prepare_base_model

    settings = apply(data_dir=data_dir)

    def ready() -> int:
        prepare_base_model(settings)
        typer.echo(f"{settings.base_model_name} is ready in {settings.resolved_base_model_path}.")
        return 0

    _exit_with(ready)


@app.command()
def doctor(
    data_dir: DataDir = None, port: Port = None, engine_port: EnginePort = None, redis_port: RedisPort = None, json: Json = False
) -> None:
    """Look at what the platform needs of this machine."""
    from cli.doctor import run_doctor
    from cli.environment import apply

    settings = apply(data_dir=data_dir, port=port, engine_port=engine_port, redis_port=redis_port)
    _exit_with(lambda: run_doctor(settings, json=json))


@app.command()
def migrate(data_dir: DataDir = None) -> None:
    """Bring the database to the newest schema."""
    from cli.environment import apply
    from cli.up import migrate_database

    settings = apply(data_dir=data_dir)

    def done() -> int:
        migrate_database()
        typer.echo(f"Database is at the newest schema ({settings.resolved_database_url.split('@')[-1]}).")
        return 0

    _exit_with(done)


def _add_part(name: Any, doc: str) -> None:
    def command(data_dir: DataDir = None) -> None:
        from cli.commands import run_part
        from cli.environment import apply

        apply(data_dir=data_dir)
        run_part(name)

    app.command(name, help=doc)(command)


_add_part("api", "Run the API alone, in the foreground.")
_add_part("worker", "Run a Celery worker alone, in the foreground.")
_add_part("beat", "Run Celery beat alone, in the foreground; one per platform.")
_add_part("engine", "Run the engine host alone, in the foreground.")


def _exit_with(command: Callable[[], int]) -> None:
    """Runs a command; errors meant for users become one message on stderr and an exit code."""
    try:
        code = command()
    except EspalierError as error:
        typer.echo(f"error: {error.message}", err=True)
        code = EXIT_CODES.get(error.code, 1)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    app()
