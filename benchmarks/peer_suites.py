"""Tests of torch, Lightning and transformers with optimizers and clipping of ours in place of torch's.

    python benchmarks/peer_suites.py --sources DIR [--suites torch …] [--put-in torch clipped …] [--words]

DIR has public sources, none of which is a part of this repository:

- torch/test: `test_optim.py`, `optim/` and `test_nn.py` of pytorch, at the installed version or close to it;
- lightning/tests: `tests_pytorch` of pytorch-lightning;
- transformers/tests: `trainer` of transformers, with its `conftest.py` beside `tests`;
- lib: `pip install --target DIR/lib expecttest parameterized`.

Each suite runs first with nothing replaced, then with `torch.optim.SGD` and `AdamW` as ours that never clip
("clipped"), as torch's own under `cs.clip` with an infinite threshold ("clip"), and with
`cs.clip_grad_norm_` in place of torch's ("norm"). Printed are tests that passed, failed, and those that fail
only with ours. The exit code is the number of these, at most 100.

pytest loads this file as a plugin, which puts ours in before a test is collected.
"""

import argparse
import math
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PUT_IN = ("torch", "clipped", "clip", "norm")
VARIABLE = "CURVESTEP_PUT_IN"
SUITES = {
    "torch": ("torch/test", ["test_optim.py", "-k", "TestOptimRenewed and (SGD or AdamW) and cpu"]),
    "torch clipping": ("torch/test", ["test_nn.py", "-k", "clip_grad"]),
    "lightning": (
        "lightning/tests",
        [
            *("tests_pytorch/trainer/optimization", "tests_pytorch/core/test_lightning_optimizer.py"),
            *("tests_pytorch/plugins/precision/test_amp.py", "tests_pytorch/plugins/test_amp_plugins.py"),
            *("tests_pytorch/trainer/test_trainer.py", "-k", "optim or clip or lr"),
        ],
    ),
    "transformers": (
        "transformers",
        [
            *("tests/trainer/test_trainer.py", "tests/trainer/test_trainer_optimizers.py"),
            *("-k", "clip or grad_norm or optim or adamw or lr"),
        ],
    ),
}


def pytest_configure(config):
    """Put ours in place of torch's, in the process that runs the tests."""
    import torch

    import curvestep as cs

    kind = os.environ.get(VARIABLE, "torch")
    if kind == "norm":
        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_
    if kind not in ("clipped", "clip"):
        return
    for name, clipped in (("SGD", cs.ClippedSGD), ("AdamW", cs.ClippedAdamW)):
        theirs = getattr(torch.optim, name)
        ours = put_in(theirs) if kind == "clip" else in_place_of(theirs, clipped)
        setattr(torch.optim, name, ours)
        from torch.testing._internal.common_optimizers import optim_db

        for info in optim_db:
            if info.optim_cls is theirs:
                info.optim_cls = ours


def clip_grad_norm_(parameters, *args, **options):
    """Ours, with the norm in the dtype of the gradients: ours is float64."""
    import torch

    import curvestep as cs

    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = cs.clip_grad_norm_(parameters, *args, **options)
    dtypes = [p.grad.dtype for p in parameters if p.grad is not None]
    return norm.to(dtypes[0]) if dtypes else norm.float()


def in_place_of(theirs, clipped):
    """Our class under the name and with the signature of torch's; nothing is ever clipped.

    It has no `differentiable`: where a test asks for it, the rest of the test is asked.
    """

    def __init__(self, params, lr=1e-3, momentum=None, dampening=None, *, differentiable=False, **options):
        del differentiable
        named = {"momentum": momentum, "dampening": dampening}
        given = {name: value for name, value in named.items() if value is not None}
        clipped.__init__(self, params, lr, math.inf, nonfinite="propagate", **given, **options)

    return type(theirs.__name__, (clipped,), {"__init__": __init__, "__module__": theirs.__module__})


def put_in(theirs):
    """Torch's class, clipped by a hook that was added to it; nothing is ever clipped."""
    import curvestep as cs

    def __init__(self, *args, **kwargs):
        theirs.__init__(self, *args, **kwargs)
        cs.clip(self, math.inf, nonfinite="propagate")

    return type(theirs.__name__, (theirs,), {"__init__": __init__, "__module__": theirs.__module__})


def run(sources, suite, kind):
    """The names of the tests that passed, and of those that failed with their last words."""
    folder, words = SUITES[suite]
    place = sources / folder
    path = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(sources / "lib"), str(place)]
    env = {**os.environ, VARIABLE: kind, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "peer_suites", "-p", "no:cacheprovider", "-q", "-rpfE"]
    command += ["--tb=line", "-W", "ignore", "-o", "addopts=", *words]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
    passed = set(re.findall(r"^PASSED (\S+)", done.stdout, re.MULTILINE))
    failed = dict(re.findall(r"^(?:FAILED|ERROR) (\S+)(.*)", done.stdout, re.MULTILINE))
    if not passed and not failed:
        print(done.stdout[-1500:], done.stderr[-1500:])
    return passed, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--put-in", nargs="+", choices=PUT_IN, default=list(PUT_IN))
    parser.add_argument("--words", action="store_true", help="also print what fails with ours alone, and why")
    args = parser.parse_args()
    num_different = 0
    print("| suite | put in | passed | failed | with ours alone |\n| --- | --- | --: | --: | --: |")
    for suite in args.suites:
        control, _ = run(args.sources.resolve(), suite, "torch")
        for kind in args.put_in:
            passed, failed = run(args.sources.resolve(), suite, kind)
            different = sorted(control - passed)
            num_different += len(different)
            print(f"| {suite} | {kind} | {len(passed)} | {len(failed)} | {len(different)} |", flush=True)
            for name in different if args.words else []:
                print(f"    {name}{failed.get(name, ' not run')[:160]}")
    return min(num_different, 100)


if __name__ == "__main__":
    sys.exit(main())
