"""The checks of `mnist`: gradients averaged by hand, and a training loop ported to torchrun."""

import ast
import gzip
import re
import runpy
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ddp_common as ddp
from tutorials.checks.common import ScriptRun, Wrong, enough_workers, run_script

PLAIN = Path(__file__).parents[1] / "scripts" / "plain_loop.py"
SOLUTION = PLAIN.parent / "solutions" / PLAIN.name
RANKS = 2
SAMPLES = 1_088  # even: no rank repeats a digit; the last batch of an epoch is half a batch
TIMEOUT = 120.0  # seconds for the script
ROUNDING = 1e-3  # of a weight; where a ReLU tips over it is up to 6e-4; a rate of 16 makes 2e-3
OTHER_MACHINE = "Rank 5 is the second rank on the second machine. Which GPU is its own?"
TWO_MACHINES = "(These are two machines: both ranks have LOCAL_RANK 0.)"
OF_A_PEER = ("gloo", "onnection", "imed out", "timeout")  # said on a rank that has lost another
QUESTIONS = {  # by a word of the error
    "invalid device ordinal": f"Each machine has two GPUs here. {OTHER_MACHINE}",
    "same device": "Each tensor that meets the model must be moved, too. Which one is not?",
    "no backend type": "NCCL averages tensors that are on GPUs. Where are yours?",
    "specified index": "'cuda' without a number: which GPU is that?",
    "and the module is on": f"On which GPU is the model? {OTHER_MACHINE}",
    "process group has not": "What must every process do before it can talk to the others?",
    "shuffle": "Who shuffles now, the loader or its sampler?",
    "device_ids": "Here is no GPU. What must device_ids be for a model on the CPU?",
    "cuda": "Here is no GPU. Which lines are only for machines that have one?",
    "": "Which of your changes does this line need?",
}


# The prediction

MEANINGS = {
    "half": {"half", "halve", "halved", "0.5", ".5", "1/2"},
    "double": {"double", "doubled", "twice", "2", "2.0", "2x"},
    "same": {"same", "equal", "equally", "identical", "1", "1.0", "1x"},
}
REPLIES = {
    "half": "you predicted 'half'. Not right: it is the same. Each rank saw half of the digits, "
    "but a mean over 64 is as large as a mean over 128",
    "double": "you predicted 'double'. Not right: it is the same. There were two gradients, and "
    "their sum is divided by two",
    "same": "you predicted 'same'. Right: a mean of two means, each over 64 digits, is the mean "
    "over 128",
}


def prediction(said: object) -> str:
    """What is to be said of a prediction, whatever its words and their spelling."""
    if said is None:
        return "you have made no prediction: section 5"
    words = set(re.findall(r"[a-z0-9./]*[a-z0-9]", str(said).lower()))
    meant = [meaning for meaning, its_words in MEANINGS.items() if words & its_words]
    if len(meant) != 1 or words & {"not", "no", "never"}:
        return f"you predicted {said!r:.60}: is that half, double or the same?"
    return REPLIES[meant[0]]


# Gradients averaged by hand

ACCEPTED = []  # answers that were right, functions


def averaging(client, answer):
    """Call `answer(model)` on 2, 1 and 3 ranks: each gradient must be the mean of all."""
    model = runpy.run_path(str(PLAIN))["autoencoder"]()
    given = {"answer": answer, "model": model, "directory": False, "stall_timeout": 15}
    for ranks in (RANKS, 1, 3):
        with enough_workers(client, ranks):
            seen = ddp.launch(client, averaged, workers=ranks, **given).result
        mean = torch.stack([before for before, _, _ in seen]).mean(0)
        for rank, (before, after, weights_stay) in enumerate(seen):
            where = f"on rank {rank} of {ranks}" if ranks > 1 else "on a single rank"
            if not weights_stay:
                question = "Which tensor of a parameter holds its gradient?"
                raise Wrong(f"{where} the weights have changed", "only the gradients do", question)
            if after is None:
                question = "Where does the optimizer look for it?"
                raise Wrong(f"{where} a parameter has no .grad", "a gradient for each", question)
            if not torch.allclose(after, mean, rtol=1e-4, atol=1e-6):
                raise Wrong(*told_of_gradient(where, before, after, mean, ranks))
    ACCEPTED.append(answer)
    return "each rank holds the mean of all ranks' gradients, for one, two and three ranks"


