"""The notebooks: paired with their scripts, executed in order, reproducible, and their exercises judge rightly."""

import ast
import contextlib
import gzip
import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import jupytext
import nbformat
import numpy as np
import pytest
import torch
import torch.distributed as dist
from nbclient import NotebookClient

import ddp_common as ddp
from ddp_common.cli import LESSON_TAGS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tutorials"))
import sync  # noqa: E402

TUTORIALS = [path.stem for path in sync.sources()]
each_tutorial = pytest.mark.parametrize("name", TUTORIALS)


def cells_of(notebook):
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]


def script(name):
    return jupytext.read(ROOT / "tutorials" / f"{name}.py")


def notebook(name):
    return nbformat.read(ROOT / "tutorials" / f"{name}.ipynb", 4)


@each_tutorial
def test_notebook_and_script_are_a_pair(name):
    assert cells_of(notebook(name)) == cells_of(script(name)), f"{name}.ipynb is not what {name}.py says: run make sync"


@each_tutorial
def test_every_cell_was_executed_in_order(name):
    counts = [cell.execution_count for cell in notebook(name).cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run make sync"


@each_tutorial
def test_no_output_is_an_error_or_a_warning(name):
    outputs = [output for cell in notebook(name).cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


@each_tutorial
def test_student_notebook_is_generated_from_the_notebook(name):
    student = nbformat.read(ROOT / "tutorials" / "student" / f"{name}.ipynb", 4)
    assert cells_of(student) == cells_of(sync.student(notebook(name))), "run make sync"
    assert not any(cell.get("outputs") for cell in student.cells)
    assert not any("instructor" in cell.metadata.get("tags", []) for cell in student.cells)
    solutions = [cell.source for cell in notebook(name).cells if "solution" in cell.metadata.get("tags", [])]
    assert solutions and not any(solution in cell.source for solution in solutions for cell in student.cells)


def test_a_solution_without_marks_is_refused():
    with pytest.raises(ValueError, match="end of your code"):
        sync.stub("def f():\n    return 1")


@each_tutorial
def test_code_cells_are_short(name):
    for cell in script(name).cells:
        if cell.cell_type == "code" and "solution" not in cell.metadata.get("tags", []):
            longest = 60 if "ddp.Checkpoint(" in cell.source else 26
            assert len(cell.source.splitlines()) <= longest, cell.source.splitlines()[0]


# On another processor, floating-point sums come in another order: what the notebook compares must not depend on it.
PROCESSORS = {"this": {}, "old": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processor", PROCESSORS)
@each_tutorial
def test_notebook_reproduces_its_outputs(name, processor, tmp_path):
    environment = clean_environment(tmp_path) | PROCESSORS[processor]
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=240", "-p", "no:cacheprovider",
               "-o", "timeout=600", "-o", "addopts=", f"tutorials/{name}.ipynb"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


@pytest.mark.timeout(600)
@each_tutorial
def test_student_notebook_runs_through_unsolved(name, tmp_path, monkeypatch):
    for key, value in (clean_environment(tmp_path) | {"SET": "epochs=1"}).items():
        monkeypatch.setenv(key, value)
    student = nbformat.read(ROOT / "tutorials" / "student" / f"{name}.ipynb", 4)
    NotebookClient(student, timeout=120, resources={"metadata": {"path": str(ROOT / "tutorials")}}).execute()
    text = "".join(output.get("text", "") for cell in student.cells for output in cell.get("outputs", []))
    assert text.count("not yet") == sum("solution" in cell.metadata.get("tags", []) for cell in student.cells)


def clean_environment(runs):
    kept = {key: value for key, value in os.environ.items() if key not in ("CLUSTER", "PRESET", "SET", "RESUME")}
    return kept | {"WORKERS": "2", "RUNS": str(runs), "DDP_PROGRESS": "off"}


@contextlib.contextmanager
def names_of(name, runs):
    """The names that a tutorial's job defines before section 5, and all functions of the cells after it: exercises, solutions, checks."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in clean_environment(runs).items():
            patch.setenv(key, value)
        names = {"__name__": "__main__"}
        cells = script(name).cells
        start = next(number for number, cell in enumerate(cells) if cell.source.startswith("## 5."))
        for cell in cells[:start]:
            if cell.cell_type == "code" and not LESSON_TAGS & set(cell.metadata.get("tags", [])):
                exec(cell.source, names)
        for cell in cells[start:]:
            if cell.cell_type == "code":
                functions = [node for node in ast.parse(cell.source).body if isinstance(node, ast.FunctionDef)]
                exec(compile(ast.Module(functions, []), "<cell>", "exec"), names)
        yield names
        names["client"].close()


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    with names_of("pets", tmp_path_factory.mktemp("runs")) as names:
        yield names


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    with names_of("mnist", tmp_path_factory.mktemp("runs")) as names:
        yield names


def test_the_checks_of_pets_accept_the_solutions(pets, capsys):
    assert pets["check_share"](pets["my_share"])
    assert pets["check_weight"](pets["my_weight"])
    assert pets["check_search"](pets["train_one"])
    assert capsys.readouterr().out.count("right") == 3


@pytest.mark.parametrize("check, wrong", [
    ("check_share", lambda batch, rank, size: batch[rank * (len(batch) // size):(rank + 1) * (len(batch) // size)]),
    ("check_share", lambda batch, rank, size: batch),
    ("check_share", lambda batch, rank, size: None),
    ("check_weight", lambda mine, everyones, size: mine / everyones),
    ("check_weight", lambda mine, everyones, size: 1.0),
    ("check_weight", lambda mine, everyones, size: None),
    ("check_search", lambda rate, contexts, targets: None),
    ("check_search", lambda rate, contexts, targets: (rate, rate)),
])
def test_the_checks_of_pets_refuse_wrong_answers(pets, capsys, check, wrong):
    assert not pets[check](wrong)
    assert "not yet" in capsys.readouterr().out


def test_a_name_outside_the_alphabet_is_refused_by_name(pets, tmp_path):
    (tmp_path / "names.csv").write_text("name,count\nbella,2\nzoë,1\n")
    with pytest.raises(ddp.Error, match="'zoë' has 'ë'"):
        pets["read_names"](tmp_path / "names.csv")


@pytest.mark.parametrize("content", ["name,count\n", "something,else\nbella,1\n"])
def test_a_table_without_names_is_refused(pets, tmp_path, content):
    (tmp_path / "names.csv").write_text(content)
    with pytest.raises(ddp.Error, match="holds no names"):
        pets["read_names"](tmp_path / "names.csv")


def test_windows_of_a_name(pets):
    contexts, targets = pets["windows"](["bo"])
    alphabet = pets["ALPHABET"]
    assert ["".join(alphabet[code] for code in row) for row in contexts] == ["*" * 8, "*" * 7 + "b", "*" * 6 + "bo"]
    assert "".join(alphabet[code] for code in targets) == "bo+"


def test_the_checks_of_mnist_accept_the_solutions(mnist, capsys):
    assert mnist["check_buckets"](mnist["my_buckets"])
    assert mnist["check_broadcast"](mnist["my_broadcast"])
    assert mnist["check_accumulation"](mnist["my_accumulation"])
    assert capsys.readouterr().out.count("right") == 3


def in_the_order_of_the_model(sizes, capacity):
    return [[number for number in range(len(sizes))]]


def closed_before_it_overflows(sizes, capacity):
    buckets, held = [], capacity
    for number in reversed(range(len(sizes))):
        if held + sizes[number] > capacity:
            buckets, held = [*buckets, []], 0
        buckets[-1].append(number)
        held += sizes[number]
    return buckets


def average_the_weights(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= ddp.world_size()


def only_rank_0_calls(model):
    if ddp.rank() == 0:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)


def average_after_every_part(model, parts):
    for part in parts:
        (torch.nn.functional.mse_loss(model(part), part) / len(parts)).backward()


def forget_to_divide(model, parts):
    with model.no_sync():
        for part in parts[:-1]:
            torch.nn.functional.mse_loss(model(part), part).backward()
    torch.nn.functional.mse_loss(model(parts[-1]), parts[-1]).backward()


def never_average(model, parts):
    with model.no_sync():
        average_after_every_part(model, parts)


@pytest.mark.parametrize("check, wrong", [
    ("check_buckets", in_the_order_of_the_model),
    ("check_buckets", closed_before_it_overflows),
    ("check_buckets", lambda sizes, capacity: None),
    ("check_broadcast", lambda model: None),
    ("check_broadcast", average_the_weights),
    ("check_broadcast", only_rank_0_calls),
    ("check_accumulation", lambda model, parts: None),
    ("check_accumulation", average_after_every_part),
    ("check_accumulation", forget_to_divide),
    ("check_accumulation", never_average),
])
def test_the_checks_of_mnist_refuse_wrong_answers(mnist, capsys, check, wrong):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as if it were defined in a notebook
    try:
        assert not mnist[check](wrong)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert "not yet" in capsys.readouterr().out


def test_epochs_that_deal_the_same_are_caught(mnist):
    deals = mnist["deals"]()
    mnist["check_epochs_differ"](deals["ElasticSampler"])
    mnist["check_epochs_differ"](deals["with set_epoch"])
    with pytest.raises(AssertionError, match="every epoch deals the same"):
        mnist["check_epochs_differ"](deals["DistributedSampler"])


@pytest.mark.parametrize("rank_0_only", [True, False])
def test_writing_from_all_ranks_is_caught(mnist, tmp_path, rank_0_only):
    found = mnist["on_two_ranks"](mnist["all_ranks_write"], folder=str(tmp_path / "new"), rank_0_only=rank_0_only)
    with contextlib.nullcontext() if rank_0_only else pytest.raises(AssertionError, match="FileExistsError.*finds 0 bytes"):
        mnist["check_written_once"](*found)


@pytest.mark.parametrize("with_training_sampler", [True, False])
def test_validation_with_the_training_sampler_is_caught(mnist, with_training_sampler):
    training, held_out = ddp.split(103, [0.2])
    judged = mnist["on_two_ranks"](mnist["judged"], samples=103, training=training, held_out=held_out, with_training_sampler=with_training_sampler)
    with pytest.raises(AssertionError, match="not held out") if with_training_sampler else contextlib.nullcontext():
        mnist["check_judged"](judged, held_out)


@pytest.mark.parametrize("seen", [[[0, 1], [2, 3]], [[0, 1, 2], [1]], [[], [0]]])
def test_held_out_digits_that_are_missing_or_count_twice_are_caught(mnist, seen):
    with pytest.raises(AssertionError):
        mnist["check_judged"](seen, [0, 1, 2])


def test_shards_of_different_length_end_at_once_and_are_named(mnist):
    few = {"epochs": 1, "batch_size": 128, "learning_rate": 1e-3, "width": 8, "bottleneck": 2, "seed": 0}
    with pytest.raises(ddp.RankFailed, match="returned at step 4, while rank 0 went on") as failed:
        ddp.launch(mnist["client"], mnist["train_on_own_part"], images=mnist["images"][:1_100], **few, workers=2)
    assert failed.value.rank == 1


def write_idx(path, array):
    path.write_bytes(gzip.compress(bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4) for length in array.shape) + array.tobytes()))


@pytest.mark.parametrize("parts, read", [({"digits": 50}, [45, 45, 5, 5]), ({"train": 30, "t10k": 20}, [30, 30, 20, 20])])
def test_digits_of_ones_own_come_with_a_test_set_or_a_tenth_is_held_out(mnist, tmp_path, parts, read):
    for part, count in parts.items():
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", np.zeros((count, 28, 28), np.uint8))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8))
    assert [len(tensor) for tensor in mnist["read_digits"](tmp_path)] == read


@pytest.mark.parametrize("shape, labels", [((5, 28, 28), 4), ((5, 32, 32), 5)])
def test_digits_without_a_label_each_or_of_another_size_are_refused(mnist, tmp_path, shape, labels):
    write_idx(tmp_path / "digits-images-idx3-ubyte.gz", np.zeros(shape, np.uint8))
    write_idx(tmp_path / "digits-labels-idx1-ubyte.gz", np.zeros(labels, np.uint8))
    with pytest.raises(ddp.Error, match="not digits of 28 x 28 with one label each"):
        mnist["read_digits"](tmp_path)
