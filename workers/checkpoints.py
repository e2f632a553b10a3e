"""Checkpoints: a trainer state that a job resumes from, and an adapter version that can be served. Content first, rows last."""

import logging
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.contracts import JobSpec, Lineage
from core.db import after_commit, session_scope
from core.errors import Conflict, CorruptData, NotFound, Unavailable
from core.events import add_event
from core.ids import new_id
from core.leases import Held
from core.tables import Adapter, AdapterVersion, Checkpoint, Job
from engine import wire
from engine.loop.curriculum import Memory, RowMemory
from engine.types import AdapterInfo, BaseModelInfo, StackedOn, Verbs
from registry.download import load_manifest
from registry.manifest import WEIGHTS_FILE
from registry.peft_format import PeftAdapter, check_adapter
from registry.revision import code_revision
from registry.store import ObjectStore
from registry.versions import VersionKind, publish, store_content
from workers.claim import fenced

log = logging.getLogger(__name__)

NUM_KEPT_STATES = 2


@dataclass(frozen=True)
class _State:
    """What an object of states/ holds."""

    trainer: bytes
    """The engine's `save_state`."""
    rows: tuple[RowMemory, ...]
    """The loop's memory."""


@dataclass(frozen=True)
class Checkpoints:
    """A job's checkpoints, for its holder."""

    store: ObjectStore
    held: Held
    job: Job
    spec: JobSpec
    base: BaseModelInfo

    def restore(self, verbs: Verbs) -> tuple[AdapterInfo, int, Memory]:
        """Puts the job's adapter into the engine: from the newest checkpoint, else from its start.

        Returns:
            (the adapter as the engine holds it, steps done, what the loop remembered then).
        Raises:
            Conflict: the engine's base is not the one that the checkpoint was made over.
            NotFound, CorruptData, Unavailable: the store's or the engine's.
        """
        with session_scope(readonly=True) as session:
            newest = session.execute(
                select(Checkpoint, AdapterVersion)
                .join(AdapterVersion, Checkpoint.adapter_version_id == AdapterVersion.id)
                .where(Checkpoint.job_id == self.job.id, Checkpoint.state_key.is_not(None))
                .order_by(Checkpoint.step.desc())
            ).first()
        if newest is None or newest[0].state_key is None:
            return self._create(verbs), 0, ()
        checkpoint, version = newest
        made_over = Lineage.model_validate(version.lineage).base_model_digest
        if version.job_id == self.job.id and made_over != self.base.digest:
            raise Conflict(
                f"The engine's base model has digest {self.base.digest[:12]}, the job's checkpoint was made over {made_over[:12]}. "
                "Bring the old base back, or submit the job again.",
                code="base_model_changed",
            )
        state = _read_state(self.store.get(newest[0].state_key))
        return verbs.load_state(self.job.id, state.trainer), checkpoint.step, state.rows

    def save(self, verbs: Verbs, step: int, metrics: dict[str, float], memory: Memory) -> None:
        """Makes a checkpoint at `step`, visible as a whole or not at all, and prunes older states.

        Args:
            memory: what the loop has to remember.
        Raises:
            LeaseLost: the job has another holder; at most an object that no row names was written.
        """
        state_key = f"states/{self.job.id}/{step}-{self.held.token}.state"
        self.store.put(state_key, wire.pack(_State(verbs.save_state(self.job.id), tuple(memory))))
        peft = self._content(verbs)
        with fenced(self.held) as (session, _):
            self._publish(session, peft, step, "checkpoint", metrics, state_key)
            self._prune(session)

    def finish(self, verbs: Verbs) -> PeftAdapter:
        """The final adapter, checked and in the store; `record_final` makes it a version."""
        return self._content(verbs)

    def promote(self, session: Session, step: int) -> AdapterVersion:
        """Makes the version of an earlier checkpoint the final one. Only states are pruned, so it is there."""
        version = session.scalars(
            select(AdapterVersion)
            .join(Checkpoint, Checkpoint.adapter_version_id == AdapterVersion.id)
            .where(Checkpoint.job_id == self.job.id, Checkpoint.step == step)
        ).one()
        version.kind = "final"
        return version

    def record_last(self, session: Session, peft: PeftAdapter, step: int, metrics: dict[str, float]) -> None:
        """Publishes the last step's adapter as a checkpoint, where another step's is the final one."""
        self._publish(session, peft, step, "checkpoint", metrics, None)

    def record_final(self, session: Session, peft: PeftAdapter, step: int, metrics: dict[str, float]) -> AdapterVersion:
        """Publishes the final version and the checkpoint of the last step, inside the transaction that ends the job."""
        for warning in peft.warnings:
            add_event(session, self.job.id, warning, level="warn")
        return self._publish(session, peft, step, "final", metrics, None)

    def _content(self, verbs: Verbs) -> PeftAdapter:
        saved = verbs.save(self.job.id)
        peft = check_adapter(saved.weights, saved.config, base_model=self.spec.base_model, num_layers=self.base.num_layers)
        store_content(self.store, peft)
        return peft

    def _publish(
        self, session: Session, peft: PeftAdapter, step: int, kind: VersionKind, metrics: dict[str, float], state_key: str | None
    ) -> AdapterVersion:
        lineage = Lineage(
            job_id=self.job.id,
            training_file_sha256=self.spec.training_file_sha256,
            validation_file_sha256=self.spec.validation_file_sha256,
            base_model=self.spec.base_model,
            base_model_digest=self.base.digest,
            spec=self.spec,
            code_revision=code_revision(),
            parent_digest=self.spec.start_from,
            step=step,
        )
        version = publish(
            session,
            self.store,
            tenant_id=self.job.tenant_id,
            project_id=self.job.project_id,
            adapter_name=self.job.suffix or self.job.id,
            base_model=self.spec.base_model,
            peft=peft,
            kind=kind,
            job_id=self.job.id,
            lineage=lineage,
        )
        row = session.scalar(select(Checkpoint).where(Checkpoint.job_id == self.job.id, Checkpoint.step == step))
        if row is None:
            row = Checkpoint(id=new_id("ftckpt"), job_id=self.job.id, step=step)
            session.add(row)
        row.adapter_version_id, row.state_key, row.metrics = version.id, state_key, metrics
        session.flush()
        return version

    def _prune(self, session: Session) -> None:
        statement = select(Checkpoint).where(Checkpoint.job_id == self.job.id, Checkpoint.state_key.is_not(None))
        old = session.scalars(statement.order_by(Checkpoint.step.desc()).offset(NUM_KEPT_STATES)).all()
        keys = [row.state_key for row in old if row.state_key]
        for row in old:
            row.state_key = None

        def delete() -> None:
            for key in keys:
                self.store.delete(key)

        after_commit(session, delete)

    def _create(self, verbs: Verbs) -> AdapterInfo:
        spec = self.spec
        start = self._start_weights() if spec.start_from else None
        if start is None or spec.start_lora is None:
            return verbs.create_adapter(self.job.id, spec.lora, seed=spec.seed, weights=start)
        under = StackedOn(start, spec.start_lora, trainable=spec.start_learning_rate > 0)
        return verbs.create_adapter(self.job.id, spec.lora, seed=spec.seed, under=under)

    def _start_weights(self) -> bytes:
        # The digest came in by the user's request: only a version of the job's own project may be read.
        with session_scope(readonly=True) as session:
            owned = session.scalar(
                select(AdapterVersion.digest)
                .join(Adapter, AdapterVersion.adapter_id == Adapter.id)
                .where(
                    Adapter.tenant_id == self.job.tenant_id,
                    Adapter.project_id == self.job.project_id,
                    AdapterVersion.digest == self.spec.start_from,
                )
                .limit(1)
            )
        if owned is None:
            raise NotFound("The adapter version that training should start from is not there any more.", param="start_from")
        return self.store.get_blob(load_manifest(self.store, owned).files[WEIGHTS_FILE])


def _read_state(data: bytes) -> _State:
    try:
        return wire.build(_State, wire.unpack(data))
    except (ValueError, TypeError) as error:
        raise CorruptData(f"A checkpoint's state can't be read: {error}.") from error


def delete_states(session: Session, store: ObjectStore, job_id: str) -> None:
    """Forgets all trainer states of a job that has ended, those that no row names included; objects go after the commit."""
    for row in session.scalars(select(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.state_key.is_not(None))):
        row.state_key = None

    def delete() -> None:
        try:
            for key in store.list_keys(f"states/{job_id}"):
                store.delete(key)
        except Unavailable as error:
            log.warning("states of %s stay in the store: %s", job_id, error)

    after_commit(session, delete)
