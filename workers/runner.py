"""Runs one job: claims it, restores it, trains it step by step, and gives it back in the state that it earned."""

import logging
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto

from sqlalchemy.orm import Session

from core import leases
from core.clock import now_s
from core.contracts import JobSpec, JobStatus
from core.db import session_scope
from core.errors import EspalierError, InvalidInput, LeaseLost, NotFound, Unavailable
from core.events import add_event, record_metrics
from core.jobs import transition
from core.tables import AdapterVersion, Job, Metric
from engine.grpo import GrpoLoop
from engine.loop.evaluation import score_of
from engine.loop.export import export_cost
from engine.loop.rows import PromptRow
from engine.supervised import SupervisedLoop
from engine.types import BaseModelInfo, Verbs
from registry.peft_format import PeftAdapter
from workers import held_out as held_out_scores
from workers.checkpoints import Checkpoints, delete_states
from workers.claim import Claim, Heartbeat, claim, fenced
from workers.context import RUN_JOB, Context
from workers.dataset import parse_file
from workers.row_formats import RowFormat

log = logging.getLogger(__name__)

RUNNABLE = frozenset({JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSING})
MAX_RESTORES_WITHOUT_PROGRESS = 5
"""Restores in a row that led to no new step; after these the fault is not a passing one."""
ETA_STEPS = 10


class Control(Enum):
    """What a job is to do next."""

    GO_ON = auto()
    CANCEL = auto()
    PAUSE = auto()
    GIVE_BACK = auto()


class EngineGone(Unavailable):
    """The engine stayed away for longer than a job waits, or lost the job again and again."""

    default_code = "engine_unavailable"


def run_job(context: Context, job_id: str) -> JobStatus | None:
    """Runs a job until it ends, pauses or has to be given back.

    Returns:
        Where the job stands; None when another worker holds it or has taken it over.
    """
    claimed = claim(job_id, context.settings, RUNNABLE)
    if claimed is None:
        return None
    try:
        with Heartbeat(claimed.held, context.settings) as heartbeat, context.connect(claimed.held.token, claimed.job.tenant_id) as verbs:
            return JobRun(context, claimed, verbs, heartbeat.ensure).run()
    except LeaseLost as error:
        log.warning("%s", error)
        return None


