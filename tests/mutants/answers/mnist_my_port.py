"""Answers to exercise B of `mnist`: ports of a script, each a change of the solution's."""

SAMPLER = "DistributedSampler(data, shuffle=True)"
SHARE = "torch.utils.data.Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))"
SAVE = 'torch.save(model.module.state_dict(), "model.pt")'
LOCAL = 'local_rank = int(os.environ["LOCAL_RANK"])'
IDS = ', device_ids=[local_rank] if device.type == "cuda" else None'
SET = "torch.cuda.set_device(device)"
DEVICE = 'device = torch.device("cuda", local_rank)'
MOVED = ("model = autoencoder().to(device)", "model = autoencoder()")
BARRIER = ("loss.backward()", "(dist.barrier() if dist.get_rank() else None, loss.backward())")
LOCAL_SIZE = (LOCAL, LOCAL + '\n    local_size = int(os.environ["LOCAL_WORLD_SIZE"])')
KEPT = ("        held_out = held_out.to(device)\n", "")
LOGGING = [
    ("import sys\n", "import logging\nimport sys\n\nlogging.basicConfig(level=logging.INFO)\n"),
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
    ("held_out = held_out.to(device)", "held_out = held_out.cuda() if CUDA else held_out"),
    ("def main", "CUDA = torch.cuda.is_available()\n\n\ndef main"),
]
EPOCH_ENDS = '            print(f"epoch {epoch}: loss {np.mean(losses):.4f}")\n'
HELD_OUT_LINE = '        print(f"held out: loss {loss:.4f}")\n'
AT_EACH_EPOCH = [(f"        {SAVE}\n", ""), (EPOCH_ENDS, f"{EPOCH_ENDS}            {SAVE}\n")]
RANK_0_ALONE = [("with torch.no_grad():", "if dist.get_rank() == 0:")]
IMPORT = ("import gzip\n", "import atexit\nimport gzip\n")
SEED = "    torch.manual_seed(0)\n"
AT_EXIT = [("    dist.destroy_process_group()\n", ""), IMPORT]
AT_EXIT += [(SEED, f"    atexit.register(dist.destroy_process_group)\n{SEED}")]
CHOSEN = 'os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]'
OWN_GPU = [("import gzip\n", f"import os\n\n{CHOSEN}\nimport gzip\n")]
OWN_GPU += [('"cuda", local_rank', '"cuda"'), ("        " + SET + "\n", ""), (IDS, "")]
BARE = ('"cuda", local_rank', '"cuda"')
VAGUE = [(SET, "pass"), BARE, (IDS, "")]
LATER_BARRIER = ("    for epoch in", "    dist.barrier()\n    for epoch in")
NCCL = '"nccl")'
SETUP = 'def choose():\n    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n\n\n'
HELPER = 'def numbers():\n    return int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])\n\n\n'
LATE = ("    optimizer =", "    torch.cuda.set_device(local_rank)\n    optimizer =")
OF_ALL = """    total = torch.tensor(0.0, device=device)
    mine = held_out[dist.get_rank() :: dist.get_world_size()].to(device)
    with torch.no_grad():
        total += F.mse_loss(model.module(mine), mine, reduction="sum")
    dist.all_reduce(total)
    loss = total / held_out.numel()
"""
EVALUATION = """    with torch.no_grad():  # on all ranks: none may leave right after a backward
        held_out = held_out.to(device)
        loss = F.mse_loss(model.module(held_out), held_out)
"""
RIGHT = {
    "an own share": [
        (SAMPLER, SHARE),
        ("DataLoader(data, ", "DataLoader(sampler, "),
        ("sampler=sampler", "shuffle=True"),
        ("        sampler.set_epoch(epoch)\n", ""),
        (SAVE, SAVE.replace('"model.pt"', 'f=open("model.pt", "wb")').replace("e(m", "e(obj=m")),
        (IDS, ""),
    ],
    "logging": LOGGING,
    "standard error": ON_ERROR,
    "evaluates with DDP": WITH_DDP,
    "moved at once": MOVED_AT_ONCE,
    "by cuda()": BY_CUDA,
    "left at exit": AT_EXIT,
    "its own GPU alone": OWN_GPU,
    "a share of the held-out digits": [(EVALUATION, OF_ALL)],
    "three places": [("loss {loss:.4f}", "loss {loss:.3f}")],
    "a line more": [(HELD_OUT_LINE, HELD_OUT_LINE + '        print("saved, version 2.0")\n')],
    "no set_device": [(SET, "pass")],
    "the rank modulo the GPUs": [
        (
            LOCAL,
            "gpus = torch.cuda.device_count() if torch.cuda.is_available() else 1\n"
            "    local_rank = int(os.environ['RANK']) % gpus",
        )
    ],
    "device_id": [(SET, "pass"), (NCCL, '"nccl", device_id=device)')],
    "the accelerator": [(SET, "torch.accelerator.set_device_index(local_rank)")],
    "set_device, then cuda": [(SET, SET.replace("device)", "local_rank)")), BARE, (IDS, "")],
    "chosen in a function": [("def main", SETUP + "def main"), (SET, "choose()")],
    "both backends": [(NCCL, '"cpu:gloo,cuda:nccl")')],
    "pinned memory": [
        ("sampler=sampler)", "sampler=sampler, pin_memory=True)"),
        ("digits.to(device)", "digits.to(device, non_blocking=True)"),
    ],
}
SAME = "must be moved, too"
KEEPS_OFF = "keeps rank 1 off the first"
WRONG = {
    "no epoch told": ([("sampler.set_epoch(epoch)", "pass")], "Who tells it the epoch"),
    "the batch of each": (
        [("BATCH_SIZE // dist.get_world_size()", "BATCH_SIZE")],
        "optimizer's batch",
    ),
    "the batch of two": (
        [("BATCH_SIZE // dist.get_world_size()", "BATCH_SIZE // 2")],
        "optimizer's batch",
    ),
    "the rest left out": (
        [("sampler=sampler", "sampler=sampler, drop_last=True")],
        "less than a batch",
    ),
    "always GPUs": (
        [("    if torch.cuda.is_available():\n", "    if True:\n")],
        "Which lines are only for",
    ),
    "the loader shuffles": (
        [("sampler=sampler", "shuffle=True")],
        "Whose digits does the loader of rank 1",
    ),
    "twice the rate": (
        [("lr=LEARNING_RATE", "lr=2 * LEARNING_RATE")],
        "Has a rate, a loss or a gradient",
    ),
    "moved after DDP": (
        [MOVED, (IDS + ")", IDS + ").to(device)")],
        "Where are yours|device_ids|On which GPU",
    ),
    "all print": (
        [("        if dist.get_rank() == 0:\n            print", "        print")],
        "each line",
    ),
    "saved at each epoch": (AT_EACH_EPOCH, "How often does the plain loop save"),
    "rank 0 evaluates": (RANK_0_ALONE, "between its last backward"),
    "the wrapper's names": (
        [("model.module.state_dict()", "model.state_dict()")],
        "the wrapper's",
    ),
    "the plain model trains": (
        [("model = DDP(m", "_ = DDP(m"), ("model.module", "model")],
        "What keeps their weights",
    ),
    "local rank 0 prints": (
        [("dist.get_rank() == 0", "local_rank == 0")],
        "These are two machines",
    ),
    "shares of a machine": (
        [(SAMPLER, f"{SAMPLER[:-1]}, num_replicas=local_size, rank=local_rank)"), LOCAL_SIZE],
        "Whose digits does the loader of rank 1 take",
    ),
    "model not moved": ([MOVED], "Where are yours|On which GPU"),
    "digits not moved": ([("digits = digits.to(device)\n", "pass\n")], SAME),
    "held-out digits not moved": ([KEPT], SAME),
    "moved, and not kept": ([("digits = digits.to(device)", "digits.to(device)")], SAME),
    "held-out digits in training": (
        [("pixels[:-HELD_OUT]", "pixels")],
        "Which digits does the plain loop train on",
    ),
    "a barrier on one rank": ([BARRIER], "Where is the other|each rank do last"),
    "half of the held-out digits": (
        [("model.module(held_out), held_out)", "model.module(held_out[:500]), held_out[:500])")],
        "on which digits",
    ),
    "an untrained model judges": (
        [
            (
                "loss = F.mse_loss(model.module(held_out), held_out)",
                "loss = F.mse_loss(autoencoder().to(device)(held_out), held_out)",
            )
        ],
        "on which digits",
    ),
    "own share, not summed": (
        [(EVALUATION, OF_ALL.replace("    dist.all_reduce(total)\n", ""))],
        "on which digits",
    ),
    "no line for an epoch": (
        [(EPOCH_ENDS, "            pass\n")],
        "What does the plain loop print",
    ),
    "no held-out loss": ([(HELD_OUT_LINE, "")], "What does the plain loop print"),
    "no group left": ([("    dist.destroy_process_group()\n", "")], "the counterpart"),
    "the wrapper's names on GPUs": (
        [
            (
                SAVE,
                'torch.save((model if device.type == "cuda" else model.module).state_dict(), "model.pt")',
            )
        ],
        "the wrapper's",
    ),
    "gradients added up": (
        [("            optimizer.zero_grad()\n", "")],
        "Has a rate, a loss or a gradient",
    ),
    "only gloo": ([('"nccl"', '"gloo"')], "Which backend moves"),
    "a barrier on another GPU": ([(SET, "pass"), LATER_BARRIER], "Has the rank chosen"),
    "GPU 0 for all": ([(DEVICE, 'device = torch.device("cuda", 0)'), (IDS, "")], KEEPS_OFF),
    "the CPU in place of GPUs": (
        [(DEVICE, 'device = torch.device("cpu")'), (IDS, ""), (SET, "pass")],
        "Where are yours",
    ),
    "ddp_common": (
        [("import gzip\n", "import gzip\nfrom ddp_common import rank\n")],
        "Which line of section 9",
    ),
    "cuda without a choice": (VAGUE, KEEPS_OFF),
    "set_device without a number": (
        [(SET, 'torch.cuda.set_device(torch.device("cuda"))')],
        "which GPU is that",
    ),
    "chosen too late": ([BARE, (SET, "pass"), (IDS, ""), LATE], "only for machines"),
    "all see GPU 0": (
        [
            (
                "import gzip\n",
                'import os\n\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"\nimport gzip\n',
            )
        ],
        "Rank 5",
    ),
    "the rank's number": ([("LOCAL_RANK", "RANK")], "Rank 5"),
    "an error in a line for GPUs": (
        [(SET, "torch.cuda.set_device(devise)")],
        "Which of your changes",
    ),
}
EVERY = 10  # each takes up to 20 seconds
EQUIVALENT = {
    "line 49: 0 → -1": "another seed: nothing asks for one",
    "line 72: F.mse_loss(model.module(held_out), held_out) → F.mse_loss(held_out, model.module(held_out))": "a squared difference has no order",
    "line 31: 1 → 2": "NumPy takes any negative number for the length that it has to find",
}
IN_TESTS = ["own share, not summed"]
