"""Submitting a job: everything that can be refused is refused here, before anything is queued."""

import hashlib
import secrets
from dataclasses import dataclass

from sqlalchemy import update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api.openai.file_service import get_file
from api.openai.job_method import check_settings, method_settings
from api.openai.job_schemas import JobCreate, JobObject
from api.openai.job_view import to_object
from api.queue import VALIDATE_JOB, wake
from api.retries import WINDOW_S
from core.clock import now_s
from core.contracts import JobSpec, JobStatus, LoraSettings
from core.contracts.lora import MAX_RANK
from core.db import session_scope
from core.errors import Conflict, InvalidInput, NotFound
from core.events import add_event
from core.ids import new_id
from core.scope import Scope
from core.settings import get_settings
from core.tables import Adapter, File, Job
from registry.download import load_manifest
from registry.manifest import CONFIG_FILE
from registry.names import check_name, resolve
from registry.peft_config import parse_config
from registry.store import ObjectStore


@dataclass(frozen=True)
class Start:
    """What training starts from; `digest` and `lora` are None for a new adapter."""

    digest: str | None = None
    lora: LoraSettings | None = None


def create_job(scope: Scope, store: ObjectStore, body: JobCreate, raw_body: bytes, *, is_retry: bool) -> JobObject:
    """Stores a job and wakes a worker to validate its files; a retry of a request that was stored returns that job.

    Args:
        raw_body: the request's bytes; with the API key they tell a retry from another job.
    Raises:
        InvalidInput, NotFound, Conflict: `param` names the field.
    """
    key = hashlib.sha256(scope.api_key_id.encode() + b"\n" + raw_body).hexdigest()
    try:
        return _create(scope, store, body, key, is_retry=is_retry)
    except IntegrityError:
        # The first try was still being stored: its row is committed now, so the second look finds it.
        return _create(scope, store, body, key, is_retry=is_retry)


def _create(scope: Scope, store: ObjectStore, body: JobCreate, key: str, *, is_retry: bool) -> JobObject:
    reinforcement, supervised = method_settings(body)
    check_settings(body)
    with session_scope() as session:
        if is_retry:
            earlier = session.scalar(scope.select(Job).where(Job.idempotency_key == key, Job.created_at > now_s() - WINDOW_S))
            if earlier is not None:
                return to_object(session, scope, earlier)
        training = _input_file(session, scope, body.training_file, param="training_file")
        validation = None if body.validation_file is None else _input_file(session, scope, body.validation_file, param="validation_file")
        start = _start(session, scope, store, body)
        if body.suffix is not None:
            _check_suffix(session, scope, body.suffix)
        spec = JobSpec(
            base_model=get_settings().base_model_name,
            training_file_sha256=training.sha256,
            validation_file_sha256=None if validation is None else validation.sha256,
            seed=secrets.randbelow(2**31) if body.seed is None else body.seed,
            reinforcement=reinforcement,
            supervised=supervised,
            lora=_lora(body, start),
            start_from=start.digest,
            start_lora=start.lora if body.start_mode == "stack" else None,
            **body.shared(),
        )
        # The key belongs to the newest request with this body: the same job may be wanted twice on purpose.
        session.execute(update(Job).where(Job.idempotency_key == key).values(idempotency_key=None))
        job = Job(
            id=new_id("ftjob"), tenant_id=scope.tenant_id, project_id=scope.project_id, status=JobStatus.VALIDATING_FILES,
            training_file_id=training.id, validation_file_id=None if validation is None else validation.id, suffix=body.suffix,
            spec=spec.model_dump(mode="json"), request_metadata=body.metadata or {}, idempotency_key=key,
        )  # fmt: skip
        session.add(job)
        session.flush()
        add_event(session, job.id, "Job created; its files are being validated.")
        wake(session, VALIDATE_JOB, job.id)
        return to_object(session, scope, job)


def _input_file(session: Session, scope: Scope, file_id: str, *, param: str) -> File:
    row = get_file(session, scope, file_id, param=param)
    if row.purpose != "fine-tune":
        message = f"{param}: file {file_id!r} has purpose {row.purpose!r}; upload it again with purpose 'fine-tune'."
        raise InvalidInput(message, param=param, code="wrong_purpose")
    return row


def _start(session: Session, scope: Scope, store: ObjectStore, body: JobCreate) -> Start:
    """What `model` and `start_from` mean together."""
    from_model = _adapter_start(session, scope, store, body.model, param="model")
    if body.start_from is None:
        return from_model
    if from_model.digest is not None:
        raise InvalidInput("start_from: model names an adapter already; give the base there, or leave this out.", param="start_from")
    start = _adapter_start(session, scope, store, body.start_from, param="start_from")
    if start.digest is None:
        raise InvalidInput("start_from: this is the base model; training starts from it anyway, leave start_from out.", param="start_from")
    return start


def _adapter_start(session: Session, scope: Scope, store: ObjectStore, name: str, *, param: str) -> Start:
    try:
        resolved = resolve(session, scope, name)
    except NotFound as error:
        base = get_settings().base_model_name
        message = f"{param}: no model {name!r} in this project; the base is {base!r}, adapters are in the list of models."
        raise NotFound(message, param=param, code=error.code) from error
    if resolved is None:
        return Start()
    if resolved.adapter.base_model != get_settings().base_model_name:
        message = f"{param}: {name!r} is an adapter of {resolved.adapter.base_model!r}, which this platform does not serve now."
        raise InvalidInput(message, param=param)
    manifest = load_manifest(store, resolved.version.digest)
    return Start(resolved.version.digest, parse_config(store.get_blob(manifest.files[CONFIG_FILE])).lora_settings())


def _lora(body: JobCreate, start: Start) -> LoraSettings:
    """The shape of what is trained: an adapter that training continues from brings its own, over a stacked one it is free.

    Raises:
        InvalidInput: stacking without a start or beyond the limit of ranks; a shape that is not the continued adapter's.
    """
    asked = body.lora
    if body.start_mode == "stack":
        if start.lora is None:
            message = "start_mode: stack puts a new adapter over another one; name that one as model or in start_from."
            raise InvalidInput(message, param="start_mode")
        new = asked or LoraSettings()
        both = new.exported_rank + start.lora.max_rank
        if both > MAX_RANK:
            message = f"lora.rank: with the rank of the adapter underneath it comes to {both}, over the limit of {MAX_RANK}."
            raise InvalidInput(message, param="lora.rank")
        return new
    if start.lora is None:
        return asked or LoraSettings()
    if asked is None:
        return start.lora
    kept = start.lora.model_copy(update={"dropout": asked.dropout})
    for name in LoraSettings.model_fields:
        has, wants = getattr(kept, name), getattr(asked, name)
        if name in asked.model_fields_set and (set(wants) != set(has) if name == "target_modules" else wants != has):
            message = f"lora.{name}: the adapter that training continues from has {has}, not {wants}; leave lora out to keep its shape."
            raise InvalidInput(message, param=f"lora.{name}")
    return kept


def _check_suffix(session: Session, scope: Scope, suffix: str) -> None:
    check_name(suffix, param="suffix")
    adapter = session.scalar(scope.select(Adapter).where(Adapter.name == suffix))
    if adapter is not None and adapter.base_model != get_settings().base_model_name:
        message = f"suffix: adapter {suffix!r} is of base model {adapter.base_model!r}; choose another name."
        raise Conflict(message, param="suffix")