class JobRun:
    """One holder's run of one job.

    Args:
        verbs: the engine, for this holder.
        ensure: raises LeaseLost once the lease is lost.
    """

    def __init__(self, context: Context, claimed: Claim, verbs: Verbs, ensure: Callable[[], None]) -> None:
        self._context, self._held, self._job, self._verbs, self._ensure = context, claimed.held, claimed.job, verbs, ensure
        self._spec = JobSpec.model_validate(claimed.job.spec)
        self._num_steps = claimed.job.num_steps or 0
        self._step_times_s: deque[float] = deque(maxlen=ETA_STEPS)
        self._restores_without_progress = 0

    def run(self) -> JobStatus:
        """Trains until something ends it.

        Raises:
            LeaseLost: another holder has the job; nothing more was written.
        """
        try:
            while True:
                try:
                    return self._attempt()
                except (NotFound, Unavailable) as error:
                    if isinstance(error, EngineGone) or not _engine_lost(error):
                        raise
                    status = self._await_engine(error)
                    if status is not None:
                        return status
        except LeaseLost:
            raise
        except EspalierError as error:
            return self._end(JobStatus.FAILED, f"Job failed: {error.message}", error=error)

    def _attempt(self) -> JobStatus:
        """From the newest checkpoint on. Raises NotFound (adapter_not_loaded) or Unavailable when the engine is lost on the way."""
        base = self._verbs.info()
        if base.name != self._spec.base_model:
            raise InvalidInput(f"The engine holds base model {base.name!r}; this job asks for {self._spec.base_model!r}.", param="model")
        checkpoints = Checkpoints(self._context.store, self._held, self._job, self._spec, base)
        adapter, step, memory = checkpoints.restore(self._verbs)
        rows = self._rows(self._spec.training_file_sha256, training=True)
        held_out = self._rows(self._spec.validation_file_sha256, training=False)
        make_loop = GrpoLoop if self._spec.algorithm.samples else SupervisedLoop
        loop = make_loop(self._verbs, self._job.id, self._spec, rows, held_out, self._num_steps, self._ensure, memory)
        loop.begin(adapter.fingerprint)
        self._note_restored(step, base)
        saved_step, metrics = step, {}
        while True:
            self._ensure()
            control = self._control()
            if control in (Control.PAUSE, Control.GIVE_BACK) and step > saved_step:
                checkpoints.save(self._verbs, step, metrics, loop.memory())
                saved_step = step
            if control is not Control.GO_ON:
                status = self._stop(control)
                if status is not None:
                    return status
                continue
            if step == self._num_steps or self._stalled(step):
                metrics |= export_cost(self._verbs, self._job.id, self._spec, held_out or rows, step)
                return self._succeed(checkpoints, step, metrics)
            started = time.monotonic()
            if step == 0 and loop.wants_eval(0):
                self._record(0, loop.evaluate())
            result = loop.run_step(step)
            step, metrics = result.step, result.metrics
            if loop.wants_eval(step):
                metrics = metrics | loop.evaluate()
            is_best = self._record(step, metrics)
            self._restores_without_progress = 0
            wanted = step % self._spec.checkpoint_interval == 0 or (is_best and self._spec.evaluation.publish == "best")
            if wanted and step < self._num_steps:
                checkpoints.save(self._verbs, step, metrics, loop.memory())
                saved_step = step
            self._step_times_s.append(time.monotonic() - started)

    def _rows(self, sha256: str | None, *, training: bool) -> list[PromptRow]:
        form = RowFormat.of(self._spec, training=training)
        return parse_file(self._context.store.get_blob(sha256), form).rows if sha256 else []

    def _stalled(self, step: int) -> bool:
        with session_scope(readonly=True) as session:
            return held_out_scores.stalled(session, self._job.id, self._spec, step) is not None

    def _control(self) -> Control:
        with session_scope(readonly=True) as session:
            job = session.get_one(Job, self._job.id)
            if job.cancel_requested:
                return Control.CANCEL
            if job.pause_requested or job.status == JobStatus.PAUSING:
                return Control.PAUSE
        return Control.GIVE_BACK if self._context.stopping.is_set() else Control.GO_ON

    def _stop(self, control: Control) -> JobStatus | None:
        """Carries out a wish to stop; None when it was taken back meanwhile."""
        if control is Control.CANCEL:
            return self._end(JobStatus.CANCELLED, "Job cancelled.")
        if control is Control.PAUSE:
            return self._pause()
        with fenced(self._held) as (session, job):
            add_event(session, job.id, "The worker is shutting down; another one takes the job on.")
            leases.release(session, self._held)
            status = JobStatus(job.status)
        self._context.send(RUN_JOB, self._job.id)
        return status

    def _pause(self) -> JobStatus | None:
        with fenced(self._held) as (session, job):
            if not job.pause_requested:
                if job.status == JobStatus.PAUSING:
                    transition(session, job, JobStatus.RUNNING, "Pause taken back.")
                return None
            if job.status == JobStatus.RUNNING:
                transition(session, job, JobStatus.PAUSING, "Pausing.")
            transition(session, job, JobStatus.PAUSED, f"Job paused after step {job.step}.")
            job.pause_requested, job.estimated_finish = False, None
            leases.release(session, self._held)
        self._drop()
        return JobStatus.PAUSED

    def _record(self, step: int, metrics: dict[str, float]) -> bool:
        """One step's numbers and progress; a step that is done again replaces what it counted before.

        Returns:
            Whether it has the best held-out score so far; `best_step` is then among its metrics, as at every evaluation.
        """
        remaining = self._num_steps - step
        score, is_best = score_of(metrics), False
        with fenced(self._held) as (session, job):
            earlier = session.get(Metric, (job.id, step))
            counted = earlier.values.get("num_tokens", 0.0) if earlier else 0.0
            job.trained_tokens += int(metrics.get("num_tokens", 0.0) - counted)
            job.step = step
            if self._step_times_s:
                job.estimated_finish = now_s() + remaining * sum(self._step_times_s) / len(self._step_times_s)
            if score is not None and step:
                best = held_out_scores.best_trained(session, job.id, self._spec, step, score)
                assert best is not None, "this step's is one"
                metrics["best_step"], is_best = float(best.best_step), best.best_step == step
            record_metrics(session, job.id, step, metrics)
            if is_best and earlier is None:
                add_event(session, job.id, f"Step {step} is the best so far on held-out rows: {score:.4g}.")
        return is_best

    def _note_restored(self, step: int, base: BaseModelInfo) -> None:
        with fenced(self._held) as (session, job):
            if job.step > step:
                add_event(session, job.id, f"Restored after step {step}; steps {step + 1} to {job.step} are done again.", level="warn")
            elif step:
                add_event(session, job.id, f"Restored after step {step}.")
            else:
                add_event(session, job.id, f"Training {self._num_steps} steps over {base.name} ({base.digest[:12]}) on {base.device}.")
            job.step = step

    def _await_engine(self, error: EspalierError) -> JobStatus | None:
        """Waits until the engine answers; returns a status when the job was stopped meanwhile.

        Raises:
            EngineGone: it stayed away too long, or this happens again and again without a step in between.
        """
        self._restores_without_progress += 1
        if self._restores_without_progress > MAX_RESTORES_WITHOUT_PROGRESS:
            tries = MAX_RESTORES_WITHOUT_PROGRESS
            raise EngineGone(f"The job was restored {tries} times and never got through a step. Last: {error.message}")
        wait_s = self._context.engine_wait_s
        with fenced(self._held) as (session, job):
            message = f"The engine was lost; waiting up to {wait_s:g} s for it, then going on from the last checkpoint."
            add_event(session, job.id, message, level="warn", data={"reason": error.message})
        deadline = time.monotonic() + wait_s
        while True:
            self._context.stopping.wait(self._context.engine_poll_s * self._restores_without_progress)
            self._ensure()
            control = self._control()
            if control is not Control.GO_ON and (status := self._stop(control)) is not None:
                return status
            try:
                self._verbs.info()
            except Unavailable as still:
                if time.monotonic() > deadline:
                    raise EngineGone(f"The engine did not answer for {wait_s:g} s. Start it, then submit the job again.") from still
            else:
                return None

    def _succeed(self, checkpoints: Checkpoints, step: int, metrics: dict[str, float]) -> JobStatus:
        peft = checkpoints.finish(self._verbs)
        with fenced(self._held) as (session, job):
            if job.cancel_requested:
                transition(session, job, JobStatus.CANCELLED, "Job cancelled.")
            else:
                version, of_step = self._publish(session, checkpoints, peft, step, metrics)
                job.adapter_version_id = version.id
                message = f"Job succeeded: adapter version {version.number}, {version.digest[:12]}, of step {of_step}."
                transition(session, job, JobStatus.SUCCEEDED, message)
            delete_states(session, self._context.store, job.id)
            leases.release(session, self._held)
            status = JobStatus(job.status)
        self._drop()
        return status

    def _publish(
        self, session: Session, checkpoints: Checkpoints, peft: PeftAdapter, step: int, metrics: dict[str, float]
    ) -> tuple[AdapterVersion, int]:
        """The adapter that the job ends with, and the step that made it."""
        stalled = held_out_scores.stalled(session, self._job.id, self._spec, step)
        if stalled is not None and step < self._num_steps:
            message = (
                f"Stopped after step {step}: {stalled.num_since} evaluations without a better one than after step {stalled.best_step}."
            )
            add_event(session, self._job.id, message)
        if "distilled_kl" in metrics:
            message = f"The mixture leaves as one adapter, {metrics['distilled_kl']:.3g} nats a token (KL) from what was trained."
            add_event(session, self._job.id, message, level="warn", data={"distilled_kl": metrics["distilled_kl"]})
        if self._spec.evaluation.publish == "best":
            best = held_out_scores.best_trained(session, self._job.id, self._spec, step)
            if best is not None and best.best_step != step:
                checkpoints.record_last(session, peft, step, metrics)
                return checkpoints.promote(session, best.best_step), best.best_step
        return checkpoints.record_final(session, peft, step, metrics), step

    def _end(self, status: JobStatus, message: str, *, error: EspalierError | None = None) -> JobStatus:
        with fenced(self._held) as (session, job):
            transition(session, job, status, message, error=error)
            delete_states(session, self._context.store, job.id)
            leases.release(session, self._held)
        self._drop()
        return status

    def _drop(self) -> None:
        # After the lease is given back: a successor may already have spoken, and then the adapter is its own.
        try:
            self._verbs.drop_adapter(self._job.id)
        except (LeaseLost, Unavailable) as error:
            log.info("adapter of %s stays in the engine: %s", self._job.id, error)


def _engine_lost(error: EspalierError) -> bool:
    return isinstance(error, Unavailable) or error.code == "adapter_not_loaded"
