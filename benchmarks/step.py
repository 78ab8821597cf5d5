"""The optimizer phase alone: curvestep against clip_grad_norm_ + SGD, or + AdamW.

    python benchmarks/step.py [--optimizer adamw] [--rounds 40] [--threads 1 2] [--warm]
                              [--json PATH [--tree NAME]]
    python benchmarks/step.py --json PATH --page PATH
    python benchmarks/step.py --rules [--rounds 40] [--threads 1]

All variants share parameters and gradients and take turns in one process, in a new order each round, so that
a busy machine slows them alike; each number is a median. One thread is timed in its own CPU time, several
threads by the clock. The gradients are put back before every timed call, outside the clock, because
clip_grad_norm_ rewrites them. After the turns of the others a variant's state has left the cache, as after a
forward and backward pass of a large model; ``--warm`` calls it once before each timed call, as in a loop in
which nothing else runs.

``--json`` adds a call to those that the file holds. To time another tree, put its ``src`` first on
``PYTHONPATH`` and give it a name. ``--page`` times nothing: it shows the range over the calls of the file.
``--rules`` times each rule of ``clip_rules`` and gives its cost in steps with a constant threshold.
"""

import argparse
import json
import random
import statistics
import time
from functools import partial
from pathlib import Path

import torch

from curvestep import ClippedSGD, NormalizedSGD
from curvestep.tensors.kernel import native

LR, MAX_NORM = 1e-4, 0.25


def awd_lstm_shapes():
    layers = [(400, 1150), (1150, 1150), (1150, 400)]
    lstm = [s for i, h in layers for s in [(4 * h, i), (4 * h, h), (4 * h,), (4 * h,)]]
    return [(10_000, 400), *lstm, (10_000,)]


def resnet20_shapes():
    shapes = [(16, 3, 3, 3), (16,), (16,)]
    width = 16
    for out in (16, 32, 64):
        for block in range(3):
            shapes += [(out, width, 3, 3), (out,), (out,), (out, out, 3, 3), (out,), (out,)]
            if block == 0 and out != 16:
                shapes += [(out, width, 1, 1), (out,), (out,)]
            width = out
    return [*shapes, (10, 64), (10,)]


SHAPES = {
    "AWD-LSTM, 24.2 M in 14": awd_lstm_shapes(),
    "10 M in 100": [(1000, 100)] * 100,
    "ResNet20, 0.27 M in 65": resnet20_shapes(),
}

# Bytes read and bytes written for each parameter, fp32: norm, scaling of the gradient, update.
BYTES = {
    "clip_grad_norm_ + SGD": {False: (4 + 4 + 8, 4 + 4), True: (4 + 4 + 20, 4 + 12)},
    "clip_grad_norm_ + SGD(foreach)": {False: (4 + 4 + 8, 4 + 4), True: (4 + 4 + 20, 4 + 12)},
    "clip_grad_norm_ + SGD(fused)": {False: (4 + 4 + 8, 4 + 4), True: (4 + 4 + 12, 4 + 8)},
    "ClippedSGD": {False: (4 + 8, 4), True: (4 + 12, 8)},
    "ClippedSGD(foreach)": {False: (4 + 8, 4), True: (4 + 20, 12)},
    "NormalizedSGD": {False: (4 + 8, 4), True: (4 + 12, 8)},
}
# Decay, both moments, root, corrections and step are passes of their own where they are not fused.
ADAMW_BYTES = {
    "clip_grad_norm_ + AdamW": (4 + 4 + 48, 4 + 32),
    "clip_grad_norm_ + AdamW(foreach)": (4 + 4 + 48, 4 + 32),
    "clip_grad_norm_ + AdamW(fused)": (4 + 4 + 16, 4 + 12),
    "ClippedAdamW": (4 + 16, 12),
    "ClippedAdamW(foreach)": (4 + 4 + 48, 4 + 32),
    "ClippedAdamW(fused)": (4 + 4 + 16, 4 + 12),
}


def torch_step(params, optimizer=torch.optim.SGD, **options):
    opt = optimizer(params, lr=LR, **options)

    def step():
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        opt.step()

    return step


def variants(params, momentum):
    m = {"momentum": 0.9} if momentum else {}
    return {
        "clip_grad_norm_ + SGD": torch_step(params, **m),
        "clip_grad_norm_ + SGD(foreach)": torch_step(params, foreach=True, **m),
        "clip_grad_norm_ + SGD(fused)": torch_step(params, fused=True, **m),
        "ClippedSGD": ClippedSGD(params, lr=LR, max_norm=MAX_NORM, **m).step,
        "ClippedSGD(foreach)": ClippedSGD(params, lr=LR, max_norm=MAX_NORM, foreach=True, **m).step,
        "NormalizedSGD": NormalizedSGD(params, lr=LR * MAX_NORM, offset=MAX_NORM, **m).step,
    }


