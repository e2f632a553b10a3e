"""Submitting a job: everything that can be refused is refused here, before anything is queued."""

import hashlib
import secrets
from dataclasses import dataclass

from sqlalchemy import update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api.openai.file_service import get_file
from api.openai.job_schemas import JobCreate, JobObject, ReinforcementCreate
from api.openai.job_view import to_object
from api.queue import VALIDATE_JOB, wake
from api.retries import WINDOW_S
from core.clock import now_s
from core.contracts import Hyperparameters, JobSpec, JobStatus, LoraSettings, ReinforcementSettings
from core.db import session_scope
from core.errors import Conflict, InvalidInput, NotFound
from core.events import add_event
from core.ids import new_id
from core.scope import Scope
from core.settings import get_settings
from core.tables import Adapter, File, Job
from engine.graders import validate_grader
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
    reinforcement = _reinforcement(body)
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
            lora=_lora(body.lora, start),
            algorithm=body.algorithm,
            rollout=body.rollout,
            optimizer=body.optimizer,
            checkpoint_interval=body.checkpoint_interval,
            num_steps=body.num_steps,
            start_from=start.digest,
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


def _reinforcement(body: JobCreate) -> ReinforcementSettings:
    """The method's settings, checked.

    Raises:
        InvalidInput: another method, a grader that could not grade, a field that is not supported.
    """
    if body.method is None:
        raise InvalidInput("method: required; send {'type': 'reinforcement', 'reinforcement': {'grader': …}}.", param="method")
    if body.method.type != "reinforcement":
        message = f"method.type: {body.method.type!r} is not trained by this platform; use 'reinforcement'."
        raise InvalidInput(message, param="method.type", code="unsupported_method")
    for other in ("supervised", "dpo"):
        if getattr(body.method, other) is not None:
            raise InvalidInput(f"method.{other}: does not go with type 'reinforcement'; leave it out.", param=f"method.{other}")
    settings: ReinforcementCreate | None = body.method.reinforcement
    if settings is None:
        raise InvalidInput("method.reinforcement: required with this type; give at least its grader.", param="method.reinforcement")
    if body.hyperparameters is not None:
        message = "hyperparameters: OpenAI's old place of them; move them to method.reinforcement.hyperparameters."
        raise InvalidInput(message, param="hyperparameters")
    if body.integrations:
        raise InvalidInput("integrations: none is supported; leave it out.", param="integrations")
    max_model_len = get_settings().max_model_len
    if body.rollout.max_tokens >= max_model_len:
        message = f"rollout.max_tokens: {body.rollout.max_tokens} leaves no room for a prompt: there are {max_model_len} tokens in all."
        raise InvalidInput(message, param="rollout.max_tokens")
    validate_grader(settings.grader, None, param="method.reinforcement.grader")
    return ReinforcementSettings(grader=settings.grader, hyperparameters=settings.hyperparameters or Hyperparameters())


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


def _lora(asked: LoraSettings | None, start: Start) -> LoraSettings:
    """The adapter's shape: an adapter that training continues from brings its own."""
    if start.lora is None:
        return asked or LoraSettings()
    if asked is None:
        return start.lora
    for name in ("rank", "alpha"):
        if getattr(asked, name) != getattr(start.lora, name):
            has, wants = getattr(start.lora, name), getattr(asked, name)
            message = f"lora.{name}: the adapter that training starts from has {has}, not {wants}; leave lora out to keep its shape."
            raise InvalidInput(message, param=f"lora.{name}")
    if set(asked.target_modules) != set(start.lora.target_modules):
        message = "lora.target_modules: not those of the adapter that training starts from; leave lora out to keep its shape."
        raise InvalidInput(message, param="lora.target_modules")
    return start.lora


def _check_suffix(session: Session, scope: Scope, suffix: str) -> None:
    check_name(suffix, param="suffix")
    adapter = session.scalar(scope.select(Adapter).where(Adapter.name == suffix))
    if adapter is not None and adapter.base_model != get_settings().base_model_name:
        message = f"suffix: adapter {suffix!r} is of base model {adapter.base_model!r}; choose another name."
        raise Conflict(message, param="suffix")
