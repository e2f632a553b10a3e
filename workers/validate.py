"""Validation of a job's files, before it is queued."""

import logging
from dataclasses import dataclass

from core import leases
from core.contracts import DatasetReport, JobSpec, JobStatus
from core.db import after_commit
from core.errors import EspalierError, InvalidInput, LeaseLost, Unavailable
from core.events import add_event
from core.jobs import transition
from engine.graders import validate_grader
from engine.guidance import advise
from engine.types import Verbs
from workers.claim import Claim, Heartbeat, claim, fenced
from workers.context import RUN_JOB, Context
from workers.dataset import check_file
from workers.row_formats import RowFormat

log = logging.getLogger(__name__)
NUM_SHOWN_FAULTS = 3


@dataclass(frozen=True)
class _Checked:
    training: DatasetReport
    validation: DatasetReport | None
    guidance: list[str]


def validate_job(context: Context, job_id: str) -> JobStatus | None:
    """Checks a job's files and queues the job, or fails it with every fault in its report.

    Returns:
        Where the job stands now; None where this call had nothing to do, or could not finish and left the job to the next sweep.
    """
    claimed = claim(job_id, context.settings, frozenset({JobStatus.VALIDATING_FILES}))
    if claimed is None:
        return None
    spec = JobSpec.model_validate(claimed.job.spec)
    try:
        with Heartbeat(claimed.held, context.settings) as heartbeat, context.connect(claimed.held.token, claimed.job.tenant_id) as verbs:
            checked = _check(context, spec, verbs, heartbeat)
        return _conclude(context, claimed, spec, checked)
    except LeaseLost as error:
        log.warning("%s", error)
    except Unavailable as error:
        log.warning("validation of %s waits for the next sweep: %s", job_id, error)
        with fenced(claimed.held) as (session, _):
            leases.release(session, claimed.held)
    except EspalierError as error:
        with fenced(claimed.held) as (session, job):
            transition(session, job, JobStatus.FAILED, f"The job's files could not be checked: {error.message}", error=error)
            leases.release(session, claimed.held)
        return JobStatus.FAILED
    return None


def _check(context: Context, spec: JobSpec, verbs: Verbs, heartbeat: Heartbeat) -> _Checked:
    info = verbs.info()
    if info.name != spec.base_model:
        raise InvalidInput(f"The engine holds base model {info.name!r}; this job asks for {spec.base_model!r}.", param="model")

    def check(sha256: str, *, training: bool) -> DatasetReport:
        return check_file(
            context.store.get_blob(sha256), RowFormat.of(spec, training=training), verbs, max_model_len=info.max_model_len,
            max_completion_tokens=spec.rollout.max_tokens, between=heartbeat.ensure,
        )  # fmt: skip

    training = check(spec.training_file_sha256, training=True)
    if not training.num_faults and spec.algorithm.samples:
        validate_grader(spec.grader, set(training.item_fields), param="method.reinforcement.grader")
    validation = check(spec.validation_file_sha256, training=False) if spec.validation_file_sha256 else None
    guidance = [str(advice) for advice in advise(spec, info.num_params, info.num_layers, training.num_rows)] if training.num_rows else []
    return _Checked(training, validation, guidance)


def _conclude(context: Context, claimed: Claim, spec: JobSpec, checked: _Checked) -> JobStatus:
    error = _fault("training_file", checked.training) or (checked.validation and _fault("validation_file", checked.validation))
    with fenced(claimed.held) as (session, job):
        job.report = {
            "training_file": checked.training.model_dump(mode="json"),
            "validation_file": checked.validation and checked.validation.model_dump(mode="json"),
            "guidance": checked.guidance,
        }
        if job.cancel_requested:
            transition(session, job, JobStatus.CANCELLED, "Job cancelled.")
        elif error:
            transition(session, job, JobStatus.FAILED, error.message, error=error)
        else:
            job.num_steps = spec.total_steps(checked.training.num_rows)
            for advice in checked.guidance:
                add_event(session, job.id, advice)
            transition(session, job, JobStatus.QUEUED, f"Files are valid: {_summary(checked.training)}; {job.num_steps} steps.")
            after_commit(session, lambda: context.send(RUN_JOB, job.id))
        leases.release(session, claimed.held)
        return JobStatus(job.status)


def _fault(param: str, report: DatasetReport) -> InvalidInput | None:
    if not report.num_faults:
        return None
    shown = " ".join(f"Line {fault.line}: {fault.message}" for fault in report.faults[:NUM_SHOWN_FAULTS])
    more = f" … {report.num_faults - NUM_SHOWN_FAULTS} more are in the job's report." if report.num_faults > NUM_SHOWN_FAULTS else ""
    return InvalidInput(f"{param} has {report.num_faults} faults. {shown}{more}", param=param, code=f"invalid_{param}")


def _summary(report: DatasetReport) -> str:
    tokens = report.prompt_tokens
    sizes = f", {tokens.min} to {tokens.max} tokens a prompt (mean {tokens.mean:.0f}, 95% within {tokens.p95})" if tokens else ""
    notes = f" ({' '.join(report.warnings)})" if report.warnings else ""
    return f"{report.num_rows} rows{sizes}{notes}"
