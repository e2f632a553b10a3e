"""Publishing: an adapter becomes an immutable version. Content first, row last, so that no crash leaves half a version to be seen."""

import contextlib
from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core.contracts import Lineage
from core.errors import Conflict
from core.ids import new_id
from core.tables import Adapter, AdapterVersion
from registry.download import tar_sha256
from registry.manifest import manifest_key
from registry.naming import check_name
from registry.peft_format import PeftAdapter
from registry.revision import code_revision
from registry.store import ObjectStore

__all__ = ["VersionKind", "code_revision", "publish", "store_content"]

VersionKind = Literal["final", "checkpoint"]


def store_content(store: ObjectStore, peft: PeftAdapter) -> None:
    """Puts files and manifest into the store. Idempotent; call it before a transaction opens to keep uploads out of the lock."""
    for content in peft.files.values():
        store.put_blob(content)
    store.put(manifest_key(peft.digest), peft.manifest.to_bytes())


def publish(
    session: Session,
    store: ObjectStore,
    *,
    tenant_id: str,
    project_id: str,
    adapter_name: str,
    base_model: str,
    peft: PeftAdapter,
    kind: VersionKind,
    job_id: str | None,
    lineage: Lineage,
) -> AdapterVersion:
    """Publishes a checked adapter as a version of `adapter_name`, which is made if new; visible once the session commits.

    Content that the adapter already has keeps its row, number and lineage; a checkpoint published again as final becomes final, never back.

    Args:
        kind: final, or a checkpoint (served on demand, never the default).
    Returns:
        The version's row, flushed.
    Raises:
        InvalidInput: the name. Conflict: the adapter's versions are of another base model. Unavailable: the store does not answer.
    """
    check_name(adapter_name, param="adapter")
    store_content(store, peft)
    adapter = _locked_adapter(session, tenant_id=tenant_id, project_id=project_id, name=adapter_name, base_model=base_model)
    version = session.scalar(select(AdapterVersion).where(AdapterVersion.adapter_id == adapter.id, AdapterVersion.digest == peft.digest))
    if version is not None:
        if kind == "final":
            version.kind = "final"
        session.flush()
        return version
    newest = session.scalar(select(func.max(AdapterVersion.number)).where(AdapterVersion.adapter_id == adapter.id))
    version = AdapterVersion(
        id=new_id("av"),
        adapter_id=adapter.id,
        number=(newest or 0) + 1,
        digest=peft.digest,
        num_bytes=peft.num_bytes,
        tar_sha256=tar_sha256(peft.manifest, peft.files),
        kind=kind,
        job_id=job_id,
        lineage=lineage.model_dump(mode="json"),
    )
    session.add(version)
    session.flush()
    return version


def _locked_adapter(session: Session, *, tenant_id: str, project_id: str, name: str, base_model: str) -> Adapter:
    """The adapter's row, locked until the transaction ends (on SQLite the whole database is), so that numbers are given one by one."""
    own = select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.project_id == project_id, Adapter.name == name)
    statement = own.with_for_update()
    adapter = session.scalar(statement)
    if adapter is None:
        # Another first publish may win the name; its row is there, and locked below, once it has committed.
        with contextlib.suppress(IntegrityError), session.begin_nested():
            session.add(Adapter(id=new_id("adapter"), tenant_id=tenant_id, project_id=project_id, name=name, base_model=base_model))
        adapter = session.scalars(statement).one()
    if adapter.base_model != base_model:
        raise Conflict(
            f"Adapter {name!r} is of base model {adapter.base_model!r}, not {base_model!r}; publish it under another name.",
            param="adapter",
        )
    return adapter
