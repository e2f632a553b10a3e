"""Several tenants' jobs on one engine at once, against the same jobs one after the other: total throughput.

`python -m benchmarks.tenants [--json] [--quick] [--only small large slow_grader peer adapters] [--repeats N]`

Every job is the real loop over HTTP with an adapter of its own, in a thread of its own. A grader that takes 5 s a batch is played by a
client that holds completions back so long before the loop gets to grade them: the engine is free meanwhile, as with a real one.

JSON: speedup_small_4, speedup_large_4, speedup_slow_grader_4 (seconds in turn over seconds at once), speedup_4_trl_processes (seconds of
four TRL processes side by side over ours at once), and what one more tenant costs, 1 to 16 adapters. --quick leaves TRL out unless named.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.engine_process import EngineProcess, engine_process
from benchmarks.job import Job, token_counter
from benchmarks.machine import Machine, this_machine
from benchmarks.measure import Spread, alternate, ratio
from benchmarks.options import base_models, parser
from benchmarks.peer_process import PeerProcess, PeerSettings, peer_process, require_peer
from benchmarks.report import print_json, print_table, say, until_stopped
from benchmarks.workload import Workload, fixed_workload
from engine.client import EngineClient
from engine.types import Completion, SampleRequest

NUM_JOBS = 4
ADAPTER_COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Kind:
    """Jobs of one size."""

    key: str
    num_prompts: int
    group_size: int
    num_steps: int
    """Of each job in one measurement."""
    grader_s: float = 0.0
    prompt_tokens: int = 57
    completion_tokens: int = 64
    repeats: int = 3
    warm_up: int = 1
    """Rounds that do not count; none for large jobs, whose length makes a first step's extra work small."""

    @property
    def title(self) -> str:
        """For people."""
        slow = f", grader of {self.grader_s:g} s" if self.grader_s else ""
        return f"{self.num_prompts} x {self.group_size} x {self.completion_tokens}{slow}"


@dataclass(frozen=True)
class Outcome:
    """Seconds of the same jobs at once and in turn."""

    kind: Kind
    at_once: Spread
    in_turn: Spread

    def as_json(self) -> dict[str, object]:
        """All figures."""
        return {"speedup": ratio(self.in_turn, self.at_once), "at_once_s": self.at_once.as_json(), "in_turn_s": self.in_turn.as_json()}


@dataclass(frozen=True)
class Crowd:
    """So many small jobs at once."""

    num_adapters: int
    step_s: Spread
    """Seconds until each has done a step."""
    peak_bytes: int


