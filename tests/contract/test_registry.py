"""Publishing, names, aliases and downloads, on both databases and a real store.

1. Content and manifest are there before the row is; a rollback leaves no version to be seen.
2. Equal content is one version of an adapter; a checkpoint becomes final, never the other way round.
3. Numbers have no gaps and no doubles, also when several publish at once.
4. A name means the alias `prod`, else the newest final version; another tenant's name reads as one that does not exist.
5. Any byte range of the tar is what the whole tar has there, and its digest is known beforehand.
"""

import hashlib
import io
import tarfile
import threading
from dataclasses import replace

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from core import db
from core.contracts import Lineage
from core.errors import Conflict, CorruptData, InvalidInput, NotFound
from core.scope import Scope
from core.settings import get_settings
from core.tables import Adapter, AdapterVersion, Project
from registry import aliases, download
from registry.manifest import blob_key, manifest_key
from registry.names import resolve
from registry.peft_format import PeftAdapter
from registry.store import ObjectStore, open_store
from registry.versions import VersionKind, code_revision, publish
from tests.peft_files import adapter
from tests.rows import add_project


@pytest.fixture
def store(database_url: str) -> ObjectStore:
    return open_store()


@pytest.fixture
def scope(database_url: str) -> Scope:
    with db.session_scope() as session:
        return add_project(session, "acme", "billing")


def lineage(step: int = 3) -> Lineage:
    return Lineage(job_id=None, base_model="tiny", base_model_digest="0" * 64, code_revision=code_revision(), step=step)


def put(
    session: Session,
    store: ObjectStore,
    scope: Scope,
    peft: PeftAdapter,
    *,
    name: str = "invoices",
    kind: VersionKind = "final",
    base: str = "tiny",
) -> AdapterVersion:
    return publish(
        session, store, tenant_id=scope.tenant_id, project_id=scope.project_id, adapter_name=name, base_model=base, peft=peft, kind=kind,
        job_id=None, lineage=lineage(),
    )  # fmt: skip


def own_adapter(session: Session, scope: Scope, name: str = "invoices") -> Adapter:
    return session.scalars(scope.select(Adapter).where(Adapter.name == name)).one()


def test_a_version_is_stored_whole(store: ObjectStore, scope: Scope) -> None:
    peft = adapter()
    with db.session_scope() as session:
        version_id = put(session, store, scope, peft).id
    with db.session_scope(readonly=True) as session:
        version = session.get_one(AdapterVersion, version_id)
        assert (version.number, version.digest, version.kind, version.num_bytes) == (1, peft.digest, "final", peft.num_bytes)
        assert Lineage.model_validate(version.lineage) == lineage()
    manifest = download.load_manifest(store, peft.digest)
    assert {name: store.get_blob(sha256) for name, sha256 in manifest.files.items()} == dict(peft.files)


def test_a_rollback_leaves_no_version(store: ObjectStore, scope: Scope) -> None:
    class Crash(Exception):
        pass

    def crash_before_commit() -> None:
        with db.session_scope() as session:
            put(session, store, scope, adapter())
            raise Crash

    with pytest.raises(Crash):
        crash_before_commit()
    with db.session_scope() as session:
        assert session.scalars(select(AdapterVersion)).all() == []
        assert put(session, store, scope, adapter()).number == 1


def test_equal_content_is_one_version(store: ObjectStore, scope: Scope) -> None:
    with db.session_scope() as session:
        first = put(session, store, scope, adapter(0), kind="checkpoint")
        second = put(session, store, scope, adapter(1), kind="checkpoint")
        assert (first.number, second.number) == (1, 2)
        again = put(session, store, scope, adapter(0), kind="final")
        assert (again.id, again.number, again.kind) == (first.id, 1, "final")
        assert put(session, store, scope, adapter(0), kind="checkpoint").kind == "final"
        other = put(session, store, scope, adapter(0), name="other")
        assert (other.number, other.digest) == (1, first.digest)
        assert other.id != first.id


def test_refused_publishes(store: ObjectStore, scope: Scope) -> None:
    with db.session_scope() as session:
        put(session, store, scope, adapter())
    with pytest.raises(Conflict, match="another name"), db.session_scope() as session:
        put(session, store, scope, adapter(1), base="other-base")
    for name in ("", "Upper", "../up", "/abs", "a..b", "a@b", "-a", "a-", "a/b", "a" * 64, "a\n"):
        with pytest.raises(InvalidInput) as caught, db.session_scope() as session:
            put(session, store, scope, adapter(1), name=name)
        assert caught.value.param == "adapter"


