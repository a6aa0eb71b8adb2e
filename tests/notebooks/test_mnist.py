"""What the notebook `mnist` teaches by functions.

Its exercises judge rightly, its museum's faults are caught, its data are checked.
"""

import contextlib
import gzip
import importlib.util
import re
import subprocess
import sys

import cloudpickle
import nbformat
import numpy as np
import pytest
import torch
import torch.distributed as dist
from tutorials_here import ROOT, names_of, script

import ddp_common as ddp
from ddp_common.teaching import ports

SCRIPTS = ROOT / "tutorials" / "scripts"
PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    with names_of("mnist", tmp_path_factory.mktemp("runs")) as names:
        yield names


SOLUTION = SCRIPTS / "solutions" / "plain_loop.py"
REPAIRED = SCRIPTS / "solutions" / "broken_loop.py"


@pytest.mark.parametrize(
    "check, answer",
    [
        ("check_broadcast", "my_broadcast"),
        ("check_port", "my_port"),
        ("check_diagnosis", "my_diagnosis"),
        ("check_accumulation", "my_accumulation"),
    ],
)
def test_the_checks_of_mnist_accept_the_solutions(mnist, capsys, check, answer):
    assert mnist[check](mnist[answer])
    assert capsys.readouterr().out.startswith("right")


def average_the_weights(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= ddp.world_size()


def only_rank_0_calls(model):
    if ddp.rank() == 0:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)


def only_the_first_row_of_each_parameter(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data[:1], src=0)


def from_the_last_rank(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=ddp.world_size() - 1)


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


def only_the_last_part(model, parts):
    torch.nn.functional.mse_loss(model(parts[-1]), parts[-1]).backward()


@pytest.mark.parametrize(
    "check, wrong",
    [
        ("check_broadcast", lambda model: None),
        ("check_broadcast", average_the_weights),
        ("check_broadcast", only_rank_0_calls),
        ("check_broadcast", only_the_first_row_of_each_parameter),
        ("check_broadcast", from_the_last_rank),
        ("check_port", lambda: None),
        ("check_port", lambda: "no_such_file.py"),
        ("check_diagnosis", lambda: None),
        ("check_diagnosis", lambda: ("C", REPAIRED)),
        ("check_diagnosis", lambda: ("B", None)),
        ("check_accumulation", lambda model, parts: None),
        ("check_accumulation", average_after_every_part),
        ("check_accumulation", forget_to_divide),
        ("check_accumulation", never_average),
        ("check_accumulation", only_the_last_part),
    ],
)
def test_the_checks_of_mnist_refuse_wrong_answers(mnist, capsys, check, wrong):
    cloudpickle.register_pickle_by_value(
        sys.modules[__name__]
    )  # as if it were defined in a notebook
    try:
        assert not mnist[check](wrong)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert "not yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    "check", ["check_broadcast", "check_port", "check_diagnosis", "check_accumulation"]
)
def test_an_answer_to_mnist_that_raises_is_shown_in_words(mnist, capsys, check):
    ddp.judge(mnist[check], mnist["crashes"])
    said = capsys.readouterr().out
    assert said.startswith("not yet") and "ZeroDivisionError: division by zero" in said


