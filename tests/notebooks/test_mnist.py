"""The exercises of `mnist` judge rightly, and digits of one's own are checked."""

import functools
import gzip
import os
import re
import shutil
import socket
import subprocess
import sys

import jupytext
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from tutorials_here import ROOT

import ddp_common as ddp
from tutorials.checks import mnist as checks
from tutorials.checks.common import judge
from tutorials.helpers import read_digits

SOLUTION = (ROOT / "tutorials" / "scripts" / "solutions" / "plain_loop.py").read_text()


def changed(*replacements):
    """The solution of exercise B with (old, new) pieces of text."""
    text = SOLUTION
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return text


def said_of(check, answer, capsys):
    capsys.readouterr()
    judge(check, answer, timeout=240)
    return capsys.readouterr().out


# A: gradients averaged by hand


@pytest.fixture(scope="module")
def averaging():
    with ddp.connect("local", workers=2) as client:
        yield functools.partial(checks.averaging, client)


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


def as_told(model):
    for gradient in gradients_of(model):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def divided_first(model):
    for parameter in model.parameters():
        parameter.grad = parameter.grad / dist.get_world_size()
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


def one_bucket(model):
    bucket = nn.utils.parameters_to_vector(gradients_of(model))
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    start = 0
    for gradient in gradients_of(model):
        gradient.copy_(bucket[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def gathered(model):
    for parameter in model.parameters():
        everyones = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, parameter.grad)
        parameter.grad = torch.stack(everyones).mean(0)


def waited_for(model):
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients_of(model)]
    for work, gradient in zip(works, gradients_of(model), strict=True):
        work.wait()
        gradient.div_(dist.get_world_size())


def as_objects(model):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, gradients_of(model))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = sum(each[number] for each in everyones) / len(everyones)


@pytest.mark.parametrize(
    "answer", [as_told, divided_first, one_bucket, gathered, waited_for, as_objects]
)
def test_every_way_to_average_is_right_and_the_lesson_goes_on_with_it(averaging, answer, capsys):
    assert said_of(averaging, answer, capsys).startswith("right: each rank holds the mean")
    assert checks.yours_or_ours(answer) is answer


def untouched(model):
    """After this, each rank holds the mean of all ranks' gradients."""
    # your code
    ...


def only_summed(model):
    for gradient in gradients_of(model):
        dist.all_reduce(gradient)


def only_divided(model):
    for gradient in gradients_of(model):
        gradient /= dist.get_world_size()


def by_two(model):
    for gradient in gradients_of(model):
        dist.all_reduce(gradient)
        gradient /= 2


def divided_twice(model):
    as_told(model)
    only_divided(model)


def of_a_copy(model):
    for gradient in gradients_of(model):
        mean = gradient / dist.get_world_size()
        dist.all_reduce(mean)


def assigned_the_answer(model):
    for parameter in model.parameters():
        parameter.grad = dist.all_reduce(parameter.grad)  # it returns None


def of_weights(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def on_rank_0(model):
    for gradient in gradients_of(model):
        dist.reduce(gradient, dst=0)
        gradient /= dist.get_world_size()


def of_rank_0(model):
    for gradient in gradients_of(model):
        dist.broadcast(gradient, src=0)


def rebound(model):
    for gradient in gradients_of(model):
        dist.all_reduce(gradient)
        gradient = gradient / dist.get_world_size()


def the_first(model):
    gradient = next(model.parameters()).grad
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def steps_too(model):
    as_told(model)
    torch.optim.SGD(model.parameters(), lr=1).step()


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        (untouched, "nothing is written yet"),
        (only_summed, "divided by what"),
        (only_divided, "Where are the other ranks' gradients added"),
        (by_two, "How many ranks are there"),
        (divided_twice, "How often is it divided"),
        (of_a_copy, "is that the gradient itself"),
        (assigned_the_answer, "Where does the optimizer look"),
        (of_weights, "is that the gradient itself"),
        (on_rank_0, "rank 1 of 2"),
        (of_rank_0, "On each rank"),
        (rebound, "divided by what"),
        (the_first, "another gradient"),
        (steps_too, "Which tensor of a parameter"),
    ],
)
def test_a_wrong_average_gets_a_question_and_the_lesson_goes_on_with_ours(
    averaging, answer, question, capsys
):
    said = said_of(averaging, answer, capsys)
    assert said.count("not yet") == 1 and question in said, said
    assert checks.yours_or_ours(answer) is not answer


