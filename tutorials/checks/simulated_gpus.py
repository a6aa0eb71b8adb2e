"""GPUs that are simulated, so that a script's lines for GPUs run where there is none.

All is computed on the CPU. Beside each tensor is noted on which GPU it would be. Where PyTorch
would raise an error because of that, the same error is raised here: tensors of one operation on
two devices, a GPU that the machine does not have, NCCL with a tensor on the CPU, a model that is
not on its `device_ids`. Promises: what is computed and saved is what the CPU computes. What is not
simulated, such as streams or autocast, raises torch's own error where there is no GPU.
"""

import functools
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

MOVES = ("copy_", "to", "cuda", "cpu")
OF_TENSORS = "all_reduce broadcast reduce all_gather all_gather_into_tensor reduce_scatter".split()
OF_OBJECTS = "barrier all_gather_object gather_object broadcast_object_list".split()
CHECKED = "Expected all tensors to be on the same device, but found at least two devices"


class SimulatedGpus(TorchFunctionMode):
    """Notes for the program at `script` on which GPU each tensor is; use it with `with`.

    Attributes: `used`, the numbers on this machine of the GPUs that had a tensor, or were used by
    a collective call; `backends`, what `init_process_group` was asked for.
    """

    def __init__(self, script: str, count: int):
        super().__init__()
        self.script = script
        self.used: set[int] = set()
        self.backends: list[str] = []
        self._current = 0
        self._place = WeakTensorKeyDictionary()  # of a tensor: an index, as in cuda:1
        self._bound = False  # the group knows its GPU
        self._asleep = False  # what torch does by itself is not looked at
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(count)))
        self._replace_functions()

    # What an operation does

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if self._asleep:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name == "__get__" and isinstance(first, Tensor) and self._is_asked_by_script():
            place = self._place.get(first)
            if func == Tensor.device.__get__ and place is not None:
                return torch.device("cuda", place)
            if func == Tensor.is_cuda.__get__:
                return place is not None
        if name in ("to", "cuda") and isinstance(first, Tensor):
            return self._moved(name, first, args[1:], kwargs)
        if name == "cpu":
            return first.view_as(first)
        places = {self._place.get(each) for each in _tensors((args, kwargs)) if _has_place(each)}
        on_gpus = {place for place in places | self._scalars((args, kwargs)) if place is not None}
        computes = name not in MOVES and not name.startswith("_")  # as indexing does not
        if computes and (len(on_gpus) > 1 or (on_gpus and None in places)):
            on = sorted("cpu" if place is None else f"cuda:{place}" for place in places | on_gpus)
            raise RuntimeError(f"{CHECKED}, {on[0]} and {on[1]}! (in {name})")
        if on_gpus and name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda device type tensor to numpy. Use Tensor.cpu()")
        named = kwargs.get("device")
        if named is not None and (place := self._index(named)) is not None:
            kwargs["device"], on_gpus = "cpu", {place}
        result = func(*args, **kwargs)
        if func == Tensor.data.__set__:
            self._put(first, self._place.get(args[1]))
        elif on_gpus and name != "copy_":
            for each in _tensors(result):
                self._put(each, min(on_gpus))
        return result

    def _is_asked_by_script(self):
        return sys._getframe(2).f_code.co_filename == self.script

    def _scalars(self, values):
        return {self._place.get(each) for each in _tensors(values) if not _has_place(each)}

    def _moved(self, name, tensor, args, kwargs):
        """`tensor.to(…)` or `.cuda(…)`: another tensor, unless it is there already."""
        place, rest = self._place.get(tensor), []
        if name == "cuda":
            named = [each for each in (*args, *kwargs.values()) if each is not None]
            place = self._index(named[0] if named else "cuda")
            result = tensor
        else:
            for value in [*args, *([kwargs.pop("device")] if "device" in kwargs else [])]:
                if isinstance(value, (str, torch.device)) or type(value) is int:
                    place = self._index(value)
                elif isinstance(value, Tensor):
                    place = self._place.get(value)
                elif isinstance(value, torch.dtype):  # others say how to copy
                    rest.append(value)
            result = tensor.to(*rest, **kwargs) if rest or kwargs else tensor
        if result is tensor and place != self._place.get(tensor):
            result = tensor.view_as(tensor)
        self._put(result, place)
        return result

    def _put(self, tensor, place):
        if place is None:
            self._place.pop(tensor, None)
        else:
            self._place[tensor] = place
            self.used.add(self._visible()[place])

    def _visible(self):
        """The numbers on the machine of the GPUs that this process sees."""
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return [int(each) for each in named if each.strip().isdigit()]

    def _index(self, device, needs_number=False):
        """The index of a named GPU, None for a CPU. Raises torch's error if there is none."""
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            if device.type != "cuda":
                return None
            if device.index is None and needs_number:
                said = "Expected a torch.device with a specified index or an integer"
                raise ValueError(f"{said}, but got:{device}")
            device = self._current if device.index is None else device.index
        if not 0 <= device < len(self._visible()):
            raise RuntimeError(f"CUDA error: invalid device ordinal ({device})")
        return int(device)

    # Functions that are no operations

    def _replace_functions(self):
        for module in (torch.cuda, torch.accelerator):
            module.is_available = lambda: self._is_asked_by_script()
            module.device_count = lambda: len(self._visible())
            module.synchronize = module.empty_cache = lambda *_: None
        torch.cuda.set_device = torch.accelerator.set_device_index = self._set_device
        torch.cuda.current_device = lambda: self._current
        torch.accelerator.current_device_index = torch.cuda.current_device
        torch.accelerator.current_accelerator = lambda *_: torch.device("cuda")
        dist.init_process_group = self._with_gloo(dist.init_process_group)
        for name in OF_TENSORS + OF_OBJECTS:
            setattr(dist, name, self._on_gpus(getattr(dist, name), name in OF_OBJECTS))
        wrap = DistributedDataParallel.__init__

        @functools.wraps(wrap)
        def __init__(ddp, module, device_ids=None, output_device=None, *args, **kwargs):
            places = {self._place.get(each) for each in module.parameters()}
            if places == {None}:
                self._refuse_cpu()
            ids = {self._index(each) for each in device_ids or []}
            if device_ids and ids != places:
                on = sorted(map(str, places))
                raise ValueError(f"device_ids is {device_ids}, and the module is on cuda:{on[0]}")
            self._asleep = True
            wrap(ddp, module, None, None, *args, **kwargs)
            self._asleep = False
            if device_ids:  # inputs are moved there
                ddp.register_forward_pre_hook(self._move_inputs(min(ids)), with_kwargs=True)

        DistributedDataParallel.__init__ = __init__

    def _set_device(self, device):
        self._current = self._index(device, needs_number=True)

    def _move_inputs(self, place):
        def move(_, inputs, named):
            given = [each.view_as(each) if isinstance(each, Tensor) else each for each in inputs]
            for each in _tensors(given):
                self._put(each, place)
            return tuple(given), named

        return move

    def _with_gloo(self, init):
        @functools.wraps(init)
        def init_process_group(backend=None, *args, device_id=None, **kwargs):
            self.backends.append(str(backend or "nccl"))
            self._bound = device_id is not None and self._index(device_id) is not None
            init("gloo", *args, **kwargs)

        return init_process_group

    def _refuse_cpu(self):
        if self.backends == ["nccl"]:
            raise RuntimeError("No backend type associated with device type cpu")

    def _on_gpus(self, function, of_objects):
        @functools.wraps(function)
        def call(*args, **kwargs):
            if any(self._place.get(each) is None for each in _tensors((args, kwargs))):
                self._refuse_cpu()
            if of_objects and "nccl" in self.backends and not self._bound:
                self.used.add(self._visible()[self._current])
            return function(*args, **kwargs)

        return call


def _tensors(value) -> Iterator[Tensor]:
    """The tensors in a value, a list, a dict, and so on."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _has_place(tensor):
    """A number on the CPU may be used with any tensor."""
    return tensor.dim() > 0