# A usual wrong port: what is replaced in the solution (or in the plain loop), and words of the
# question that the check asks.
INIT = """        dist.init_process_group("gloo")
"""
SAVE = """    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
"""
WRONG_PORTS = {
    "no process group": ([(INIT, "")], "before it can talk to the others"),
    "shuffle beside the sampler": (
        [("sampler=sampler)", "sampler=sampler, shuffle=True)")],
        "Who shuffles now",
    ),
    "device_ids on the CPU": (
        [
            (
                'device_ids=[local_rank] if device.type == "cuda" else None',
                "device_ids=[local_rank]",
            )
        ],
        "On which device",
    ),
    "no sampler": (
        [
            ("sampler=sampler)", "shuffle=True)"),
            ("        sampler.set_epoch(epoch)\n", ""),
        ],
        "Which digits does rank 1 take",
    ),
    "no DDP": (
        [
            (
                "model = DDP(model, device_ids=[local_rank] if device.type ==",
                "_ = (model, [local_rank] if device.type ==",
            ),
            ("model.module", "model"),
        ],
        "What keeps their weights equal",
    ),
    "the loss of the model inside": (
        [("F.mse_loss(model(batch), batch)", "F.mse_loss(model.module(batch), batch)")],
        "Which of the two models",
    ),
    "the whole batch on each rank": (
        [("batch_size=per_rank", "batch_size=BATCH_SIZE")],
        "How large is the batch",
    ),
    "set_epoch forgotten": (
        [("        sampler.set_epoch(epoch)\n", "")],
        "Who tells it the epoch",
    ),
    "a sampler that does not shuffle": (
        [
            (
                "DistributedSampler(digits, shuffle=True)",
                "DistributedSampler(digits, shuffle=False)",
            )
        ],
        "The plain loop shuffles",
    ),
    "the same rank everywhere": (
        [("(digits, shuffle=True)", "(digits, num_replicas=2, rank=0)")],
        "From where does your sampler know the rank",
    ),
    "a rate for two ranks": (
        [("lr=LEARNING_RATE", "lr=2 * LEARNING_RATE")],
        "Why should the step",
    ),
    "averaged twice": (
        [
            (
                "            optimizer.step()\n",
                "            for each in model.parameters():\n"
                "                each.grad /= dist.get_world_size()\n"
                "            optimizer.step()\n",
            )
        ],
        "Which of loss, gradient and step",
    ),
    "a collective on rank 0 alone": (
        [(SAVE, SAVE + "        dist.barrier()\n")],
        "Under which `if` does this barrier stand",
    ),
    "a sum on rank 0 alone, while the other trains on": (
        [
            (
                '            print(f"epoch',
                '            dist.all_reduce(loss.detach())\n            print(f"epoch',
            )
        ],
        "Under which `if` does this all_reduce stand",
    ),
    "rank 0 trains alone": (
        [
            (
                "    for epoch in range(EPOCHS):",
                "    for epoch in range(EPOCHS * (1 - local_rank)):",
            )
        ],
        "Who answers the rank that makes one more",
    ),
    "all ranks save": (
        [(SAVE, '    torch.save(model.module.state_dict(), "model.pt")\n')],
        "What happens when two write one file",
    ),
    "no rank saves": ([(SAVE, "")], "What is left of this training"),
    "the wrapper's names": (
        [("model.module.state_dict()", "model.state_dict()")],
        "the wrapper's",
    ),
    "saved before training": (
        [(SAVE, ""), ("    for epoch in range", SAVE + "    for epoch in range")],
        "When is the file written",
    ),
    "the group is left open": (
        [("    dist.destroy_process_group()\n", "")],
        "counterpart of init",
    ),
    "no step of the optimizer": (
        [("optimizer.step()", "pass")],
        "Who changes the weights?",
    ),
    "fewer epochs": ([("range(EPOCHS)", "range(EPOCHS // 2)")], "Has the number of epochs"),
    "a mistake of Python": (
        [("losses.append(loss.item())", "losses.append(los.item())")],
        "the last in its traceback",
    ),
    "main is not called": ([("    main(sys.argv[1])", "    pass")], "before it can talk"),
}


@pytest.mark.parametrize("name", WRONG_PORTS)
def test_each_usual_wrong_port_gets_its_own_question(mnist, tmp_path, capsys, name):
    replaced, question = WRONG_PORTS[name]
    source = SOLUTION.read_text()
    for old, new in replaced:
        assert old in source, old
        source = source.replace(old, new)
    port = tmp_path / "my_port.py"
    port.write_text(source)
    assert not mnist["check_port"](lambda: str(port))
    said = capsys.readouterr().out
    assert said.startswith("not yet") and question in said


def test_a_port_may_save_into_a_file_that_is_open_and_name_what_it_saves(mnist, tmp_path, capsys):
    save = """    if dist.get_rank() == 0:
        with open("model.pt", "wb") as file:
            torch.save(obj=model.module.state_dict(), f=file)
"""
    source = SOLUTION.read_text()
    assert SAVE in source
    port = tmp_path / "my_port.py"
    port.write_text(source.replace(SAVE, save))
    assert mnist["check_port"](lambda: str(port)), capsys.readouterr().out


def test_the_text_of_a_script_is_no_path(mnist, capsys):
    assert not mnist["check_port"](lambda: SOLUTION.read_text())
    said = capsys.readouterr().out
    assert "is not the path of a file" in said and len(said) < 300


@pytest.mark.parametrize(
    "line, said",
    [
        ("while True: print('x' * 1000, sum(range(10**6)))", "it was ended after 45 s"),
        ("sys.exit(3)", "raised SystemExit: 3"),
    ],
)
def test_a_port_that_does_not_end_or_leaves_is_told_so(
    mnist, tmp_path, capsys, monkeypatch, line, said
):
    if "while" in line:
        monkeypatch.setattr(ports, "TIMEOUT", 45.0)
    port = tmp_path / "my_port.py"
    source = SOLUTION.read_text()
    port.write_text(source.replace("    torch.manual_seed(0)\n", f"    {line}\n"))
    assert not mnist["check_port"](lambda: port)
    printed = capsys.readouterr().out
    assert printed.startswith("not yet") and said in printed and len(printed) < 5_000


