"""The names that adapters go by. No database here: anything may import this.

In requests: `project/adapter`, or `adapter` for one of the caller's own project, each with an optional `@alias`, `@number` or
`@digest prefix`.
On replicas: `<tenant_id>/<project>/<adapter>@<digest>`, see `registry.replica_name`.
"""

import re
from dataclasses import dataclass

from core.errors import InvalidInput
from registry.replica_name import ReplicaName

MIN_DIGEST_PREFIX = 12
LATEST = "latest"
# Begins and ends with a letter or digit; no "..", since names become parts of file names on the users' side.
_NAME = re.compile(r"(?!.*\.\.)[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
_ALIAS = re.compile(r"(?!.*\.\.)[a-z](?:[a-z0-9._-]{0,61}[a-z0-9])?")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_DIGEST_PREFIX = re.compile(rf"[0-9a-f]{{{MIN_DIGEST_PREFIX},64}}")


@dataclass(frozen=True)
class ModelName:
    """An adapter's name as a request spells it; at most one of alias, number and digest_prefix is set."""

    adapter: str
    project: str | None = None
    """None: the caller's own."""
    alias: str | None = None
    number: int | None = None
    digest_prefix: str | None = None


def parse_model_name(name: str) -> ModelName | None:
    """The parts of `[project/]adapter[@alias|@number|@digest prefix]`, or None where `name` has another form."""
    path, at, selector = name.partition("@")
    project, slash, adapter = path.rpartition("/")
    if not is_name(adapter) or (slash and not is_name(project)):
        return None
    own = project or None
    if not at:
        return ModelName(adapter, own)
    if _NUMBER.fullmatch(selector):
        return ModelName(adapter, own, number=int(selector))
    if _DIGEST_PREFIX.fullmatch(selector):
        return ModelName(adapter, own, digest_prefix=selector)
    if _ALIAS.fullmatch(selector):
        return ModelName(adapter, own, alias=selector)
    return None


def is_name(name: str) -> bool:
    """Whether `name` can name an adapter or a project."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, *, param: str) -> str:
    """Returns `name`, of an adapter or a project.

    Raises:
        InvalidInput: it has another form.
    """
    if not is_name(name):
        raise InvalidInput(
            f"{name!r} can't be a name: use 1 to 63 of a-z, 0-9, '.', '_', '-', a letter or digit first and last, no '..'.", param=param
        )
    return name


def check_alias(name: str, *, param: str = "alias") -> str:
    """Returns `name`, of an alias.

    Raises:
        InvalidInput: it has another form, reads as a digest, or is `latest`.
    """
    if name == LATEST:
        raise InvalidInput("The alias 'latest' always means the newest final version and can't be moved; choose another.", param=param)
    if _ALIAS.fullmatch(name) is None or _DIGEST_PREFIX.fullmatch(name):
        raise InvalidInput(
            f"{name!r} can't be an alias: use 1 to 63 of a-z, 0-9, '.', '_', '-', a letter first, a letter or digit last, no '..', "
            "and nothing that reads as a digest.",
            param=param,
        )
    return name


def replica_name(tenant_id: str, project: str, adapter: str, digest: str) -> str:
    """The immutable name under which replicas know a version."""
    return str(ReplicaName(tenant_id, project, adapter, digest))


def fine_tuned_name(project: str, adapter: str, digest: str) -> str:
    """The immutable name that users see, e.g. `billing/invoices@3f0c9a1b2d4e`."""
    return f"{project}/{adapter}@{digest[:MIN_DIGEST_PREFIX]}"