def adamw_variants(params):
    from curvestep import ClippedAdamW  # an older tree has none

    torch_adamw, options = torch.optim.AdamW, {"lr": LR, "max_norm": MAX_NORM}
    return {
        "clip_grad_norm_ + AdamW": torch_step(params, torch_adamw),
        "clip_grad_norm_ + AdamW(foreach)": torch_step(params, torch_adamw, foreach=True),
        "clip_grad_norm_ + AdamW(fused)": torch_step(params, torch_adamw, fused=True),
        "ClippedAdamW": ClippedAdamW(params, **options).step,
        "ClippedAdamW(foreach)": ClippedAdamW(params, foreach=True, **options).step,
        "ClippedAdamW(fused)": ClippedAdamW(params, fused=True, **options).step,
    }


def rule_variants(params, optimizer, **options):
    from curvestep import clip_rules  # an older tree has none

    rules = [
        clip_rules.percentile(10),
        clip_rules.zscore(2.5),
        clip_rules.ema(),
        clip_rules.weight_ratio(0.01),
    ]
    named = {"constant": MAX_NORM, **{rule.name: rule for rule in rules}}
    return {name: optimizer(params, lr=LR, max_norm=rule, **options).step for name, rule in named.items()}


def rules_table(rounds, threads, warm):
    """The cost of a step by each rule, that with a constant threshold being 1."""
    from curvestep import ClippedAdamW

    clock = time.thread_time if threads == 1 else time.perf_counter
    kinds = {
        "plain": partial(rule_variants, optimizer=ClippedSGD),
        "momentum": partial(rule_variants, optimizer=ClippedSGD, momentum=0.9),
        "AdamW": partial(rule_variants, optimizer=ClippedAdamW),
    }
    for shape, shapes in SHAPES.items():
        small = sum(torch.Size(s).numel() for s in shapes) < 1e6
        for kind, variants_of in kinds.items():
            medians = measure(shapes, variants_of, 5 * rounds if small else rounds, clock, warm)
            costs = {name: medians[name] / medians["constant"] for name in medians if name != "add_"}
            listed = ", ".join(f"{name} {cost:.2f}" for name, cost in costs.items())
            print(f"{shape} tensors, {kind}, {threads} threads: {listed}", flush=True)


def measure(shapes, variants_of, rounds, clock, warm=False):
    params = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    gradients = [torch.randn(s) for s in shapes]
    for p in params:
        p.grad = torch.empty_like(p)
    steps = variants_of(params)
    flat = [torch.zeros(sum(g.numel() for g in gradients)) for _ in range(2)]
    steps["add_"] = lambda: flat[0].add_(flat[1], alpha=1e-3)
    times = {name: [] for name in steps}
    shuffle = random.Random(0)
    for k in range(-2, rounds):  # two rounds to warm up
        for name in shuffle.sample(list(steps), len(steps)):
            for _ in range(1 + warm):
                for p, g in zip(params, gradients, strict=True):
                    p.grad.copy_(g)
                start = clock()
                steps[name]()
                elapsed = clock() - start
            if k >= 0:
                times[name].append(elapsed)
    return {name: statistics.median(t) for name, t in times.items()}


def table(title, medians, bytes_of, num_params):
    base = medians[next(iter(bytes_of))]
    fastest = min(seconds for name, seconds in medians.items() if name.startswith("clip_grad_norm_"))
    add = 12 * num_params / medians["add_"]
    rows = []
    print(f"\n{title}")
    print(
        f"{'':34}{'ms':>9}{'speed-up':>10}{'fastest':>9}{'B read':>8}{'written':>9}{'GB/s':>7}{'of add_':>9}"
    )
    for name, seconds in medians.items():
        if name == "add_":
            continue
        read, written = bytes_of[name]
        bandwidth = (read + written) * num_params / seconds
        rows.append(
            {
                "variant": name,
                "milliseconds": 1e3 * seconds,
                "speed_up": base / seconds,
                "speed_up_on_fastest_of_torch": fastest / seconds,
                "bytes_per_parameter": read + written,
                "bytes_read_per_parameter": read,
                "bytes_written_per_parameter": written,
                "gigabytes_per_second": bandwidth / 1e9,
                "fraction_of_add_": bandwidth / add,
            }
        )
        print(
            f"{name:34}{1e3 * seconds:9.3f}{base / seconds:9.2f}x{fastest / seconds:8.2f}x"
            f"{read:8d}{written:9d}{bandwidth / 1e9:7.1f}{bandwidth / add:9.0%}"
        )
    return rows