# B: the port of a script

SAMPLER = "DistributedSampler(data, shuffle=True)"
SHARE = "torch.utils.data.Subset(data, range(dist.get_rank(), len(data), 2))"
SAVE = 'torch.save(model.module.state_dict(), "model.pt")'
LOCAL = 'local_rank = int(os.environ["LOCAL_RANK"])'
IDS = ', device_ids=[local_rank] if device.type == "cuda" else None'
SET = "torch.cuda.set_device(device)"
MOVED = ("model = autoencoder().to(device)", "model = autoencoder()")
BARRIER = ("loss.backward()", "(dist.barrier() if dist.get_rank() else None, loss.backward())")


@pytest.mark.timeout(600)
def test_a_port_with_another_way_to_share_and_save_is_right(tmp_path, capsys):
    text = changed(
        (SAMPLER, SHARE),
        ("DataLoader(data, ", "DataLoader(sampler, "),
        ("sampler=sampler", "shuffle=True"),
        ("        sampler.set_epoch(epoch)\n", ""),
        (SAVE, SAVE.replace('"model.pt"', 'f=open("model.pt", "wb")').replace("e(m", "e(obj=m")),
        (IDS, ""),
    )
    (tmp_path / "port.py").write_text(text)
    said = said_of(checks.port, lambda: str(tmp_path / "port.py"), capsys)
    assert said.startswith("right: two ranks"), said