def test_publishes_at_once_get_numbers_one_by_one(store: ObjectStore, scope: Scope) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with db.session_scope() as session:
                put(session, store, scope, adapter(seed))
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert errors == []
    with db.session_scope(readonly=True) as session:
        assert sorted(session.scalars(select(AdapterVersion.number))) == list(range(1, 9))
        assert len(session.scalars(select(Adapter)).all()) == 1


def test_names_mean_versions(store: ObjectStore, scope: Scope) -> None:
    with db.session_scope() as session:
        one, two = put(session, store, scope, adapter(0)), put(session, store, scope, adapter(1))
        three = put(session, store, scope, adapter(2), kind="checkpoint")

        def number(name: str) -> int:
            resolved = resolve(session, scope, name)
            assert resolved is not None
            return resolved.version.number

        assert resolve(session, scope, get_settings().base_model_name) is None
        assert number("invoices") == number("billing/invoices") == number("billing/invoices@latest") == 2
        assert [number(f"invoices@{n}") for n in (1, 2, 3)] == [1, 2, 3]
        assert number(f"billing/invoices@{three.digest[:12]}") == number(f"invoices@{three.digest}") == 3
        aliases.move(session, own_adapter(session, scope), "prod", one)
        assert number("invoices") == number("invoices@prod") == 1
        assert number("invoices@latest") == 2
        found = resolve(session, scope, "invoices")
        assert found is not None
        assert found.replica_name == f"{scope.tenant_id}/billing/invoices@{one.digest}"
        assert found.public_name == f"billing/invoices@{one.digest[:12]}"
        assert number(found.public_name) == 1
        aliases.move(session, own_adapter(session, scope), "prod", two)
        assert number("invoices") == 2


def test_a_checkpoint_alone_is_no_default(store: ObjectStore, scope: Scope) -> None:
    with db.session_scope() as session:
        put(session, store, scope, adapter(), kind="checkpoint")
        assert resolve(session, scope, "invoices@1") is not None
        with pytest.raises(NotFound):
            resolve(session, scope, "invoices")


def test_other_projects_models_read_as_none(store: ObjectStore, scope: Scope) -> None:
    with db.session_scope() as session:
        digest = put(session, store, scope, adapter()).digest
        other = add_project(session, "rival", "billing")
        third = add_project(session, "third", "sales")
        names = ["invoices", "billing/invoices", "billing/invoices@1", f"billing/invoices@{digest[:12]}", f"invoices@{digest}"]
        for stranger in (other, third):
            for name in names:
                with pytest.raises(NotFound) as caught:
                    resolve(session, stranger, name)
                with pytest.raises(NotFound) as unknown:
                    resolve(session, stranger, name.replace("invoices", "unknownx"))
                assert caught.value.message.replace("invoices", "unknownx") == unknown.value.message
                assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
                assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


def test_the_same_tenants_other_project_can_not_call_it(store: ObjectStore, scope: Scope) -> None:
    with db.session_scope() as session:
        put(session, store, scope, adapter())
        session.add(Project(id="proj-2", tenant_id=scope.tenant_id, name="sales"))
        session.flush()
        sibling = replace(scope, project_id="proj-2", project="sales")
        for name in ("invoices", "billing/invoices", "sales/invoices"):
            with pytest.raises(NotFound):
                resolve(session, sibling, name)
        put(session, store, sibling, adapter(1))
        found = resolve(session, sibling, "invoices")
        assert found is not None
        assert found.version.digest == adapter(1).digest


@pytest.mark.parametrize(
    "name",
    ["", "@1", "invoices@", "invoices@0", "invoices@01", "invoices@-1", "invoices@1@2", "../invoices", "billing/../invoices",
     "/billing/invoices",  "billing/invoices/x", "billing/invoices@../x", "invoices@abcdef012345\n",
     "invoices@ABCDEF012345", "invoices@deadbeef", "invoices@%",
     "invoices@" + "0" * 65, "a" * 300],
)  # fmt: skip
def test_names_of_another_form_mean_nothing(store: ObjectStore, scope: Scope, name: str) -> None:
    with db.session_scope() as session:
        put(session, store, scope, adapter())
        with pytest.raises(NotFound):
            resolve(session, scope, name)