PAGE = """# Speed of the optimizer phase

How many times faster than `clip_grad_norm_` and torch's optimizer with its default each variant is:
`ClippedSGD` and `ClippedAdamW` are faster than all of torch's. The optimizer phase alone, fp32,
torch {torch}, two shared cores, medians; a range is that of several calls.
Numbers: `{json}`, to which each call adds:

```
python benchmarks/step.py --rounds 24 --json docs/results/{json}
python benchmarks/step.py --rounds 24 --json docs/results/{json} --optimizer adamw [--warm]
python benchmarks/step.py --json docs/results/{json} --page docs/results/step.md
```

*Warm* calls a variant once before each timed call, as in a loop in which nothing else runs.
{tables}
AWD-LSTM: 24.2 million parameters in 14 tensors; 10 M: in 100 tensors; ResNet20: 0.27 million in 65 tensors.
Bytes moved for each parameter: [compare](../compare.md#speed-of-the-optimizer-phase). On small models most of
the time is spent in Python, on both sides.
"""


def limits(numbers):
    """The least and the largest of a few numbers, or the one that there is."""
    low, high = f"{min(numbers):.2f}", f"{max(numbers):.2f}"
    return low if low == high else f"{low}-{high}"


def speed_tables(calls):
    """The speed-ups of several calls as their range, a table for each number of threads."""
    tables = []
    for threads in dict.fromkeys(case["threads"] for case in calls[0]):
        cases = [same for same in zip(*calls, strict=True) if same[0]["threads"] == threads]
        kinds = {True: ", momentum", False: ", plain", None: ""}
        heads = [f"{c['shape'].split(',')[0]}{kinds[c.get('momentum')]}" for c, *_ in cases]
        rows = [["variant", *heads], ["---"] * (len(heads) + 1)]
        for i, variant in list(enumerate(cases[0][0]["variants"]))[1:]:  # the first is 1 by definition
            speeds = [[case["variants"][i]["speed_up"] for case in same] for same in cases]
            rows.append([f"`{variant['variant']}`", *map(limits, speeds)])
        lines = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        tables.append(f"\n{threads} thread{'s' if threads > 1 else ''}:\n\n{lines}\n")
    return "".join(tables)


def page(path):
    """The results as the page docs/results/step.md."""
    found = json.loads(path.read_text())
    tables = [
        f"\n## {name}, {len(calls)} call{'s' if len(calls) > 1 else ''}\n{speed_tables(calls)}"
        for name, calls in found["calls"].items()
    ]
    return PAGE.format(torch=found["torch"], json=path.name, tables="".join(tables))


def add_call(path, name, results):
    """Add the results of a call to those of the same name in a file."""
    found = json.loads(path.read_text()) if path.exists() else {"calls": {}}
    found["torch"] = torch.__version__
    found["calls"].setdefault(name, []).append(results)
    path.write_text(json.dumps(found))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd", help="which (default sgd)")
    parser.add_argument("--rounds", type=int, default=40, help="timed calls of each variant (default 40)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default 1 2)")
    parser.add_argument("--warm", action="store_true", help="one call of a variant before each timed one")
    parser.add_argument("--rules", action="store_true", help="time the rules of clip_rules instead")
    parser.add_argument("--tree", default="", help="name of the tree, if it is not today's")
    parser.add_argument("--json", type=Path, help="add the numbers to this file")
    parser.add_argument("--page", type=Path, help="time nothing: write what --json holds as a page")
    options = parser.parse_args()
    if options.page:
        options.page.write_text(page(options.json), encoding="utf-8")
        return
    if native() is None:
        print("curvestep's kernel was not built: these are times without it")
    torch.manual_seed(0)
    if options.rules:
        for threads in options.threads:
            torch.set_num_threads(threads)
            rules_table(options.rounds, threads, options.warm)
        return
    results = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        clock = time.thread_time if threads == 1 else time.perf_counter
        for name, shapes in SHAPES.items():
            num_params = sum(torch.Size(s).numel() for s in shapes)
            rounds = options.rounds if num_params > 1e6 else 5 * options.rounds
            ending = f"{threads} thread{'s' if threads > 1 else ''}"
            if options.optimizer == "adamw":
                medians = measure(shapes, adamw_variants, rounds, clock, options.warm)
                rows = table(f"{name} tensors, AdamW, {ending}", medians, ADAMW_BYTES, num_params)
                results.append({"shape": name, "threads": threads, "variants": rows})
                continue
            for momentum in (False, True):
                kind = "momentum 0.9" if momentum else "plain"
                bytes_of = {variant: moved[momentum] for variant, moved in BYTES.items()}
                of = partial(variants, momentum=momentum)
                medians = measure(shapes, of, rounds, clock, options.warm)
                rows = table(f"{name} tensors, {kind}, {ending}", medians, bytes_of, num_params)
                results.append({"shape": name, "momentum": momentum, "threads": threads, "variants": rows})
    if options.json:
        name = {"sgd": "SGD", "adamw": "AdamW"}[options.optimizer]
        name += ", warm" * options.warm + f", {options.tree}" * bool(options.tree)
        add_call(options.json, name, results)


if __name__ == "__main__":
    main()
