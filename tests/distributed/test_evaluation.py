"""Evaluation across ranks, with the functions of the tutorial `ucmerced`.

What all ranks count together is what one process counts.
"""

import ast
import sys
from pathlib import Path

import cloudpickle
import jupytext
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import default_collate

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TUTORIAL = Path(__file__).parents[2] / "tutorials" / "ucmerced.py"
SIZE, CLASSES = 40, 5


@pytest.fixture(scope="module")
def tutorial():
    """The functions of the tutorial by which it evaluates."""
    import torchvision

    names = {
        "torch": torch,
        "torchvision": torchvision,
        "dist": dist,
        "ddp": ddp,
        "np": np,
        "default_collate": default_collate,
    }
    wanted = {"normalized", "share_buffers", "evaluate", "make_network", "judge"}
    for cell in jupytext.read(TUTORIAL).cells:
        if cell.cell_type == "code":
            functions = [
                node
                for node in ast.parse(cell.source).body
                if isinstance(node, ast.FunctionDef) and node.name in wanted
            ]
            exec(compile(ast.Module(functions, []), TUTORIAL, "exec"), names)
    return names


class Noise(torch.utils.data.Dataset):
    """Pictures of noise, each with a class: what an ImageFolder offers, without files."""

    classes = [f"class {number}" for number in range(CLASSES)]
    targets = [(7 * row + 3) % CLASSES for row in range(60)]

    def __len__(self):
        return len(self.targets)

    def __getitems__(self, rows):
        return [(self._picture(int(row)), self.targets[row]) for row in rows]

    def _picture(self, row):
        chance = torch.Generator().manual_seed(row)
        return torch.randint(0, 256, (3, SIZE, SIZE), dtype=torch.uint8, generator=chance)


@pytest.fixture(scope="module")
def weights(tutorial):
    torch.manual_seed(1)
    model = tutorial["make_network"]("resnet18", CLASSES)
    model(torch.randn(8, 3, SIZE, SIZE))  # running statistics that are not those of the beginning
    return model.state_dict()


@pytest.fixture(scope="module")
def alone(tutorial, weights):
    """The confusion matrix of the first `count` pictures, by this process, which is no rank."""

    def matrix(count):
        model = tutorial["make_network"]("resnet18", CLASSES)
        model.load_state_dict(weights)
        return tutorial["evaluate"](model, Noise(), np.arange(count))[0]

    return matrix


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_confusion_matrix_of_all_ranks_is_that_of_one_process_entry_for_entry(
    client, tutorial, weights, alone, ranks
):
    def judge_each(counts, judge, **arguments):
        return [judge(rows=np.arange(count), **arguments) for count in counts]

    counts = (60, 37, 13, 3, 1)  # 3 and 1: some ranks get nothing
    results = ddp.launch(
        client,
        judge_each,
        counts=counts,
        judge=tutorial["judge"],
        images=Noise(),
        network="resnet18",
        weights=weights,
        workers=ranks,
    ).result
    # the network does not say the same of all
    assert len(np.unique(alone(60).numpy().nonzero()[1])) > 1
    for count, (matrix, everyones) in zip(counts, results):
        assert torch.equal(matrix, alone(count))
        assert matrix.sum() == count
        assert sorted(row for guesses in everyones for row in guesses) == list(range(count))
        again = torch.zeros(CLASSES, CLASSES, dtype=torch.long)
        for guesses in everyones:
            for row, guess in guesses.items():
                again[Noise.targets[row], guess] += 1
        assert torch.equal(matrix, again)


def judge_with_own_statistics(evaluate, make_network, share):
    """What each rank guesses of the same pictures after a step in which each saw others."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(make_network("resnet18", CLASSES))
    scenes, labels = default_collate(Noise().__getitems__(range(ddp.rank(), 16, ddp.world_size())))
    torch.nn.functional.cross_entropy(model(scenes / 255), labels).backward()
    if share:
        evaluate(model.module, Noise(), np.arange(4))
    mine = [buffer.double().sum().item() for buffer in model.module.buffers()]
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


@pytest.mark.parametrize("share", [True, False])
def test_ranks_evaluate_with_the_same_statistics_which_training_leaves_different(
    client, tutorial, share
):
    first, second = ddp.launch(
        client,
        judge_with_own_statistics,
        evaluate=tutorial["evaluate"],
        make_network=tutorial["make_network"],
        share=share,
        workers=2,
    ).result
    assert (first == second) == share


def test_a_function_that_says_images_classes_travels_to_the_ranks(client):
    def count(images):
        # torch.classes and torch.ops are modules
        return torch.tensor([len(images.classes), len(images.ops)]).tolist()

    images = type("Images", (), {"classes": ["a", "b"], "ops": ["c"]})
    assert ddp.launch(client, count, images=images, workers=1).result == [2, 1]
