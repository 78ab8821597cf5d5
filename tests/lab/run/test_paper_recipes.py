"""Paper-scale recipes build their models, train, and say what they cost."""

import pytest
import torch

from curvestep.lab.recipes import get_recipe
from curvestep.lab.run.folder import Run
from curvestep.lab.run.loop import train
from tests.lab.small import small_language, write_text

PARAMETERS = {"ptb-lstm": 4_043_472, "ptb-awd-lstm": 24_221_600, "cifar-resnet20": 269_722}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_paper_scale_takes_two_steps(tmp_path, name):
    stand_in = (
        {"corpus": write_text(tmp_path / "text.txt", lines=200)} if "ptb" in name else {"images": "digits"}
    )
    size = {"batch_size": 4, "eval_size": 100} if "ptb" in name else {"batch_size": 16, "eval_size": 16}
    recipe = get_recipe(name, "paper", steps=2, eval_every=1, log_every=1, probe_data=0, **stand_in, **size)
    result = train(recipe, tmp_path / "run", progress=False)
    assert (result.status, result.step) == ("finished", 2)
    assert len(Run.load(tmp_path / "run").rows("train")) == 2


@pytest.mark.slow
def test_the_probe_on_a_share_of_the_data_measures_that_share(tmp_path):
    recipe = small_language(tmp_path, probe_data=0.5, steps=6, probe_every=2, precision="64-true")
    train(recipe, tmp_path / "run", progress=False)
    from curvestep.lab.tasks import make_task
    from curvestep.smoothness.trace import Trace

    trace = Trace.load(tmp_path / "run" / "trace.jsonl")
    assert trace.column("step").tolist() == [0, 2, 4]
    task = make_task(recipe)
    model, state, total, words = task.build(), None, 0.0, 0
    for batch in task.oracle_batches(0.5):
        loss, state = task.loss(model, batch, state)
        total, words = total + loss * batch[1].numel(), words + batch[1].numel()
    grads = torch.autograd.grad(total / words, list(model.parameters()))
    norm = torch.sqrt(sum(g.square().sum() for g in grads))
    torch.testing.assert_close(torch.tensor(trace.column("grad_norm")[0]), norm)
    assert abs(words / (task.streams.numel() - 4) - 0.5) < 0.02