LOCAL_SIZE = (LOCAL, LOCAL + '\n    local_size = int(os.environ["LOCAL_WORLD_SIZE"])')
KEPT = ("        held_out = held_out.to(device)\n", "")
LOG = "import logging\nimport sys\n"
LOGGING = [
    ("import sys\n", LOG + "\nlogging.basicConfig(level=logging.INFO)\n"),
    ("print(f", "logging.info(f"),
]
ON_ERROR = [('{np.mean(losses):.4f}"', '{np.mean(losses):.4f}", file=sys.stderr')]
ON_ERROR += [('{loss:.4f}"', '{loss:.4f}", file=sys.stderr')]
WITH_DDP = [("model.module(held_out)", "model(held_out)")]
WITH_A_GRADIENT = [*WITH_DDP, ("with torch.no_grad():", "if True:")]
MOVED_AT_ONCE = [("pixels = read_digits(path)", "pixels = read_digits(path).to(device)")]
MOVED_AT_ONCE += [("digits = digits.to(device)\n", "pass\n"), KEPT]
BY_CUDA = [
    (
        "model = autoencoder().to(device)",
        "model = autoencoder()\n    if CUDA:\n        model.cuda()",
    ),
    ("digits = digits.to(device)", "digits = digits.cuda() if CUDA else digits"),
    KEPT,
    ("def main", "CUDA = torch.cuda.is_available()\n\n\ndef main"),
]
ODD = {
    "logging": LOGGING,
    "standard error": ON_ERROR,
    "evaluates with DDP": WITH_DDP,
    "evaluates with a gradient": WITH_A_GRADIENT,
    "moved at once": MOVED_AT_ONCE,
    "by cuda()": BY_CUDA,
    "keyword": [("model(digits), digits)", "model(input=digits), digits)")],
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("replacements", ODD.values(), ids=ODD)
def test_a_port_in_an_odd_form_is_right(replacements, tmp_path, capsys):
    (tmp_path / "port.py").write_text(changed(*replacements))
    said = said_of(checks.port, lambda: tmp_path / "port.py", capsys)
    assert said.startswith("right: two ranks"), said


EPOCH_ENDS = '            print(f"epoch {epoch}: loss {np.mean(losses):.4f}")\n'
AT_EACH_EPOCH = [(f"        {SAVE}\n", ""), (EPOCH_ENDS, f"{EPOCH_ENDS}            {SAVE}\n")]
RANK_0_ALONE = [("with torch.no_grad():", "if dist.get_rank() == 0:")]
IMPORT = ("import gzip\n", "import atexit\nimport gzip\n")
AT_EXIT = [("    dist.destroy_process_group()\n", ""), IMPORT]
AT_EXIT += [
    (
        "    torch.manual_seed(0)\n",
        "    atexit.register(dist.destroy_process_group)\n    torch.manual_seed(0)\n",
    )
]
CHOSEN = 'os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]'
OWN_GPU = [("import gzip\n", f"import os\n\n{CHOSEN}\nimport gzip\n")]
OWN_GPU += [('"cuda", local_rank', '"cuda"'), ("        " + SET + "\n", ""), (IDS, "")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("replacements", [AT_EXIT, OWN_GPU], ids=["atexit", "own GPU"])
def test_a_port_may_leave_its_group_at_exit_and_see_only_its_own_gpu(
    replacements, tmp_path, capsys
):
    (tmp_path / "port.py").write_text(changed(*replacements))
    said = said_of(checks.port, lambda: tmp_path / "port.py", capsys)
    assert said.startswith("right: two ranks"), said


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("replacements", "question"),
    [
        ([("sampler.set_epoch(epoch)", "pass")], "Who tells it the epoch"),
        ([("BATCH_SIZE // dist.get_world_size()", "BATCH_SIZE")], "optimizer's batch"),
        ([("sampler=sampler", "sampler=sampler, drop_last=True")], "less than a batch"),
        ([('"model.pt")', '"../model.pt")')], "In which folder"),
        ([("    if torch.cuda.is_available():\n", "    if True:\n")], "Which lines are only for"),
        ([("sampler=sampler", "shuffle=True")], "Whose digits does the loader of rank 1 take"),
        ([("lr=LEARNING_RATE", "lr=2 * LEARNING_RATE")], "Has a rate, a loss or a gradient"),
        ([(IDS, ", device_ids=[local_rank]")], "Here is no GPU"),
        ([MOVED, (IDS + ")", IDS + ").to(device)")], "DDP copies those of rank 0"),
        ([("        if dist.get_rank() == 0:\n            print", "        print")], "each line"),
        ([(f"        {SAVE}", f"    {SAVE}")], "two write one file"),
        (AT_EACH_EPOCH, "How often does the plain loop save"),
        (RANK_0_ALONE, "between its last backward"),
        ([("model.module.state_dict()", "model.state_dict()")], "the wrapper's"),
        ([("model = DDP(m", "_ = DDP(m"), ("model.module", "model")], "What keeps their weights"),
        ([("dist.get_rank() == 0", "local_rank == 0")], "These are two machines"),
        (
            [(SAMPLER, f"{SAMPLER[:-1]}, num_replicas=local_size, rank=local_rank)"), LOCAL_SIZE],
            "Whose digits does the loader of rank 1 take",
        ),
        ([("autoencoder().to(device)", "autoencoder()")], "On which device are its weights"),
        ([("digits = digits.to(device)\n", "pass\n"), KEPT], "On which device are they"),
        (
            [("BATCH_SIZE // dist.get_world_size()", "BATCH_SIZE // local_size"), LOCAL_SIZE],
            "batch",
        ),
        ([("pixels[:-HELD_OUT]", "pixels")], "Which digits does the plain loop train on"),
        ([BARRIER], "Where is the other|each rank do last"),
    ],
    ids=str,
)
def test_a_port_with_a_fault_gets_a_question_that_leads_on(
    replacements, question, tmp_path, capsys
):
    (tmp_path / "port.py").write_text(changed(*replacements))
    said = said_of(checks.port, lambda: tmp_path / "port.py", capsys)
    assert said.count("not yet") == 1 and "right:" not in said and re.search(question, said), said


VAGUE = [(SET, "pass"), ('"cuda", local_rank', '"cuda"'), (IDS, "")]
DEVICE = 'device = torch.device("cuda", local_rank)'
LATER_BARRIER = ("    for epoch in", "    dist.barrier()\n    for epoch in")
NCCL = '"nccl")'
SETUP = 'def choose():\n    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n\n\n'
BOTH = 'rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])'
DOC = '"""Train an autoencoder on handwritten digits, on as many ranks as torchrun starts.'
LATE = ("    optimizer =", "    torch.cuda.set_device(local_rank)\n    optimizer =")
HELPER = 'def numbers():\n    return int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])\n\n\n'


@pytest.mark.parametrize(
    "replacements",
    [
        [(LOCAL, BOTH), (SET, SET.replace("device)", "local_rank)")), (IDS, "")],
        [(LOCAL, LOCAL.replace(" =", ": int ="))],
        [(SET, "pass")],
        [(SET, "pass"), ('torch.device("cuda", local_rank)', 'f"cuda:{local_rank}"')],
        [(LOCAL, "rank, local_rank = numbers()"), ("def main", HELPER + "def main")],
        [(LOCAL, "local_rank = dist.get_node_local_rank()")],
        [(LOCAL, LOCAL.replace('"LOCAL_RANK"]', '"RANK"]') + " % torch.cuda.device_count()")],
        [('torch.device("cuda", local_rank)', 'f"cuda:{local_rank}"')],
        [(SET, "pass"), (NCCL, '"nccl", device_id=device)')],
        [(SET, "torch.accelerator.set_device_index(local_rank)")],
        [
            (SET, SET.replace("device)", "local_rank)")),
            ('"cuda", local_rank', '"cuda"'),
            (IDS, ""),
        ],
        [("def main", SETUP + "def main"), (SET, "choose()")],
        OWN_GPU,
        [*OWN_GPU, (NCCL, NCCL + "\n        torch.cuda.set_device(0)")],
    ],
)
def test_lines_for_gpus_may_be_written_in_several_ways(replacements):
    checks.check_text(changed(*replacements))


@pytest.mark.parametrize(
    ("replacements", "said"),
    [
        ([(SET, "pass"), LATER_BARRIER], "Which GPU does this call use"),
        ([(SET, "pass"), ("(device)", "(0)"), (IDS, "")], "All"),
        ([(DEVICE, 'device = torch.device("cpu")'), (IDS, ""), (SET, "pass")], "Where are yours"),
        ([("import gzip\n", "import gzip\nfrom ddp_common import rank\n")], "PyTorch alone"),
        (
            [(LOCAL, "pass"), ('"cuda", local_rank', '"cuda"'), (IDS, ""), (SET, "pass")],
            "'cuda' as long as",
        ),
        ([(SET, 'torch.cuda.set_device(torch.device("cuda"))')], "without a number"),
        ([(SET, 'torch.cuda.set_device("cuda")')], "without a number"),
        ([*VAGUE, (DOC, DOC + " torch.cuda.set_device(local_rank)")], "'cuda' as long as"),
        ([(DOC, DOC + " nccl"), ('"nccl"', '"gloo"')], "nccl where there are GPUs"),
        ([*VAGUE, ("def main", SETUP + "def main")], "'cuda' as long as"),
        ([('"cuda", local_rank', '"cuda"'), (SET, "pass"), (IDS, ""), LATE], "'cuda' as long as"),
        (
            [("def main", 'VISIBLE = os.environ["CUDA_VISIBLE_DEVICES"] = "0"\n\n\ndef main')],
            "All",
        ),
        ([("LOCAL_RANK", "RANK")], "Rank 5 is the second"),
        ([(SET, "torch.cuda.set_device(0)")], "All ranks run this line"),
        (
            [('"cuda", local_rank', '"cuda:0"'), (SET, SET.replace("device)", "local_rank)"))],
            "All",
        ),
        ([("[local_rank]", "[dist.get_rank()]")], "Rank 5 is the second"),
        ([('"nccl"', '"gloo"')], "nccl where there are GPUs"),
    ],
)
def test_a_script_with_wrong_lines_for_gpus_is_refused(replacements, said):
    with pytest.raises(checks.Wrong, match=said):
        checks.check_text(changed(*replacements))


# What is typed in a terminal

LESSON = "\n".join(
    cell.source
    for cell in jupytext.read(ROOT / "tutorials" / "mnist.py").cells
    if cell.cell_type == "markdown"
)
PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])


