"""Whether it learns the same, as curves over seeds and a stated test.

`python -m benchmarks.learning_parity [trl | full | stack | flow] [--json] [--quick] [--seeds N] [--steps N]`

trl (the default): our GRPO and TRL's on the demo's task, the same prompts at each step, half of the demo's batch; both in float32.
full: LoRA r=128 against full-parameter training. stack: GRPO on an SFT adapter, or on a new LoRA over it. flow: FlowRL against GRPO on a
known target of many peaks. Each writes a plot, PNG and SVG, into docs/images.

The test (trl, full): for the area under the reward curve (mean over all steps) and for the final reward (mean of the last two steps), one
value a seed: `same` is 1 if for both a two-sided t test at 5% detects no difference and the difference is within 0.1 of reward. Beside it
stand the 90% interval, whether that lies within the margin (equivalence shown: the stricter claim, for which three seeds are few), and the
exact permutation p.
"""

from contextlib import ExitStack

from benchmarks.curves import Curves, compare, same, summary
from benchmarks.engine_process import engine_process
from benchmarks.job import Job, StepFigures
from benchmarks.machine import Machine, this_machine
from benchmarks.options import base_models, parser
from benchmarks.parity_flow import run_flow
from benchmarks.parity_full import run_full
from benchmarks.parity_stack import run_stack
from benchmarks.peer_process import PeerSettings, peer_process, require_peer
from benchmarks.plots import plot_curves, require_plots
from benchmarks.report import print_json, print_table, say
from benchmarks.workload import demo_workload

NUM_SEEDS = 3
TRL_STEPS = 7
TRL_PROMPTS = 4
"""Half of the demo's batch: its full TRL step takes 40 to 100 s on 2 cores."""
OUR_STEPS = 9


def main() -> None:
    """Runs one of the four."""
    options = parser(__doc__)
    options.add_argument("what", nargs="?", choices=("trl", "full", "stack", "flow"), default="trl")
    options.add_argument("--seeds", type=int, help=f"seeds a side; default {NUM_SEEDS}")
    options.add_argument("--steps", type=int, help=f"optimizer steps; default {TRL_STEPS} for trl, {OUR_STEPS} for full and stack")
    chosen = options.parse_args()
    seeds = chosen.seeds or (2 if chosen.quick else NUM_SEEDS)
    steps = chosen.steps or (1 if chosen.quick else OUR_STEPS)
    match chosen.what:
        case "full":
            run_full(quick=chosen.quick, as_json=chosen.json, num_seeds=seeds, num_steps=steps)
        case "stack":
            run_stack(quick=chosen.quick, as_json=chosen.json, num_seeds=seeds, num_steps=steps)
        case "flow":
            run_flow(quick=chosen.quick, as_json=chosen.json, num_seeds=seeds)
        case _:
            run_trl(quick=chosen.quick, as_json=chosen.json, num_seeds=seeds, num_steps=min(steps, chosen.steps or TRL_STEPS))


def run_trl(*, quick: bool, as_json: bool, num_seeds: int, num_steps: int) -> None:
    """Trains both sides with every seed, in turns; prints, and plots (not in --quick)."""
    require_peer()
    if not quick:
        require_plots()
    machine = this_machine()
    ours: list[list[StepFigures]] = []
    theirs: list[list[StepFigures]] = []
    with base_models(quick=quick) as (base, _), engine_process(base, threads=machine.cores, dtype="float32") as engine:
        for seed in range(num_seeds):
            workload = demo_workload(seed=seed, num_steps=num_steps, num_prompts=TRL_PROMPTS)
            with engine.client() as client:
                job = Job(client, workload, f"seed-{seed}")
                ours.append([job.run_step() for _ in range(num_steps)])
                job.close()
            with ExitStack() as stack:
                stack.enter_context(engine.paused())
                peer = stack.enter_context(peer_process(machine.cores))
                peer.begin(base, workload, PeerSettings("float32", micro_batch=16, threads=machine.cores, seed=seed))
                theirs.append([peer.run_step() for _ in range(num_steps)])
            for side, run in (("ours", ours[-1]), ("TRL", theirs[-1])):
                say(f"{side}, seed {seed}: {' '.join(f'{step.reward_mean:.2f}' for step in run)}")
    for mine, other in zip(ours, theirs, strict=True):
        if [step.prompts_digest for step in mine] != [step.prompts_digest for step in other]:
            raise RuntimeError("the two sides trained on different prompts")
    _report(Curves("ours", _rewards(ours)), Curves("TRL", _rewards(theirs)), machine, quick=quick, as_json=as_json)


def _rewards(runs: list[list[StepFigures]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(step.reward_mean for step in run) for run in runs)


def _report(ours: Curves, trl: Curves, machine: Machine, *, quick: bool, as_json: bool) -> None:
    rows = [(side.name, seed, *curve) for side in (ours, trl) for seed, curve in enumerate(side.rewards)]
    steps = [f"step {number}" for number in range(1, len(ours.mean) + 1)]
    print_table("Mean reward of each step's completions, the demo's task", ("side", "seed", *steps), rows)
    comparisons = compare(ours, trl)
    print(summary(comparisons, ("ours", "TRL")))
    if not quick:
        plot_curves([ours, trl], "ours_vs_trl", "GRPO of ours and of TRL, the demo's task")
    if as_json:
        curves = {side.name: side.rewards for side in (ours, trl)}
        tests = {what: comparison.as_json() for what, comparison in comparisons.items()}
        print_json({"same": int(same(comparisons)), "tests": tests, "curves": curves, "machine": machine.as_json()})


if __name__ == "__main__":
    main()