def averaged(answer, model):
    """On each rank: for all ranks the gradient before and after, and whether the weights stay."""
    model = model.to(ddp.device())
    torch.manual_seed(1 + dist.get_rank())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    weights, before = flat(model.parameters()), flat(each.grad for each in model.parameters())
    answer(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    after = None if any(each is None for each in gradients) else flat(gradients)
    seen = [None] * dist.get_world_size()
    stay = torch.equal(weights, flat(model.parameters()))
    dist.all_gather_object(seen, (before, after, stay))
    return seen


def flat(tensors):
    return torch.cat([each.detach().flatten().cpu().float() for each in tensors])


def told_of_gradient(where, before, after, mean, ranks):
    """What is wrong with a gradient: yours, expected, a question."""
    expected = "the mean over all ranks"
    if ranks == 1:
        question = "How many ranks are there? Does your function ask?"
        return f"{where} the gradient changes", "it stays: it is the mean of one", question
    if torch.allclose(after, before):
        question = "What does all_reduce change, and is that the gradient itself? On each rank?"
        return f"{where} the gradient is that rank's own, as before", expected, question
    if torch.allclose(after, ranks * mean, rtol=1e-4, atol=1e-6):
        question = "A mean is a sum, divided by what?"
        return f"{where} the gradient is the sum over the ranks", expected, question
    if torch.allclose(after, before / ranks, rtol=1e-4, atol=1e-6):
        question = "You have divided. Where are the other ranks' gradients added?"
        return f"{where} the gradient is that rank's own, divided by {ranks}", expected, question
    if torch.allclose(after, mean / ranks, rtol=1e-4, atol=1e-6):
        question = "How often is it divided?"
        return f"{where} the gradient is the mean, divided by {ranks} again", expected, question
    question = "What is the gradient after each of your lines, on rank 0 and on rank 1?"
    return f"{where} another gradient", expected, question


def yours_or_ours(answer):
    """The student's function if the check has found it right, else one that is."""
    if any(answer is accepted for accepted in ACCEPTED):
        print("The lesson goes on with your function.")
        return answer

    def average_gradients(model):  # defined here, it reaches the ranks by value
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    print("The lesson goes on with a function of ours, until yours is right.")
    return average_gradients


# A port of scripts/plain_loop.py


def port(answer):
    """Run the script that `answer()` names on two ranks, and compare with one process."""
    path = answer()
    if not (isinstance(path, (str, Path)) and Path(path).is_file()):
        raise Wrong(f"{path!r:.80}", "the path of a file", "Where have you saved your script?")
    if Path(path).resolve() == SOLUTION:
        raise Wrong("the solution itself", "a file of your own", "What have you changed in it?")
    check_imports(Path(path).read_text(encoding="utf-8"))
    plain = runpy.run_path(str(PLAIN))
    pixels = ink(SAMPLES, plain["HELD_OUT"])
    with tempfile.TemporaryDirectory() as folder:
        digits = Path(folder) / "digits-images-idx3-ubyte.gz"
        header = b"\0\0\x08\x03" + b"".join(size.to_bytes(4) for size in (len(pixels), 28, 28))
        digits.write_bytes(gzip.compress(header + pixels.numpy().tobytes(), 1))
        given = {"timeout": TIMEOUT}
        run = run_script(Path(path), str(digits), ranks=RANKS, on_each=1, **given)
        ranks, steps, model = judged(run, plain, pixels)
        check_held_out(ranks, pixels[SAMPLES:])
        check_printed(run.printed[0], loss_of(model, pixels[SAMPLES:]), plain["EPOCHS"] + 1)
        check_weights(ranks, steps, pixels, plain, model)
        run = run_script(Path(path), str(digits), ranks=2 * RANKS, on_each=2, gpus=True, **given)
        on_gpus = check_on_gpus(run, plain, pixels)
    return (
        "two ranks, one training\n"
        "  each epoch deals every digit once, in a new order\n"
        "  the replicas are equal; one process gets the same weights, up to rounding\n"
        "  rank 0 alone prints, and saves the plain model once; its held-out loss is printed\n"
        f"  so it is on two machines with one rank each; {on_gpus}"
    )


def ink(samples: int, held_out: int) -> torch.Tensor:
    """Digits at random, uint8 (n, 784), with as much ink as real ones, so that steps are stable.

    The first of those that are held out have more, the others less: no other loss is theirs.
    """
    dense = torch.full((samples + held_out, 1), 0.2)
    dense[samples:], dense[samples + held_out // 2 :] = 0.4, 0.1
    pixels = torch.randint(256, (samples + held_out, 784), dtype=torch.uint8)
    return pixels * (torch.rand(pixels.shape) < dense)


def loss_of(model: nn.Module, pixels: torch.Tensor) -> float:
    digits = pixels.float() / 255
    with torch.no_grad():
        return F.mse_loss(model(digits), digits).item()


def judged(run: ScriptRun, plain: dict, pixels: torch.Tensor) -> tuple[list, list, nn.Module]:
    """What each rank did, the digits of each step, and the saved model, if they are right."""
    ranks = records_of(run)
    check_model(ranks)
    steps = steps_of(ranks, pixels[:SAMPLES])
    check_batches(steps, plain["BATCH_SIZE"], plain["EPOCHS"])
    check_rank_0(ranks)
    return ranks, steps, loaded(run.folder / "model.pt", plain["autoencoder"]())


def check_on_gpus(run: ScriptRun, plain: dict, pixels: torch.Tensor) -> str:
    """Whether each rank uses its own GPU; returns what is to be said of that."""
    for rank in range(2 * RANKS):
        file = run.folder.parent / f"rank-{rank}.pt"
        error = torch.load(file)["error"] if file.exists() else ""
        if re.search("not compiled with CUDA|NVIDIA driver", error):
            return f"its lines for GPUs were not tried: {error.splitlines()[0][:100]}"
    ranks, _, _ = judged(run, plain, pixels)
    for rank, seen in enumerate(ranks):
        where = f"on machine {rank // 2}, which has two GPUs, local rank {rank % 2}"
        if not any("nccl" in each for each in seen["backends"]):
            question = "Which backend moves GPU tensors?"
            raise Wrong("only gloo", "nccl where there are GPUs", question)
        if len(seen["used"]) > 1:
            question = "Without a number, 'cuda' and barrier() mean the GPU of set_device. "
            question += "Has the rank chosen its own by then?"
            raise Wrong(f"{where} uses GPU 0 and GPU 1", "its own alone", question)
    for one, other in zip(ranks[::2], ranks[1::2]):
        if one["used"] & other["used"]:
            question = "All ranks run these lines. Which of them keeps rank 1 off the first?"
            yours = f"ranks 0 and 1 of one machine both use GPU {min(one['used'])}"
            raise Wrong(yours, "each the GPU of its LOCAL_RANK", question)
    return "so it is\n  with four ranks on two machines with two GPUs each, which were simulated"


def records_of(run: ScriptRun) -> list[dict]:
    """What each rank did (see `as_rank.Seen`), if all have ended without an error."""
    files = [run.folder.parent / f"rank-{rank}.pt" for rank in range(len(run.printed))]
    ranks = [torch.load(file) if file.exists() else None for file in files]
    errors = [(rank, seen) for rank, seen in enumerate(ranks) if seen and seen["error"]]
    own = [each for each in errors if not any(word in each[1]["error"] for word in OF_A_PEER)]
    for rank, seen in own:
        error = seen["error"].splitlines()[0][:300]
        question = next(QUESTIONS[word] for word in QUESTIONS if word in error.lower())
        raise Wrong(f"rank {rank}, {seen['line']}: {error}", "no error", question)
    if errors:
        places = ", ".join(f"rank {rank} in {seen['line']}" for rank, seen in errors)
        question = "Where is the other rank? Is a call that all must make under an `if`?"
        raise Wrong(f"a rank waits, or has lost the other: {places}", "no error", question)
    if not run.ok or None in ranks:
        yours = run.ended_because or f"torchrun ended with code {run.exit_code}"
        last = "".join(f"\n  {line[:160]}" for line in run.output.splitlines()[-6:])
        raise Wrong(yours, "no error", f"What did each rank do last?{last}")
    return ranks


def check_model(ranks: list[dict]) -> None:
    for rank, seen in enumerate(ranks):
        if not seen["calls"].get("init_process_group"):
            raise Wrong(
                f"rank {rank} joins no group", "all do", QUESTIONS["process group has not"]
            )
        if not seen["batches"]:
            question = "Two ranks see different digits. What keeps their weights equal?"
            raise Wrong("no DDP model is called", "one in each step", question)
        if not seen["calls"].get("destroy_process_group"):
            question = "What is the counterpart of init_process_group?"
            raise Wrong(f"rank {rank} never leaves its group", "the last line does", question)


def steps_of(ranks: list[dict], pixels: torch.Tensor) -> list[tuple]:
    """For each step what each rank took: a list of the digits' numbers in the file."""
    number = {row.numpy().tobytes(): index for index, row in enumerate(pixels)}
    taken = []
    for seen in ranks:
        batches = [(255 * batch).round().to(torch.uint8) for batch in seen["batches"]]
        taken.append([[number.get(row.numpy().tobytes()) for row in each] for each in batches])
    return list(zip(*taken))


def check_batches(steps: list[tuple], batch: int, epochs: int) -> None:
    """A step takes `batch` digits, an epoch all of them, and no two epochs deal alike."""
    full, in_epoch = SAMPLES // batch, -(-SAMPLES // batch)
    for shares in steps[:full]:
        if sum(map(len, shares)) != batch:
            yours = f"a step takes {' + '.join(str(len(share)) for share in shares)} digits"
            question = "batch_size is that of one rank. How large is the optimizer's batch?"
            raise Wrong(yours, f"{batch} of all ranks together", question)
    dealt = [steps[start : start + in_epoch] for start in range(0, len(steps), in_epoch)]
    if any(index is None for shares in steps for share in shares for index in share):
        question = "Which digits does the plain loop train on, and as which numbers?"
        raise Wrong("a step with other inputs", "digits that are not held out", question)
    for epoch, its_steps in enumerate(dealt):
        counts = Counter(index for shares in its_steps for share in shares for index in share)
        if len(counts) < SAMPLES:
            yours = f"in epoch {epoch}, {SAMPLES - len(counts)} digits are never taken"
            question = "Whose digits does the loader of rank 1 take? (Here both are local rank 0.)"
            if len(steps) == full * epochs:
                question = "What becomes of the last digits, which are less than a batch?"
            raise Wrong(yours, "each digit once, by one rank", question)
    if len(dealt) != epochs:
        question = "The ranks share each epoch. Why another number of epochs?"
        raise Wrong(f"{len(dealt)} epochs", f"{epochs}, as before", question)
    of_rank_0 = [[index for shares in its_steps for index in shares[0]] for its_steps in dealt]
    if len(set(map(tuple, of_rank_0))) < epochs:
        question = "The sampler shuffles from (seed, epoch). Who tells it the epoch?"
        if of_rank_0[0] == sorted(of_rank_0[0]):
            question = "The plain loop shuffles. Who does so in yours?"
        raise Wrong("two epochs deal the same batches", "a new order each time", question)


def check_rank_0(ranks: list[dict]) -> None:
    printing = [rank for rank, seen in enumerate(ranks) if seen["printed"]]
    if printing != [0]:
        yours = f"ranks that print: {printing or 'none'}"
        question = f"How often do you want to read each line? {TWO_MACHINES}"
        if not printing:
            question = "What does the plain loop print?"
        raise Wrong(yours, "rank 0 alone", question)
    saves = [seen["calls"].get("save", 0) for seen in ranks]
    if saves[0] != 1 or any(saves[1:]):
        yours = f"torch.save is called {saves[0]} times on rank 0, {saves[1]} times on rank 1"
        question = "All ranks hold the same weights. What if two write one file at once?"
        question += f" {TWO_MACHINES}"
        if saves[1] == 0:
            question = "How often does the plain loop save, and when?"
        raise Wrong(yours, "once, on rank 0", question)


def check_held_out(ranks: list[dict], held_out: torch.Tensor) -> None:
    """Each rank gives some of the held-out digits to a model."""
    rows = {row.numpy().tobytes() for row in held_out}
    for rank, seen in enumerate(ranks):
        if not seen["shown"] & rows:
            question = "What does each rank do between its last backward() and its end?"
            raise Wrong(f"rank {rank} computes no held-out loss", "all ranks do", question)


def check_printed(printed: str, expected: float, lines: int) -> None:
    """So many lines have a decimal number, and one number is the expected one, as rounded."""
    found = [re.findall(r"\d+\.\d+(?:e-?\d+)?", line) for line in printed.splitlines()]
    if sum(map(bool, found)) < lines:
        yours = f"rank 0 prints {sum(map(bool, found))} lines with a loss"
        raise Wrong(
            yours, "one for each epoch, and one in the end", "What does the plain loop print?"
        )
    for text in sum(found, []):
        mantissa, _, exponent = text.partition("e")
        last_place = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        if abs(float(text) - expected) < 0.6 * last_place + 1e-6:
            return
    question = "Of which model, on which digits, is the last loss that you print?"
    raise Wrong(
        f"no printed number is {expected:.4f}", "the saved model's held-out loss", question
    )


def loaded(file: Path, model: nn.Module) -> nn.Module:
    """The plain model with the weights that were saved."""
    if not file.is_file():
        question = "In which folder does the plain loop save?"
        raise Wrong("no model.pt in the current folder", "one", question)
    try:
        model.load_state_dict(torch.load(file, weights_only=True))
    except Exception as error:  # a whole model, other names, another model
        question = "Whose state_dict() did you save, the wrapper's or that of the model inside?"
        yours = f"loading model.pt raises {type(error).__name__}: {str(error)[:200]}"
        raise Wrong(yours, "weights that the plain model can load", question) from None
    return model


def check_weights(ranks, steps, pixels: torch.Tensor, plain: dict, saved: nn.Module) -> None:
    """The replicas are equal, and one process ends with the same after the same batches."""
    mine, other = (seen["final"] for seen in ranks)
    if not all(torch.equal(mine[name].nan_to_num(), other[name].nan_to_num()) for name in mine):
        question = "What changes weights or gradients after DDP has averaged them?"
        raise Wrong("the replicas differ in the end", "equal, bit for bit", question)
    alone = plain["autoencoder"]()
    alone.load_state_dict(ranks[0]["initial"])
    optimizer = torch.optim.SGD(alone.parameters(), lr=plain["LEARNING_RATE"])
    for shares in steps:
        batch = pixels[[index for share in shares for index in share]].float() / 255
        optimizer.zero_grad()
        F.mse_loss(alone(batch), batch).backward()
        optimizer.step()
    pairs = zip(alone.parameters(), saved.parameters())
    off = max((expected - mine).abs().max().item() for expected, mine in pairs)
    if not off < ROUNDING:
        yours = f"a saved weight differs by {off:.1g} from that of one process"
        question = "Has a rate, a loss or a gradient changed? Is the file written at the end?"
        raise Wrong(yours, f"less than {ROUNDING:g}", question)


def check_imports(text: str) -> None:
    """Refuse the course's own packages."""
    for line in ast.walk(ast.parse(text)):
        is_import = isinstance(line, (ast.Import, ast.ImportFrom))
        if is_import and re.search("ddp_common|dask_ranks", ast.unparse(line)):
            question = "Which line of section 9 does the same?"
            raise Wrong(f"line {line.lineno}: {ast.unparse(line)}", "PyTorch alone", question)