class SlowGraderClient(EngineClient):
    """A client whose completions come `grader_s` seconds late, as if they had been graded so long."""

    def __init__(self, url: str, grader_s: float) -> None:
        super().__init__(url)
        self._grader_s = grader_s

    def sample(self, adapter_id: str | None, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        """See Verbs."""
        completions = super().sample(adapter_id, requests)
        time.sleep(self._grader_s)
        return completions


def kinds(*, quick: bool) -> list[Kind]:
    """Small, large and slowly graded jobs."""
    if quick:
        tiny = {"num_prompts": 1, "group_size": 2, "num_steps": 1, "prompt_tokens": 180, "completion_tokens": 6, "repeats": 1}
        return [Kind("small", **tiny), Kind("slow_grader", grader_s=0.3, **tiny)]
    return [
        Kind("small", 2, 4, num_steps=1),
        Kind("large", 8, 8, num_steps=1, repeats=2, warm_up=0),
        Kind("slow_grader", 2, 4, num_steps=1, grader_s=5.0),
    ]


def main() -> None:
    """Runs what was asked for."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", metavar="KEY", help="small large slow_grader peer adapters")
    options.add_argument("--repeats", type=int, help="measurements of each; default 3, 2 of the large jobs")
    chosen = options.parse_args()

    def wanted(key: str) -> bool:
        return key in chosen.only if chosen.only else not (chosen.quick and key == "peer")

    if wanted("peer"):
        require_peer()
    machine = this_machine()
    small = kinds(quick=chosen.quick)[0]
    counts = (1, 2) if chosen.quick else ADAPTER_COUNTS
    outcomes: list[Outcome] = []
    peers: tuple[Spread, Spread] | None = None
    crowds: list[Crowd] = []
    with base_models(quick=chosen.quick) as (base, endless_base), until_stopped():
        for kind in kinds(quick=chosen.quick):
            if wanted(kind.key):
                outcomes.append(against_in_turn(replace(kind, repeats=chosen.repeats or kind.repeats), endless_base, machine))
                say(f"{kind.key}: at once {outcomes[-1].at_once} s, in turn {outcomes[-1].in_turn} s")
        if wanted("peer"):
            peers = against_peers(replace(small, repeats=chosen.repeats or small.repeats), base, endless_base, machine)
            say(f"peer: ours {peers[0]} s, {NUM_JOBS} TRL processes {peers[1]} s")
        for count in counts if wanted("adapters") else ():
            crowds.append(crowd_cost(replace(small, repeats=1), count, endless_base, machine))
            say(f"{count} adapters: {crowds[-1].step_s} s, peak {crowds[-1].peak_bytes / 2**20:.0f} MiB")
    _print(outcomes, peers, crowds, machine)
    if chosen.json:
        values: dict[str, object] = {f"speedup_{o.kind.key}_{NUM_JOBS}": ratio(o.in_turn, o.at_once) for o in outcomes}
        values |= {"scenarios": {o.kind.key: o.as_json() for o in outcomes}, "machine": machine.as_json()}
        if peers:
            values |= {f"speedup_{NUM_JOBS}_trl_processes": ratio(peers[1], peers[0]), "four_trl_s": peers[1].as_json()}
        values["adapters"] = [{"num": c.num_adapters, "step_s": c.step_s.as_json(), "peak_bytes": c.peak_bytes} for c in crowds]
        print_json(values)


def against_in_turn(kind: Kind, base: Path, machine: Machine) -> Outcome:
    """Four jobs at once and the same four one after the other, by turns on one engine."""
    with ExitStack() as stack:
        engine = stack.enter_context(engine_process(base, threads=machine.cores))
        jobs = _jobs(stack, engine, kind, NUM_JOBS)
        runs = [partial(_at_once, jobs, kind), partial(_in_turn, jobs, kind)]
        at_once, in_turn = alternate(runs, repeats=kind.repeats, warm_up=kind.warm_up)
    return Outcome(kind, at_once, in_turn)


def against_peers(kind: Kind, base: Path, endless_base: Path, machine: Machine) -> tuple[Spread, Spread]:
    """Four of our jobs at once, and four TRL processes side by side, each with its share of the cores: seconds of both."""
    with ExitStack() as stack:
        engine = stack.enter_context(engine_process(endless_base, threads=machine.cores, dtype="float32"))
        jobs = _jobs(stack, engine, kind, NUM_JOBS)
        workload = _workload(kind, engine, seed=0)
        threads = max(1, machine.cores // NUM_JOBS)
        peers = [stack.enter_context(peer_process(threads)) for _ in range(NUM_JOBS)]
        for peer in peers:
            peer.begin(base, workload, PeerSettings("float32", kind.num_prompts * kind.group_size, threads))
        ours, theirs = alternate([partial(_at_once, jobs, kind), partial(_side_by_side, peers)], repeats=kind.repeats)
    return ours, theirs


def crowd_cost(kind: Kind, count: int, base: Path, machine: Machine) -> Crowd:
    """A step of so many small jobs at once, on an engine of its own."""
    with ExitStack() as stack:
        engine = stack.enter_context(engine_process(base, threads=machine.cores))
        jobs = _jobs(stack, engine, kind, count)
        (step_s,) = alternate([partial(_at_once, jobs, kind)], repeats=kind.repeats)
        return Crowd(count, step_s, engine.peak_bytes)


def _jobs(stack: ExitStack, engine: EngineProcess, kind: Kind, count: int) -> list[Job]:
    return [
        Job(stack.enter_context(SlowGraderClient(engine.url, kind.grader_s)), _workload(kind, engine, seed=number), f"tenant-{number}")
        for number in range(count)
    ]


def _workload(kind: Kind, engine: EngineProcess, *, seed: int) -> Workload:
    # Rounds: the warm-up and the repeats, each at once and in turn.
    num_steps = 2 * (1 + kind.repeats) * kind.num_steps
    with engine.client() as client:
        workload = fixed_workload(
            num_prompts=kind.num_prompts, group_size=kind.group_size, prompt_tokens=kind.prompt_tokens,
            completion_tokens=kind.completion_tokens, num_steps=num_steps, count_tokens=token_counter(client),
        )  # fmt: skip
    return replace(workload, spec=workload.spec.model_copy(update={"seed": seed}))


def _steps(job: Job, num_steps: int) -> None:
    for _ in range(num_steps):
        job.run_step()


def _at_once(jobs: Sequence[Job], kind: Kind) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(_steps, job, kind.num_steps) for job in jobs]:
            done.result()
    return time.perf_counter() - started


def _in_turn(jobs: Sequence[Job], kind: Kind) -> float:
    started = time.perf_counter()
    for job in jobs:
        _steps(job, kind.num_steps)
    return time.perf_counter() - started


def _side_by_side(peers: Sequence[PeerProcess]) -> float:
    started = time.perf_counter()
    for peer in peers:
        peer.start_step()
    for peer in peers:
        peer.end_step()
    return time.perf_counter() - started


def _print(outcomes: Sequence[Outcome], peers: tuple[Spread, Spread] | None, crowds: Sequence[Crowd], machine: Machine) -> None:
    rows = [(f"{o.kind.title}, {o.kind.num_steps} steps", str(o.at_once), str(o.in_turn), ratio(o.in_turn, o.at_once)) for o in outcomes]
    title = f"{NUM_JOBS} jobs on one engine, seconds: median (least to greatest), {machine.cores} threads, {machine.cpu}"
    if rows:
        print_table(title, ("each job", "at once", "in turn", "in turn / at once"), rows)
    if peers:
        heading = f"{NUM_JOBS} small jobs, a step each, float32: one engine against {NUM_JOBS} TRL processes on the same cores"
        print_table(heading, ("", "seconds"), [("ours", str(peers[0])), ("TRL", str(peers[1])), ("TRL/ours", ratio(peers[1], peers[0]))])
    if crowds:
        lines = [(c.num_adapters, str(c.step_s), c.step_s.median / c.num_adapters, c.peak_bytes / 2**20,
                  (c.peak_bytes - crowds[0].peak_bytes) / 2**20 / max(1, c.num_adapters - 1)) for c in crowds]  # fmt: skip
        print_table(
            "What one more tenant costs (small jobs at once, a step each)",
            ("adapters", "seconds until all did a step", "seconds a tenant", "peak MiB", "MiB a further adapter"), lines,
        )  # fmt: skip


if __name__ == "__main__":
    main()
