"""torchvision beside a torch without CUDA, in a process that has imported nothing yet."""

from processes import finished


def test_a_torchvision_model_runs_though_torchvision_is_imported_first():
    forward = "print(torchvision.models.resnet18().eval()(torch.zeros(1, 3, 32, 32)).shape[1])"
    program = f"import torchvision, torch; {forward}"
    assert finished("-c", program).stdout == "1000\n"