def test_the_plain_loop_itself_is_no_port(mnist, capsys):
    assert not mnist["check_port"](lambda: SCRIPTS / "plain_loop.py")
    assert "before it can talk to the others" in capsys.readouterr().out


def test_the_plain_loop_trains_in_one_process(tmp_path):
    digits = ROOT / "data" / "mnist" / "digits-images-idx3-ubyte.gz"
    command = [sys.executable, SCRIPTS / "plain_loop.py", digits]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "epoch 0",
        "epoch 1",
        "epoch 2",
    ]
    assert (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("script", ["plain_loop.py", "solutions/plain_loop.py"])
def test_what_students_begin_with_and_end_with_needs_pytorch_alone(script):
    assert "ddp_common" not in (SCRIPTS / script).read_text()


def test_the_broken_script_fails_as_the_notebook_says():
    run = ddp.run_script(SCRIPTS / "broken_loop.py", "0")
    assert not run.ok and not run.timed_out
    assert "op.preamble.length <= op.nbytes" in run.output or "Connection" in run.output
    shown = "".join(cell.source for cell in script("mnist").cells)
    lines = (SCRIPTS / "broken_loop.py").read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "loss.backward()" in line)
    assert f'File "broken_loop.py", line {number}, in main' in shown


WRONG_REPAIRS = {
    "not repaired": (
        [
            (
                "        dist.all_reduce(total)  # all ranks call it\n        if rank == 0:\n",
                "        if rank == 0:\n            dist.all_reduce(total)\n",
            )
        ],
        "Under which `if`",
    ),
    "no sum over the ranks": (
        [("        dist.all_reduce(total)  # all ranks call it\n", "")],
        "Whose losses are in your sum",
    ),
    "all ranks print": (
        [("        if rank == 0:\n            print", "        if True:\n            print")],
        "Which ranks print",
    ),
}


@pytest.mark.parametrize("name", WRONG_REPAIRS)
def test_each_wrong_repair_gets_its_own_question(mnist, tmp_path, capsys, name):
    replaced, question = WRONG_REPAIRS[name]
    source = REPAIRED.read_text()
    for old, new in replaced:
        assert old in source, old
        source = source.replace(old, new)
    repaired = tmp_path / "repaired.py"
    repaired.write_text(source)
    assert not mnist["check_diagnosis"](lambda: ("B", repaired))
    said = capsys.readouterr().out
    assert said.startswith("not yet") and question in said