def test_aliases(store: ObjectStore, scope: Scope) -> None:
    with db.session_scope() as session:
        one, two = put(session, store, scope, adapter(0)), put(session, store, scope, adapter(1))
        foreign = put(session, store, scope, adapter(0), name="other")
        own = own_adapter(session, scope)
        aliases.move(session, own, "staging", one)
        aliases.move(session, own, "prod", one)
        aliases.move(session, own, "staging", two)
        assert [(alias.name, alias.version_id) for alias in aliases.list_aliases(session, own)] == [("prod", one.id), ("staging", two.id)]
        aliases.delete(session, own, "prod")
        assert [alias.name for alias in aliases.list_aliases(session, own)] == ["staging"]
        with pytest.raises(NotFound, match="prod"):
            aliases.delete(session, own, "prod")
        with pytest.raises(InvalidInput, match="latest"):
            aliases.move(session, own, "latest", one)
        with pytest.raises(InvalidInput) as caught:
            aliases.move(session, own, "prod", foreign)
        assert caught.value.param == "version"
        for name in ("", "1", "12", "-x", "x-", "A", "a/b", "a..b", "deadbeefcafe", "a@b", "x" * 64):
            with pytest.raises(InvalidInput) as caught:
                aliases.move(session, own, name, one)
            assert caught.value.param == "alias"


def test_the_tar_is_deterministic_and_any_range_streams(store: ObjectStore, scope: Scope) -> None:
    peft = adapter()
    with db.session_scope() as session:
        version = put(session, store, scope, peft)
    manifest = download.load_manifest(store, version.digest)
    size = download.tar_size(store, manifest)
    whole = b"".join(download.read_tar_range(store, manifest, 0, size))
    assert len(whole) == size
    assert hashlib.sha256(whole).hexdigest() == version.tar_sha256
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        members = archive.getmembers()
        assert [(m.name.split("/")[1], m.mtime, m.uid, m.gid, m.mode) for m in members] == [
            ("adapter_config.json", 0, 0, 0, 0o644),
            ("adapter_model.safetensors", 0, 0, 0, 0o644),
        ]
        for member in members:
            content = archive.extractfile(member)
            assert content is not None
            assert content.read() == peft.files[member.name.split("/")[1]]
    borders = [0, 1, 511, 512, 513, 512 + len(peft.config), 1024, 1536, 1537, size - 1025, size - 1, size]
    for start in borders:
        for end in borders:
            if start <= end:
                assert b"".join(download.read_tar_range(store, manifest, start, end)) == whole[start:end], (start, end)
    for start, end in ((-1, 5), (5, size + 1), (6, 5)):
        with pytest.raises(InvalidInput):
            download.read_tar_range(store, manifest, start, end)


def test_single_files(store: ObjectStore, scope: Scope) -> None:
    peft = adapter()
    with db.session_scope() as session:
        put(session, store, scope, peft)
    manifest = download.load_manifest(store, peft.digest)
    for entry in download.files(store, manifest):
        assert b"".join(download.read_file_range(store, manifest, entry.name, 0, entry.num_bytes)) == peft.files[entry.name]
        assert entry.sha256 == hashlib.sha256(peft.files[entry.name]).hexdigest()
    assert b"".join(download.read_file_range(store, manifest, "adapter_config.json", 3, 9)) == peft.config[3:9]
    with pytest.raises(NotFound):
        download.read_file_range(store, manifest, "../adapter_config.json", 0, 1)


def test_changed_content_is_noticed(store: ObjectStore, scope: Scope) -> None:
    peft = adapter()
    with db.session_scope() as session:
        put(session, store, scope, peft)
    store.put(manifest_key(peft.digest), b"{}")
    with pytest.raises(CorruptData):
        download.load_manifest(store, peft.digest)
    store.put(manifest_key(peft.digest), peft.manifest.to_bytes())
    store.put(blob_key(peft.manifest.files["adapter_config.json"]), b"{}")
    with pytest.raises(CorruptData):
        store.get_blob(peft.manifest.files["adapter_config.json"])


def test_code_revision_names_version_and_commit() -> None:
    assert code_revision().startswith("0.1.0")
