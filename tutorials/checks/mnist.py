"""The checks of `mnist`: gradients averaged by hand, and a training loop ported to torchrun."""

import ast
import gzip
import re
import runpy
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ddp_common as ddp
from tutorials.checks.common import ScriptRun, Wrong, run_script

PLAIN = Path(__file__).parents[1] / "scripts" / "plain_loop.py"
RANKS = 2
SAMPLES = 1_088  # even: no rank repeats a digit; the last batch of an epoch is half a batch
TIMEOUT = 120.0  # seconds for the script
ROUNDING = 2e-3  # of a weight; where a ReLU tips over it is up to 6e-4, and a step moves 3e-3
CHOOSE_FOR_ALL = ("set_device", "set_device_index")  # functions: 'cuda' is now that GPU
VISIBLE = "CUDA_VISIBLE_DEVICES"
# words that name no GPU in particular
NO_GPU = {"torch", "device", "cuda", "cpu", "str", "int", "current_device"}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
OF_MACHINE = "LOCAL_RANK|local_rank|device_count"  # a rank's number on its own machine
OTHER_MACHINE = "Rank 5 is the second rank on the second machine. Which GPU is its own?"
TWO_MACHINES = "(These are two machines: both ranks have LOCAL_RANK 0.)"
USES_CURRENT_GPU = {  # with NCCL they use the GPU that set_device has chosen
    "barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
}
OF_A_PEER = ("gloo", "onnection", "imed out", "timeout")  # said on a rank that has lost another
QUESTIONS = {  # by a word of the error
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
    """Call `answer(model)` on two ranks, then on one: each gradient must be the mean of all."""
    for ranks in (RANKS, 1):
        seen = ddp.launch(
            client, averaged, answer=answer, workers=ranks, directory=False, stall_timeout=15
        ).result
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
    return "each rank holds the mean of all ranks' gradients, for two ranks and for one"


def averaged(answer):
    """On each rank: for all ranks the gradient before and after, and whether the weights stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).to(ddp.device())
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
    plain = runpy.run_path(str(PLAIN))
    total = SAMPLES + plain["HELD_OUT"]
    pixels = torch.randint(256, (total, 784), dtype=torch.uint8)
    pixels *= torch.rand(pixels.shape) < 0.2  # as much ink as in digits, for steps as stable
    with tempfile.TemporaryDirectory() as folder:
        digits = Path(folder) / "digits-images-idx3-ubyte.gz"
        header = b"\0\0\x08\x03" + b"".join(size.to_bytes(4) for size in (total, 28, 28))
        digits.write_bytes(gzip.compress(header + pixels.numpy().tobytes(), 1))
        run = run_script(Path(path), str(digits), ranks=RANKS, timeout=TIMEOUT, apart=True)
    ranks = records_of(run)
    check_model(ranks)
    pixels, held_out = pixels[:SAMPLES], pixels[SAMPLES:]
    steps = steps_of(ranks, pixels)
    check_batches(steps, plain["BATCH_SIZE"], plain["EPOCHS"])
    check_rank_0(ranks)
    check_held_out(ranks, held_out)
    check_weights(ranks, steps, pixels, plain, run.folder / "model.pt")
    text = Path(path).read_text(encoding="utf-8")
    check_text(text)
    check_moves(text, ranks[0]["moves"])
    return (
        "two ranks, one training\n"
        "  each epoch deals every digit once, in a new order\n"
        "  the replicas are equal; one process gets the same weights, up to rounding\n"
        "  rank 0 alone prints, and saves the plain model once\n"
        "  so it is on two machines with one rank each; its lines for GPUs were read, not tried"
    )


def records_of(run: ScriptRun) -> list[dict]:
    """What each rank did (see `as_rank.Seen`), if all have ended without an error."""
    files = [run.folder.parent / f"rank-{rank}.pt" for rank in range(RANKS)]
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
        if seen["moved_late"]:
            question = "Where are the weights when DDP copies those of rank 0?"
            raise Wrong("DDP(model), then .to(device)", "the other order", question)
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
    if saves != [1, 0]:
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


def check_weights(ranks, steps, pixels: torch.Tensor, plain: dict, file: Path) -> None:
    """The replicas are equal, and one process saves the same after the same batches."""
    mine, other = (seen["final"] for seen in ranks)
    if not all(torch.equal(mine[name].nan_to_num(), other[name].nan_to_num()) for name in mine):
        question = "What changes weights or gradients after DDP has averaged them?"
        raise Wrong("the replicas differ in the end", "equal, bit for bit", question)
    if not file.is_file():
        question = "In which folder does the plain loop save?"
        raise Wrong("no model.pt in the current folder", "one", question)
    alone, loaded = plain["autoencoder"](), plain["autoencoder"]()
    try:
        loaded.load_state_dict(torch.load(file, weights_only=True))
        alone.load_state_dict(ranks[0]["initial"])
    except Exception as error:  # a whole model, other names, another model
        question = "Whose state_dict() did you save, the wrapper's or that of the model inside?"
        yours = f"loading model.pt raises {type(error).__name__}: {str(error)[:200]}"
        raise Wrong(yours, "weights that the plain model can load", question) from None
    optimizer = torch.optim.SGD(alone.parameters(), lr=plain["LEARNING_RATE"])
    for shares in steps:
        batch = pixels[[index for share in shares for index in share]].float() / 255
        optimizer.zero_grad()
        F.mse_loss(alone(batch), batch).backward()
        optimizer.step()
    pairs = zip(alone.parameters(), loaded.parameters())
    off = max((expected - saved).abs().max().item() for expected, saved in pairs)
    if not off < ROUNDING:
        yours = f"a saved weight differs by {off:.1g} from that of one process"
        question = "Has a rate, a loss or a gradient changed? Is the file written at the end?"
        raise Wrong(yours, f"less than {ROUNDING:g}", question)


def check_text(text: str) -> None:
    """Refuse ddp_common and what is surely wrong on GPUs. What is not told is accepted."""
    tree = ast.parse(text)
    for line in ast.walk(tree):
        is_import = isinstance(line, (ast.Import, ast.ImportFrom))
        if is_import and re.search("ddp_common|dask_ranks", ast.unparse(line)):
            question = "Which line of section 9 does the same?"
            raise Wrong(f"line {line.lineno}: {ast.unparse(line)}", "PyTorch alone", question)
    steps, values = steps_in_order(tree), values_of_names(tree)
    words = set().union(*(origins(step, values) for step in steps))
    if "gloo" in words and not any("nccl" in word for word in words):
        raise Wrong("only gloo", "nccl where there are GPUs", "Which backend moves GPU tensors?")
    own_gpu_alone = False  # this rank sees no GPU but its own: that is number 0
    chosen = explicit = False  # set_device was called; a GPU is named in each move
    on_cpu, on_gpu = [], []  # moves
    for step in steps:
        name, gpus, chooses = gpus_of(step)
        origin = set().union(*(origins(gpu, values) for gpu in gpus))
        of_machine = any(re.search(OF_MACHINE, word) for word in origin)
        names = {word for word in origin - NO_GPU if not re.fullmatch(r"(cuda:)?\d+", word)}
        yours, expected = f"line {step.lineno}: {ast.unparse(step)}", "a number from LOCAL_RANK"
        if origin & {"RANK", "get_rank"} and not of_machine:
            raise Wrong(yours, expected, OTHER_MACHINE)
        if any(re.fullmatch(r"(cuda:)?\d+", word) for word in origin) and not names:
            if not own_gpu_alone:
                raise Wrong(yours, expected, "All ranks run this line. Which GPU does each take?")
        elif chooses and not names:
            raise Wrong(yours, expected, "'cuda' without a number: which GPU is that?")
        if name in ("to", "cuda") and not names and (not gpus or "cuda" in origin) and not chosen:
            question = "Which GPU is 'cuda' as long as the rank has not chosen its own?"
            raise Wrong(yours, "set_device before it", question)
        if name in USES_CURRENT_GPU and not gpus and not chosen:
            question = "Which GPU does this call use, as long as the rank has not chosen its own?"
            raise Wrong(yours, "set_device before it", question)
        if name in ("to", "cuda"):
            explicit = explicit or of_machine
            is_cpu = "cpu" in origin and origin <= {"torch", "device", "cpu"}
            (on_cpu if is_cpu else on_gpu).append(yours)
        chosen = chosen or chooses
        own_gpu_alone = own_gpu_alone or name == VISIBLE
    if on_cpu and not on_gpu and any("nccl" in word for word in words):
        question = "NCCL averages gradients that are on GPUs. Where are yours?"
        raise Wrong(on_cpu[0], "the rank's GPU, where there is one", question)
    if not any(re.search(OF_MACHINE, word) for word in words):
        raise Wrong("LOCAL_RANK is never read", "it chooses the GPU", OTHER_MACHINE)
    if not chosen and not explicit:
        question = "A machine has two GPUs. Which of your lines keeps rank 1 off the first?"
        raise Wrong("set_device is never called", "set_device, with local_rank", question)


def check_moves(text: str, moves: set[tuple[int, str]]) -> None:
    """Refuse a script that leaves its model or its digits on the CPU.

    `moves` is what was seen here; of moves that only GPUs see, the text tells.
    """
    tree = ast.parse(text)
    values, moved = values_of_names(tree), {kind for _, kind in moves}
    seen = {line for line, _ in moves}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).split(".")[-1]
        if name == "set_default_device":
            moved |= {"model", "tensor"}
        elif any(keyword.arg == "device" for keyword in call.keywords):
            moved.add("tensor")
        elif name in ("to", "cuda") and not seen & set(range(call.lineno, call.end_lineno + 1)):
            is_model = isinstance(call.func, ast.Attribute) and origins(
                call.func.value, values
            ) & {"autoencoder", "model", "DDP", "DistributedDataParallel"}
            moved.add("model" if is_model else "tensor")
    for block in (node for node in ast.walk(tree) if isinstance(node, ast.With)):
        if any("device" in ast.unparse(item.context_expr) for item in block.items):
            moved.add("model")
    if "model" not in moved:
        question = "On which device are its weights, where there is a GPU?"
        raise Wrong("the model is never moved", ".to(device) before DDP", question)
    if "tensor" not in moved:
        question = "On which device are they when the loss compares them with the model's output?"
        raise Wrong("the digits are never moved", ".to(device) in each step", question)


def gpus_of(step: ast.Call | ast.Assign) -> tuple[str, list[ast.expr], bool]:
    """The name of what is called, the arguments that name a GPU, and whether it chooses one.

    A choice holds for all that follows: `set_device`, `init_process_group(device_id=…)`, or
    `os.environ["CUDA_VISIBLE_DEVICES"] = …`.
    """
    if isinstance(step, ast.Assign):
        return VISIBLE, [step.value], True
    name = ast.unparse(step.func).split(".")[-1]
    gpus = [word.value for word in step.keywords if word.arg in ("device_ids", "device_id")]
    chooses = name in CHOOSE_FOR_ALL or ast.unparse(step.func).endswith("cuda.device")
    chooses = chooses or (name == "init_process_group" and bool(gpus))
    if chooses and not gpus:
        gpus = [*step.args, *(word.value for word in step.keywords)]
    elif name in ("device", "to"):
        gpus += [*step.args, *(word.value for word in step.keywords if word.arg == "device")]
    elif name == "cuda":
        gpus += step.args
    return name, gpus, chooses


def steps_in_order(tree: ast.Module) -> list[ast.Call | ast.Assign]:
    """Calls, and assignments to CUDA_VISIBLE_DEVICES, about in the order in which they run.

    A function's own are where it is first named outside of its definition. Of a function that is
    never named nothing runs.
    """
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, DEFINITIONS)}
    entered, steps = set(), []

    def visit(node):
        if isinstance(node, DEFINITIONS):
            return
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Call):  # arguments come first
            parts = [*node.args, *node.keywords, node.func]
        for part in parts:
            visit(part)
        name = getattr(node, "id", getattr(node, "attr", None))
        if isinstance(node, (ast.Name, ast.Attribute)) and name in functions.keys() - entered:
            entered.add(name)
            body = functions[name].body
            if isinstance(functions[name], ast.ClassDef):
                methods = [each for each in body if isinstance(each, ast.FunctionDef)]
                body = [line for each in methods if each.name == "__init__" for line in each.body]
            for line in body:
                visit(line)
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Call) or any(VISIBLE in ast.unparse(each) for each in targets):
            steps.append(node)

    for line in tree.body:
        visit(line)
    return steps


def values_of_names(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """What each name gets. Of several names at once, only if each has a value of its own."""
    values = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names = getattr(target, "elts", [target])
            parts = getattr(node.value, "elts", []) if len(names) > 1 else [node.value]
            for name, part in zip(names, parts):
                values[ast.unparse(name)].append(part)
    return values


def origins(node: ast.AST, values: dict[str, list], known: frozenset = frozenset()) -> set[str]:
    """All names, strings and numbers that a value is made from; a known name's are its own."""
    if isinstance(node, (ast.Name, ast.Attribute)) and (name := ast.unparse(node)) not in known:
        if name in values:
            return set().union(*(origins(each, values, known | {name}) for each in values[name]))
    if isinstance(node, ast.IfExp):  # either may be, whatever is asked
        return origins(node.body, values, known) | origins(node.orelse, values, known)
    fields = [getattr(node, field, None) for field in ("id", "attr", "value")]
    own = {str(each) for each in fields if isinstance(each, (str, int))}
    return own.union(*(origins(part, values, known) for part in ast.iter_child_nodes(node)))