def test_the_map_in_the_repository_is_the_one_its_script_draws():
    spec = importlib.util.spec_from_file_location("draw_map", PICTURES / "draw_map.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (PICTURES / "who-talks-to-whom.svg").read_text() == module.drawing()


def test_every_picture_of_mnist_has_a_sentence_for_those_who_cannot_see_it():
    notebook = nbformat.read(ROOT / "tutorials" / "mnist.ipynb", 4)
    pictures = [
        output.metadata.get(kind, {}).get("alt", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        for kind in output.get("data", {})
        if kind.startswith("image/")
    ]
    assert len(pictures) >= 5 and all(alt.endswith(".") for alt in pictures)


def test_no_line_of_mnist_is_cut_off_on_a_page():
    for path in [ROOT / "tutorials" / "mnist.py", *SCRIPTS.rglob("*.py")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 88, f"{path.name}, line {number}"


def test_the_minutes_of_mnist_add_up_to_those_on_the_card():
    card, *_ = script("mnist").cells
    listed = re.search(r"75 minutes in class\.\*\*(.*)\.", card.source.replace("\n", " "))[1]
    minutes = [int(number) for number in re.findall(r" (\d+)", listed.split(".")[0])]
    assert sum(minutes) == 75
    notes = [
        int(re.search(r"\*\*Instructor · (\d+) minutes", cell.source)[1])
        for cell in script("mnist").cells
        if "**Instructor ·" in cell.source
    ]
    assert notes == minutes


@pytest.mark.parametrize("late", [0.0, 0.3])
def test_the_timeline_shows_overlap_and_who_is_late(mnist, late):
    rank_0, rank_1 = mnist["on_two_ranks"](mnist["record_step"], way="DDP", late=late)
    (backward,) = [mark for mark in rank_0 if mark[0] == "backward"]
    first = min((mark for mark in rank_0 if mark[0] == "averaging"), key=lambda mark: mark[1])
    assert backward[1] < first[1] < backward[2]
    waited = sum(end - begin for what, begin, end in rank_1 if what == "late")
    assert waited >= late and (late == 0 or first[2] - first[1] > 0.1)


def test_ddp_sends_one_bucket_first_and_more_afterwards(mnist):
    first, second = mnist["on_two_ranks"](mnist["bucket_sizes"])
    assert len(first) == 1 and len(second) > 1 and second[0] < second[1]
    assert abs(sum(first) - sum(second)) < 0.2


def test_a_layer_that_is_not_used_is_named_by_ddp(mnist):
    digits = torch.rand(8, 784)
    with pytest.raises(ddp.RankFailed, match="finished reduction"):
        mnist["on_two_ranks"](mnist["two_steps"], pixels=digits)
    options = {"find_unused_parameters": True}
    assert mnist["on_two_ranks"](mnist["two_steps"], pixels=digits, **options) == 2


def test_epochs_that_deal_the_same_are_caught(mnist):
    deals = mnist["deals"]()
    mnist["check_epochs_differ"](deals["ElasticSampler"])
    mnist["check_epochs_differ"](deals["with set_epoch"])
    with pytest.raises(AssertionError, match="every epoch deals the same"):
        mnist["check_epochs_differ"](deals["DistributedSampler"])


@pytest.mark.parametrize("rank_0_only", [True, False])
def test_writing_from_all_ranks_is_caught(mnist, tmp_path, rank_0_only):
    found = mnist["on_two_ranks"](
        mnist["all_ranks_write"], folder=str(tmp_path / "new"), rank_0_only=rank_0_only
    )
    with (
        contextlib.nullcontext()
        if rank_0_only
        else pytest.raises(AssertionError, match="FileExistsError.*finds 0 bytes")
    ):
        mnist["check_written_once"](*found)


@pytest.mark.parametrize("with_training_sampler", [True, False])
def test_validation_with_the_training_sampler_is_caught(mnist, with_training_sampler):
    training, held_out = ddp.split(103, [0.2])
    judged = mnist["on_two_ranks"](
        mnist["judged"],
        samples=103,
        training=training,
        held_out=held_out,
        with_training_sampler=with_training_sampler,
    )
    with (
        pytest.raises(AssertionError, match="not held out")
        if with_training_sampler
        else contextlib.nullcontext()
    ):
        mnist["check_judged"](judged, held_out)


@pytest.mark.parametrize("seen", [[[0, 1], [2, 3]], [[0, 1, 2], [1]], [[], [0]]])
def test_held_out_digits_that_are_missing_or_count_twice_are_caught(mnist, seen):
    with pytest.raises(AssertionError):
        mnist["check_judged"](seen, [0, 1, 2])


def test_shards_of_different_length_end_at_once_and_are_named(mnist):
    few = {
        "epochs": 1,
        "batch_size": 128,
        "learning_rate": 1e-3,
        "channels": 2,
        "bottleneck": 2,
        "seed": 0,
    }
    with pytest.raises(ddp.RankFailed, match="returned at step 4, while rank 0 went on") as failed:
        ddp.launch(
            mnist["client"],
            mnist["train_on_own_part"],
            images=mnist["images"][:1_100],
            **few,
            workers=2,
        )
    assert failed.value.rank == 1


def write_idx(path, array):
    path.write_bytes(
        gzip.compress(
            bytes([0, 0, 8, array.ndim])
            + b"".join(length.to_bytes(4) for length in array.shape)
            + array.tobytes()
        )
    )


@pytest.mark.parametrize(
    "parts, read",
    [({"digits": 50}, [45, 45, 5, 5]), ({"train": 30, "t10k": 20}, [30, 30, 20, 20])],
)
def test_digits_of_ones_own_come_with_a_test_set_or_a_tenth_is_held_out(
    mnist, tmp_path, parts, read
):
    for part, count in parts.items():
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", np.zeros((count, 28, 28), np.uint8))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8))
    assert [len(tensor) for tensor in mnist["read_digits"](tmp_path)] == read


@pytest.mark.parametrize("shape, labels", [((5, 28, 28), 4), ((5, 32, 32), 5)])
def test_digits_without_a_label_each_or_of_another_size_are_refused(
    mnist, tmp_path, shape, labels
):
    write_idx(tmp_path / "digits-images-idx3-ubyte.gz", np.zeros(shape, np.uint8))
    write_idx(tmp_path / "digits-labels-idx1-ubyte.gz", np.zeros(labels, np.uint8))
    with pytest.raises(ddp.Error, match="not digits of 28 x 28 with one label each"):
        mnist["read_digits"](tmp_path)