def typed(begins):
    """The lines of the lesson's text that a student types, from the one that begins so."""
    block = LESSON[LESSON.index(begins) :].split("\n\n")[0]
    return re.sub(r"(?m)^ +", "", block)


@pytest.fixture
def my_work(tmp_path):
    """A copy of the repository's parts that are typed about, as JupyterLab would show them."""
    for name in ("tutorials/scripts", "data/mnist"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "tutorials" / "my-work").mkdir()
    return tmp_path / "tutorials" / "my-work"


def shell(lines, my_work, **variables):
    """A terminal in which these lines are typed."""
    root = str(my_work.parent)
    return subprocess.Popen(
        ["bash", "-ec", lines],
        cwd=root,
        env={**os.environ, "PATH": PATH, "JUPYTER_SERVER_ROOT": root, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(300)
def test_a_script_that_torchrun_starts_unchanged_trains_twice_and_the_port_once(my_work):
    start = typed('cd "$JUPYTER_SERVER_ROOT/my-work"')
    printed, errors = shell(start, my_work).communicate()
    # the ranks share the pipe: a line's end may come late
    lines = re.findall(r"(?:epoch \d|held out): loss \d\.\d{4}", printed)
    assert len(lines) == 2 * 4 and len(set(lines)) == 4, printed + errors
    assert "scripts/plain_loop.py" in start
    solved = start.replace("scripts/plain_loop.py", "scripts/solutions/plain_loop.py")
    printed, errors = shell(solved, my_work).communicate()
    assert len(printed.splitlines()) == 4, printed + errors


@pytest.mark.timeout(300)
def test_the_command_for_two_machines_trains_one_model(my_work):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{free.getsockname()[1]}"
    start = typed("torchrun --nnodes 2")
    assert "first-host:29400" in start and "--nproc-per-node 4" in start
    start = start.replace("first-host:29400", meet).replace("node 4", "node 1")
    (my_work / "my_port.py").write_text(SOLUTION)
    digits = my_work.parents[1] / "data" / "mnist" / "digits-images-idx3-ubyte.gz"
    machines = [shell("cd my-work\n" + start, my_work, DIGITS=str(digits)) for _ in range(2)]
    said = [machine.communicate() for machine in machines]
    assert sorted(len(printed.splitlines()) for printed, _ in said) == [0, 4], said
    assert torch.load(my_work / "model.pt", weights_only=True)


def test_the_table_of_the_batch_job_is_true_to_its_file():
    job = (ROOT / "clusters" / "batch" / "mnist.sbatch").read_text()
    lines = [line for line in job.splitlines() if re.match(r"#SBATCH|[^#]", line)]
    table = LESSON[LESSON.index("| in the job |") :].split("\n\n")[0]
    named = re.findall(r"`([^`]+)`", " ".join(row.split("|")[1] for row in table.splitlines()))
    assert len(named) == 8
    for word in named:
        assert any(word in line for line in lines), f"{word} is not in mnist.sbatch"


# The prediction


@pytest.mark.parametrize(
    ("meant", "spellings"),
    [
        (
            "'same'. Right",
            ["same", "Same", " SAME.", "the same", "equal", "Identical", 1, "as far: same"],
        ),
        ("'half'", ["half", "Half", "halved", "half as far", 0.5, "1/2"]),
        ("'double'", ["double", "DOUBLE", "twice as far", 2]),
        ("is that half, double", ["not the same", "half or double", "", "none", "twelve"]),
        ("no prediction", [None]),
    ],
)
def test_a_prediction_is_read_in_any_spelling(meant, spellings):
    for said in spellings:
        assert meant in checks.prediction(said), said


# Digits of one's own


def write_idx(path, array):
    sizes = b"".join(length.to_bytes(4) for length in array.shape)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()))


@pytest.mark.parametrize(
    ("parts", "read"),
    [({"digits": 50}, [45, 45, 5, 5]), ({"train": 30, "t10k": 20}, [30, 30, 20, 20])],
)
def test_digits_of_ones_own_come_with_a_test_set_or_a_tenth_is_held_out(tmp_path, parts, read):
    for part, count in parts.items():
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", np.zeros((count, 28, 28), np.uint8))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8))
    assert [len(tensor) for tensor in read_digits(tmp_path)] == read


def test_digits_without_a_label_each_are_refused(tmp_path):
    write_idx(tmp_path / "digits-images-idx3-ubyte.gz", np.zeros((5, 28, 28), np.uint8))
    write_idx(tmp_path / "digits-labels-idx1-ubyte.gz", np.zeros(4, np.uint8))
    with pytest.raises(ddp.Error, match="not digits of 28 x 28 with one label each"):
        read_digits(tmp_path)
